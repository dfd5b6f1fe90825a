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


def is_top_left(causal_alignment: str) -> bool:
    if causal_alignment == "bottom-right":
        return False
    if causal_alignment == "top-left":
        return True
    raise ValueError(
        'flash_attn: causal_alignment: expected "bottom-right" or "top-left",'
        f" got {shown(causal_alignment)}"
    )


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
    if block_table is not None:
        k, v, cu_seqlens_k, seqused_k, attn_bias = _unpage(
            k, v, block_table, cu_seqlens_k, seqused_k, leftpad_k, max_seqlen_k, attn_bias
        )
    if rng_state is None and dropout_p > 0.0:
        rng_state = draw_rng_state(q)
    window_left, window_right = window_sides(window_size)
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
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_left,
        window_right,
        is_top_left(causal_alignment),
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
