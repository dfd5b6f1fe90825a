"""From Python's options to the ops' argument lists: the one place that knows their order.

Eager calls go to `_C` (pybind11 into a typed dispatcher handle), traced ones to
`torch.ops.flash_attn`, those inside torch.func's transforms to `_functorch`.
"""

import operator

import torch
from torch import Tensor

from flash_attn import _checks, _functorch, _log
from flash_attn._errors import shown
from flash_attn._library import C
from flash_attn.masks import Mask, lowering
from flash_attn.masks.tiles import Geometry, Tiled, is_top_left

# `names`: the backends that this thread's or async context's use_backend blocks name, outermost
# first. torch.compile guards on it.
forced_backends = C.ForcedBackends()


def forced_backend() -> str | None:
    """The backend of the innermost use_backend block, if any."""
    names = forced_backends.names
    return names[-1] if names else None


def _ops():
    return torch.ops.flash_attn if torch.compiler.is_compiling() else C


def expect(condition: bool, argument: str, requirement: str, got: object) -> None:
    """Raises unless the condition holds: which argument, what was expected, what came."""
    if not condition:
        raise RuntimeError(f"flash_attn: {argument}: expected {requirement}, got {got}")


def as_int(value, argument: str):
    """A SymInt, or as an int what has __index__: bools, NumPy's ints, 0-dim tensors."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(
            f"flash_attn: {argument}: expected an int, got {type(value).__name__}"
        ) from None


def window_sides(window_size):
    """(left, right) as ints, with -1 for "no limit"."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(
            f"flash_attn: window_size: expected (left, right), got {shown(window_size)}"
        ) from None
    if type(left) is int and type(right) is int:
        return left, right
    return tuple(-1 if side is None else as_int(side, "window_size") for side in (left, right))


def dense_seqlen(x: Tensor) -> int:
    """The length of a (batch, seqlen, heads, d) tensor; 0 for another rank, which C++ reports."""
    return x.size(1) if x.dim() == 4 else 0


def _check_pages(k: Tensor, v: Tensor, block_table: Tensor, **indices: Tensor | None) -> None:
    for name, tensor in {"v": v, "block_table": block_table, **indices}.items():
        if tensor is not None and tensor.device != k.device:
            raise RuntimeError(
                f"flash_attn: {name}: expected device {k.device} as k has, got {tensor.device}"
            )
    for name, tensor in indices.items():
        if tensor is not None and (tensor.dim() != 1 or tensor.dtype != torch.int32):
            raise RuntimeError(
                f"flash_attn: {name}: expected int32 of one dimension, got {shown(tensor)}"
            )
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise RuntimeError(
            "flash_attn: block_table: expected int32 of shape (batch, max_pages), got"
            f" {block_table.dtype} of shape {tuple(block_table.shape)}"
        )
    for name, cache in (("k", k), ("v", v)):
        if cache.dim() != 4:
            raise RuntimeError(
                f"flash_attn: {name}: expected shape (num_pages, page_size, heads_kv, d) with"
                f" block_table, got {tuple(cache.shape)}"
            )
    if k.shape[:2] != v.shape[:2]:
        raise RuntimeError(
            f"flash_attn: v: expected {k.size(0)} pages of {k.size(1)} keys as k has, got"
            f" {v.size(0)} of {v.size(1)}"
        )


def gather_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """A paged cache (num_pages, page_size, …) as (batch, max_pages * page_size, …): a copy.

    A page that does not exist is a copy of another one; of zeros, if there is none.
    """
    if cache.size(0) == 0:
        cache = torch.cat([cache, cache.new_zeros(1, *cache.shape[1:])])
    return cache[block_table.clamp(0, cache.size(0) - 1)].flatten(1, 2)


def _mask_missing(k, missing, page_size, attn_bias, max_seqlen_k, leftpad_k):
    """The gathered k and the bias of a call in which pages, bool (batch, max_pages), are missing.

    On the CPU their keys are masked. A GPU's kernels take no mask and its host cannot know whether
    one is needed: there a NaN in each key shows in every row that sees one.
    """
    if not k.is_cpu:
        lost = missing.repeat_interleave(page_size, 1)[..., None]
        k[..., 0].masked_fill_(lost, float("nan"))
        return k, attn_bias
    if missing.size(1) == 0 or not (torch.compiler.is_compiling() or bool(missing.any())):
        return k, attn_bias
    position = torch.arange(max_seqlen_k, device=k.device).expand(missing.size(0), -1)
    if leftpad_k is not None:
        position = position + leftpad_k.clamp(min=0)[:, None]
    page = (position // page_size).clamp(max=missing.size(1) - 1)
    masked = missing.gather(1, page)[:, None, None]
    if attn_bias is None:
        return k, ~masked
    if attn_bias.dtype == torch.bool:
        return k, attn_bias & ~masked
    return k, attn_bias.masked_fill(masked, float("-inf"))


def _unpage(k, v, block_table, cu_seqlens_k, seqused_k, leftpad_k, max_seqlen_k, attn_bias):
    """The pages of each sequence side by side, as a varlen call takes them.

    Each sequence is padded to the table's capacity; its true length moves into seqused_k. Returns
    k, v, cu_seqlens_k, seqused_k, attn_bias.
    """
    lengths = {"cu_seqlens_k": cu_seqlens_k} if seqused_k is None else {"seqused_k": seqused_k}
    _check_pages(k, v, block_table, leftpad_k=leftpad_k, **lengths)
    (pages, page_size), (batch, columns) = k.shape[:2], block_table.shape
    lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if pages == 0:
        lengths = torch.zeros_like(lengths)
    first = torch.arange(columns, device=k.device) * page_size
    missing = ((block_table < 0) | (block_table >= pages)) & (first < lengths[:, None])
    k, v = gather_pages(k, block_table), gather_pages(v, block_table)
    k, attn_bias = _mask_missing(k, missing, page_size, attn_bias, max_seqlen_k, leftpad_k)
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * columns * page_size
    return k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, lengths, attn_bias


def _diagonal(q, max_seqlens, lengths_q, lengths_k, is_top_left):
    """The key that each sequence's query 0 meets on its diagonal: of Geometry."""
    if is_top_left:
        return 0
    if lengths_q is None:
        return max_seqlens[1] - max_seqlens[0]
    return (lengths_k.long() - lengths_q.long())[:, None, None, None]


def _lower_mask(mask, q, max_seqlens, window, is_top_left, lengths_q=None, lengths_k=None):
    """The window, attn_bias and tiles of a call whose attn_bias is a mask."""
    if not isinstance(q, Tensor) or q.dim() != (4 if lengths_q is None else 3):
        return window, None, Tiled(None)  # which C++ reports
    diagonal = _diagonal(q, max_seqlens, lengths_q, lengths_k, is_top_left)
    at = Geometry(*max_seqlens, diagonal, q.device)
    batch = q.size(0) if lengths_q is None else lengths_q.size(0)
    lower = lowering.lower if lengths_q is None else lowering.lower_to_bool
    lowered = lower(mask, batch, q.size(-2), at)
    return (
        lowering.intersect_windows(window, lowered.window),
        lowered.attn_bias,
        lowered.tiled or Tiled(None),
    )


def _used_lengths(cu_seqlens, seqused, leftpad=None):
    """int32 (batch): what counts of each sequence. cu_seqlens: None where pages hold the keys."""
    if cu_seqlens is None:
        lengths = seqused
    else:
        lengths = cu_seqlens.diff()
        if seqused is not None:
            lengths = torch.minimum(lengths, seqused)
    return lengths if leftpad is None else (lengths - leftpad).clamp(min=0)


def fwd_arguments(
    q,
    k,
    v,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
    block_table=None,
    attn_bias=None,
    alibi_slopes=None,
    learnable_sink=None,
    rng_state=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    causal_alignment="bottom-right",
    softcap=0.0,
    deterministic=False,
    return_probs=False,
    return_max_logits=False,
):
    """The argument list of the op `fwd`.

    Lengths that are None are those of dense tensors; with dropout an rng_state of None is drawn.
    """
    if max_seqlen_q is None:
        max_seqlen_q = dense_seqlen(q)
    if max_seqlen_k is None:
        max_seqlen_k = dense_seqlen(k)
    if _checks.ENABLED:
        _checks.fwd(
            q,
            k,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            block_table=block_table,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
    window_left, window_right = window_sides(window_size)
    top_left = is_top_left(causal_alignment)
    tiled = Tiled(None)
    if isinstance(attn_bias, Mask):
        lengths = ()
        if cu_seqlens_q is not None:
            lengths = (
                _used_lengths(cu_seqlens_q, seqused_q),
                _used_lengths(cu_seqlens_k, seqused_k, leftpad_k),
            )
        (window_left, window_right), attn_bias, tiled = _lower_mask(
            attn_bias,
            q,
            (max_seqlen_q, max_seqlen_k),
            (window_left, window_right),
            top_left,
            *lengths,
        )
    if block_table is not None:
        k, v, cu_seqlens_k, seqused_k, attn_bias = _unpage(
            k, v, block_table, cu_seqlens_k, seqused_k, leftpad_k, max_seqlen_k, attn_bias
        )
    if rng_state is None and dropout_p > 0.0:
        rng_state = draw_rng_state(q)
    return (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        leftpad_k,
        None,  # block_table
        attn_bias,
        alibi_slopes,
        learnable_sink,
        rng_state,
        *tiled,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_left,
        window_right,
        top_left,
        softcap,
        deterministic,
        return_probs,
        return_max_logits,
        forced_backend(),
    )


def _with_largest_1(probabilities):
    """Each row divided by its largest: what upstream's kernels leave after their last tile."""
    if probabilities.numel() == 0:
        return probabilities
    largest = probabilities.abs().amax(-1, keepdim=True)
    return probabilities / torch.where(largest > 0, largest, 1)


def fwd(arguments):
    """Runs the op `fwd` on fwd_arguments(…). Returns out, softmax_lse, S_dmask, max_logits."""
    if torch.compiler.is_compiling():
        results = torch.ops.flash_attn.fwd(*arguments)
    else:
        if _log.ENABLED:
            _log.call("fwd", arguments)
        run = _functorch.fwd if _functorch.is_active() else C.fwd
        results = run(*arguments)
    return_probs = arguments[-3]
    if return_probs:
        out, softmax_lse, probabilities, max_logits = results
        return out, softmax_lse, _with_largest_1(probabilities), max_logits
    return results


def heads_first(query, key, value, attn_mask, dropout_p, scale, causal, gqa):
    """The op `fwd` of (batch, heads, rows, d), turned in C++; None where the call needs more."""
    if torch.compiler.is_compiling() or _functorch.is_active() or _log.ENABLED:
        return None
    if isinstance(attn_mask, Mask):
        return None
    options = (dropout_p, scale, causal, gqa, forced_backend())
    return C.heads_first(query, key, value, attn_mask, *options)


def _runs_packed(q, k, attn_bias, alibi_slopes, dropout_p, return_probs):
    """The windows and bounds of packed documents that a varlen call serves, and as fast as any."""
    if not isinstance(attn_bias, Mask) or not isinstance(q, Tensor) or q.dim() != 4:
        return None
    # Its dropout is another one; where slopes are each sequence's own, sequences are others.
    plain = dropout_p == 0.0 and not return_probs
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        return None
    # ATen pads sequences that only the device knows: each to the length of all.
    fast = q.is_cpu or (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16))
    same = k.dim() == 4 and q.shape[:2] == k.shape[:2]
    return lowering.packed_bounds(attn_bias) if plain and fast and same else None


def _packed_lengths(bounds, batch, seqlen):
    """cu_seqlens and seqused_k of the documents of all sequences, one after the other.

    Before a sequence's first document and behind its last one lie queries without keys.
    """
    bounds = bounds.clamp(0, seqlen).expand(batch, -1)
    zero = torch.zeros_like(bounds[:, :1])
    start = torch.arange(batch, dtype=torch.int32, device=bounds.device)[:, None] * seqlen
    cu_seqlens = (torch.cat([zero, bounds], 1) + start).flatten()
    cu_seqlens = torch.cat([cu_seqlens, torch.full_like(cu_seqlens[:1], batch * seqlen)])
    used = torch.cat([zero, bounds.diff(), zero], 1).flatten()
    return cu_seqlens, used


def attend(
    q, k, v, *, attn_bias=None, alibi_slopes=None, dropout_p=0.0, return_probs=False, **options
):
    """The op `fwd` of dense tensors, or what packed documents make of it."""
    packed = _runs_packed(q, k, attn_bias, alibi_slopes, dropout_p, return_probs)
    if packed is None:
        return fwd(
            fwd_arguments(
                q,
                k,
                v,
                attn_bias=attn_bias,
                alibi_slopes=alibi_slopes,
                dropout_p=dropout_p,
                return_probs=return_probs,
                **options,
            )
        )
    window, bounds = packed
    batch, seqlen = q.shape[:2]
    if batch == 1 and options.get("learnable_sink") is None:
        cu_seqlens, used = bounds.flatten(), None  # rows outside of all documents: out 0, LSE -inf
    else:
        cu_seqlens, used = _packed_lengths(bounds, batch, seqlen)
    window = lowering.intersect_windows(window, window_sides(options.pop("window_size", (-1, -1))))
    out, softmax_lse, *rest = fwd(
        fwd_arguments(
            *(x.flatten(0, 1) for x in (q, k, v)),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            seqused_k=used,
            max_seqlen_q=seqlen,
            max_seqlen_k=seqlen,
            alibi_slopes=alibi_slopes,
            window_size=window,
            **options,
        )
    )
    softmax_lse = softmax_lse.unflatten(1, (batch, seqlen)).transpose(0, 1)
    return out.unflatten(0, (batch, seqlen)), softmax_lse, *rest


def draw_rng_state(like):
    """What a call with dropout draws its mask from: int64 (2) on the device of `like`."""
    return _ops().rng_state(like)


def bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    *,
    dlse=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    attn_bias=None,
    alibi_slopes=None,
    rng_state=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale,
    causal=False,
    window_size,
    causal_alignment="bottom-right",
    softcap,
    deterministic,
):
    """Runs the op `bwd` for q, k and v. Returns dq, dk, dv.

    k and v may be some of the keys only, where out and softmax_lse belong to all of them: the
    results then are what these keys contribute to dq, and dk and dv of these keys.
    """
    window_left, window_right = window_sides(window_size)
    dq, dk, dv, _, _ = _ops().bwd(
        dout,
        dlse,
        out,
        softmax_lse,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        None,  # seqused_q
        None,  # seqused_k
        None,  # leftpad_k
        None,  # block_table
        attn_bias,
        alibi_slopes,
        None,  # learnable_sink
        rng_state,
        None,  # mask_tiles
        None,  # mask_rows
        None,  # mask_labels
        dense_seqlen(q) if max_seqlen_q is None else max_seqlen_q,
        dense_seqlen(k) if max_seqlen_k is None else max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_left,
        window_right,
        is_top_left(causal_alignment),
        softcap,
        deterministic,
        [True, True, True, False, False],
        forced_backend(),
    )
    return dq, dk, dv


def decode_arguments(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    alibi_slopes=None,
    learnable_sink=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    num_splits=0,
    batch_invariant=False,
    return_max_logits=False,
    new=0,
):
    """The argument list of the op `decode`, and the end of that of `kvcache`, with `new` tokens."""
    if _checks.ENABLED:
        _checks.decode(
            q,
            k_cache,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            new=new,
        )
    window_left, window_right = window_sides(window_size)
    return (
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        alibi_slopes,
        learnable_sink,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        window_left,
        window_right,
        softcap,
        num_splits,
        batch_invariant,
        return_max_logits,
        forced_backend(),
    )


def decode(arguments):
    """Runs the op `decode` on decode_arguments(…). Returns out, softmax_lse, max_logits."""
    if _log.ENABLED:
        _log.call("decode", arguments)
    return _ops().decode(*arguments)


def kvcache(k, v, rotary_cos, rotary_sin, rotary_interleaved, arguments):
    """The same after k and v were written to the caches, from cache_seqlens on."""
    arguments = (k, v, rotary_cos, rotary_sin, rotary_interleaved, *arguments)
    if _log.ENABLED:
        _log.call("kvcache", arguments)
    return _ops().kvcache(*arguments)
