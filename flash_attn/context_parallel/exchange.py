"""Rows of keys and values between the ranks of a group: one by one, or all at once.

A group's ranks count from 0 in its own order; where they lie in the world does not matter. NCCL
runs its transfers on a stream of its own, gloo on threads: what is asked for before a computation
travels during it. Errors and time-outs are those of the group.

Transfers are prepared first and started together. NCCL's kernels need multiprocessors, and those of
attention take all of them until they end: what is started behind another transfer would find none.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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

T = TypeVar("T")


# In clock cycles of a GPU, some 20 µs: another stream follows on an event within 10 µs.
WAY_CYCLES = 36_000


@dataclass
class Transfer:
    """Tensors on their way, once `start` was called with it. They are there, and what was sent may
    be written to, after wait, which hands them over."""

    works: list[dist.Work]
    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]  # kept until they have left
    operations: list[dist.P2POp] = field(default_factory=list)  # not started yet

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        received = self.received
        self.works, self.sent, self.received = [], (), ()
        return received


def start(*transfers: Transfer | None) -> bool:
    """Starts what was prepared, as one transfer of NCCL's; returns whether anything travels.

    Every rank has to start its transfers in the same order.
    """
    prepared = [transfer for transfer in transfers if transfer is not None]
    operations = [operation for transfer in prepared for operation in transfer.operations]
    if not operations:
        return False
    works = dist.batch_isend_irecv(operations)
    # One for all of them, or for each its own, which is waited for once.
    one_each, position = len(works) == len(operations), 0
    for transfer in prepared:
        end = position + len(transfer.operations)
        transfer.works = works[position:end] if one_each else works
        transfer.operations, position = [], end
    return True


def give_way(x: Tensor) -> None:
    """Keeps the stream of x's GPU idle for some microseconds. An attention kernel that followed at
    once on a transfer's start would have taken the multiprocessors before NCCL's kernel comes."""
    if x.is_cuda:
        with torch.cuda.device(x.device):
            torch.cuda._sleep(WAY_CYCLES)


def one_ahead(starts: Sequence[Callable[[], T]]) -> Iterator[T]:
    """What each of `starts` returns, when the one behind it is started, too."""
    coming = None
    for start in [*starts, None]:
        here, coming = coming, start and start()
        if here is not None:
            yield here


def exchange(
    group: dist.ProcessGroup,
    sent: Sequence[Tensor],
    destination: int,
    received: Sequence[Tensor],
    source: int,
) -> Transfer:
    """Prepares to send tensors to one rank and to receive others from one; empty ones do not
    travel. sent and received are contiguous."""
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
    return Transfer([], tuple(received), tuple(sent), operations)


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """The next sent[r] rows of x go to rank r, received[r] come from it; differentiable."""
    if torch.is_grad_enabled():
        return all_to_all_single_autograd(x, received, sent, group)
    # In inference mode the differentiable op does not exist.
    return wait_tensor(all_to_all_single(x, received, sent, group))


def with_each_rank(
    sent: Tensor, incoming: list[int], outgoing: list[int], group: dist.ProcessGroup
) -> Transfer:
    """Prepares to send the next outgoing[r] numbers to rank r, and to receive incoming[r]."""
    received = sent.new_empty(sum(incoming))
    operations = [
        dist.P2POp(operation, part, group=group, group_peer=rank)
        for operation, flat, sizes in (
            (dist.isend, sent, outgoing),
            (dist.irecv, received, incoming),
        )
        for rank, part in enumerate(flat.split(sizes))
        if part.numel()
    ]
    return Transfer([], (received,), (sent,), operations)


def from_first_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the first rank of the group has for x."""
    return wait_tensor(broadcast(x, 0, group))


def copy(target: Tensor, source: Tensor) -> None:
    """Of one dtype; in units of 16 bytes, where both lie so.

    What copies between strides takes one number after the other: it is faster where these are wide.
    """
    numbers = 16 // source.element_size()
    places = [
        n for x in (target, source) for n in (x.size(-1), x.storage_offset(), *x.stride()[:-1])
    ]
    rows = all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in (target, source))
    if rows and target.dtype == source.dtype and all(n % numbers == 0 for n in places):
        target, source = (x.view(torch.complex128) for x in (target, source))
    target.copy_(source)


class Gathering:
    """Rows of all ranks on their way to each of them."""

    def __init__(self, xs: Sequence[Tensor], held: tuple[Ranges, ...], group) -> None:
        """xs: (batch, rows of this rank, …), of one dtype; held: what each rank holds."""
        # Equal parts, as a collective of unequal ones exists for some backends only.
        rows = max(map(size_of, held))
        self._held, self._shapes = held, [(x.size(0), rows, *x.shape[2:]) for x in xs]
        mine = xs[0].new_empty(sum(map(math.prod, self._shapes)))
        for x, part in zip(xs, self._views(mine), strict=True):
            copy(part[:, : x.size(1)], x)
        everything = mine.new_empty(len(held) * mine.numel())
        work = dist.all_gather_into_tensor(everything, mine, group=group, async_op=True)
        self._transfer = Transfer([work], (everything,), (mine,))

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def wait(self) -> list[Tensor]:
        """(batch, rows of all ranks in the order of the tokens, …) of each."""
        (everything,) = self._transfer.wait()
        self._transfer = None
        of_ranks = [self._views(flat) for flat in everything.chunk(len(self._held))]
        rows = sum(map(size_of, self._held))
        results = [everything.new_empty(n[0], rows, *n[2:]) for n in self._shapes]
        position = 0
        for rank, row, count in in_order(self._held):
            for whole, part in zip(results, of_ranks[rank], strict=True):
                copy(whole[:, position : position + count], part[:, row : row + count])
            position += count
        return results
