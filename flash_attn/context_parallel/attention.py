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
the next group is computed, or its first step.

As torch ops they are one node each for torch.compile, which does not look inside.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from flash_attn.context_parallel.calls import (
    Options,
    Queries,
    forced_backend_again,
    run_backward,
    run_forward,
    sink_grad,
)
from flash_attn.context_parallel.dropout import Dropout
from flash_attn.context_parallel.exchange import Gathering, Transfer, exchange, one_ahead
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

    def source(self, step: int) -> int:
        """Whose keys this rank computes with in a step."""
        return (self.rank - step) % self.size

    def destination(self, step: int) -> int:
        """Who computes with this rank's keys in a step."""
        return (self.rank + step) % self.size

    def fetch(self, step: int, k: Tensor, v: Tensor) -> Transfer | None:
        """Starts to bring the keys and values of a step, if there is such a step."""
        if step == self.size:
            return None
        source, destination = self.source(step), self.destination(step)
        sent = (k, v) if self.calls(destination, self.rank) else ()
        rows = size_of(self.k[source]) if self.calls(self.rank, source) else 0
        received = [x.new_empty(x.size(0), rows, *x.shape[2:]) for x in (k, v)]
        return exchange(self.group, sent, destination, received, source)

    def give_back(self, step: int, dk: Tensor, dv: Tensor) -> Transfer:
        """Starts to bring the gradients of a step's keys to their owner."""
        source, destination = self.source(step), self.destination(step)
        sent = (dk, dv) if self.calls(self.rank, source) else ()
        rows = size_of(self.k[self.rank]) if self.calls(destination, self.rank) else 0
        received = [x.new_empty(x.size(0), rows, *x.shape[2:]) for x in (dk, dv)]
        return exchange(self.group, sent, destination=source, received=received, source=destination)


# Query heads, and their key heads.
Groups = list[tuple[slice, slice]]
# dq, and what waits for the last of dk and dv and returns them.
Grads = tuple[RunningSum, Callable[[], Sequence[Tensor]]]


def _own_keys(blocks: _Blocks, k: Tensor, v: Tensor, groups: Groups) -> Iterator[list[Tensor]]:
    """For each group of heads, the keys and values that are here before the first step."""
    for _, heads in groups:
        yield [x[:, :, heads].contiguous() for x in (k, v)]


def _all_keys(blocks: _Blocks, k: Tensor, v: Tensor, groups: Groups) -> Iterator[list[Tensor]]:
    """For each group of heads those of all ranks; the next group's are on their way meanwhile."""

    def start(heads: slice) -> Gathering:
        return Gathering([x[:, :, heads] for x in (k, v)], blocks.k, blocks.group)

    for coming in one_ahead([partial(start, heads) for _, heads in groups]):
        yield coming.wait()


def _ring_forward(blocks: _Blocks, q, k, v, options: Options, merge: RunningMerge) -> None:
    keys = (k, v)
    for step in range(blocks.size):
        following = blocks.fetch(step + 1, k, v)
        for call in blocks.calls(blocks.rank, blocks.source(step)):
            run_forward(call, q, *keys, options, merge)
        keys = following.wait() if following else ()


def _ring_backward(
    blocks: _Blocks,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    options: Options,
    finish_before: Callable[[], None],
) -> Grads:
    dq, dk, dv = RunningSum(queries.q), RunningSum(k), RunningSum(v)
    keys, returning = (k, v), None
    for step in range(blocks.size):
        following = blocks.fetch(step + 1, k, v)
        grads = (dk, dv) if step == 0 else [RunningSum(x) for x in keys]
        for call in blocks.calls(blocks.rank, blocks.source(step)):
            run_backward(call, queries, *keys, options, (dq, *grads))
        if step == 0:  # later on there are more buffers
            finish_before()
        keys = following.wait() if following else ()
        _add_returned(returning, dk, dv)
        returning = blocks.give_back(step, *(x.value() for x in grads)) if step else None

    def of_keys() -> tuple[Tensor, Tensor]:
        _add_returned(returning, dk, dv)
        return dk.value(), dv.value()

    return dq, of_keys


def _add_returned(returning: Transfer | None, dk: RunningSum, dv: RunningSum) -> None:
    """Adds what another rank found for this rank's keys, once it is here; in the order of steps."""
    if returning is None:
        return
    for grad, part in zip((dk, dv), returning.wait(), strict=True):
        if part.size(1):
            grad.add(slice(0, part.size(1)), part)


def _gather_forward(blocks: _Blocks, q, k, v, options: Options, merge: RunningMerge) -> None:
    for call in blocks.calls_with_all_keys():
        run_forward(call, q, k, v, options, merge)


def _gather_backward(
    blocks: _Blocks,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    options: Options,
    finish_before: Callable[[], None],
) -> Grads:
    dq, dk, dv = RunningSum(queries.q), RunningSum(k), RunningSum(v)
    for call in blocks.calls_with_all_keys():
        run_backward(call, queries, k, v, options, (dq, dk, dv))
    finish_before()
    # Every rank has all of these heads, and gets what all found for its rows.
    share = Share(blocks.k, ((0, k.size(2)),) * blocks.size)
    parts = [dk.value(), dv.value()]
    leaving = ToRows(parts, [share, share], blocks.group)

    def of_keys() -> list[Tensor]:
        leaving.wait()
        sums = [x.new_empty(x.size(0), share.rows(blocks.rank), *x.shape[2:]) for x in parts]
        leaving.store(sums)
        return sums

    return dq, of_keys


_SCHEMES = {
    "ring": (_own_keys, _ring_forward, _ring_backward),
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
            forward(blocks, q[:, :, heads_q], *keys, options.of_heads(heads_q), merge)
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

    def store(heads: slice, of_keys: Callable[[], Sequence[Tensor]]) -> None:
        for whole, part in zip((dk, dv), of_keys(), strict=True):
            whole[:, :, heads] = part

    def nothing() -> None:
        pass

    finish = nothing
    with forced_backend_again(backend):
        groups = _head_groups(blocks, q, k)
        for (heads_q, heads_kv), keys in zip(groups, keys_of(blocks, k, v, groups), strict=True):
            some = queries.of_heads(heads_q), *keys
            sum_of_dq, of_keys = backward(blocks, *some, options.of_heads(heads_q), finish)
            sum_of_dq.store(dq[:, :, heads_q])
            finish = partial(store, heads_kv, of_keys)
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
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsink = context_parallel_bwd(
        dout, dlse, out, softmax_lse, q, k, v, alibi_slopes, sink, rng_state, *ctx.rest
    )
    return dq, dk, dv, None, None if sink is None else dsink, None, *[None] * len(ctx.rest)


context_parallel_fwd.register_autograd(_backward, setup_context=_setup_context)
