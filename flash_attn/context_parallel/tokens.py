"""From the whole sequence to each rank's tokens, and back."""

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._errors import expect, explained
from flash_attn._functorch import check_no_tangents
from flash_attn.context_parallel.exchange import all_to_all
from flash_attn.context_parallel.shards import (
    Group,
    Ranges,
    check_layout,
    global_length,
    in_order,
    ranks_of,
    size_of,
)


@explained(of_torch=True)
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
    _check_dim(x, dim)
    ranks = ranks_of(group)
    shards = ranks.shards(x.size(dim), layout)
    parts = [
        x.narrow(dim, first, last - first)
        for first, last in shards.ranges(ranks.outer_rank, ranks.inner_rank)
    ]
    if not parts:
        return x.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@explained()
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
            time-out, a rank that is gone. ValueError: layout or group. NotImplementedError: x, or
            its gradient, has a tangent of forward-mode AD.
    """
    check_layout(layout)
    check_no_tangents(x=x)
    _check_dim(x, dim)
    ranks = ranks_of(group)
    shards = ranks.shards(global_length(length, x.size(dim), ranks), layout)
    ranks.check_rows(shards, x.size(dim), "x")
    rows = x.movedim(dim, 0)
    if ranks.inner is not None:
        rows = _gather(rows, shards.inner_ranges(ranks.outer_rank), ranks.inner)
    outer = tuple(shards.outer_ranges(rank) for rank in range(ranks.outer_size))
    return _GradientWithoutTangent.apply(_gather(rows, outer, ranks.outer)).movedim(0, dim)


class _GradientWithoutTangent(torch.autograd.Function):
    """The same tensor, whose gradient the exchange would strip of its tangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, dout: Tensor) -> Tensor:
        check_no_tangents(dout=dout)
        return dout


def _check_dim(x: Tensor, dim: int) -> None:
    expect(-x.dim() <= dim < x.dim(), "dim", f"one of the {x.dim()} dimensions of x", dim)


def _gather(rows: Tensor, held: tuple[Ranges, ...], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in the order of the tokens."""
    sizes = [size_of(ranges) for ranges in held]
    copies = rows.repeat(len(held), *[1] * (rows.dim() - 1))
    parts = all_to_all(copies, sizes, [rows.size(0)] * len(held), group).split(sizes)
    pieces = [parts[rank].narrow(0, row, count) for rank, row, count in in_order(held)]
    return torch.cat(pieces) if pieces else parts[0]


@explained(of_torch=True)
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
