"""All-to-all over heads (Jacobs et al. 2023, DeepSpeed-Ulysses): some tokens of all heads become
all tokens of some heads, and back. Differentiable: the gradient is the way back."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.context_parallel.exchange import all_to_all
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


@dataclass(frozen=True)
class Share:
    """How a tensor (batch, rows, heads, d) lies on the ranks of a group, by tokens and by heads."""

    held: tuple[Ranges, ...]  # the tokens of each rank, as positions among those of the group
    heads: tuple[Range, ...]  # the heads of each rank

    def rows(self, rank: int) -> int:
        return size_of(self.held[rank])


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
    several = sum(last - first for first, last in share.heads) > x.size(2)
    wide = x.to(compute_dtype(x.dtype)) if several else x
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
