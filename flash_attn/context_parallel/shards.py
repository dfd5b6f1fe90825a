"""Which tokens of a sequence lie on which rank, and the way there and back.

    contiguous, 4 ranks      0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
    zigzag, 4 ranks          0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0

Under a causal mask the last tokens have the most keys: zigzag gives every rank an early and a late
piece, so that all have the same work. Lengths that do not divide are cut as evenly as integers
allow, and a rank may hold nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

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
        raise ValueError(f"flash_attn: layout: expected one of {LAYOUTS}, got {layout!r}")


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
        return Ranks(*group)
    return Ranks(group)


def global_length(length: int | None, rows: int, ranks: Ranks) -> int:
    return rows * ranks.size if length is None else length


def split(x: Tensor, group: Group = None, dim: int = 1, *, layout: str = "zigzag") -> Tensor:
    """This rank's part of x, which every rank of the group has whole. Communicates nothing.

    Any tensor with a dimension of tokens is split alike: q, k, v, labels, position ids
    (`position_ids` makes them without the whole).

    Arguments:
        x: the whole tensor, any dtype and device, equal on all ranks.
        group: the ranks that share the sequence, in the order of the group, which need not be
            neighbours. A ProcessGroup; a DeviceMesh of one dimension; of two dimensions (or a tuple
            of two ProcessGroups): outer and inner, as the calls take them. Default: all ranks.
        dim: the dimension of tokens: 1 in dense tensors (batch, seqlen, …), 0 in varlen ones
            (total, …).
        layout: "zigzag": rank r of n has pieces r and 2 n - 1 - r of 2 n, which evens out causal
            work. "contiguous": piece r of n, which lets a window reach the fewest ranks. The same
            has to be given to join and to the calls.

    Returns:
        x without the other ranks' tokens: a view where they are one piece, else a copy.
        Differentiable: the tokens of the other ranks get no gradient here.

    Raises:
        ValueError: layout or group is none of those above.
    """
    check_layout(layout)
    ranks = ranks_of(group)
    shards = ranks.shards(x.size(dim), layout)
    parts = [
        x.narrow(dim, first, last - first)
        for first, last in shards.ranges(ranks.outer_rank, ranks.inner_rank)
    ]
    if not parts:
        return x.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def join(
    x: Tensor,
    group: Group = None,
    dim: int = 1,
    *,
    length: int | None = None,
    layout: str = "zigzag",
) -> Tensor:
    """The whole tensor on every rank, from the parts that split makes; all ranks have to call it.

    Arguments:
        x: this rank's part, of one dtype everywhere; the other dimensions are alike on all ranks.
        group, dim, layout: as in split.
        length: tokens of the whole. Default: as many on each rank as on this one.

    Returns:
        The whole tensor, a copy. Differentiable: a part's gradient is the sum over the ranks of
        what each of their losses passes back to it.

    Raises:
        RuntimeError: x has other rows than its rank should hold, or the group's own errors: a
            time-out, a rank that is gone. ValueError: layout or group.
    """
    check_layout(layout)
    ranks = ranks_of(group)
    shards = ranks.shards(global_length(length, x.size(dim), ranks), layout)
    ranks.check_rows(shards, x.size(dim), "x")
    rows = x.movedim(dim, 0)
    if ranks.inner is not None:
        rows = _gather(rows, shards.inner_ranges(ranks.outer_rank), ranks.inner)
    outer = tuple(shards.outer_ranges(rank) for rank in range(ranks.outer_size))
    return _gather(rows, outer, ranks.outer).movedim(0, dim)


def _gather(rows: Tensor, held: tuple[Ranges, ...], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in the order of the tokens."""
    sizes = [size_of(ranges) for ranges in held]
    copies = rows.repeat(len(held), *[1] * (rows.dim() - 1))
    parts = all_to_all_single_autograd(copies, sizes, [rows.size(0)] * len(held), group)
    parts = parts.split(sizes)
    pieces = [parts[rank].narrow(0, row, count) for rank, row, count in in_order(held)]
    return torch.cat(pieces) if pieces else parts[0]


def position_ids(
    length: int,
    group: Group = None,
    *,
    layout: str = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions 0 … length - 1 of this rank's tokens: int64 (rows), as split of arange gives.

    Rotary and learned position embeddings are looked up by them. For packed documents split the
    positions within each document instead.

    Arguments: length: tokens of the whole sequence. device: default torch's. Others: see split.
    """
    check_layout(layout)
    ranks = ranks_of(group)
    ranges = ranks.shards(length, layout).ranges(ranks.outer_rank, ranks.inner_rank)
    parts = [torch.arange(first, last, device=device) for first, last in ranges]
    return torch.cat(parts) if parts else torch.arange(0, device=device)
