"""The calls of flash_attn_interface, over the ranks that share a sequence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._call import (
    as_int,
    draw_rng_state,
    forced_backend,
    is_top_left,
    window_sides,
)
from flash_attn._errors import expect, explained, shown
from flash_attn._functorch import check_no_tangents
from flash_attn.context_parallel.attention import context_parallel_fwd
from flash_attn.context_parallel.exchange import from_first_rank
from flash_attn.context_parallel.heads import Share, head_shares, to_heads, to_rows
from flash_attn.context_parallel.merge import compute_dtype
from flash_attn.context_parallel.schemes import SCHEMES, Window, choose_scheme
from flash_attn.context_parallel.shards import (
    Group,
    Ranks,
    Shards,
    check_layout,
    global_length,
    ranks_of,
)
from flash_attn.context_parallel.ulysses import ulysses_fwd

Lengths = Sequence[int] | Tensor
Result = Tensor | tuple[Tensor, Tensor, Tensor]


@explained()
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    group: Group = None,
    scheme: str | None = None,
    layout: str = "zigzag",
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
) -> Result:
    """flash_attn.flash_attn_func over the ranks that share each sequence; exact, differentiable.

    Each rank passes the tokens that `split` gives it and gets the output of its own. All ranks of
    the group have to make the call, those without tokens too, and the backward pass, too.

        q, k, v = (split(x, group) for x in (q, k, v))
        out = flash_attn_func(q, k, v, causal=True, group=group)      # of this rank's queries
        whole = join(out, group)

    Arguments (the others, as those of flash_attn.flash_attn_func, are alike on all ranks):
        q: (batch, rows of this rank, heads_q, d). fp16, bf16, fp32 or fp64, any device that the
            group serves.
        k: (batch, rows of this rank, heads_kv, d); v: (batch, rows of this rank, heads_kv, d_v).
        dropout_p: probability of dropping a weight. The mask is that of one GPU whose generator is
            in the state of that of the group's first rank, however many ranks there are. "ring" and
            "all-gather" bring parts that begin inside of a block of 16 queries or 32 keys there,
            with copies of q, k and v, and run a call for each document of varlen ones: fast where
            all ranks' pieces are multiples of 32 tokens, as "ulysses" is for all lengths.
        alibi_slopes: fp32 (heads_q) or (batch, heads_q). Where keys and diagonals lie on different
            ranks, "ring" and "all-gather" add ALiBi as a bias, which takes longer, on backends that
            serve attn_bias; "ulysses" calls the kernels as one GPU does.
        deterministic: the backward gives the same bits in every run with as many ranks.
        learnable_sink: float (heads_q), alike on all ranks: it enters once. Its gradient is a share
            that has to be summed over the ranks, as that of every parameter.
        group: the ranks that share each sequence; they need not be neighbours. A ProcessGroup, a
            DeviceMesh of one dimension, or of two (or a tuple of two ProcessGroups): then heads are
            exchanged over the inner dimension and keys over the outer one. Default: all ranks.
            With NCCL, init_process_group needs its device_id, so that ranks which have nothing to
            send are connected, too.
        scheme: "ring": keys and values go from rank to rank while the rank computes with those
            before them. "all-gather": all keys and values of some heads come first. "ulysses": all
            tokens of some heads on each rank, by all-to-all; over two dimensions it names what the
            outer one does and may not be "ulysses". Default: `choose_scheme`.
        layout: which tokens lie where, as given to split: "zigzag" or "contiguous".
        seqlen_q, seqlen_k: tokens of the whole sequences. Default: as many on each rank as on this
            one. Has to be given where the ranks have different numbers of rows (a length that does
            not divide): ranks that expect different lengths send one another tensors of the wrong
            size, which a group does not survive.

    Returns:
        As flash_attn.flash_attn_func, for this rank's queries: out (batch, rows, heads_q, d_v) and
        with return_attn_probs softmax_lse (batch, heads_q, rows), differentiable, and an empty
        S_dmask.

    Rounding: what "ring" merges, and the gradients that any scheme adds up, may be results of 16
    bits where the kernels of a GPU made them: one more rounding than on one GPU. The gradients of
    calls without options on Hopper are not, up to a head dim of 128. On a CPU they are fp32.
    "ulysses" where heads_kv is a multiple of the ranks computes as one GPU does.

    Not served: attn_bias, as it grows with the square of the sequence.

    Raises:
        RuntimeError: as flash_attn.flash_attn_func; rows that do not fit the layout; or the group's
            own error, where a rank is gone or does not come before the group's time-out.
        NotImplementedError: an input has a tangent of forward-mode AD.
        ValueError: scheme, layout, group or causal_alignment.
    """
    _check_dimensions(q, k, v, 4)
    ranks = ranks_of(group)
    seqlens = [
        global_length(None if n is None else as_int(n, "seqlen"), x.size(1), ranks)
        for n, x in ((seqlen_q, q), (seqlen_k, k))
    ]
    call = _WholeCall(
        cu_seqlens_q=(0, seqlens[0]),
        cu_seqlens_k=(0, seqlens[1]),
        varlen=False,
        softmax_scale=q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=window_sides(window_size),
        top_left=is_top_left(causal_alignment),
        softcap=softcap,
        dropout_p=dropout_p,
        heads=q.size(-2),
        deterministic=deterministic,
    )
    tensors = (q, k, v, alibi_slopes, learnable_sink)
    out, lse = _attend(call, ranks, scheme, layout, tensors, return_attn_probs)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


@explained()
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    group: Group = None,
    scheme: str | None = None,
    layout: str = "zigzag",
) -> Result:
    """flash_attn.flash_attn_varlen_func of packed documents whose tokens lie on many ranks.

    All documents together are split, `split(x, group, dim=0)`, wherever their borders are: a
    document may lie on several ranks and a rank may hold many documents.

    Arguments (the others: see flash_attn_func here and flash_attn.flash_attn_varlen_func):
        q: (rows of this rank, heads_q, d); k: (rows of this rank, heads_kv, d); v: (rows of this
            rank, heads_kv, d_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1) numbers, from 0 to all tokens of all ranks, alike on
            all ranks. The host plans by them: a list, or a tensor on the CPU. A tensor on a GPU
            works, at the price of a synchronisation.
        max_seqlen_q, max_seqlen_k: not read, as the lengths say it.
        alibi_slopes: fp32 (heads_q) or (batch, heads_q).

    Returns:
        out: (rows of this rank, heads_q, d_v). With return_attn_probs also softmax_lse (heads_q,
        rows of this rank) and an empty S_dmask.

    Raises: as flash_attn_func here; RuntimeError: cu_seqlens do not start with 0 or fall.
    """
    _check_dimensions(q, k, v, 3)
    call = _WholeCall(
        cu_seqlens_q=_on_host(cu_seqlens_q, "cu_seqlens_q"),
        cu_seqlens_k=_on_host(cu_seqlens_k, "cu_seqlens_k"),
        varlen=True,
        softmax_scale=q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=window_sides(window_size),
        top_left=is_top_left(causal_alignment),
        softcap=softcap,
        dropout_p=dropout_p,
        heads=q.size(-2),
        deterministic=deterministic,
    )
    expect(
        len(call.cu_seqlens_k) == len(call.cu_seqlens_q),
        "cu_seqlens_k",
        f"{len(call.cu_seqlens_q)} numbers as in cu_seqlens_q",
        len(call.cu_seqlens_k),
    )
    tensors = (*(x.unsqueeze(0) for x in (q, k, v)), alibi_slopes, learnable_sink)
    out, lse = _attend(call, ranks_of(group), scheme, layout, tensors, return_attn_probs)
    out = out.squeeze(0)
    return (out, lse.squeeze(0), q.new_empty(0)) if return_attn_probs else out


@dataclass(frozen=True)
class _WholeCall:
    """What is attended to, whoever holds it."""

    cu_seqlens_q: tuple[int, ...]  # (0, length) where it is dense
    cu_seqlens_k: tuple[int, ...]
    varlen: bool
    softmax_scale: float
    causal: bool
    window: tuple[int, int]
    top_left: bool
    softcap: float
    dropout_p: float
    heads: int  # of the queries
    deterministic: bool


def _attend(
    call: _WholeCall,
    ranks: Ranks,
    scheme: str | None,
    layout: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out and softmax_lse of this rank's rows; tensors: q, k, v (batch, rows, heads, d), slopes,
    sink."""
    check_layout(layout)
    shards = [ranks.shards(cu[-1], layout) for cu in (call.cu_seqlens_q, call.cu_seqlens_k)]
    q, k, v, slopes, sink = tensors
    _check(call, ranks, shards, tensors)
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    if scheme is None:
        scheme = choose_scheme(
            ranks,
            seqlen_q=call.cu_seqlens_q[-1],
            heads_q=q.size(2),
            heads_kv=k.size(2),
            head_dim=q.size(3),
            causal=call.causal,
            window_size=call.window,
            alibi=slopes is not None,
            rounds_parts=_rounds_parts(call, q, v),
        )
    _check_scheme(scheme, ranks)
    rng_state = _shared_state(q, ranks) if call.dropout_p > 0 else None
    tensors = (q, k, v, slopes, sink, rng_state)
    over_keys = partial(_over_keys, call, ranks.outer, scheme, layout)
    with torch.autocast(device, enabled=False):
        if scheme == "ulysses":
            out, lse = _whole_heads(call, ranks.outer, layout, tensors, with_lse)
        elif ranks.inner is not None:
            held = [s.inner_ranges(ranks.outer_rank) for s in shards]
            out, lse = _over_heads(over_keys, ranks.inner, held, tensors, with_lse)
        else:
            out, lse = over_keys(tensors)
    return out, lse if with_lse else None


def _rounds_parts(call: _WholeCall, q: Tensor, v: Tensor) -> bool:
    """Whether parts of dk and dv come rounded: who returns them in fp32 is Hopper's kernel up to a
    head dim of 128, without options that have kernels of their own. On a CPU all are fp32, and
    inputs of 32 bits or more have parts as wide as they are."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    on_hopper = torch.cuda.get_device_capability(q.device) == (9, 0)
    if not on_hopper or forced_backend() not in (None, "sm90"):
        return True
    has_options = call.softcap != 0 or call.dropout_p > 0 or call.deterministic
    return has_options or max(q.size(-1), v.size(-1)) > 128


def _shared_state(like: Tensor, ranks: Ranks) -> Tensor:
    """What the first rank draws. Every rank draws, so that their generators advance alike."""
    state = draw_rng_state(like)
    for group in (ranks.outer, ranks.inner):
        if group is not None:
            state = from_first_rank(state, group)
    return state


def _whole_heads(call: _WholeCall, group, layout: str, tensors, with_lse: bool):
    """All tokens of some heads come to each rank of `group`."""
    left, right = call.window
    out, lse, _ = ulysses_fwd(
        *tensors,
        call.softmax_scale,
        call.softcap,
        call.dropout_p,
        call.deterministic,
        [left, 0 if call.causal else right, int(call.top_left)],
        list(call.cu_seqlens_q),
        list(call.cu_seqlens_k),
        call.varlen,
        with_lse,
        layout,
        group.group_name,
        forced_backend(),
    )
    return out, lse


def _over_heads(attend, group, held, tensors, with_lse: bool):
    """`attend` to all tokens of `group` with some of the heads on each of its ranks.

    held: of q, and of k and v, what each rank holds (Share.held).
    """
    q, k, v, slopes, sink, rng_state = tensors
    heads = head_shares(q.size(2), k.size(2), dist.get_world_size(group))
    heads_q, heads_kv = zip(*heads, strict=True)
    share_q, share_k = Share(held[0], heads_q), Share(held[1], heads_kv)
    q, k, v = to_heads([q, k, v], [share_q, share_k, share_k], group)
    mine = slice(*heads_q[dist.get_rank(group)])
    slopes = None if slopes is None else slopes[..., mine]
    sink = None if sink is None else sink[mine]
    tensors = (q, k, v, slopes, sink, rng_state)
    out, lse = attend(tensors, mine.start) if q.size(2) else _without_heads(tensors)
    out = to_rows(out, share_q, group)
    if with_lse:
        lse = to_rows(lse.transpose(1, 2).unsqueeze(-1), share_q, group)
        lse = lse.squeeze(-1).transpose(1, 2)
    return out, lse


def _over_keys(call: _WholeCall, group, scheme: str, layout: str, tensors, first_head: int = 0):
    """Keys and values come from the other ranks of `group`."""
    left, right = call.window
    _, _, _, slopes, _, rng_state = tensors
    flags = (call.top_left, slopes is not None, rng_state is not None)
    mask = [left, 0 if call.causal else right, *map(int, flags)]
    return context_parallel_fwd(
        *tensors,
        call.softmax_scale,
        call.softcap,
        call.dropout_p,
        [call.heads, first_head],
        call.deterministic,
        mask,
        list(call.cu_seqlens_q),
        list(call.cu_seqlens_k),
        call.varlen,
        scheme,
        layout,
        group.group_name,
        forced_backend(),
    )


def _without_heads(tensors) -> tuple[Tensor, Tensor]:
    """The results of a rank that got no heads. They depend on q, k, v and the sink, so that the
    backward comes through here, too, and exchanges nothing with the others, who wait for it."""
    q, k, v, _, sink, _ = tensors
    nothing = k.sum() + v.sum()
    if sink is not None:
        nothing = nothing + sink.sum().to(q.dtype)
    out = q[..., :1].expand(*q.shape[:-1], v.size(-1)) + nothing
    return out, q[..., 0].transpose(1, 2).to(compute_dtype(q.dtype)) + nothing


def _check_dimensions(q: Tensor, k: Tensor, v: Tensor, dims: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"flash_attn: {name}: expected torch.Tensor, got {type(x).__name__}")
        expect(x.dim() == dims, name, f"{dims} dimensions", x.dim())
        expect(x.size(-1) > 0, name, "a head_dim of at least 1", 0)


def _check_scheme(scheme: str, ranks: Ranks) -> None:
    allowed = SCHEMES if ranks.inner is None else SCHEMES[:2]
    if scheme not in allowed:
        raise ValueError(
            f"flash_attn: scheme: expected one of {allowed} for a group of"
            f" {1 if ranks.inner is None else 2} dimensions, got {shown(scheme)}"
        )


def _check(call: _WholeCall, ranks: Ranks, shards: list[Shards], tensors) -> None:
    """What every rank has to find wrong by itself, before it waits for the others."""
    q, k, v, slopes, sink = tensors
    check_no_tangents(q=q, k=k, v=v, alibi_slopes=slopes, learnable_sink=sink)
    scale = call.softmax_scale
    expect(0 <= call.dropout_p < 1, "dropout_p", "a number in [0, 1)", call.dropout_p)
    expect(math.isfinite(scale) and scale > 0, "softmax_scale", "a finite number above 0", scale)
    capped = math.isfinite(call.softcap) and call.softcap >= 0
    expect(capped, "softcap", "a finite number of at least 0", call.softcap)
    expect(min(call.window) >= -1, "window_size", "numbers of at least -1", call.window)
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect(x.dtype == q.dtype, name, f"dtype {q.dtype} as q has", x.dtype)
        expect(x.device == q.device, name, f"device {q.device} as q has", x.device)
        expect(x.size(0) == q.size(0), name, f"batch {q.size(0)} as q has", x.size(0))
    expect(k.size(-1) == q.size(-1), "k", f"head_dim {q.size(-1)} as q has", k.size(-1))
    expect(v.shape[1:3] == k.shape[1:3], "v", "rows and heads of k", tuple(v.shape[1:3]))
    heads, heads_kv = q.size(2), k.size(2)
    divides = heads_kv > 0 and heads % heads_kv == 0
    expect(divides, "k", f"a number of heads that divides {heads}", heads_kv)
    for name, x, held in (("q", q, shards[0]), ("k", k, shards[1])):
        ranks.check_rows(held, x.size(1), name)
    for name, x in (("alibi_slopes", slopes), ("learnable_sink", sink)):
        if x is not None:
            expect(x.device == q.device, name, f"device {q.device} as q has", x.device)
    if slopes is not None:
        sequences = len(call.cu_seqlens_q) - 1 if call.varlen else q.size(0)
        fits = tuple(slopes.shape) in ((heads,), (sequences, heads))
        wanted = f"float32 ({heads}) or ({sequences}, {heads})"
        expect(fits and slopes.dtype == torch.float32, "alibi_slopes", wanted, _described(slopes))
        if slopes.requires_grad:
            raise NotImplementedError(
                "flash_attn: alibi_slopes: has no gradient, expected requires_grad=False, got True"
            )
    if sink is not None:
        fits = tuple(sink.shape) == (heads,) and sink.is_floating_point()
        expect(fits, "learnable_sink", f"a floating dtype of shape ({heads})", _described(sink))


def _described(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _on_host(lengths: Lengths, argument: str) -> tuple[int, ...]:
    if isinstance(lengths, Tensor):
        readable = lengths.dim() == 1 and lengths.device.type != "meta"
        expect(readable, argument, "numbers in one dimension", shown(lengths))
    numbers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    numbers = tuple(as_int(n, argument) for n in numbers)
    rises = all(a <= b for a, b in pairwise(numbers))
    expect(
        bool(numbers) and numbers[0] == 0 and rises,
        argument,
        "0 and then no falling number",
        numbers,
    )
    return numbers
