"""From a mask to a call's arguments."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_attn.masks.forms import PackedDocuments
from flash_attn.masks.mask import Mask, any_tiled, intersection, narrower, split
from flash_attn.masks.tensors import can_wait, in_line
from flash_attn.masks.tiles import Geometry, Tiled

T = TypeVar("T")


class Lowered(NamedTuple):
    """A mask as a call's arguments. window: (left, right), -1: no limit."""

    window: tuple[int, int]
    attn_bias: Tensor | None = None
    tiled: Tiled | None = None


def _check_batch(x: Tensor, batch: int, heads: int, at: Geometry) -> None:
    if x.size(0) not in (1, batch) or x.size(1) not in (1, heads):
        raise RuntimeError(
            "flash_attn: attn_bias: expected a mask that broadcasts to"
            f" ({batch}, {heads}, {at.seqlen_q}, {at.seqlen_k}), got one of batch {x.size(0)} and"
            f" {x.size(1)} heads"
        )


def _check_device(mask: Mask, device: torch.device) -> None:
    for x in mask.tensors():
        if x.device != device:
            raise RuntimeError(
                f"flash_attn: attn_bias: expected a mask of tensors on {device} as q is, got one on"
                f" {x.device}"
            )


def _cache_key(mask: Mask, device: torch.device, *sizes: int) -> tuple | None:
    """None: what is computed now must not be used again."""
    tensors = mask.tensors()
    # What is computed under capture is there in replays only, and for other streams not yet; what
    # is traced is no tensor of other calls.
    if not can_wait(device) or any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    if any(x.is_inference() for x in tensors) or torch.is_inference_mode_enabled():
        return None  # without versions nobody hears of writes
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return *sizes, stream, tuple(x._version for x in tensors)


def _kept(mask: Mask, key: tuple | None, compute: Callable[[], T]) -> T:
    """What the mask keeps under this key, the latest alone, or what is computed now."""
    found = mask.cache.get(key) if key is not None else None
    if found is None:
        found = compute()
        if key is not None:
            mask.cache.clear()
            mask.cache[key] = found
    return found


def lower(mask: Mask, batch: int, heads: int, at: Geometry) -> Lowered:
    """Of a dense call: what of the mask is a window, and the rest as tiles.

    Raises:
        RuntimeError: the mask does not fit the call.
    """
    _check_device(mask, at.device)
    sides, rest = split(mask)
    if not rest:
        return Lowered(sides)
    key = _cache_key(mask, at.device, at.seqlen_q, at.seqlen_k, at.diagonal)
    tiled = _kept(mask, key, lambda: any_tiled(intersection(rest), at))
    for x in (tiled.tiles, tiled.rows):
        if x is not None:
            _check_batch(x, batch, heads, at)
    return Lowered(sides, tiled=Tiled(*(x if x is None else x.contiguous() for x in tiled)))


def lower_to_bool(mask: Mask, batch: int, heads: int, at: Geometry) -> Lowered:
    """The same with the rest as a bool tensor, which is computed in each call."""
    _check_device(mask, at.device)
    sides, rest = split(mask)
    if not rest:
        return Lowered(sides)
    seen = intersection(rest).seen_at(at)
    _check_batch(seen, batch, heads, at)
    return Lowered(sides, attn_bias=seen)


def intersect_windows(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The window (left, right) of what both let pass."""
    return narrower(a[0], b[0]), narrower(a[1], b[1])


def packed_documents(
    mask: Mask, q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[int, int], PackedDocuments] | None:
    """Of packed documents in windows alone: the windows, and the documents.

    q, k, v: (batch, rows, heads, d), of as many rows.
    """
    sides, rest = split(mask)
    documents = rest[0].packed_for(q, k, v) if len(rest) == 1 else None
    return None if documents is None else (sides, documents)


def packed_lengths(
    documents: PackedDocuments, batch: int, seqlen: int
) -> tuple[Tensor, Tensor | None]:
    """cu_seqlens and seqused_k of the documents of all sequences, one after the other.

    Before a sequence's first document and behind its last one lie queries without keys.
    """
    if documents.in_line is not None and batch == documents.cu_seqlens.size(0):
        return documents.in_line, None

    def compute() -> tuple[Tensor, Tensor]:
        bounds = documents.cu_seqlens.clamp(0, seqlen).expand(batch, -1)
        cu_seqlens = in_line(torch.nn.functional.pad(bounds, (1, 0)), seqlen)
        return cu_seqlens, torch.nn.functional.pad(bounds.diff(), (1, 1)).flatten()

    key = _cache_key(documents, documents.cu_seqlens.device, batch, seqlen)
    return _kept(documents, key, compute)
