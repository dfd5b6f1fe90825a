"""Sequences of a paged cache that begin with the same pages: what decoding reads once for all."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn._call import as_int
from flash_attn._errors import expect, explain


class SharedPrefix(NamedTuple):
    """The first lens[b] keys of sequence b lie where those of sequence source[b] do.

    Both are int32 (batch) tensors on the cache's device, and may hold anything: lens is clamped to
    the sequence's length, and what names no sequence has no keys. lens are multiples of the page
    size; of another length, the page that is not full may be read from either sequence's row.
    """

    source: Tensor
    lens: Tensor


def find_shared_prefix(
    block_table: Tensor, cache_seqlens: Tensor, page_size: int, least_pages: int = 1
) -> SharedPrefix:
    """Which sequences begin with the same pages, by block_table; to be found once a step, for all
    layers.

    Sequences whose first least_pages pages are the same share what the first of them has in common
    with each. All on the device: nothing waits for it, and CUDA graphs can record it.

    Arguments:
        block_table: int32 (batch, max_pages), a row for each sequence.
        cache_seqlens: int32 (batch), tokens in each cache. Of them only whole pages are shared;
            give the lengths before an append.
        page_size: tokens of a page.
        least_pages: pages that a shared prefix has at least.

    Raises:
        RuntimeError: a shape, dtype or value does not fit; the message names it.
    """
    try:
        return _find(block_table, cache_seqlens, page_size, least_pages)
    except Exception as error:
        explain(error, find_shared_prefix, locals())
        raise


def _find(block_table: Tensor, cache_seqlens: Tensor, page_size: int, least: int) -> SharedPrefix:
    expect(block_table.dim() == 2, "block_table", "2 dimensions", block_table.dim())
    batch, columns = block_table.shape
    shape = tuple(cache_seqlens.shape)
    expect(shape == (batch,), "cache_seqlens", f"shape ({batch},), a length a row", shape)
    for name, x in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        expect(x.dtype == torch.int32, name, "dtype int32", x.dtype)
    device, other = block_table.device, cache_seqlens.device
    expect(device == other, "block_table, cache_seqlens", "one device", f"{device} and {other}")
    page_size, least = as_int(page_size, "page_size"), as_int(least, "least_pages")
    expect(page_size > 0, "page_size", "at least 1", page_size)
    expect(least > 0, "least_pages", "at least 1", least)
    number = torch.arange(batch, dtype=torch.int32, device=device)
    if least > columns or batch == 0:
        return SharedPrefix(number, torch.zeros_like(number))
    full = torch.div(cache_seqlens, page_size, rounding_mode="floor").clamp(0, columns)
    column = torch.arange(columns, device=device)
    pages = block_table.masked_fill(column >= full[:, None], -1)
    alike = (pages[:, None, :least] == pages[None, :, :least]).all(-1)
    alike &= (full >= least)[:, None]
    source = torch.where(alike, number, batch).amin(1)
    has_source = source < batch
    place = source.clamp(max=batch - 1).long()
    same = (pages == pages[place]) & (pages >= 0) & has_source[:, None]
    common = same.to(torch.int32).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    # A source shares what any other has in common with it.
    others = common.masked_fill(place == number, 0)
    shared_by = torch.zeros_like(common).scatter_reduce(0, place, others, "amax")
    common = torch.where(place == number, shared_by, common)
    return SharedPrefix(source.to(torch.int32), common * page_size)
