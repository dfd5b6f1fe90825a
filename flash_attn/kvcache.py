"""Decoding: new queries against a cache of keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn._cache_call import check_append, decode, decode_arguments, kvcache
from flash_attn._call import as_int, dense_seqlen
from flash_attn._errors import expect, explain
from flash_attn.masks import Mask
from flash_attn.shared_prefix import SharedPrefix

Window = Sequence[int | None] | Tensor


def _chosen(results, return_softmax_lse: bool, return_max_logits: bool):
    """Of out, softmax_lse and max_logits those that a call asks for."""
    wanted = (True, return_softmax_lse, return_max_logits)
    chosen = tuple(x for x, is_wanted in zip(results, wanted, strict=True) if is_wanted)
    return chosen if len(chosen) > 1 else chosen[0]


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
    cache_leftpad: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    shared_prefix: SharedPrefix | None = None,
    attn_bias: Tensor | Mask | None = None,
    tree_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of the newest tokens to a cache that holds their keys and values already.

    Split-KV: each sequence's keys are cut into pieces that run side by side; their (out, lse) pairs
    are then combined (reference.split_kv shows how). With more than 16 tokens a sequence (a chunk
    of a prompt), and on Hopper with more than 16 rows that read a kv head (tokens times query
    heads), the kernels of flash_attn_func run instead where they are faster (can_use tells); most
    of them copy pages first, into at most 1 GiB. Reads the cache, never writes; has no gradient.
    All arguments combine freely, but for attn_bias beside tree_mask.

    Arguments:
        q: (batch, seqlen_q, heads_q, d), the last seqlen_q tokens of each sequence.
        k_cache: (batch, capacity, heads_kv, d); with cache_batch_idx any number of rows; with
            block_table (num_pages, page_size, heads_kv, d), any page size. dtype of q, or
            float8_e4m3fn or int8.
        v_cache: like k_cache, with its own head dim d_v.
        cache_seqlens: int32 (batch), tokens in each cache, the new ones included. Default:
            capacity, which is max_pages * page_size with block_table.
        causal: query i of a sequence of length n sees keys up to n - seqlen_q + i. seqlen_q = 2, n
            = 5:

                1 1 1 1 0
                1 1 1 1 1

        softmax_scale, window_size, softcap, alibi_slopes, learnable_sink: as in flash_attn_func.
        block_table: int32 (batch, max_pages), the page of each run of page_size keys.
        num_splits: pieces that each sequence's keys are cut into, up to 256; 0: chosen to fill the
            device. The result differs by rounding only.
        return_softmax_lse: also return softmax_lse.
        cache_batch_idx: int32 (batch): the row of the cache (of block_table, if given) of each
            sequence. Default: 0, 1, 2, …
        cache_leftpad: int32 (batch): keys to skip at the start of each cache. Default: 0.
        k_descale, v_descale: fp32 (heads_kv) or (batch, heads_kv), for a cache of float8_e4m3fn or
            int8: value = stored * descale. Default: 1.
        batch_invariant: the bits of a sequence's result do not depend on the other sequences of
            the call, nor on their number.
        return_max_logits: also return max_logits, as the last of the results.
        shared_prefix: with block_table: which sequences have leading pages in common, that a GPU
            may read once for all of them (find_shared_prefix finds it): the first lens[b] keys of
            sequence b lie where those of sequence source[b] do, and b's own row of block_table is
            not asked about them. The result differs by rounding only.
        attn_bias: broadcasts to (batch, heads_q, seqlen_q, capacity), added to the scores: column j
            belongs to position j of a sequence's cache. A floating dtype, or bool, where False
            hides the key. Numbers below -2^26 hide it, too. Or a mask of flash_attn.masks, whose
            query i is new token i, and whose key j is position j; all but causal and windows become
            a bool tensor.
        tree_mask: bool (seqlen_q, seqlen_q) or (batch, seqlen_q, seqlen_q), without attn_bias: the
            new tokens are a tree of drafts. Token i sees token j of them where [i, j] is True; the
            keys before them all are seen. With causal, which is the default, no token sees a later
            one, as a tree in which parents come first asks for anyway. To windows and ALiBi a
            draft's position is its place in the cache.

    What the index tensors hold is not checked, as that would wait for the device. It is clamped:
    lengths to 0 … capacity, cache_leftpad to 0 … length. A page or a row that does not exist has no
    keys. Entries of block_table past a sequence's length may hold anything.

    Returns:
        out: (batch, seqlen_q, heads_q, d_v), dtype of q; 0 where there is nothing to attend to.
        softmax_lse (with return_softmax_lse): (batch, heads_q, seqlen_q), natural logarithm, fp32
            (fp64 for fp64 inputs).
        max_logits (with return_max_logits): (heads_q), as in flash_attn_func.

    Raises: as flash_attn_func.
    """
    try:
        results = decode(
            decode_arguments(
                q,
                k_cache,
                v_cache,
                cache_seqlens=cache_seqlens,
                cache_batch_idx=cache_batch_idx,
                cache_leftpad=cache_leftpad,
                block_table=block_table,
                alibi_slopes=alibi_slopes,
                learnable_sink=learnable_sink,
                k_descale=k_descale,
                v_descale=v_descale,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                num_splits=num_splits,
                batch_invariant=batch_invariant,
                return_max_logits=return_max_logits,
                shared_prefix=shared_prefix,
                attn_bias=attn_bias,
                tree_mask=tree_mask,
            )
        )
        return _chosen(results, return_softmax_lse, return_max_logits)
    except Exception as error:
        explain(error, flash_decode_func, locals())
        raise


def _at_length(q, k_cache, v_cache, block_table, length, new, is_masked):
    """The caches of sequences that all have `length` tokens before `new` more, and cache_seqlens.

    Unpaged caches are cut to their tokens, views, so that no lengths have to reach the device; not
    with a mask, which knows their capacity.
    """
    expect(k_cache.dim() == 4, "k_cache", "4 dimensions", k_cache.dim())
    capacity = k_cache.size(1) * (1 if block_table is None else block_table.size(-1))
    expect(0 <= length <= capacity, "cache_seqlens", f"0 to {capacity} (the capacity)", length)
    if block_table is None and length + new <= capacity and not is_masked:
        return k_cache[:, : length + new], v_cache[:, : length + new], None
    lengths = torch.full((q.size(0),), length, dtype=torch.int32, device=q.device)
    return k_cache, v_cache, lengths


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
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    shared_prefix: SharedPrefix | None = None,
    attn_bias: Tensor | Mask | None = None,
    tree_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Appends k and v to the cache in place, rotates, and attends: one step of decoding, or a chunk
    of a prompt.

    Arguments combine as in flash_decode_func. There is no gradient. Safe in CUDA graphs: replay
    reads the tensors' new contents, cache_seqlens among them.

    Arguments:
        q: (batch, seqlen_q, heads_q, d).
        k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table, num_splits, k_descale,
            v_descale, batch_invariant, shared_prefix: as in flash_decode_func. With k and v, each
            element of the caches needs a place in memory of its own, and they are written to the
            pages in a sequence's own row of block_table.
        k, v: (batch, seqlen_new, heads_kv, d) and (…, d_v), dtype of q, written to the cache from
            position cache_seqlens on: rounded to nearest even; for a cache of 8 bits divided by its
            descale and saturated. What does not fit the cache, or belongs to a page or a row that
            does not exist, is dropped.
        rotary_cos, rotary_sin: (rows, rotary_dim / 2), dtype of q, rows at least the capacity,
            rotary_dim at most d: rotate k, and q, by their positions (Su et al. 2021), from
            cache_seqlens on, in fp32. Without causal and window, all of q is at position
            cache_seqlens.
        cache_seqlens: int, or int32 (batch): tokens in the cache before k and v. Default: capacity.
        rotary_interleaved: pairs are dimensions 0 and 1, 2 and 3, …; else i and i + rotary_dim / 2.
        softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink: as in
            flash_attn_func. Masks are aligned bottom-right to the cache with k and v in it.
        return_softmax_lse, return_max_logits: also return softmax_lse, and max_logits.
        attn_bias, tree_mask: as in flash_decode_func; the last seqlen_q keys of a sequence, k and v
            among them, are the tree's. With cache_seqlens an int, attn_bias may also have
            cache_seqlens + seqlen_new columns.

    Returns:
        out: (batch, seqlen_q, heads_q, d_v); softmax_lse: (batch, heads_q, seqlen_q), fp32 (fp64
            for fp64 inputs); max_logits: (heads_q), as in flash_attn_func.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it.
        NotImplementedError: an input has a tangent of forward-mode AD. Either way nothing has been
        written.
    """
    try:
        check_append(k, v, rotary_cos, rotary_sin, cache_seqlens)
        new = 0 if k is None else dense_seqlen(k)
        if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
            length = as_int(cache_seqlens, "cache_seqlens")
            capacity = k_cache.size(1)
            k_cache, v_cache, cache_seqlens = _at_length(
                q, k_cache, v_cache, block_table, length, new, isinstance(attn_bias, Mask)
            )
            has_columns = isinstance(attn_bias, Tensor) and attn_bias.dim() > 0
            if has_columns and attn_bias.size(-1) == capacity:
                attn_bias = attn_bias[..., : k_cache.size(1)]
        arguments = decode_arguments(
            q,
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            alibi_slopes=alibi_slopes,
            learnable_sink=learnable_sink,
            k_descale=k_descale,
            v_descale=v_descale,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            return_max_logits=return_max_logits,
            shared_prefix=shared_prefix,
            attn_bias=attn_bias,
            tree_mask=tree_mask,
            new=new,
        )
        if k is None:
            results = decode(arguments)
        else:
            results = kvcache(k, v, rotary_cos, rotary_sin, rotary_interleaved, arguments)
        return _chosen(results, return_softmax_lse, return_max_logits)
    except Exception as error:
        explain(error, flash_attn_with_kvcache, locals())
        raise
