"""Decoding against a cache whose tokens lie on many ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._cache_call import decode, decode_arguments
from flash_attn._call import window_sides
from flash_attn._errors import expect, explained, shown
from flash_attn._functorch import check_no_tangents
from flash_attn.context_parallel.merge import compute_dtype, merge_attention
from flash_attn.context_parallel.shards import Group, ranks_of

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
Window = Sequence[int | None] | Tensor


@explained()
def flash_decode_func(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    cache_batch_idx: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
    group: Group = None,
    seqlens: Tensor | None = None,
    first_key: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_decode_func against a cache that is split over ranks; exact.

    Each rank attends to the keys it has; the (out, lse) pairs of all ranks travel to all of them
    and are merged by `merge_attention`. So a step moves batch * heads_q * (d_v + 1) numbers a rank,
    however long the cache is. Has no gradient.

    Which rank has which tokens is the caller's choice, as long as each token is on one rank. One
    new token with neither a window nor ALiBi sees all keys, wherever they lie: then their order
    does not matter (pages dealt out in turn keep ranks even). Otherwise each rank's keys of a
    sequence have to follow one another, and seqlens and first_key say where they stand in it.

    Arguments (the others: as in flash_attn.flash_decode_func, this rank's cache, alike on all
    ranks where they are not):
        q: (batch, seqlen_q, heads_q, d), the newest tokens, equal on all ranks.
        k_cache, v_cache, block_table, cache_batch_idx: this rank's cache, of any capacity.
        cache_seqlens: int32 (batch), tokens of each sequence in this rank's cache, 0 allowed.
            Default: its capacity.
        learnable_sink: alike on all ranks: it enters once.
        group: as in flash_attn_func; the dimensions of a mesh count alike. Default: all ranks.
        seqlens: int32 (batch), tokens of each sequence on all ranks, the new ones included.
        first_key: int32 (batch), position in its sequence of the first key in this rank's cache.

    Returns:
        out: (batch, seqlen_q, heads_q, d_v), dtype of q, equal on all ranks; 0 where no rank has a
            key that is seen.
        softmax_lse (with return_softmax_lse): (batch, heads_q, seqlen_q), over the keys of all
            ranks; fp32 (fp64 for fp64 inputs).

    Rounding: each rank's part of out has the dtype of q before it is merged: one more rounding than
    one process does.

    Raises:
        RuntimeError: seqlens or first_key are missing where they are needed; as
            flash_attn.flash_decode_func; or the group's own error and time-out.
        NotImplementedError: an input has a tangent of forward-mode AD.
    """
    ranks = ranks_of(group)
    left, right = window_sides(window_size)
    check_no_tangents(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        alibi_slopes=alibi_slopes,
        learnable_sink=learnable_sink,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    for name, x, dims in (
        ("q", q, 4),
        ("k_cache", k_cache, 4),
        ("v_cache", v_cache, 4),
        ("block_table", block_table, 2),
    ):
        if x is not None:
            expect(x.dim() == dims, name, f"{dims} dimensions", x.dim())
    _check_numbers(q, "cache_seqlens", cache_seqlens, (torch.int32,))
    _check_numbers(q, "cache_batch_idx", cache_batch_idx, (torch.int32,))
    _check_numbers(q, "seqlens", seqlens, _INTEGERS)
    _check_numbers(q, "first_key", first_key, _INTEGERS)
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None:
            expect(x.dim() in (1, 2), name, "one dimension or two", x.dim())
    _check_terms(q, alibi_slopes, learnable_sink)
    tokens, wide = q.size(1), compute_dtype(q.dtype)
    options = dict(
        softmax_scale=softmax_scale,
        softcap=softcap,
        block_table=block_table,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
    )
    per_sequence = dict(
        cache_batch_idx=cache_batch_idx,
        alibi_slopes=alibi_slopes,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    by_position = (left, right) != (-1, -1) or alibi_slopes is not None or (causal and tokens > 1)
    with torch.no_grad():
        if by_position:
            _check_positions(seqlens, first_key, alibi_slopes, causal, tokens)
            capacity = k_cache.size(1) * (1 if block_table is None else block_table.size(1))
            held = capacity if cache_seqlens is None else cache_seqlens[:, None]
            window = (left, 0 if causal else right)
            starts, ends, last_seen = _keys_of_rows(tokens, seqlens, first_key, held, window)
            if cache_batch_idx is None:
                rows = torch.arange(q.size(0), dtype=torch.int32, device=q.device)
                per_sequence["cache_batch_idx"] = rows
            # Each token is a sequence of its own, which has keys of its own.
            options |= {name: _repeated(x, tokens) for name, x in per_sequence.items()}
            options |= dict(cache_leftpad=starts.flatten(), cache_seqlens=ends.flatten())
            out, lse, _ = decode(
                decode_arguments(q.flatten(0, 1)[:, None], k_cache, v_cache, **options)
            )
            out, lse = out.view(*q.shape[:-1], -1), lse.view(*q.shape[:-1]).transpose(1, 2)
            if alibi_slopes is not None:
                lse = lse - alibi_slopes[..., None].to(wide) * last_seen[:, None]
        else:
            options |= per_sequence | dict(cache_seqlens=cache_seqlens)
            out, lse, _ = decode(decode_arguments(q, k_cache, v_cache, **options))
        partial = (out.to(wide), lse)
        for members in (ranks.inner, ranks.outer):
            if members is not None:
                partial = merge_attention(*_from_all(*partial, members))
        out, lse = partial
        if learnable_sink is not None:
            sink = learnable_sink.to(wide)[:, None].expand_as(lse)
            out, lse = merge_attention((out, torch.zeros_like(out)), (lse, sink))
    return (out.to(q.dtype), lse) if return_softmax_lse else out.to(q.dtype)


def _check_numbers(q: Tensor, name: str, x: Tensor | None, dtypes: tuple) -> None:
    """One for each sequence."""
    if x is None:
        return
    fits = x.dtype in dtypes and tuple(x.shape) == (q.size(0),) and x.layout == torch.strided
    words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    wanted = f"{words} ({q.size(0)}) on {q.device} as q is"
    expect(fits and x.device == q.device, name, wanted, shown(x))


def _check_terms(q: Tensor, slopes: Tensor | None, sink: Tensor | None) -> None:
    """What this rank works out beside the kernels."""
    batch, heads = q.size(0), q.size(2)
    if slopes is not None:
        fits = tuple(slopes.shape) in ((heads,), (batch, heads)) and slopes.device == q.device
        wanted = f"float32 ({heads}) or ({batch}, {heads}) on {q.device} as q is"
        expect(fits and slopes.dtype == torch.float32, "alibi_slopes", wanted, shown(slopes))
    if sink is not None:
        fits = tuple(sink.shape) == (heads,) and sink.device == q.device
        wanted = f"a floating dtype of shape ({heads}) on {q.device} as q is"
        expect(fits and sink.is_floating_point(), "learnable_sink", wanted, shown(sink))


def _check_positions(seqlens, first_key, alibi_slopes, causal: bool, tokens: int) -> None:
    for name, x in (("seqlens", seqlens), ("first_key", first_key)):
        got = "None" if x is None else x.dtype
        reason = "int32 (batch), as a window, ALiBi and several causal tokens depend on positions"
        expect(x is not None and x.dtype == torch.int32, name, reason, got)
    if alibi_slopes is not None and not causal and tokens > 1:
        raise NotImplementedError(
            "flash_attn: alibi_slopes: expected causal=True or one token over a split cache, got"
            f" causal=False and {tokens} tokens"
        )


def _keys_of_rows(tokens: int, seqlens: Tensor, first_key: Tensor, held, window: tuple[int, int]):
    """Of the keys that this rank holds of each sequence, those that each new token sees.

    Returns int32 (batch, tokens): the first; the one behind the last; and how far in front of the
    token the last one stands, which is what ALiBi counts from there on.
    """
    left, right = window
    token = torch.arange(tokens, dtype=torch.int32, device=seqlens.device)
    position = seqlens[:, None] - tokens + token
    first = position - left if left >= 0 else torch.zeros_like(position)
    last = (
        torch.minimum(position + right, seqlens[:, None] - 1)
        if right >= 0
        else seqlens[:, None] - 1
    )
    ends = (last + 1 - first_key[:, None]).clamp(min=0).clamp(max=held).expand_as(position)
    starts = torch.minimum((first - first_key[:, None]).clamp(min=0), ends)
    return starts.contiguous(), ends.contiguous(), position - first_key[:, None] - ends + 1


def _repeated(x: Tensor | None, times: int) -> Tensor | None:
    """What belongs to a sequence, for each of its tokens; (heads) belongs to all."""
    if x is None or (x.dim() == 1 and x.is_floating_point()):
        return x
    return x.repeat_interleave(times, 0)


def _from_all(out: Tensor, lse: Tensor, group: dist.ProcessGroup):
    """The outs and the LSEs of all ranks, in one collective."""
    mine = torch.cat([out, lse.transpose(1, 2)[..., None]], dim=-1)
    size = dist.get_world_size(group)
    everything = mine.new_empty(size * mine.size(0), *mine.shape[1:])
    dist.all_gather_into_tensor(everything, mine, group=group)
    parts = everything.chunk(size)
    return [part[..., :-1] for part in parts], [part[..., -1].transpose(1, 2) for part in parts]
