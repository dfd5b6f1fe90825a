"""Which tokens of a sequence lie on which rank.

    contiguous, 4 ranks      0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
    zigzag, 4 ranks          0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0

Under a causal mask the last tokens have the most keys: zigzag gives every rank an early and a late
piece, so that all have the same work. Lengths that do not divide are cut as evenly as integers
allow, and a rank may hold nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flash_attn._errors import shown

LAYOUTS = ("zigzag", "contiguous")

Range = tuple[int, int]  # tokens [first, last)
Ranges = tuple[Range, ...]  # what one rank holds, in the order in which it lies there
Group = dist.ProcessGroup | DeviceMesh | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


def size_of(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)


def even_part(length: int, parts: int, index: int) -> Range:
    """The index-th of `parts` pieces of [0, length) whose sizes differ by at most one."""
    return length * index // parts, length * (index + 1) // parts


@dataclass(frozen=True)
class Shards:
    """A sequence of `length` tokens over `outer` times `inner` ranks.

    The layout deals the tokens out over the outer ranks. The ranks of an inner group share what
    their outer rank holds, each a contiguous part of it.
    """

    length: int
    layout: str
    outer: int
    inner: int = 1

    def outer_ranges(self, rank: int) -> Ranges:
        """What the ranks of outer rank `rank` hold together."""
        if self.layout == "contiguous":
            return _joined([even_part(self.length, self.outer, rank)])
        halves = 2 * self.outer
        head = even_part(self.length, halves, rank)
        tail = even_part(self.length, halves, halves - 1 - rank)
        return _joined([head, tail])

    def inner_ranges(self, rank: int) -> tuple[Ranges, ...]:
        """What each inner rank holds, as positions among the tokens of outer rank `rank`."""
        held = size_of(self.outer_ranges(rank))
        return tuple(_joined([even_part(held, self.inner, i)]) for i in range(self.inner))

    def ranges(self, outer_rank: int, inner_rank: int = 0) -> Ranges:
        """What one rank holds."""
        first, last = even_part(size_of(self.outer_ranges(outer_rank)), self.inner, inner_rank)
        held, start = [], 0
        for a, b in self.outer_ranges(outer_rank):
            held.append((max(a, a + first - start), min(b, a + last - start)))
            start += b - a
        return _joined(held)


def _joined(ranges: Sequence[Range]) -> Ranges:
    """Without empty ranges, and neighbours as one."""
    result: list[Range] = []
    for first, last in ranges:
        if first >= last:
            continue
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], last)
        else:
            result.append((first, last))
    return tuple(result)


@lru_cache(maxsize=256)
def in_order(held: tuple[Ranges, ...]) -> tuple[tuple[int, int, int], ...]:
    """The pieces (rank, first row there, rows) of all ranks in the order of the tokens."""
    pieces = []
    for rank, ranges in enumerate(held):
        row = 0
        for first, last in ranges:
            pieces.append((first, rank, row, last - first))
            row += last - first
    return tuple(piece[1:] for piece in sorted(pieces))


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"flash_attn: layout: expected one of {LAYOUTS}, got {shown(layout)}")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks that share a sequence; a group of None has one rank."""

    outer: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None = None

    @property
    def outer_size(self) -> int:
        return 1 if self.outer is None else dist.get_world_size(self.outer)

    @property
    def inner_size(self) -> int:
        return 1 if self.inner is None else dist.get_world_size(self.inner)

    @property
    def outer_rank(self) -> int:
        return 0 if self.outer is None else dist.get_rank(self.outer)

    @property
    def inner_rank(self) -> int:
        return 0 if self.inner is None else dist.get_rank(self.inner)

    @property
    def size(self) -> int:
        return self.outer_size * self.inner_size

    def shards(self, length: int, layout: str) -> Shards:
        return Shards(length, layout, self.outer_size, self.inner_size)

    def check_rows(self, shards: Shards, rows: int, argument: str) -> None:
        """Raises unless this rank holds as many rows as it should."""
        expected = size_of(shards.ranges(self.outer_rank, self.inner_rank))
        if rows != expected:
            raise RuntimeError(
                f"flash_attn: {argument}: expected {expected} rows, which is what this rank holds"
                f" of {shards.length} in the layout {shards.layout!r}, got {rows}"
            )


def ranks_of(group: Group) -> Ranks:
    """One group, or two dimensions: the outer and the inner one."""
    if isinstance(group, Ranks):
        return group
    if group is None:
        return Ranks(dist.group.WORLD)
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(
                "flash_attn: group: expected a DeviceMesh of one or two dimensions, got"
                f" {group.ndim}"
            )
        return Ranks(*(group.get_group(dim) for dim in range(group.ndim)))
    if isinstance(group, tuple):
        if len(group) != 2:
            raise ValueError(
                f"flash_attn: group: expected (outer, inner), got a tuple of {len(group)}"
            )
        return Ranks(*(_process_group(member) for member in group))
    return Ranks(_process_group(group))


def _process_group(group: object) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "flash_attn: group: expected a ProcessGroup that this rank is in, a DeviceMesh, a tuple"
            f" of two ProcessGroups or None, got {shown(group)}"
        )
    return group


def global_length(length: int | None, rows: int, ranks: Ranks) -> int:
    return rows * ranks.size if length is None else length
