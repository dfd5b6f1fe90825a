"""Paged keys of a varlen call, whose kernels read no block_table: the pages side by side."""

import torch
from torch import Tensor

from flash_attn._errors import shown
from flash_attn._masked_call import used_lengths


def _check(k: Tensor, v: Tensor, block_table: Tensor, **indices: Tensor | None) -> None:
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


def host_reads(tensor: Tensor) -> bool:
    """Whether the host may look at values: where no device has to be waited for."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def is_one_call(q: Tensor) -> bool:
    """Whether a mask of the keys that exist is given with all sequences. On a GPU it would slow
    every call, as the host does not know whether a page is missing."""
    return q.is_cpu


def _existing_keys(missing: Tensor, page_size: int, max_seqlen_k, leftpad_k: Tensor | None):
    """Bool (batch, 1, 1, max_seqlen_k): False for keys of pages that `missing` (batch, max_pages)
    marks."""
    position = torch.arange(max_seqlen_k, device=missing.device).expand(missing.size(0), -1)
    if leftpad_k is not None:
        position = position + leftpad_k.clamp(min=0)[:, None]
    page = (position // page_size).clamp(max=missing.size(1) - 1)
    return ~missing.gather(1, page)[:, None, None]


def _with_mask(attn_bias: Tensor | None, exists: Tensor) -> Tensor:
    if attn_bias is None:
        return exists
    if attn_bias.dtype == torch.bool:
        return attn_bias & exists
    return attn_bias.masked_fill(~exists, float("-inf"))


def unpage(k, v, block_table, cu_seqlens_k, seqused_k, leftpad_k, max_seqlen_k):
    """The pages of each sequence side by side, as a varlen call takes them.

    Each sequence is padded to the table's capacity; its true length moves into seqused_k. Returns
    k, v, cu_seqlens_k, seqused_k, and which keys exist: bool (batch, 1, 1, max_seqlen_k), or None
    where the host knows that all do.
    """
    lengths = {"cu_seqlens_k": cu_seqlens_k} if seqused_k is None else {"seqused_k": seqused_k}
    _check(k, v, block_table, leftpad_k=leftpad_k, **lengths)
    (pages, page_size), (batch, columns) = k.shape[:2], block_table.shape
    lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if pages == 0:
        lengths = torch.zeros_like(lengths)
    k, v = gather_pages(k, block_table), gather_pages(v, block_table)
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * columns * page_size
    unpaged = k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, lengths
    if pages == 0 or columns == 0:
        return *unpaged, None
    first = torch.arange(columns, device=k.device) * page_size
    missing = ((block_table < 0) | (block_table >= pages)) & (first < lengths[:, None])
    if host_reads(k) and not bool(missing.any()):
        return *unpaged, None
    return *unpaged, _existing_keys(missing, page_size, max_seqlen_k, leftpad_k)


# Where these stand among the arguments of the op `fwd`. fwd_arguments() puts which keys exist where
# the op has its block_table.
_CU_SEQLENS_Q, _SEQUSED_Q, EXISTING_KEYS, _ATTN_BIAS = 3, 5, 8, 9


def without_mask(arguments):
    """The call as if all keys existed."""
    return *arguments[:EXISTING_KEYS], None, *arguments[EXISTING_KEYS + 1 :]


def with_mask(arguments):
    """The call with a mask of the keys that exist."""
    masked = list(without_mask(arguments))
    masked[_ATTN_BIAS] = _with_mask(arguments[_ATTN_BIAS], arguments[EXISTING_KEYS])
    return tuple(masked)


def by_sequence(arguments):
    """Two calls: of the sequences whose pages exist, and, with a mask, of the others. In each, the
    other's queries do not count.

    So the device decides, which no host waits for: where all pages exist the second call finds
    nothing to do, and the first one has no mask.
    """
    exists = arguments[EXISTING_KEYS].flatten(1).all(1)
    used = used_lengths(arguments[_CU_SEQLENS_Q], arguments[_SEQUSED_Q])
    whole, masked = list(without_mask(arguments)), list(with_mask(arguments))
    whole[_SEQUSED_Q] = used.masked_fill(~exists, 0)
    masked[_SEQUSED_Q] = used.masked_fill(exists, 0)
    return tuple(whole), tuple(masked)


def merged(whole, masked):
    """The results of by_sequence()'s calls as those of one: what does not count is 0 and -inf."""
    (out, lse, probabilities, largest), other = whole, masked
    return (
        out + other[0],
        torch.maximum(lse, other[1]),
        probabilities + other[2],
        torch.maximum(largest, other[3]),
    )
