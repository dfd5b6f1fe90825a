"""Rows of keys and values between the ranks of a group: one by one, or all at once.

A group's ranks count from 0 in its own order; where they lie in the world does not matter. NCCL
runs its transfers on a stream of its own, gloo on threads: what is asked for before a computation
travels during it. Errors and time-outs are those of the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    broadcast,
    wait_tensor,
)

from flash_attn.context_parallel.shards import Ranges, in_order, size_of


@dataclass
class Transfer:
    """Tensors on their way. They are there, and what was sent may be written to, after wait."""

    works: list[dist.Work]
    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]  # kept until they have left

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        self.works, self.sent = [], ()
        return self.received


def exchange(
    group: dist.ProcessGroup,
    sent: Sequence[Tensor],
    destination: int,
    received: Sequence[Tensor],
    source: int,
) -> Transfer:
    """Starts to send tensors to one rank and to receive others from one; empty ones do not travel.

    sent and received are contiguous. Every rank has to start its transfers in the same order.
    """
    operations = [
        dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=destination)
        for tag, x in enumerate(sent)
        if x.numel()
    ]
    operations += [
        dist.P2POp(dist.irecv, x, group=group, tag=tag, group_peer=source)
        for tag, x in enumerate(received)
        if x.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(works, tuple(received), tuple(sent))


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """The next sent[r] rows of x go to rank r, received[r] come from it; differentiable."""
    if torch.is_grad_enabled():
        return all_to_all_single_autograd(x, received, sent, group)
    # In inference mode the differentiable op does not exist.
    return wait_tensor(all_to_all_single(x, received, sent, group))


def start_all_to_all(
    sent: Tensor, incoming: list[int], outgoing: list[int], group: dist.ProcessGroup
) -> Transfer:
    """Starts to send the next outgoing[r] numbers to rank r and to receive incoming[r] from it."""
    received = sent.new_empty(sum(incoming))
    work = dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True)
    return Transfer([work], (received,), (sent,))


def from_first_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the first rank of the group has for x."""
    return wait_tensor(broadcast(x, 0, group))


def gather_rows(x: Tensor, held: tuple[Ranges, ...], group: dist.ProcessGroup) -> Tensor:
    """(batch, rows of this rank, …) as (batch, rows of all ranks in the order of the tokens, …)."""
    sizes = [size_of(ranges) for ranges in held]
    # Equal parts, as a collective of unequal ones exists for some backends only.
    padded = x.new_zeros(x.size(0), max(sizes), *x.shape[2:])
    padded[:, : x.size(1)] = x
    everything = x.new_empty(len(sizes) * padded.size(0), *padded.shape[1:])
    dist.all_gather_into_tensor(everything, padded, group=group)
    parts = everything.view(len(sizes), *padded.shape)
    pieces = [parts[rank, :, row : row + count] for rank, row, count in in_order(held)]
    return torch.cat(pieces or [parts[0]], dim=1)


def sum_rows(x: Tensor, held: tuple[Ranges, ...], group: dist.ProcessGroup) -> Tensor:
    """The way back: each rank's rows of x (batch, all rows, …), summed over all ranks' x.

    The sum runs in the order of the ranks, so it is the same in every run.
    """
    rank = dist.get_rank(group)
    parts = [torch.cat([x[:, a:b] for a, b in ranges] or [x[:, :0]], 1) for ranges in held]
    mine = parts[rank].shape
    received = x.new_empty(len(held) * parts[rank].numel())
    dist.all_to_all_single(
        received,
        torch.cat([part.flatten() for part in parts]),
        [parts[rank].numel()] * len(held),
        [part.numel() for part in parts],
        group=group,
    )
    return received.view(len(held), *mine).sum(0)
