"""Paged keys of a varlen call: the pages side by side, for kernels that read no block_table."""

import torch
from torch import Tensor

from flash_attn import _functorch
from flash_attn._errors import shown
from flash_attn._library import C


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


def may_stay_in_pages(q, k, v, block_table, learnable_sink) -> bool:
    """Whether the op may be asked to read the pages of a call where they lie: the rest it says.

    It has no gradient for them, and traces and transforms are given the copy, whose operations they
    know.
    """
    plain = all(type(x) is Tensor for x in (q, k, v, block_table))
    traced = torch.compiler.is_compiling() or _functorch.is_active()
    inputs = [x for x in (q, k, v, learnable_sink) if x is not None]
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return plain and not traced and not wants_gradient


def gather_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """A paged cache (num_pages, page_size, …) as (batch, max_pages * page_size, …): a copy.

    A page that does not exist is a copy of another one; of zeros, if there is none.
    """
    if cache.size(0) == 0:
        cache = torch.cat([cache, cache.new_zeros(1, *cache.shape[1:])])
    return cache[block_table.clamp(0, cache.size(0) - 1)].flatten(1, 2)


def _clear(k, v, missing):
    """The gathered k and v with zeros in the pages, bool (batch, max_pages), that are missing.

    Whatever a page of another's holds, even NaN, must not reach a product with a weight of 0. The
    CPU sees to that itself.
    """
    if k.is_cpu or missing.numel() == 0:
        return k, v
    is_plain = all(type(x) is Tensor and x.is_cuda and x.is_contiguous() for x in (k, v, missing))
    if is_plain and not (torch.compiler.is_compiling() or _functorch.is_active()):
        C.clear_pages(k.detach(), v.detach(), missing)
        return k, v
    lost = missing.repeat_interleave(k.size(1) // missing.size(1), 1)[..., None, None]
    return k.masked_fill(lost, 0), v.masked_fill(lost, 0)


def _keys_that_exist(missing, page_size, width, leftpad_k):
    """Of pages, bool (batch, max_pages), the keys as a call counts them: (batch, 1, 1, width)."""
    if leftpad_k is None and width == missing.size(1) * page_size:
        return missing.logical_not().repeat_interleave(page_size, 1)[:, None, None]
    position = torch.arange(width, device=missing.device).expand(missing.size(0), -1)
    if leftpad_k is not None:
        position = position + leftpad_k.clamp(min=0)[:, None]
    page = (position // page_size).clamp(max=missing.size(1) - 1)
    return missing.gather(1, page).logical_not()[:, None, None]


def _mask_missing(missing, page_size, attn_bias, max_seqlen_k, leftpad_k, on_host, is_hint):
    """The bias and the max_seqlen_k of a call in which pages, bool (batch, max_pages), are missing.

    Their keys are masked; on a GPU, whose host cannot know whether there are any, always: the op
    runs sequences of which a mask hides nothing without it (csrc/bindings/key_mask.h). is_hint:
    max_seqlen_k may lie below the longest sequence, so that a mask is as long as the table.
    """
    if missing.size(1) == 0:
        return attn_bias, max_seqlen_k
    if on_host and not (torch.compiler.is_compiling() or bool(missing.any())):
        return attn_bias, max_seqlen_k
    if attn_bias is None and is_hint:
        max_seqlen_k = missing.size(1) * page_size
    exists = _keys_that_exist(missing, page_size, max_seqlen_k, leftpad_k)
    if attn_bias is None:
        return exists, max_seqlen_k
    if attn_bias.dtype == torch.bool:
        return attn_bias & exists, max_seqlen_k
    return attn_bias.masked_fill(~exists, float("-inf")), max_seqlen_k


def unpage(
    k,
    v,
    block_table,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    max_seqlen_k,
    attn_bias,
    return_probs=False,
):
    """The pages of each sequence side by side, as a varlen call takes them.

    Each sequence is padded to the table's capacity; its true length moves into seqused_k. Returns
    k, v, cu_seqlens_k, seqused_k, max_seqlen_k, attn_bias. return_probs: of max_seqlen_k keys.
    """
    lengths = {"cu_seqlens_k": cu_seqlens_k} if seqused_k is None else {"seqused_k": seqused_k}
    _check(k, v, block_table, leftpad_k=leftpad_k, **lengths)
    (pages, page_size), (batch, columns) = k.shape[:2], block_table.shape
    lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if pages == 0:
        lengths = torch.zeros_like(lengths)
    first = torch.arange(columns, device=k.device) * page_size
    missing = ((block_table < 0) | (block_table >= pages)) & (first < lengths[:, None])
    k, v = _clear(gather_pages(k, block_table), gather_pages(v, block_table), missing)
    on_host = k.is_cpu
    attn_bias, max_seqlen_k = _mask_missing(
        missing,
        page_size,
        attn_bias,
        max_seqlen_k,
        leftpad_k,
        on_host=on_host,
        is_hint=not on_host and not return_probs,
    )
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * columns * page_size
    return k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, lengths, max_seqlen_k, attn_bias
