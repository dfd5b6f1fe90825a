"""Paged keys of a varlen call, whose kernels read no block_table: the pages side by side."""

import torch
from torch import Tensor

from flash_attn._errors import shown


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


def unpage(k, v, block_table, cu_seqlens_k, seqused_k, leftpad_k, max_seqlen_k, attn_bias):
    """The pages of each sequence side by side, as a varlen call takes them.

    Each sequence is padded to the table's capacity; its true length moves into seqused_k. Returns
    k, v, cu_seqlens_k, seqused_k, attn_bias.
    """
    lengths = {"cu_seqlens_k": cu_seqlens_k} if seqused_k is None else {"seqused_k": seqused_k}
    _check(k, v, block_table, leftpad_k=leftpad_k, **lengths)
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
