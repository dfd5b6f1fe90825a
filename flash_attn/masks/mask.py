"""What a mask says of a call's queries and keys, in which forms, and what &, | and ~ make of masks.
Windows are here, as calls take them as they are."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flash_attn.masks.tensors import can_wait, has_rows_in_line, is_traced
from flash_attn.masks.tiles import (
    HIDDEN,
    SEEN,
    Geometry,
    Intervals,
    Tiled,
    has_only_whole_tiles,
    is_top_left,
    tile_bool,
    tile_intervals,
)

if TYPE_CHECKING:
    from flash_attn.masks.forms import PackedDocuments


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees. flash_attn.masks has functions that make masks, and &, | and ~
    combine them."""

    # Whether a call with it is a varlen call, which needs no tiles.
    is_packed: ClassVar[bool] = False

    # The latest tiles or lengths, by what they were computed for.
    cache: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict:
        """Copies begin with nothing: their tensors count writes anew."""
        return self.__dict__ | {"cache": {}}

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not(self)

    def to_bool(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        device: torch.device | str | None = None,
        causal_alignment: str = "bottom-right",
    ) -> Tensor:
        """The mask as a tensor: its definition, of O(seqlen²) memory.

        Arguments:
            seqlen_q, seqlen_k: number of queries and keys of each sequence.
            device: of the tensors that the mask was made of. Default: theirs, or the CPU.
            causal_alignment: as in the call that the mask is for: "bottom-right", or "top-left" as
                in scaled_dot_product_attention. Moves causal(), window() and prefix_lm().

        Returns:
            bool (batch or 1, heads or 1, seqlen_q, seqlen_k), True: seen.

        Raises:
            RuntimeError: a tensor that the mask was made of does not fit these lengths.
            ValueError: causal_alignment.
        """
        at = self._geometry(seqlen_q, seqlen_k, device, causal_alignment)
        seen = self.seen_at(at)
        return seen.expand(*seen.shape[:2], seqlen_q, seqlen_k)

    def prepared(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        device: torch.device | str | None = None,
        causal_alignment: str = "bottom-right",
    ) -> "Mask":
        """The same mask with its tiles computed here, for calls of these lengths.

        Others compute them when a first call needs them, and under capture in each call. Such calls
        do not hear of later writes to the tensors that the mask was made of. Packed documents are
        left as they are. Of documents given by ids it finds out whether each lies in one piece, for
        which it waits for the device. Then they are served as packed ones are, on a GPU where q, k
        and v can be read as they lie. Under capture, and where it is traced or transformed, it
        neither waits nor finds out.

        Arguments, errors: as to_bool.
        """
        at = self._geometry(seqlen_q, seqlen_k, device, causal_alignment)
        sides, rest = split(self)
        if not rest or rest[0].is_packed and len(rest) == 1:
            return self
        whole = intersection(rest)
        reads = can_wait(at.device) and not is_traced(self.tensors())
        with torch.inference_mode(False):  # also for calls that train
            packed = whole.packed_at(at) if reads else None
            return And(Window(*sides), Prepared(whole, at, any_tiled(whole, at), packed))

    def _geometry(self, seqlen_q, seqlen_k, device, causal_alignment) -> Geometry:
        if device is None:
            device = next((x.device for x in self.tensors()), torch.device("cpu"))
        diagonal = 0 if is_top_left(causal_alignment) else seqlen_k - seqlen_q
        device = torch.empty(0, device=device).device  # with its number
        return Geometry(seqlen_q, seqlen_k, diagonal, device)

    def parts(self) -> tuple["Mask", ...]:
        """The masks that this one is the intersection of."""
        return (self,)

    def tensors(self) -> tuple[Tensor, ...]:
        """All that it was made of."""
        raise NotImplementedError

    def seen_at(self, at: Geometry) -> Tensor:
        """bool of four dimensions that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
        raise NotImplementedError

    def intervals_at(self, at: Geometry) -> Intervals | None:
        """One or two a row; None: they are not enough."""
        return None

    def tiled_at(self, at: Geometry) -> Tiled | None:
        """Without bits; None: they are needed."""
        intervals = self.intervals_at(at)
        return None if intervals is None else tile_intervals(intervals, at)

    def packed_at(self, at: Geometry) -> "PackedDocuments | None":
        """The same mask, if it is one of packed documents. Waits for the device."""
        return None

    def packed_for(self, q: Tensor, k: Tensor, v: Tensor) -> "PackedDocuments | None":
        """The same without waiting, if it should serve these. All have as many rows."""
        return None


@dataclass(frozen=True, eq=False)
class Window(Mask):
    left: int  # -1: no limit
    right: int

    def tensors(self):
        return ()

    def seen_at(self, at):
        distance = at.keys() - at.queries()[:, None] - at.diagonal
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            seen = seen & (distance >= -self.left)
        if self.right >= 0:
            seen = seen & (distance <= self.right)
        return seen if seen.dim() == 4 else seen[None, None]

    def intervals_at(self, at):
        diagonal = at.queries() + at.diagonal
        first = torch.zeros_like(diagonal) if self.left < 0 else diagonal - self.left
        end = torch.full_like(diagonal, at.seqlen_k)
        if self.right >= 0:
            end = diagonal + self.right + 1
        ends = torch.stack([first, end], -1).clamp(0, at.seqlen_k)
        return Intervals(ends[None, None, :, None])


@dataclass(frozen=True, eq=False)
class Both(Mask):
    left: Mask
    right: Mask

    def tensors(self):
        return self.left.tensors() + self.right.tensors()

    def joined(self, states: Tensor, tiles: Tensor) -> Tensor:
        """The states of tiles of this mask, where one mask has only whole tiles of these states."""
        raise NotImplementedError

    def tiled_at(self, at):
        tiled = super().tiled_at(at)
        if tiled is not None:
            return tiled
        parts = self._with_whole_tiles(at)
        if parts is None:
            return None
        states, other = parts
        return other._replace(tiles=self.joined(states, other.tiles))

    def _with_whole_tiles(self, at: Geometry) -> tuple[Tensor, Tiled] | None:
        """The states of the one that has only whole tiles, and the other."""
        left, right = self.left.tiled_at(at), self.right.tiled_at(at)
        if left is None or right is None:
            return None
        if has_only_whole_tiles(left):
            return left.tiles, right
        return (right.tiles, left) if has_only_whole_tiles(right) else None


@dataclass(frozen=True, eq=False)
class And(Both):
    def parts(self):
        return self.left.parts() + self.right.parts()

    def seen_at(self, at):
        return self.left.seen_at(at) & self.right.seen_at(at)

    def intervals_at(self, at):
        left, right = self.left.intervals_at(at), self.right.intervals_at(at)
        if left is None or right is None or left.count * right.count > 2:
            return None
        first = torch.maximum(left.ends[..., 0], right.ends[..., 0])
        end = torch.minimum(left.ends[..., 1], right.ends[..., 1])
        return Intervals(torch.stack([first, end], -1))

    def joined(self, states, tiles):
        return torch.where(states == SEEN, tiles, HIDDEN)


@dataclass(frozen=True, eq=False)
class Or(Both):
    def seen_at(self, at):
        return self.left.seen_at(at) | self.right.seen_at(at)

    def intervals_at(self, at):
        left, right = self.left.intervals_at(at), self.right.intervals_at(at)
        if left is None or right is None or left.count + right.count > 2:
            return None
        shape = torch.broadcast_shapes(left.ends.shape[:3], right.ends.shape[:3])
        return Intervals(torch.cat([x.ends.expand(*shape, 1, 2) for x in (left, right)], -2))

    def joined(self, states, tiles):
        return torch.where(states == SEEN, SEEN, tiles)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    of: Mask

    def __invert__(self):
        return self.of

    def tensors(self):
        return self.of.tensors()

    def seen_at(self, at):
        return ~self.of.seen_at(at)

    def intervals_at(self, at):
        inner = self.of.intervals_at(at)
        if inner is None or inner.count > 1:
            return None
        first, end = inner.ends.unbind(-1)
        end = torch.maximum(first, end)
        before = torch.stack([torch.zeros_like(first), first], -1)
        behind = torch.stack([end, torch.full_like(end, at.seqlen_k)], -1)
        return Intervals(torch.cat([before, behind], -2))

    def tiled_at(self, at):
        tiled = super().tiled_at(at)
        if tiled is not None:
            return tiled
        inner = self.of.tiled_at(at)
        return Tiled(SEEN - inner.tiles) if has_only_whole_tiles(inner) else None


@dataclass(frozen=True, eq=False)
class Prepared(Mask):
    of: Mask
    at: Geometry
    tiled: Tiled
    packed: "PackedDocuments | None"  # the same for these lengths

    def tensors(self):
        return self.of.tensors()

    def seen_at(self, at):
        return self.of.seen_at(at)

    def intervals_at(self, at):
        return self.of.intervals_at(at)

    def tiled_at(self, at):
        return self.tiled if at == self.at else self.of.tiled_at(at)

    def packed_at(self, at):
        return self.packed if at == self.at else self.of.packed_at(at)

    def packed_for(self, q, k, v):
        if self.packed is None or q.size(1) != self.at.seqlen_q or q.device != self.at.device:
            return None
        # A varlen call of tensors that had to be copied would take longer than one with tiles.
        needs_no_copy = q.is_cpu or all(has_rows_in_line(x) for x in (q, k, v))
        of_batch = self.packed.cu_seqlens.size(0) in (1, q.size(0))
        return self.packed if needs_no_copy and of_batch else None


def narrower(*sides: int) -> int:
    limits = [side for side in sides if side >= 0]
    return min(limits) if limits else -1


def split(mask: Mask) -> tuple[tuple[int, int], list[Mask]]:
    """What the windows of an intersection come to, and its other parts."""
    parts = mask.parts()
    windows = [part for part in parts if isinstance(part, Window)]
    left = narrower(*(part.left for part in windows))
    right = narrower(*(part.right for part in windows))
    return (left, right), [part for part in parts if not isinstance(part, Window)]


def intersection(parts: list[Mask]) -> Mask:
    whole = parts[0]
    for part in parts[1:]:
        whole = And(whole, part)
    return whole


def any_tiled(mask: Mask, at: Geometry) -> Tiled:
    """With bits where nothing less will do."""
    tiled = mask.tiled_at(at)
    return tile_bool(mask.seen_at(at), at) if tiled is None else tiled
