"""FLASH_ATTN_CHECK=1: reads what index tensors hold, before each call, and says what is wrong.

Without it such values are clamped, as reading them waits for the device. Calls inside compiled
graphs, transforms and CUDA graph capture are not checked.
"""

import os
from collections.abc import Sequence

from torch import Tensor

from flash_attn import _log
from flash_attn._errors import expect

ENABLED = os.environ.get("FLASH_ATTN_CHECK", "0") not in ("", "0")


def _check_offsets(name: str, cu_seqlens: Tensor, rows: int | None, longest: int) -> list[int]:
    """Of sequences that lie one after the other in `rows` rows. Returns their lengths."""
    offsets = cu_seqlens.tolist()
    expect(offsets[0] == 0, name, "0 at its start", offsets[0])
    lengths = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    for i, length in enumerate(lengths):
        expect(length >= 0, name, "no value below the one before", f"{offsets[i + 1]} at {i + 1}")
        maximum = name.replace("cu_seqlens", "max_seqlen")
        expect(length <= longest, maximum, f"at least {length}, sequence {i}'s length", longest)
    if rows is not None:
        expect(offsets[-1] <= rows, name, f"at most {rows} (the rows) at its end", offsets[-1])
    return lengths


def _check_range(name: str, x: Tensor | None, least: int, most: Sequence[int]) -> None:
    for i, value in enumerate(() if x is None else x.tolist()):
        expect(least <= value <= most[i], name, f"{least} to {most[i]} for sequence {i}", value)


def _check_table(table: Tensor, rows: Sequence[int], lengths: Sequence[int], pages, page) -> None:
    """That each sequence's pages are in its row of the table, and exist."""
    if table.dim() != 2 or table.size(0) <= max(rows, default=-1):
        return
    columns, entries = table.size(1), table.tolist()
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        needed = (length + page - 1) // page
        expect(
            needed <= columns,
            "block_table",
            f"at least {needed} columns for the {length} keys of sequence {i}",
            columns,
        )
        for column, entry in enumerate(entries[row][:needed]):
            place = f"a page from 0 to {pages - 1} for sequence {i} at column {column}"
            expect(0 <= entry < pages, "block_table", place, entry)


def _are_lists(count: int, *tensors: Tensor | None) -> bool:
    """Whether each tensor has one value a sequence. Where one has not, the op says so itself."""
    return all(x is None or x.shape == (count,) for x in tensors)


def fwd(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """The index tensors of a call of flash_attn_varlen_func or the like.

    Raises:
        RuntimeError: what they hold does not fit the other tensors; the message names it.
    """
    if not _log.is_readable():
        return
    batch = q.size(0) if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    if not _are_lists(batch + 1, cu_seqlens_q, cu_seqlens_k):
        return
    if not _are_lists(batch, seqused_q, seqused_k, leftpad_k):
        return
    lengths_q, lengths_k = [max_seqlen_q] * batch, [max_seqlen_k] * batch
    if cu_seqlens_q is not None:
        lengths_q = _check_offsets("cu_seqlens_q", cu_seqlens_q, q.size(0), max_seqlen_q)
    if cu_seqlens_k is not None:
        rows = k.size(0) if block_table is None else None
        lengths_k = _check_offsets("cu_seqlens_k", cu_seqlens_k, rows, max_seqlen_k)
    _check_range("seqused_q", seqused_q, 0, lengths_q)
    most_k = [max_seqlen_k] * batch if block_table is not None else lengths_k
    _check_range("seqused_k", seqused_k, 0, most_k)
    lengths_k = lengths_k if seqused_k is None else seqused_k.tolist()
    _check_range("leftpad_k", leftpad_k, 0, lengths_k)
    if block_table is not None:
        _check_table(block_table, range(batch), lengths_k, k.size(0), k.size(1))


def decode(
    q: Tensor,
    k_cache: Tensor,
    *,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    new: int,
) -> None:
    """The index tensors of a call with a cache, to which `new` tokens a sequence are appended.

    Raises: as fwd.
    """
    if not _log.is_readable():
        return
    batch = q.size(0)
    if not _are_lists(batch, cache_seqlens, cache_batch_idx, cache_leftpad):
        return
    rows = list(range(batch))
    if cache_batch_idx is not None:
        held = (k_cache if block_table is None else block_table).size(0)
        _check_range("cache_batch_idx", cache_batch_idx, 0, [held - 1] * batch)
        rows = cache_batch_idx.tolist()
        distinct = len(set(rows)) == batch
        expect(distinct or not new, "cache_batch_idx", "one row for each sequence", rows)
    page = k_cache.size(1)
    capacity = page if block_table is None else page * block_table.size(1)
    if cache_seqlens is None:
        lengths = [capacity] * batch
    else:
        lengths = [length + new for length in cache_seqlens.tolist()]
    if block_table is not None:
        _check_table(block_table, rows, lengths, k_cache.size(0), page)
    _check_range("cache_seqlens", cache_seqlens, 0, [capacity - new] * batch)
    _check_range("cache_leftpad", cache_leftpad, 0, lengths)
