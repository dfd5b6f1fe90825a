"""Attention of the rows of one rank to the keys of all: two torch ops, forward and backward.

    ring          in step t a rank computes with the keys of the rank t places before it, while
                  those of the rank t + 1 places before it are on their way. Each block comes
                  straight from its owner, and its gradient goes straight back: ranks whose tokens
                  do not see one another exchange nothing, so that a window talks to neighbours
                  only. Two blocks of keys at a time.
    all-gather    all keys of a group of heads come first, then each rank computes once. Those of
                  the next group are on their way meanwhile.

The backward recomputes from the LSE and the output over all keys, as the backward of one GPU does,
so that the contributions of the blocks add up to the exact gradient. They are added in fp32.

Both go through the heads in groups: fp32 sums and what travels are those of one group at a time,
beside results in the dtype of q. In the backward the last gradients of a group's keys travel while
the next group is computed, or its first step. In the ring they leave together with the keys that
the next group's second step wants: during each step there is one exchange.

As torch ops they are one node each for torch.compile, which does not look inside.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from flash_attn._functorch import check_no_tangents
from flash_attn.context_parallel.calls import (
    Options,
    Queries,
    SumOfQueries,
    forced_backend_again,
    run_backward,
    run_forward,
    sink_grad,
)
from flash_attn.context_parallel.dropout import Dropout
from flash_attn.context_parallel.exchange import (
    Gathering,
    Transfer,
    copy,
    exchange,
    give_way,
    one_ahead,
    start,
)
from flash_attn.context_parallel.heads import Share, ToRows, heads_of_a_group
from flash_attn.context_parallel.merge import RunningMerge, RunningSum, compute_dtype
from flash_attn.context_parallel.plan import Call, Documents, Mask, calls
from flash_attn.context_parallel.shards import Ranges, Shards, size_of


class _Blocks:
    """Who holds which tokens, and the calls for each pair of ranks."""

    def __init__(
        self,
        group_name: str,
        layout: str,
        mask: list[int],
        cu_q: list[int],
        cu_k: list[int],
        varlen: bool,
    ) -> None:
        left, right, *flags = mask
        self.group = _resolve_process_group(group_name)
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.mask = Mask(left, right, *map(bool, flags))
        self.documents = Documents(tuple(cu_q), tuple(cu_k), varlen)
        shards_q = Shards(cu_q[-1], layout, self.size)
        shards_k = Shards(cu_k[-1], layout, self.size)
        self.q = tuple(shards_q.outer_ranges(rank) for rank in range(self.size))
        self.k = tuple(shards_k.outer_ranges(rank) for rank in range(self.size))

    def calls(self, rank_q: int, rank_k: int) -> tuple[Call, ...]:
        return calls(self.mask, self.documents, self.q[rank_q], self.k[rank_k])

    def calls_with_all_keys(self) -> tuple[Call, ...]:
        everything: Ranges = ((0, self.documents.k[-1]),)
        return calls(self.mask, self.documents, self.q[self.rank], everything)

    def ring_calls(self) -> list[Call]:
        """Those of this rank's rows with the keys of all ranks."""
        return [call for rank in range(self.size) for call in self.calls(self.rank, rank)]

    def source(self, step: int) -> int:
        """Whose keys this rank computes with in a step."""
        return (self.rank - step) % self.size

    def destination(self, step: int) -> int:
        """Who computes with this rank's keys in a step."""
        return (self.rank + step) % self.size

    def fetch(self, step: int, own: "_Keys") -> "_Keys | None":
        """Prepares to bring the keys and values of a step, if there is such a step."""
        if step == self.size:
            return None
        source, destination = self.source(step), self.destination(step)
        sent = (own.flat,) if self.calls(destination, self.rank) else ()
        rows = size_of(self.k[source]) if self.calls(self.rank, source) else 0
        coming = _Keys([(n[0], rows, *n[2:]) for n in own.shapes], own.flat)
        received = (coming.flat,)
        coming.transfer = exchange(self.group, sent, destination, received, source)
        return coming

    def give_back(self, step: int, dk: Tensor, dv: Tensor) -> Transfer:
        """Prepares to bring the gradients of a step's keys to their owner."""
        source, destination = self.source(step), self.destination(step)
        sent = (dk, dv) if self.calls(self.rank, source) else ()
        rows = size_of(self.k[self.rank]) if self.calls(destination, self.rank) else 0
        received = [x.new_empty(x.size(0), rows, *x.shape[2:]) for x in (dk, dv)]
        return exchange(self.group, sent, destination=source, received=received, source=destination)


class _Keys:
    """Keys and values of a group of heads, which travel as one. Both begin where kernels may load
    16 bytes at a time."""

    def __init__(self, shapes: list[tuple[int, ...]], like: Tensor) -> None:
        self.shapes = shapes
        self._sizes = [-(-math.prod(shape) // 16) * 16 for shape in shapes]
        self.flat = like.new_empty(sum(self._sizes))
        self.transfer: Transfer | None = None  # which brings them

    def views(self) -> list[Tensor]:
        parts = zip(self.flat.split(self._sizes), self.shapes, strict=True)
        return [part[: math.prod(shape)].view(shape) for part, shape in parts]

    def wait(self) -> list[Tensor]:
        """Hands them over."""
        (self.flat,) = self.transfer.wait()
        views = self.views()
        self.flat = self.transfer = None
        return views


# Query heads, and their key heads.
Groups = list[tuple[slice, slice]]
# dq, and what waits for the last of dk and dv and writes them to two tensors.
Grads = tuple[RunningSum, Callable[[Tensor, Tensor], None]]
# Own keys of a group of heads, what brings those of the second step, and _OwnKeys.start_after.
_OfGroup = tuple[_Keys, _Keys | None, Callable[..., _Keys | None]]


class _OwnKeys:
    """For each group of heads the keys and values that are here before the ring's first step, and
    what brings those of the second step, under way."""

    def __init__(self, blocks: _Blocks, k: Tensor, v: Tensor, groups: Groups) -> None:
        self._blocks, self._kv = blocks, (k, v)
        self._heads = (heads for _, heads in groups)
        self._next: _OfGroup | None = None
        self._start_next_group(gives_way=True)

    def __iter__(self) -> Iterator[_OfGroup]:
        while self._next is not None:
            here, self._next = self._next, None
            yield here

    def start_after(self, step: int, own: _Keys, *others: Transfer | None) -> _Keys | None:
        """Starts what comes during the step behind this one, and others with it. The last step of
        a group is followed by the first one of the next group."""
        if step + 1 == self._blocks.size:
            self._start_next_group(*others)
            return None
        coming = self._blocks.fetch(step + 2, own)
        self._start(coming, *others, gives_way=True)
        return coming

    def _start_next_group(self, *others: Transfer | None, gives_way: bool = False) -> None:
        """Between two groups results are stored, which gives way enough."""
        heads, coming = next(self._heads, None), None
        if heads is not None:
            parts = [x[:, :, heads] for x in self._kv]
            own = _Keys([x.shape for x in parts], parts[0])
            for view, part in zip(own.views(), parts, strict=True):
                copy(view, part)
            coming = self._blocks.fetch(1, own)
            self._next = own, coming, self.start_after
        self._start(coming, *others, gives_way=gives_way)

    def _start(self, coming: _Keys | None, *others: Transfer | None, gives_way: bool) -> None:
        travels = start(*others, coming and coming.transfer)
        if travels and gives_way:
            give_way(self._kv[0])


def _all_keys(blocks: _Blocks, k: Tensor, v: Tensor, groups: Groups) -> Iterator[list[Tensor]]:
    """For each group of heads those of all ranks; the next group's are on their way meanwhile."""

    def gather(heads: slice) -> Gathering:
        return Gathering([x[:, :, heads] for x in (k, v)], blocks.k, blocks.group)

    for coming in one_ahead([partial(gather, heads) for _, heads in groups]):
        yield coming.wait()


def _ring_forward(blocks: _Blocks, q, here: _OfGroup, options: Options, merge) -> None:
    own, coming, start_after = here
    keys = own.views()
    for step in range(blocks.size):
        for call in blocks.calls(blocks.rank, blocks.source(step)):
            run_forward(call, q, *keys, options, merge)
        keys = coming.wait() if coming else ()
        coming = start_after(step, own)


def _ring_backward(
    blocks: _Blocks,
    queries: Queries,
    here: _OfGroup,
    options: Options,
    finish_before: Callable[[], None],
) -> Grads:
    own, coming, start_after = here
    keys, returning = own.views(), None
    dq, dk, dv = SumOfQueries(queries, blocks.ring_calls()), *map(RunningSum, keys)
    for step in range(blocks.size):
        grads = (dk, dv) if step == 0 else [RunningSum(x) for x in keys]
        for call in blocks.calls(blocks.rank, blocks.source(step)):
            run_backward(call, queries, *keys, options, (dq, *grads))
        if step == 0:  # later on there are more buffers
            finish_before()
        keys = coming.wait() if coming else ()
        _add_returned(returning, dk, dv)
        returning = blocks.give_back(step, *(x.value() for x in grads)) if step else None
        coming = start_after(step, own, returning)

    def of_keys(*targets: Tensor) -> None:
        _add_returned(returning, dk, dv)
        for grad, target in zip((dk, dv), targets, strict=True):
            grad.store(target)

    return dq, of_keys


def _add_returned(returning: Transfer | None, dk: RunningSum, dv: RunningSum) -> None:
    """Adds what another rank found for this rank's keys, once it is here; in the order of steps."""
    if returning is None:
        return
    for grad, part in zip((dk, dv), returning.wait(), strict=True):
        if part.size(1):
            grad.add(slice(0, part.size(1)), part)


def _gather_forward(blocks: _Blocks, q, keys: list[Tensor], options: Options, merge) -> None:
    for call in blocks.calls_with_all_keys():
        run_forward(call, q, *keys, options, merge)


def _gather_backward(
    blocks: _Blocks,
    queries: Queries,
    keys: list[Tensor],
    options: Options,
    finish_before: Callable[[], None],
) -> Grads:
    planned = blocks.calls_with_all_keys()
    # Where keys lie on both sides of some rows, as with ALiBi without a causal mask, these rows
    # have two calls.
    dq, dk, dv = SumOfQueries(queries, planned), *map(RunningSum, keys)
    for call in planned:
        run_backward(call, queries, *keys, options, (dq, dk, dv))
    finish_before()
    # Every rank has all of these heads, and gets what all found for its rows.
    share = Share(blocks.k, ((0, keys[0].size(2)),) * blocks.size)
    parts = [dk.value(), dv.value()]
    leaving = ToRows(parts, [share, share], blocks.group)
    start(leaving.transfer)

    def of_keys(*targets: Tensor) -> None:
        leaving.wait()
        sums = [x.new_empty(x.size(0), share.rows(blocks.rank), *x.shape[2:]) for x in parts]
        leaving.store(sums)
        for grad, target in zip(sums, targets, strict=True):
            target.copy_(grad)

    return dq, of_keys


_SCHEMES = {
    "ring": (_OwnKeys, _ring_forward, _ring_backward),
    "all-gather": (_all_keys, _gather_forward, _gather_backward),
}


def _dropout(probability: float, rng_state: Tensor | None, heads: list[int]) -> Dropout | None:
    return None if rng_state is None else Dropout(probability, rng_state, *heads)


@torch.library.custom_op("flash_attn::context_parallel_fwd", mutates_args=())
def context_parallel_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    dropout_heads: list[int],
    deterministic: bool,
    mask: list[int],
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    varlen: bool,
    scheme: str,
    layout: str,
    group_name: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """q, k, v (batch, rows, heads, d) of this rank → out, softmax_lse. mask: left, right, top_left,
    whether there is ALiBi, and dropout. cu_seqlens: of the whole sequence, from 0 to its length.
    dropout_heads: how many heads the mask is of, and which of them is the first one here."""
    blocks = _Blocks(group_name, layout, mask, cu_seqlens_q, cu_seqlens_k, varlen)
    dropout = _dropout(dropout_p, rng_state, dropout_heads)
    options = Options(softmax_scale, softcap, alibi_slopes, deterministic, varlen, dropout)
    keys_of, forward, _ = _SCHEMES[scheme]
    out = q.new_empty(*q.shape[:-1], v.size(-1))
    lse = q.new_empty(q.size(0), q.size(2), q.size(1), dtype=compute_dtype(q.dtype))
    with forced_backend_again(backend):
        groups = _head_groups(blocks, q, k)
        for (heads_q, _), keys in zip(groups, keys_of(blocks, k, v, groups), strict=True):
            sink = None if learnable_sink is None else learnable_sink[heads_q]
            merge = RunningMerge(out[:, :, heads_q], sink)
            forward(blocks, q[:, :, heads_q], keys, options.of_heads(heads_q), merge)
            lse[:, heads_q] = merge.result()[1]
    return out, lse


@context_parallel_fwd.register_fake
def _(q, k, v, *_):
    lse = q.new_empty((q.size(0), q.size(2), q.size(1)), dtype=compute_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], v.size(-1))), lse


@torch.library.custom_op("flash_attn::context_parallel_bwd", mutates_args=())
def context_parallel_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    dropout_heads: list[int],
    deterministic: bool,
    mask: list[int],
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    varlen: bool,
    scheme: str,
    layout: str,
    group_name: str,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and of the sink what this rank's rows contribute (empty without a sink)."""
    blocks = _Blocks(group_name, layout, mask, cu_seqlens_q, cu_seqlens_k, varlen)
    dropout = _dropout(dropout_p, rng_state, dropout_heads)
    options = Options(softmax_scale, softcap, alibi_slopes, deterministic, varlen, dropout)
    queries = Queries(q, out, dout, softmax_lse, dlse)
    keys_of, _, backward = _SCHEMES[scheme]
    # Results of an op share no memory with its arguments nor with one another.
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))

    waiting: list[Callable[[], None]] = []  # of the group before, given up when done

    def finish() -> None:
        if waiting:
            waiting.pop()()

    with forced_backend_again(backend):
        groups = _head_groups(blocks, q, k)
        for (heads_q, heads_kv), keys in zip(groups, keys_of(blocks, k, v, groups), strict=True):
            some = queries.of_heads(heads_q)
            sum_of_dq, of_keys = backward(blocks, some, keys, options.of_heads(heads_q), finish)
            sum_of_dq.store(dq[:, :, heads_q])
            waiting.append(partial(of_keys, dk[:, :, heads_kv], dv[:, :, heads_kv]))
            del sum_of_dq, of_keys
        finish()
    if learnable_sink is None:
        return dq, dk, dv, q.new_empty(0)
    dsink = sink_grad(dout, out, softmax_lse, dlse, learnable_sink)
    return dq, dk, dv, dsink


def _head_groups(blocks: _Blocks, q: Tensor, k: Tensor) -> Groups:
    """Query heads with their key heads. Every rank makes the same groups."""
    groups = []
    heads_kv = k.size(2)
    heads_per_kv = q.size(2) // heads_kv
    rows = q.size(0) * (blocks.documents.q[-1] // blocks.size)
    step = heads_of_a_group(rows, heads_per_kv, heads_kv)
    for first in range(0, heads_kv, step):
        last = min(first + step, heads_kv)
        groups.append((slice(first * heads_per_kv, last * heads_per_kv), slice(first, last)))
    return groups


@context_parallel_bwd.register_fake
def _(dout, dlse, out, softmax_lse, q, k, v, alibi_slopes, learnable_sink, *_):
    dsink = q.new_empty(0) if learnable_sink is None else torch.empty_like(learnable_sink)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _setup_context(ctx, inputs, output) -> None:
    tensors, ctx.rest = inputs[:6], inputs[6:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    out, softmax_lse, q, k, v, alibi_slopes, sink, rng_state = ctx.saved_tensors
    check_no_tangents(dout=dout, dlse=dlse)
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsink = context_parallel_bwd(
        dout, dlse, out, softmax_lse, q, k, v, alibi_slopes, sink, rng_state, *ctx.rest
    )
    return dq, dk, dv, None, None if sink is None else dsink, None, *[None] * len(ctx.rest)


context_parallel_fwd.register_autograd(_backward, setup_context=_setup_context)
