"""FlashAttention-3's private functions: one forward for every layout, one backward.

They take no part in autograd: their callers sit inside autograd.Functions of their own.
"""

from functools import partial

import torch
from torch import Tensor

import flash_attn
from flash_attn import _upstream, masks
from flash_attn._cache_call import check_append
from flash_attn._call import as_int, window_sides
from flash_attn._errors import expect, explained, shown
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.masks import Mask
from flash_attn_3._checks import (
    FP8,
    check_cached,
    check_fp8,
    check_no_descale,
    check_queries_of_lengths,
    check_qv,
)


def refuse(beside: str = "", /, **given: object) -> None:
    """What FlashAttention-3 takes and this package does not, by name; beside: with what else."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            got = value if isinstance(value, int) else f"a {type(value).__name__}"
            raise NotImplementedError(f"flash_attn: {name}: not supported{beside}, got {got}")


def _sequences(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The sequence of each token."""
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True, out_int32=True)
    return sequence.clamp(max=cu_seqlens.numel() - 2)


def _scaled(x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """x times descale (batch, heads_kv), which a group of heads shares, rounded to bf16 once."""
    if descale is None or descale.size(0) == 0:  # then all tokens lie behind the last sequence
        return x.to(torch.bfloat16)
    each = descale[:, None] if cu_seqlens is None else descale[_sequences(cu_seqlens, x.size(0))]
    each = each.repeat_interleave(x.size(-2) // descale.size(1), -1)
    return (x.to(torch.float32) * each[..., None]).to(torch.bfloat16)


class _Dequantize(torch.autograd.Function):
    """_scaled(). Its backward raises: fp8 has none, as in FlashAttention-3."""

    @staticmethod
    def forward(ctx, x, descale, cu_seqlens):
        return _scaled(x, descale, cu_seqlens)

    @staticmethod
    def backward(ctx, dout):
        raise NotImplementedError(
            f"flash_attn: q, k, v: expected 16 bits or more for a gradient, got {FP8}"
        )


def dequantized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for flash_attn's functions: bf16 for fp8, else what they are.

    q takes the product of the scores' two descales, so that k stays exact. v takes its own, as out
    would be rounded before that and after it.
    """
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if q.dtype != FP8:
        check_no_descale(q, **descales)
        return q, k, v
    is_dense = cu_seqlens_q is None
    cu_seqlens = {} if is_dense else dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_fp8(dict(q=q, k=k, v=v), descales, cu_seqlens)
    if q_descale is not None and k_descale is not None:
        of_scores = q_descale * k_descale
    else:
        of_scores = k_descale if q_descale is None else q_descale
    return (
        _Dequantize.apply(q, of_scores, cu_seqlens_q),
        _Dequantize.apply(k, None, None),
        _Dequantize.apply(v, v_descale, cu_seqlens_k),
    )


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Each row of the one and then that of the other: where they lie so in memory, they themselves.

    Not where a gradient has to find its way back to both, nor where addresses are not known yet.
    """
    has_gradient = torch.is_grad_enabled() and (first.requires_grad or second.requires_grad)
    if not has_gradient and not torch.compiler.is_compiling():
        starts = [x.untyped_storage().data_ptr() for x in (first, second)]
        follows = second.storage_offset() == first.storage_offset() + first.size(-1)
        alike = first.stride() == second.stride() and first.stride(-1) == 1
        if starts[0] == starts[1] and follows and alike:
            columns = first.size(-1) + second.size(-1)
            return first.as_strided((*first.shape[:-1], columns), first.stride())
    return torch.cat([first, second], -1)


def joined(q: Tensor, qv: Tensor | None, keys: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a call whose scores are q·k + qv·v, as one product: with the columns of v in
    front of k's, as caches of multi-head latent attention have them. keys: k and v, by name."""
    k, v = keys.values()
    if qv is None:
        return q, k, v
    check_qv(q, qv, keys)
    rows = _side_by_side(v, k)
    return torch.cat([qv, q], -1), rows, rows[..., : v.size(-1)]


def _dequantized_beside_cache(q, k_cache, v_cache, k, v, q_descale, k_descale, v_descale):
    """q, k and v for flash_attn's function, which takes the caches with their descales.

    Its append divides k and v by these and rounds. That gives back the numbers that k and v are
    here, as bf16 has four bits more than fp8.
    """
    if q.dtype != FP8:
        check_no_descale(q, q_descale=q_descale)
        return q, k, v
    inputs = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_fp8(inputs, descales, {})
    k = None if k is None else _scaled(k, k_descale)
    v = None if v is None else _scaled(v, v_descale)
    return _scaled(q, q_descale), k, v


def chunks(
    attention_chunk: int,
    q: Tensor,
    k: Tensor,
    lengths: tuple[Tensor, Tensor, int, int] | None = None,
) -> Tensor | Mask | None:
    """The attn_bias of attention_chunk: a query sees the keys of its own chunk of the sequence.

    Positions are those of the keys, with the last query at the last key. lengths: of each
    sequence's queries and keys, and the longest of both, for q and k (total, heads, d).
    O(seqlen_q · seqlen_k) memory, a byte each.
    """
    if not attention_chunk:
        return None
    if attention_chunk < 0:
        raise RuntimeError(
            f"flash_attn: attention_chunk: expected at least 0, got {attention_chunk}"
        )
    if lengths is None:
        seqlen_q, seqlen_k = q.size(1), k.size(1)
        diagonal = seqlen_k - seqlen_q
    else:
        lens_q, lens_k, seqlen_q, seqlen_k = lengths
        diagonal = (lens_k - lens_q)[:, None, None, None]
    rows = torch.arange(seqlen_q, device=q.device)[:, None] + diagonal
    keys = torch.arange(seqlen_k, device=q.device)
    is_own = rows // attention_chunk == keys // attention_chunk
    return is_own if lengths else masks.from_bool(is_own)


def chunks_of_sequences(
    attention_chunk,
    q,
    k,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
):
    """chunks of a varlen call; positions count from leftpad_k on."""
    if not attention_chunk:
        return None
    lens_q = cu_seqlens_q.diff() if seqused_q is None else seqused_q
    lens_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if leftpad_k is not None:
        lens_k = (lens_k - leftpad_k).clamp(min=0)
    return chunks(attention_chunk, q, k, (lens_q, lens_k, max_seqlen_q, max_seqlen_k))


@explained(of_torch=True)
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Results of the same queries over pieces of the keys, as one result over all keys.

    Arguments:
        out_partial: (pieces, …, heads, d); lse_partial: (pieces, …, heads), natural logarithm; a
            piece of lse -inf counts for nothing.
        out: tensor to write into. out_dtype: default out_partial's.

    Returns: out (…, heads, d) and its lse (…, heads).
    """
    right = out_dtype is None or isinstance(out_dtype, torch.dtype)
    expect(right, "out_dtype", "torch.dtype", shown(out_dtype))
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial), ("out", out)):
        if x is not None:
            expect(x.is_floating_point(), name, "a floating dtype", x.dtype)
            expect(x.device == out_partial.device, name, "the device of out_partial", x.device)
    rows, form = out_partial.shape[:-1], out_partial.shape[1:]
    fits, form_of_lse = lse_partial.shape == rows, tuple(lse_partial.shape)
    expect(fits, "lse_partial", f"shape {tuple(rows)} as out_partial has", form_of_lse)
    if out is not None:
        expect(out.shape == form, "out", f"shape {tuple(form)} of out_partial", tuple(out.shape))
    lse = lse_partial.logsumexp(0)
    # Where no piece has a key, lse is -inf, and -inf - -inf would be NaN.
    weight = (lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    total = (weight[..., None] * out_partial).sum(0)
    total = total.to(out_partial.dtype if out_dtype is None else out_dtype)
    return (total if out is None else out.copy_(total)), lse


def _capacity(cache: Tensor, page_table: Tensor | None) -> int:
    return cache.size(1) * (1 if page_table is None else page_table.size(1))


def _varlen_with_cache(
    q,
    k,
    v,
    cu_seqlens_q,
    max_seqlen_q,
    lengths,
    page_table,
    rows,
    leftpad,
    attention_chunk,
    options,
):
    """Queries of different lengths, one after the other, against caches (batch, capacity, …)."""
    capacity = _capacity(k, page_table)
    cu_seqlens_k, batch = None, cu_seqlens_q.numel() - 1
    if rows is not None:
        page_table = None if page_table is None else page_table[rows]
        k, v = (k, v) if page_table is not None else (k[rows], v[rows])
    if page_table is None:
        cu_seqlens_k = capacity * torch.arange(batch + 1, dtype=torch.int32, device=k.device)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, capacity)
    bias = chunks_of_sequences(attention_chunk, q, k, *lens, None, lengths, leftpad)
    out, softmax_lse, _ = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        *lens,
        block_table=page_table,
        seqused_k=lengths,
        leftpad_k=leftpad,
        attn_bias=bias,
        return_attn_probs=True,
        **options,
    )
    return out, softmax_lse


def _one_after_the_other(
    x: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch, seqlen, …), or (total, …) with cu_seqlens, as (total, …). Returns it, its cu_seqlens,
    and of each token its sequence and its place in that."""
    if cu_seqlens is None:
        ends = torch.arange(x.size(0) + 1, dtype=torch.int32, device=x.device)
        cu_seqlens, x = ends * x.size(1), x.flatten(0, 1)
    sequence = _sequences(cu_seqlens, x.size(0))
    token = torch.arange(x.size(0), dtype=torch.int32, device=x.device)
    return x, cu_seqlens, sequence, token - cu_seqlens[sequence]


def _append(k_cache, v_cache, k, v, position, rows, page_table):
    """Writes tokens (total, heads, d) to these positions of these rows: each is a sequence of its
    own, whose step of decoding, against itself, nobody looks at."""
    flash_attn.flash_attn_with_kvcache(
        torch.zeros_like(k)[:, None],
        k_cache,
        v_cache,
        k[:, None],
        v[:, None],
        cache_seqlens=position,
        cache_batch_idx=rows,
        block_table=page_table,
        window_size=(0, 0),
    )


def _with_cache_as_varlen(
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary_cos,
    rotary_sin,
    lengths,
    rows,
    leftpad,
    page_table,
    cu_seqlens_q,
    cu_seqlens_k_new,
    max_seqlen_q,
    rotary_seqlens,
    interleaved,
    attention_chunk,
    options,
):
    """with_cache for what the kernels of a cache do not take: queries or new keys of different
    lengths, chunks. One thing after the other: rotate, append, attend."""
    if not isinstance(lengths, Tensor | None):
        lengths = as_int(lengths, "cache_seqlens")
    check_cached(
        q,
        dict(k_cache=k_cache, v_cache=v_cache, k=k, v=v),
        dict(
            cache_seqlens=(lengths if isinstance(lengths, Tensor) else None, 1),
            cache_batch_idx=(rows, 1),
            cache_leftpad=(leftpad, 1),
            page_table=(page_table, 2),
            cu_seqlens_q=(cu_seqlens_q, 1),
            cu_seqlens_k_new=(cu_seqlens_k_new, 1),
            rotary_seqlens=(rotary_seqlens, 1),
        ),
    )
    is_dense = cu_seqlens_q is None
    batch, seqlen = q.shape[:2] if is_dense else (cu_seqlens_q.numel() - 1, max_seqlen_q)
    capacity = _capacity(k_cache, page_table)
    q, cu_seqlens_q, sequence_q, place_q = _one_after_the_other(q, cu_seqlens_q)
    if not isinstance(lengths, Tensor):
        length = capacity if lengths is None else lengths
        lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if k is not None:
        v = v.flatten(0, -3)
        k, cu_seqlens_k_new, sequence, place = _one_after_the_other(k, cu_seqlens_k_new)
        if rotary_cos is not None:
            first = lengths if rotary_seqlens is None else rotary_seqlens
            is_by_position = options["causal"] or window_sides(options["window_size"]) != (-1, -1)
            q_at = first[sequence_q] + (place_q if is_by_position else 0)
            turn = partial(
                apply_rotary_emb, cos=rotary_cos, sin=rotary_sin, interleaved=interleaved
            )
            q = turn(q[:, None], seqlen_offsets=q_at).squeeze(1)
            k = turn(k[:, None], seqlen_offsets=first[sequence] + place).squeeze(1)
        new = cu_seqlens_k_new.diff()
        position = (lengths[sequence] + place).where(place < new[sequence], capacity)  # or nowhere
        into = sequence if rows is None else rows[sequence]
        _append(k_cache, v_cache, k, v, position, into, page_table)
        lengths = lengths + new
    out, softmax_lse = _varlen_with_cache(
        *(q, k_cache, v_cache, cu_seqlens_q, seqlen, lengths, page_table, rows, leftpad),
        *(attention_chunk, options),
    )
    if is_dense:
        shape = (batch, seqlen)
        return out.unflatten(0, shape), softmax_lse.unflatten(1, shape).transpose(0, 1)
    return out, softmax_lse


def _with_8bit_cache_of_lengths(
    q,
    k_cache,
    v_cache,
    lengths,
    rows,
    leftpad,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    q_descale,
    k_descale,
    v_descale,
    num_splits,
    options,
):
    """with_cache for queries of different lengths beside a cache of 8 bits, which only decode's
    kernels read. Each sequence has room for max_seqlen_q queries, and its own are the last ones, as
    masks count from there. A few sequences at a time, so that the room is O(total_q)."""
    room = as_int(max_seqlen_q, "max_seqlen_q")
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_queries_of_lengths(q, cu_seqlens_q, descales, dict(k_cache=k_cache, v_cache=v_cache))
    total, batch = q.size(0), cu_seqlens_q.numel() - 1
    if q.dtype == FP8:
        q = _scaled(q, q_descale, cu_seqlens_q)
    # One row more, for what is computed in the place of queries that a sequence lacks.
    out = q.new_zeros(total + 1, q.size(1), v_cache.size(-1))
    lse = out.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)
    token = cu_seqlens_q[1:, None] + torch.arange(-room, 0, device=q.device)
    exists = (token >= cu_seqlens_q[:-1, None].clamp(min=0)) & (token < total)
    place = token.where(exists, total)
    at_once = max(2 * total // max(room, 1), 1)
    if rows is None and at_once < batch:
        rows = torch.arange(batch, dtype=torch.int32, device=q.device)
    for first in range(0, batch if total and room else 0, at_once):

        def of_part(x, dims=1, part=slice(first, first + at_once)):
            return x[part] if isinstance(x, Tensor) and x.dim() == dims else x

        to = of_part(place, 2)
        found, lse_found = flash_attn.flash_attn_with_kvcache(
            q[to.clamp(max=total - 1)],
            k_cache,
            v_cache,
            cache_seqlens=of_part(lengths),
            cache_batch_idx=of_part(rows),
            cache_leftpad=of_part(leftpad),
            block_table=page_table,
            num_splits=num_splits,
            return_softmax_lse=True,
            k_descale=of_part(k_descale, 2),
            v_descale=of_part(v_descale, 2),
            **options,
        )
        out[to], lse[to] = found, lse_found.transpose(1, 2)
    return out[:total], lse[:total].transpose(0, 1)


def _rotated(q, k, cos, sin, rotary_seqlens, interleaved, *, each_query_at_its_own):
    """q and k turned by the positions from rotary_seqlens on; without a mask by positions, every
    query is at the first."""
    turn = partial(
        apply_rotary_emb, cos=cos, sin=sin, interleaved=interleaved, seqlen_offsets=rotary_seqlens
    )
    k = None if k is None else turn(k)
    if each_query_at_its_own:
        return turn(q), k
    return turn(q.flatten(1, 2)[:, None]).view(q.shape), k


@torch.no_grad()
def with_cache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad,
    page_table,
    cu_seqlens_q,
    cu_seqlens_k_new,
    max_seqlen_q,
    q_descale,
    k_descale,
    v_descale,
    rotary_interleaved,
    num_splits,
    rotary_seqlens,
    attention_chunk,
    **options,
):
    """out and softmax_lse of queries, dense or varlen, against a cache."""
    if cu_seqlens_q is None and cu_seqlens_k_new is None and not attention_chunk:
        descales = (q_descale, k_descale, v_descale)
        q, k, v = _dequantized_beside_cache(q, k_cache, v_cache, k, v, *descales)
        if rotary_seqlens is not None and rotary_cos is not None:
            is_by_position = options["causal"] or window_sides(options["window_size"]) != (-1, -1)
            turned = (rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved)
            q, k = _rotated(q, k, *turned, each_query_at_its_own=is_by_position)
            rotary_cos = rotary_sin = None
        return flash_attn.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            rotary_interleaved=rotary_interleaved,
            num_splits=num_splits,
            return_softmax_lse=True,
            k_descale=k_descale,
            v_descale=v_descale,
            **options,
        )
    check_append(k, v, rotary_cos, rotary_sin, cache_seqlens)
    only_reads = k is None and cu_seqlens_q is not None and not attention_chunk
    if only_reads and k_cache.element_size() == 1:
        return _with_8bit_cache_of_lengths(
            q,
            k_cache,
            v_cache,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            cu_seqlens_q,
            max_seqlen_q,
            q_descale,
            k_descale,
            v_descale,
            num_splits,
            options,
        )
    beside = (
        " with attention_chunk, nor with cu_seqlens_q or cu_seqlens_k_new unless a cache of 8 bits"
        " is only read"
    )
    refuse(beside, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return _with_cache_as_varlen(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k_new,
        max_seqlen_q,
        rotary_seqlens,
        rotary_interleaved,
        attention_chunk,
        options,
    )


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward of dense, varlen and cached calls, by what is given.

    float8_e4m3fn, descales and qv: as in flash_attn_func, and with a cache in
    flash_attn_with_kvcache. scheduler_metadata, pack_gqa, sm_margin: for tuning, not needed here.

    Returns: out (out_ if given), softmax_lse, and two empty tensors where FlashAttention-3 has its
    unfinished pieces.
    """
    if k_new is not None:
        refuse(" with k_new", qv=qv)
    q, k, v = joined(q, qv, dict(k=k, v=v))
    options = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": (window_size_left, window_size_right),
        "softcap": softcap,
    }
    descales = (q_descale, k_descale, v_descale)
    cached = (k_new, page_table, kv_batch_idx, rotary_cos)
    # Beside another q only a cache has descales.
    of_cache = () if q.dtype == FP8 else (k_descale, v_descale)
    if cu_seqlens_k is not None and all(x is None for x in cached):
        q, k, v = dequantized(q, k, v, *descales, cu_seqlens_q, cu_seqlens_k)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        used = (seqused_q, seqused_k, leftpad_k)
        out, softmax_lse, _ = flash_attn.flash_attn_varlen_func(
            q,
            k,
            v,
            *lengths,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            attn_bias=chunks_of_sequences(attention_chunk, q, k, *lengths, *used),
            return_attn_probs=True,
            **options,
        )
    elif cu_seqlens_q is None and all(
        x is None for x in (*cached, *of_cache, seqused_k, leftpad_k)
    ):
        refuse(seqused_q=seqused_q)
        q, k, v = dequantized(q, k, v, *descales)
        bias = chunks(attention_chunk, q, k)
        out, softmax_lse, _ = flash_attn.flash_attn_func(
            q, k, v, attn_bias=bias, return_attn_probs=True, **options
        )
    else:
        refuse(seqused_q=seqused_q, cu_seqlens_k=cu_seqlens_k)
        out, softmax_lse = with_cache(
            q,
            k,
            v,
            k_new,
            v_new,
            rotary_cos,
            rotary_sin,
            seqused_k,
            kv_batch_idx,
            leftpad_k,
            page_table,
            cu_seqlens_q,
            cu_seqlens_k_new,
            max_seqlen_q,
            *descales,
            rotary_interleaved,
            num_splits,
            seqlens_rotary,
            attention_chunk,
            **options,
        )
    out = out if out_ is None else out_.copy_(out)
    return out, softmax_lse, softmax_lse.new_empty(0), softmax_lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """The dense or varlen backward: writes into dq, dk and dv.

    sequed_q, sequed_k: NotImplementedError. sm_margin: not needed.

    Returns: softmax_d = rowsum(dout ∘ out), laid out like softmax_lse.
    """
    refuse(sequed_q=sequed_q, sequed_k=sequed_k)
    saved = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
    options = (
        *(0.0, softmax_scale, is_causal, window_size_left, window_size_right, softcap),
        *(None, deterministic),
    )
    if cu_seqlens_q is None:
        return _upstream._flash_attn_backward(*saved, *options)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _upstream._flash_attn_varlen_backward(*saved, *lengths, *options)
