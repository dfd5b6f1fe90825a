"""Decoding: new queries against a cache of keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn._call import as_int, decode, fwd, fwd_arguments, gather_pages, window_sides
from flash_attn.layers.rotary import apply_rotary_emb

Window = Sequence[int | None] | Tensor


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens to a cache that holds their keys and values already.

    Split-KV: each sequence's keys are cut into pieces that run side by side; their (out, lse) pairs
    are then combined (reference.split_kv shows how). Reads the cache, never writes; has no
    gradient.

    Arguments:
        q: (batch, seqlen_q, heads_q, d), the last seqlen_q tokens of each sequence.
        k_cache: (batch, capacity, heads_kv, d); with block_table (num_pages, page_size, heads_kv,
            d).
        v_cache: like k_cache, with its own head dim d_v.
        cache_seqlens: int32 (batch), tokens in each cache, the new ones included. Default:
            capacity.
        causal: query i of a sequence of length n sees keys up to n - seqlen_q + i. seqlen_q = 2, n
            = 5:

                1 1 1 1 0
                1 1 1 1 1

        softmax_scale, window_size, softcap, alibi_slopes, learnable_sink: as in flash_attn_func.
        block_table: int32 (batch, max_pages), the page of each run of page_size keys; needs
            cache_seqlens. Any page size. Entries past a sequence's length may hold anything.
        num_splits: pieces that the keys are cut into, up to 256; 0: chosen to fill the device.
        return_softmax_lse: also return softmax_lse.

    Returns:
        out: (batch, seqlen_q, heads_q, d_v), dtype of q; 0 where there is nothing to attend to.
        softmax_lse (with return_softmax_lse): (batch, heads_q, seqlen_q), natural logarithm, fp32
            (fp64 for fp64 inputs).

    Raises: as flash_attn_func.
    """
    out, softmax_lse = decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        alibi_slopes,
        learnable_sink,
        softmax_scale,
        causal,
        window_size,
        softcap,
        num_splits,
    )
    return (out, softmax_lse) if return_softmax_lse else out


def _expect(condition: bool, argument: str, requirement: str, got: object) -> None:
    if not condition:
        raise RuntimeError(f"flash_attn: {argument}: expected {requirement}, got {got}")


def _check_int32(tensor: Tensor | None, argument: str, *shape: int) -> None:
    if tensor is not None:
        _expect(tensor.dtype == torch.int32, argument, "dtype int32", tensor.dtype)
        _expect(
            tuple(tensor.shape) == shape,
            argument,
            f"must have shape {shape}",
            tuple(tensor.shape),
        )


def _check_append(q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, capacity):
    """The new keys and values and their rotation, before anything is written."""
    _expect((k is None) == (v is None), "v", "k and v together", "one of them")
    _expect(
        (rotary_cos is None) == (rotary_sin is None),
        "rotary_sin",
        "rotary_cos and rotary_sin together",
        "one of them",
    )
    if k is None:
        _expect(rotary_cos is None, "rotary_cos", "k and v to append with it", "none")
        return
    _expect(cache_seqlens is not None, "cache_seqlens", "where to append k and v", "None")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        shape = (q.size(0), k.size(1) if k.dim() == 4 else "seqlen_new", *cache.shape[2:])
        _expect(tuple(new.shape) == shape, name, f"must have shape {shape}", tuple(new.shape))
        _expect(new.dtype == cache.dtype, name, f"dtype {cache.dtype} of its cache", new.dtype)
        _expect(
            not (torch.is_grad_enabled() and cache.requires_grad),
            f"{name}_cache",
            "requires_grad=False, as it is updated in place",
            "True",
        )
    _expect(k.size(1) <= capacity, "k", f"at most {capacity} new tokens (the capacity)", k.size(1))
    if rotary_cos is not None:
        _expect(
            rotary_cos.dtype == q.dtype, "rotary_cos", f"dtype {q.dtype} of q", rotary_cos.dtype
        )
        _expect(
            rotary_cos.size(0) >= capacity,
            "rotary_cos",
            f"at least {capacity} rows (the cache's capacity)",
            rotary_cos.size(0),
        )


def _append(cache: Tensor, new: Tensor, table: Tensor, starts: Tensor) -> None:
    """Writes token i of `new` (batch, count, heads, d) to position starts[b] + i, in place.

    A position outside the cache, or a page that does not exist, drops its token. Without a host
    synchronisation the number of writes is fixed, so a dropped token repeats the write of the first
    one that fits, or writes back what is there.
    """
    num_pages, page_size = cache.shape[:2]
    count, capacity = new.size(1), table.size(1) * page_size
    if new.numel() == 0 or capacity == 0 or num_pages == 0:
        return
    token = torch.arange(count, device=cache.device)
    wanted = starts[:, None] + token
    position = wanted.clamp(0, capacity - 1)
    page = table.gather(1, position // page_size).long()
    fits = (wanted == position) & (page >= 0) & (page < num_pages)
    source = torch.where(fits, token, fits.int().argmax(1, keepdim=True))
    page = page.clamp(0, num_pages - 1).gather(1, source)
    slot = (position % page_size).gather(1, source)
    value = new[torch.arange(new.size(0), device=cache.device)[:, None], source]
    any_fits = fits.any(1)[:, None, None, None]
    cache[page, slot] = torch.where(any_fits, value, cache[page, slot])


def _rotate_q(q, rotary, is_local):
    """q at its tokens' positions; all at the first if no mask tells them apart (as upstream)."""
    if is_local:
        return apply_rotary_emb(q, *rotary)
    one_token = q.reshape(q.size(0), 1, -1, q.size(-1))
    return apply_rotary_emb(one_token, *rotary).view(q.shape)


def _page_table(q, k_cache, cache_batch_idx, block_table):
    """The page table of each sequence (None: the cache is not paged), and its capacity."""
    batch, page_size = q.size(0), k_cache.size(1)
    _check_int32(cache_batch_idx, "cache_batch_idx", batch)
    if block_table is None:
        # A row of an unpaged cache is a page as long as the capacity.
        return None if cache_batch_idx is None else cache_batch_idx[:, None], page_size
    _expect(
        block_table.dtype == torch.int32 and block_table.dim() == 2,
        "block_table",
        "int32 of shape (batch, max_pages)",
        f"{block_table.dtype} of shape {tuple(block_table.shape)}",
    )
    if cache_batch_idx is not None:
        block_table = block_table[cache_batch_idx.clamp(0, block_table.size(0) - 1)]
    return block_table, block_table.size(1) * page_size


def _lengths(q, cache_seqlens, capacity, needed):
    """cache_seqlens as int32 (batch); None, where that is not needed, for the capacity."""
    if cache_seqlens is None:
        if not needed:
            return None
        cache_seqlens = capacity
    if isinstance(cache_seqlens, Tensor):
        _check_int32(cache_seqlens, "cache_seqlens", q.size(0))
        return cache_seqlens
    length = as_int(cache_seqlens, "cache_seqlens")
    _expect(0 <= length <= capacity, "cache_seqlens", f"0 to {capacity} (the capacity)", length)
    return torch.full((q.size(0),), length, dtype=torch.int32, device=q.device)


def _attend_leftpad(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    table,
    alibi_slopes,
    learnable_sink,
    softmax_scale,
    causal,
    window_size,
    softcap,
    num_splits,
    cache_leftpad,
):
    """What the op `decode` has no argument for, through the op `fwd`."""
    if num_splits > 1:
        raise NotImplementedError(
            "flash_attn: num_splits: num_splits > 1 is not supported with cache_leftpad,"
            f" got {num_splits}"
        )
    if table is not None:
        k_cache, v_cache = gather_pages(k_cache, table), gather_pages(v_cache, table)
    arguments = fwd_arguments(
        q,
        k_cache,
        v_cache,
        seqused_k=cache_seqlens,
        leftpad_k=cache_leftpad,
        alibi_slopes=alibi_slopes,
        learnable_sink=learnable_sink,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )
    out, softmax_lse, _ = fwd(arguments)
    return out, softmax_lse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends k and v to the cache in place, rotates, and attends: one step of decoding.

    All arguments combine freely. There is no gradient through the cache.

    Arguments:
        q: (batch, seqlen_q, heads_q, d).
        k_cache: (batch_cache, capacity, heads_kv, d); with block_table (num_pages, page_size,
            heads_kv, d), any page size.
        v_cache: like k_cache.
        k, v: (batch, seqlen_new, heads_kv, d), written to the cache from position cache_seqlens on.
            What does not fit the cache is dropped.
        rotary_cos, rotary_sin: (rows, rotary_dim / 2), dtype of q, rows at least the capacity:
            rotate k, and q, by their positions (Su et al. 2021), from cache_seqlens on. Without
            causal and window, all of q is at position cache_seqlens.
        cache_seqlens: int, or int32 (batch): tokens in the cache before k and v. Default: capacity.
        cache_batch_idx: int32 (batch): the row of the cache (of block_table, if given) of each
            sequence.
        cache_leftpad: int32 (batch): keys to skip at the start of each cache.
        block_table: int32 (batch, max_pages).
        rotary_interleaved: pairs are dimensions 0 and 1, 2 and 3, …; else i and i + rotary_dim / 2.
        num_splits: as in flash_decode_func.
        softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink: as in
            flash_attn_func. Masks are aligned bottom-right to the cache with k and v in it.
        return_softmax_lse: also return softmax_lse.

    Returns:
        out: (batch, seqlen_q, heads_q, d); softmax_lse: (batch, heads_q, seqlen_q), fp32.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it.
        NotImplementedError: num_splits above 1 together with cache_leftpad.
    """
    _expect(
        q.dim() == k_cache.dim() == v_cache.dim() == 4,
        "q, k_cache, v_cache",
        "4 dimensions",
        f"{q.dim()}, {k_cache.dim()} and {v_cache.dim()}",
    )
    table, capacity = _page_table(q, k_cache, cache_batch_idx, block_table)
    _check_append(q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, capacity)
    cache_seqlens = _lengths(q, cache_seqlens, capacity, needed=table is not None)
    if k is not None:
        if rotary_cos is not None:
            rotary = rotary_cos, rotary_sin, rotary_interleaved, False, cache_seqlens
            k = apply_rotary_emb(k, *rotary)
            q = _rotate_q(q, rotary, is_local=causal or max(window_sides(window_size)) >= 0)
        rows = torch.arange(q.size(0), device=q.device)[:, None] if table is None else table
        with torch.no_grad():
            _append(k_cache, k, rows, cache_seqlens)
            _append(v_cache, v, rows, cache_seqlens)
        cache_seqlens = cache_seqlens + k.size(1)

    call = (
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        table,
        alibi_slopes,
        learnable_sink,
        softmax_scale,
        causal,
        window_size,
        softcap,
        num_splits,
    )
    out_and_lse = decode(*call) if cache_leftpad is None else _attend_leftpad(*call, cache_leftpad)
    return tuple(out_and_lse) if return_softmax_lse else out_and_lse[0]
