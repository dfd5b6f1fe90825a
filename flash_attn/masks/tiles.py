"""Masks as the ops take them: states of tiles, and what mixed tiles hold (csrc/bindings/mask.h)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn._errors import shown

TILE = 64  # csrc/core/tile_mask.h
HIDDEN, MIXED, SEEN = range(3)


def is_top_left(causal_alignment: str) -> bool:
    if causal_alignment == "bottom-right":
        return False
    if causal_alignment == "top-left":
        return True
    raise ValueError(
        'flash_attn: causal_alignment: expected "bottom-right" or "top-left",'
        f" got {shown(causal_alignment)}"
    )


@dataclass(frozen=True)
class Geometry:
    """The lengths that a mask is seen with, and the key that query 0 meets on its diagonal.

    diagonal: an int, or int64 (batch, 1, 1, 1), where the sequences' lengths differ.
    """

    seqlen_q: int
    seqlen_k: int
    diagonal: int | Tensor
    device: torch.device

    def queries(self) -> Tensor:
        return torch.arange(self.seqlen_q, device=self.device)

    def keys(self) -> Tensor:
        return torch.arange(self.seqlen_k, device=self.device)


class Intervals(NamedTuple):
    """Keys that rows see: int64 (batch or 1, heads or 1, seqlen_q, n, 2), first and end in
    [0, seqlen_k]; end may be less than first."""

    ends: Tensor

    @property
    def count(self) -> int:
        return self.ends.size(-2)


class Tiled(NamedTuple):
    """A mask as the ops take it: csrc/bindings/mask.h."""

    tiles: Tensor
    rows: Tensor | None = None
    labels: Tensor | None = None


def tiles_of(length: int) -> int:
    return -(-length // TILE)


def padded(x: Tensor, dim: int, value: float) -> Tensor:
    """x with its dimension filled up to whole tiles, which become a dimension before it."""
    missing = -x.size(dim) % TILE
    if missing:
        filler = x.new_full((1,), value).expand(*x.shape[:dim], missing, *x.shape[dim + 1 :])
        x = torch.cat([x, filler], dim)
    return x.unflatten(dim, (-1, TILE))


def states_of(some: Tensor, every: Tensor) -> Tensor:
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def tile_intervals(x: Intervals, at: Geometry) -> Tiled:
    """Of one or two intervals a row."""
    first, end = x.ends.unbind(-1)  # (batch, heads, seqlen_q, n)
    edges = torch.arange(tiles_of(at.seqlen_k) + 1, device=at.device) * TILE
    edges = edges.clamp(max=at.seqlen_k)
    first, end = first[..., None], end[..., None]
    some = ((first < edges[1:]) & (end > edges[:-1]) & (first < end)).any(-2)
    every = ((first <= edges[:-1]) & (end >= edges[1:])).any(-2)
    some, every = padded(some, 2, False).any(3), padded(every, 2, True).all(3)
    ends = x.ends.flatten(-2).to(torch.int32)
    if x.count == 1:
        ends = torch.cat([ends, torch.zeros_like(ends)], -1)
    return Tiled(states_of(some, every), ends.contiguous())


def tile_bool(seen: Tensor, at: Geometry) -> Tiled:
    """Of a bool tensor of four dimensions that broadcasts."""
    seen = seen.expand(*seen.shape[:2], at.seqlen_q, at.seqlen_k)
    some = padded(padded(seen, 3, False).any(4), 2, False).any(3)
    every = padded(padded(seen, 3, True).all(4), 2, True).all(3)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=seen.device)
    octets = padded(seen, 3, False).flatten(3).unflatten(3, (-1, 8))
    bits = (octets * weights).sum(-1, dtype=torch.uint8)
    return Tiled(states_of(some, every), bits)


def has_only_whole_tiles(x: Tiled | None) -> bool:
    return x is not None and x.rows is None
