"""All-to-all over heads (Jacobs et al. 2023, DeepSpeed-Ulysses): some tokens of all heads become
all tokens of some heads, and back.

`to_heads` and `to_rows` are differentiable: the gradient is the way back. `ToHeads` and `ToRows`
are the same exchanges, without gradient, which wait to be started together with others: each tensor
is copied once to be sent and once where it belongs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.context_parallel.exchange import Transfer, all_to_all, copy, start, with_each_rank
from flash_attn.context_parallel.merge import compute_dtype
from flash_attn.context_parallel.shards import Range, Ranges, even_part, in_order, size_of


def head_shares(heads_q: int, heads_kv: int, ranks: int) -> list[tuple[Range, Range]]:
    """The query heads and the key heads of each rank; every query head lies with its key head.

    Key heads are dealt out whole. Where there are fewer of them than ranks, several ranks have the
    same one and share its query heads. A rank may have none.
    """
    group = heads_q // heads_kv
    if heads_kv >= ranks:
        kv = [even_part(heads_kv, ranks, rank) for rank in range(ranks)]
        return [((a * group, b * group), (a, b)) for a, b in kv]
    shares = []
    for head in range(heads_kv):
        first, last = even_part(ranks, heads_kv, head)
        for index in range(last - first):
            a, b = even_part(group, last - first, index)
            q = (head * group + a, head * group + b)
            shares.append((q, (head, head + (b > a))))
    return shares


# Rows times query heads that fill a GPU many times over: groups of heads are no smaller.
ROWS_OF_A_GROUP = 1 << 17


def heads_of_a_group(rows: int, heads_per_kv: int, heads_kv: int) -> int:
    """How many of the key heads, each with its query heads, are computed at a time."""
    return min(max(ROWS_OF_A_GROUP // (max(rows, 1) * heads_per_kv), 1), max(heads_kv, 1))


def shares_in_groups(
    heads_q: int, heads_kv: int, ranks: int, rows: int
) -> list[list[tuple[Range, Range]]]:
    """head_shares in groups, one after the other: in each some of the heads of every rank.

    rows: of all ranks. Where ranks share a key head, there is one group.
    """
    shares = head_shares(heads_q, heads_kv, ranks)
    if heads_kv < ranks:
        return [shares]
    per_kv = heads_q // heads_kv
    most = max(last - first for _, (first, last) in shares)
    step = heads_of_a_group(rows, per_kv, most)
    groups = []
    for first in range(0, most, step):
        kv = [(min(a + first, b), min(a + first + step, b)) for _, (a, b) in shares]
        groups.append([((a * per_kv, b * per_kv), (a, b)) for a, b in kv])
    return groups


@dataclass(frozen=True)
class Share:
    """How a tensor (batch, rows, heads, d) lies on the ranks of a group, by tokens and by heads."""

    held: tuple[Ranges, ...]  # the tokens of each rank, as positions among those of the group
    heads: tuple[Range, ...]  # the heads of each rank

    def rows(self, rank: int) -> int:
        return size_of(self.held[rank])

    def part(self, x: Tensor, rank: int) -> Tensor:
        """The heads of a rank, of x (…, heads, d)."""
        first, last = self.heads[rank]
        return x[:, :, first:last]

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Of each piece that a rank holds: its first row there and among all rows, and its rows."""
        position = 0
        for source, row, count in in_order(self.held):
            if source == rank:
                yield row, position, count
            position += count


class _Parts:
    """Parts of some tensors for each rank, and from each rank: (batch, rows, heads, d).

    Those for one rank lie behind one another in what is sent. A rank's part for itself stays.
    """

    def __init__(self, like: Tensor, sent: list[list], received: list[list], group) -> None:
        """sent, received: for each rank the shapes of the tensors' parts. like: their dtype."""
        self.transfer: Transfer | None = None
        own, self._group = dist.get_rank(group), group
        self._outgoing, self._incoming = _others(sent, own), _others(received, own)
        self._flat = like.new_empty(sum(_sizes(self._outgoing)))
        self.sent = _views(self._flat, self._outgoing)

    def prepare(self) -> None:
        """What was written to `sent` may leave."""
        sizes = _sizes(self._incoming), _sizes(self._outgoing)
        self.transfer = with_each_rank(self._flat, *sizes, self._group)
        self._flat = self.sent = None

    def wait(self) -> None:
        """What comes is in `received`."""
        (flat,) = self.transfer.wait()
        self.received = _views(flat, self._incoming)
        self.transfer = None


def _others(shapes: list[list], own: int) -> list[list]:
    """No rows for the rank itself."""
    return [
        [(0, *shape) if rank == own else shape for shape in each]
        for rank, each in enumerate(shapes)
    ]


def _sizes(shapes: list[list]) -> list[int]:
    return [sum(map(math.prod, each)) for each in shapes]


def _views(flat: Tensor, shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    parts = iter(flat.split([math.prod(shape) for each in shapes for shape in each]))
    return [[next(parts).view(shape) for shape in each] for each in shapes]


class ToHeads:
    """Tensors on their way from some tokens of all heads to all tokens of some heads, once their
    transfer is started."""

    def __init__(
        self, xs: Sequence[Tensor], shares: Sequence[Share], group, at_once: bool = False
    ) -> None:
        """xs: (batch, rows of this rank, heads, d), of one dtype.

        at_once: they start here, in two transfers, as nothing is computed meanwhile: the second
        one's tensors are copied while the first one travels, and the first one's to where they
        belong while the second one does.
        """
        self._xs, self._shares, self._group = xs, shares, group
        self._rank = dist.get_rank(group)
        cut = len(xs) // 2 if at_once else 0
        self._parts: list[tuple[range, _Parts]] = []
        for some in filter(len, (range(cut), range(cut, len(xs)))):
            self._parts.append((some, self._packed(some)))
            if at_once:
                start(self._parts[-1][1].transfer)

    def _packed(self, some: range) -> _Parts:
        """Of some of the tensors, by their indices."""
        ranks = range(dist.get_world_size(self._group))
        pairs = [(self._xs[i], self._shares[i]) for i in some]
        sent = [[s.part(x, to).shape for x, s in pairs] for to in ranks]
        mine = sent[self._rank]
        received = [
            [(n[0], s.rows(source), *n[2:]) for n, (_, s) in zip(mine, pairs, strict=True)]
            for source in ranks
        ]
        parts = _Parts(pairs[0][0], sent, received, self._group)
        for to, views in enumerate(parts.sent):
            for view, (x, share) in zip(views, pairs, strict=True):
                if to != self._rank:
                    copy(view, share.part(x, to))
        parts.prepare()
        return parts

    @property
    def transfer(self) -> Transfer:
        """To be started."""
        ((_, parts),) = self._parts
        return parts.transfer

    def wait(self) -> list[Tensor]:
        """(batch, rows of all ranks, heads of this rank, d) of each."""
        results = []
        for x, share in zip(self._xs, self._shares, strict=True):
            own = share.part(x, self._rank)
            rows = sum(map(size_of, share.held))
            results.append(x.new_empty(x.size(0), rows, *own.shape[2:]))
            self._place(results[-1], own, share, self._rank)  # while the others' parts come
        for some, parts in self._parts:
            parts.wait()
            for rank, received in enumerate(parts.received):
                if rank != self._rank:
                    for i, part in zip(some, received, strict=True):
                        self._place(results[i], part, self._shares[i], rank)
        self._xs = self._parts = None
        return results

    @staticmethod
    def _place(whole: Tensor, part: Tensor, share: Share, rank: int) -> None:
        for row, position, count in share.pieces(rank):
            copy(whole[:, position : position + count], part[:, row : row + count])


class ToRows:
    """Tensors on their way back from all tokens of some heads to some tokens of all heads, once
    their transfer is started."""

    def __init__(
        self, xs: Sequence[Tensor], shares: Sequence[Share], group, copies_own: bool = False
    ) -> None:
        """xs: (batch, rows of all ranks, heads of this rank, d), of one dtype. copies_own: they are
        given up at once, for a copy of this rank's own rows."""
        self._shares, self._rank = shares, dist.get_rank(group)
        ranks = range(dist.get_world_size(group))
        pairs = list(zip(xs, shares, strict=True))
        sent = [[(x.size(0), s.rows(to), *x.shape[2:]) for x, s in pairs] for to in ranks]
        received = [
            [
                (x.size(0), s.rows(self._rank), s.heads[source][1] - s.heads[source][0], x.size(3))
                for x, s in pairs
            ]
            for source in ranks
        ]
        self._parts = _Parts(xs[0], sent, received, group)
        for to, views in enumerate(self._parts.sent):
            for view, (x, share) in zip(views, pairs, strict=True):
                if to != self._rank:
                    self._copy_rows(view, x, share, to)
        self._parts.prepare()
        self._xs = None if copies_own else xs
        self._own = [self._own_rows(*pair) for pair in pairs] if copies_own else None

    @property
    def transfer(self) -> Transfer:
        """To be started."""
        return self._parts.transfer

    def _own_rows(self, x: Tensor, share: Share) -> Tensor:
        own = x.new_empty(x.size(0), share.rows(self._rank), *x.shape[2:])
        self._copy_rows(own, x, share, self._rank)
        return own

    @staticmethod
    def _copy_rows(target: Tensor, x: Tensor, share: Share, rank: int) -> None:
        for row, position, count in share.pieces(rank):
            copy(target[:, row : row + count], x[:, position : position + count])

    def wait(self) -> None:
        """Everything has come, and what was sent is given up."""
        if self._parts.transfer is not None:
            self._parts.wait()

    def store(self, targets: Sequence[Tensor]) -> None:
        """Writes this group's heads of each target, (batch, rows of this rank, heads, d), when they
        have come.

        Where several ranks have the same head, what they found is added in the order of the ranks,
        in the dtype of the target.
        """
        for i, (target, share) in enumerate(zip(targets, self._shares, strict=True)):
            if shared(share.heads):
                target.zero_()
            elif self._own is None:  # while the others' parts come
                self._copy_rows(share.part(target, self._rank), self._xs[i], share, self._rank)
            else:
                copy(share.part(target, self._rank), self._own[i])
        self.wait()
        for i, (target, share) in enumerate(zip(targets, self._shares, strict=True)):
            several = shared(share.heads)
            for rank in range(len(share.held)):
                into = share.part(target, rank)
                if several:
                    into += self._found_by(rank, i)
                elif rank != self._rank:
                    copy(into, self._parts.received[rank][i])
        self._xs = self._own = self._parts = None

    def _found_by(self, rank: int, i: int) -> Tensor:
        """Of a rank, for this rank's rows."""
        if rank != self._rank:
            return self._parts.received[rank][i]
        return self._own_rows(self._xs[i], self._shares[i]) if self._own is None else self._own[i]


def shared(heads: Sequence[Range]) -> bool:
    """Whether several ranks have the same head."""
    held = sorted(part for part in heads if part[0] < part[1])
    return any(a[1] > b[0] for a, b in pairwise(held))


def to_heads(xs: list[Tensor], shares: list[Share], group: dist.ProcessGroup) -> list[Tensor]:
    """(batch, rows of this rank, heads, d) → (batch, all rows, heads of this rank, d), in one
    exchange for all tensors, which have one dtype."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = [_cut_heads(x, share) for x, share in zip(xs, shares, strict=True)]
    sent = [part[to].flatten() for to in range(size) for part in parts]
    shapes = [
        (x.size(0), share.rows(source), parts[i][rank].size(2), x.size(3))
        for source in range(size)
        for i, (x, share) in enumerate(zip(xs, shares, strict=True))
    ]
    received = _all_to_all(sent, shapes, size, group)
    results = []
    for i, share in enumerate(shares):
        rows = received[i :: len(xs)]
        pieces = [rows[source][:, row : row + n] for source, row, n in in_order(share.held)]
        results.append(torch.cat(pieces or rows[:1], dim=1))
    return results


def to_rows(x: Tensor, share: Share, group: dist.ProcessGroup) -> Tensor:
    """(batch, all rows, heads of this rank, d) → (batch, rows of this rank, heads, d)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = [n for _, _, n in in_order(share.held)]
    parts: list[list[Tensor]] = [[] for _ in range(size)]
    for (to, _, _), piece in zip(in_order(share.held), x.split(counts, dim=1), strict=True):
        parts[to].append(piece)
    sent = [torch.cat(pieces or [x[:, :0]], dim=1).flatten() for pieces in parts]
    shapes = [(x.size(0), share.rows(rank), last - first, x.size(3)) for first, last in share.heads]
    return torch.cat(_all_to_all(sent, shapes, size, group), dim=2)


def _cut_heads(x: Tensor, share: Share) -> list[Tensor]:
    """What each rank gets of the heads of x. The gradient of a head that several get is summed in
    fp32."""
    wide = x.to(compute_dtype(x.dtype)) if shared(share.heads) else x
    return [wide[:, :, first:last].to(x.dtype) for first, last in share.heads]


def _all_to_all(sent: list[Tensor], shapes: list, size: int, group) -> list[Tensor]:
    """Flat tensors, as many for each rank, rank after rank → tensors of these shapes from each."""
    numbers = [math.prod(shape) for shape in shapes]

    def per_rank(counts: list[int]) -> list[int]:
        each = len(counts) // size
        return [sum(counts[rank * each : (rank + 1) * each]) for rank in range(size)]

    outgoing = per_rank([x.numel() for x in sent])
    received = all_to_all(torch.cat(sent), per_rank(numbers), outgoing, group)
    parts = received.split(numbers)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
