"""What a mask of flash_attn.masks makes of a call: a window, a bias, tiles, or a varlen call."""

import torch
from torch import Tensor

from flash_attn.masks import Mask, lowering
from flash_attn.masks.tiles import Geometry, Tiled


def _diagonal(q, max_seqlens, lengths_q, lengths_k, is_top_left):
    """The key that each sequence's query 0 meets on its diagonal: of Geometry."""
    if is_top_left:
        return 0
    if lengths_q is None:
        return max_seqlens[1] - max_seqlens[0]
    return (lengths_k.long() - lengths_q.long())[:, None, None, None]


def lower_mask(mask, q, max_seqlens, window, is_top_left, lengths_q=None, lengths_k=None):
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


def lower_cache_mask(mask, q, k_cache, window, block_table, cache_seqlens, new):
    """The window and the attn_bias of a call against a cache whose attn_bias is a mask.

    Query i is new token i, and key j is position j of the cache.
    """
    fits = q.dim() == k_cache.dim() == 4 and (block_table is None or block_table.dim() == 2)
    if not fits or (cache_seqlens is not None and cache_seqlens.shape != q.shape[:1]):
        return window, None  # which C++ reports
    capacity = k_cache.size(1) * (1 if block_table is None else block_table.size(1))
    diagonal = capacity - q.size(1)
    if cache_seqlens is not None:
        lengths = (cache_seqlens.long() + new).clamp(0, capacity)
        diagonal = (lengths - q.size(1))[:, None, None, None]
    at = Geometry(q.size(1), capacity, diagonal, q.device)
    lowered = lowering.lower_to_bool(mask, q.size(0), q.size(2), at)
    return lowering.intersect_windows(window, lowered.window), lowered.attn_bias


def used_lengths(cu_seqlens, seqused, leftpad=None):
    """int32 (batch): what counts of each sequence. cu_seqlens: None where pages hold the keys."""
    if cu_seqlens is None:
        lengths = seqused
    else:
        lengths = cu_seqlens.diff()
        if seqused is not None:
            lengths = torch.minimum(lengths, seqused)
    return lengths if leftpad is None else (lengths - leftpad).clamp(min=0)


def runs_packed(q, k, v, attn_bias, alibi_slopes, dropout_p, return_probs):
    """The windows, and the packed documents, that a varlen call serves, and as fast as any."""
    if not isinstance(attn_bias, Mask) or not isinstance(q, Tensor) or q.dim() != 4:
        return None
    # Its dropout is another one; where slopes are each sequence's own, sequences are others.
    plain = dropout_p == 0.0 and not return_probs
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        return None
    # ATen pads sequences that only the device knows: each to the length of all.
    fast = q.is_cpu or (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16))
    same = k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    return lowering.packed_documents(attn_bias, q, k, v) if plain and fast and same else None
