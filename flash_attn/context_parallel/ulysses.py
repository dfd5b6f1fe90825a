"""Attention with whole heads on each rank: two torch ops, forward and backward.

    exchange  some tokens of all heads  →  all tokens of some heads
    compute   the very call that one GPU runs, with this rank's heads
    exchange  back

Both go through the heads in groups, so that what lies by heads is that of two groups at a time, and
exchanges travel during a computation:

    computes            heads 0           heads 1           heads 2
    arrives   heads 0   heads 1           heads 2
    leaves                                heads 0           heads 1           heads 2

What arrives and what leaves during a computation is one exchange. It starts before the copies in
front of the computation, so that its kernel has its multiprocessors when attention takes the rest.

Nothing that lies by heads is kept for the backward, but the LSE: q, k, v and out are exchanged
again, with dout. The gradients of a group stay where they arrive until the last one has come:
until then no rows of all heads are needed for them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from flash_attn._call import bwd, fwd, fwd_arguments
from flash_attn._functorch import check_no_tangents
from flash_attn.context_parallel.calls import forced_backend_again, on_device, sink_grad
from flash_attn.context_parallel.dropout import Dropout
from flash_attn.context_parallel.exchange import Transfer, start
from flash_attn.context_parallel.heads import (
    Share,
    ToHeads,
    ToRows,
    head_shares,
    shared,
    shares_in_groups,
)
from flash_attn.context_parallel.merge import compute_dtype
from flash_attn.context_parallel.shards import Shards


class _Heads:
    """Who holds which tokens before the exchange, and which heads after it."""

    def __init__(self, group_name: str, layout: str, cu_q, cu_k, q: Tensor, k: Tensor) -> None:
        self.group = _resolve_process_group(group_name)
        self.rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._held_q, self._held_k = (
            tuple(Shards(cu[-1], layout, size).outer_ranges(rank) for rank in range(size))
            for cu in (cu_q, cu_k)
        )
        self.rows = cu_q[-1]
        heads = (q.size(2), k.size(2), size)
        self.all = self._shares(head_shares(*heads))
        groups = shares_in_groups(*heads, q.size(0) * self.rows)
        self.groups = [self._shares(shares) for shares in groups]

    def _shares(self, heads) -> tuple[Share, Share]:
        """Of tensors with query heads, and of those with key heads."""
        heads_q, heads_kv = zip(*heads, strict=True)
        return Share(self._held_q, heads_q), Share(self._held_k, heads_kv)

    def mine(self, share: Share) -> slice:
        return slice(*share.heads[self.rank])


class _Arriving:
    """This rank's heads of some tensors, group after group: one is here, and the next one is on its
    way."""

    def __init__(self, heads: _Heads, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]):
        self._xs, self._group = [*of_queries, *of_keys], heads.group
        self._shares = (
            [share_q] * len(of_queries) + [share_k] * len(of_keys)
            for share_q, share_k in heads.groups
        )
        self._under_way: deque[ToHeads] = deque()

    def prepare(self, at_once: bool = False) -> Transfer | None:
        """What brings the next group, to be started; None: there is none, or it was at_once."""
        shares = next(self._shares, None)
        if shares is None:
            return None
        self._under_way.append(ToHeads(self._xs, shares, self._group, at_once))
        return None if at_once else self._under_way[-1].transfer

    def start_first_two(self) -> None:
        """Nothing is computed while the first group comes."""
        self.prepare(at_once=True)
        start(self.prepare())

    def take(self) -> list[Tensor]:
        """The next of the groups that were started."""
        return self._under_way.popleft().wait()


@dataclass(frozen=True)
class _Options:
    """What the calls of all groups share."""

    alibi_slopes: Tensor | None
    rng_state: Tensor | None
    softmax_scale: float
    softcap: float
    dropout_p: float
    heads: int  # of the queries of all ranks
    deterministic: bool
    mask: list[int]
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    varlen: bool

    def arguments(self, heads: slice, device: torch.device) -> dict:
        """The op's, for these query heads."""
        left, right, top_left = self.mask
        arguments = dict(
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            window_size=(left, right),
            causal_alignment="top-left" if top_left else "bottom-right",
            deterministic=self.deterministic,
        )
        if self.alibi_slopes is not None:
            arguments["alibi_slopes"] = self.alibi_slopes[..., heads]
        if self.rng_state is not None:
            dropout = Dropout(self.dropout_p, self.rng_state, self.heads, heads.start)
            arguments |= dropout.arguments()
        if self.varlen:
            for side, cu in (("q", self.cu_seqlens_q), ("k", self.cu_seqlens_k)):
                arguments[f"cu_seqlens_{side}"] = on_device(cu, torch.int32, device)
                longest = max((b - a for a, b in pairwise(cu)), default=0)
                arguments[f"max_seqlen_{side}"] = longest
        return arguments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, heads: slice):
        """out and LSE of these query heads, with all tokens."""
        if q.size(2) == 0:  # a rank that got none of the group
            return _empty_results(q, v)
        if self.varlen:
            q, k, v = (x.squeeze(0) for x in (q, k, v))
        sink = None if sink is None else sink[heads]
        arguments = self.arguments(heads, q.device)
        out, lse, *_ = fwd(fwd_arguments(q, k, v, learnable_sink=sink, **arguments))
        return (out.unsqueeze(0), lse.unsqueeze(0)) if self.varlen else (out, lse)

    def backward(self, inputs: list[Tensor], lse: Tensor, dlse: Tensor | None, heads: slice):
        """dq, dk and dv; inputs: q, out, dout, k, v."""
        q, out, dout, k, v = inputs
        if q.size(2) == 0:
            return q, k, v  # as empty
        if self.varlen:
            q, out, dout, k, v, lse = (x.squeeze(0) for x in (q, out, dout, k, v, lse))
            dlse = None if dlse is None else dlse.squeeze(0)
        arguments = self.arguments(heads, q.device)
        grads = bwd(dout, q, k, v, out, lse, dlse=dlse, **arguments)
        return [x.unsqueeze(0) for x in grads] if self.varlen else grads


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As many rows as q has, of none or all of its heads."""
    lse = q.new_empty(q.size(0), q.size(2), q.size(1), dtype=compute_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.size(-1)), lse


def _as_rows(lse: Tensor) -> Tensor:
    """(batch, heads, rows) as (batch, rows, heads, 1), and back by _as_lse."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _as_lse(x: Tensor) -> Tensor:
    return x.squeeze(-1).transpose(1, 2).contiguous()


@torch.library.custom_op("flash_attn::ulysses_fwd", mutates_args=())
def ulysses_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    mask: list[int],
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    varlen: bool,
    with_lse: bool,
    layout: str,
    group_name: str,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (batch, rows, heads, d) of this rank → out, softmax_lse of this rank's rows (empty
    unless with_lse), and the LSE of all rows of this rank's heads. mask: left, right, top_left.
    cu_seqlens: of the whole sequence, from 0 to its length."""
    heads = _Heads(group_name, layout, cu_seqlens_q, cu_seqlens_k, q, k)
    options = _Options(
        *(alibi_slopes, rng_state, softmax_scale, softcap, dropout_p, q.size(2)),
        *(deterministic, mask, cu_seqlens_q, cu_seqlens_k, varlen),
    )
    out, lse = _empty_results(q, v)
    arriving = _Arriving(heads, (q,), (k, v))
    arriving.start_first_two()
    leaving, lses, lse_leaving = None, [], None
    with forced_backend_again(backend):
        for share_q, _ in heads.groups:
            inputs = arriving.take()
            some, some_lse = options.forward(*inputs, learnable_sink, heads.mine(share_q))
            del inputs
            before, leaving = leaving, ToRows([some], [share_q], heads.group)
            lses.append(some_lse)
            if len(lses) == len(heads.groups):
                lse_of_heads = torch.cat(lses, dim=1)
                if with_lse:
                    rows = _as_rows(lse_of_heads)
                    lse_leaving = ToRows([rows], [heads.all[0]], heads.group)
            start(leaving.transfer, arriving.prepare(), lse_leaving and lse_leaving.transfer)
            _arrive(before, out)
    _arrive(leaving, out)
    _arrive(lse_leaving, _as_rows(lse))
    return out, lse if with_lse else lse.new_empty(0), lse_of_heads


def _arrive(leaving: ToRows | None, *targets: Tensor) -> None:
    if leaving is not None:
        leaving.store(targets)


@ulysses_fwd.register_fake
def _(q, k, v, alibi_slopes, learnable_sink, *rest):
    *_, cu_seqlens_q, _, _, with_lse, _, group_name, _ = rest
    group = _resolve_process_group(group_name)
    shares = head_shares(q.size(2), k.size(2), dist.get_world_size(group))
    (first, last), _ = shares[dist.get_rank(group)]
    out, lse = _empty_results(q, v)
    of_heads = lse.new_empty(q.size(0), last - first, cu_seqlens_q[-1])
    return out, lse if with_lse else lse.new_empty(0), of_heads


@torch.library.custom_op("flash_attn::ulysses_bwd", mutates_args=())
def ulysses_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse_of_heads: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    mask: list[int],
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    varlen: bool,
    with_lse: bool,
    layout: str,
    group_name: str,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's rows, and of the sink what this rank's heads contribute (empty
    without a sink)."""
    heads = _Heads(group_name, layout, cu_seqlens_q, cu_seqlens_k, q, k)
    options = _Options(
        *(alibi_slopes, rng_state, softmax_scale, softcap, dropout_p, q.size(2)),
        *(deterministic, mask, cu_seqlens_q, cu_seqlens_k, varlen),
    )
    all_q, _ = heads.all
    first_head = heads.mine(all_q).start
    arriving = _Arriving(heads, (q, out, dout), (k, v))
    if dlse is not None:
        dlse_arriving = ToHeads([_as_rows(dlse)], [all_q], heads.group, at_once=True)
    arriving.start_first_two()
    if dlse is not None:
        (dlse,) = dlse_arriving.wait()
        dlse = _as_lse(dlse)
    dsink = q.new_empty(0) if learnable_sink is None else torch.zeros_like(learnable_sink)
    leaving = []
    with forced_backend_again(backend):
        for share_q, share_k in heads.groups:
            inputs = arriving.take()
            mine = heads.mine(share_q)
            local = slice(mine.start - first_head, mine.stop - first_head)
            lse = lse_of_heads[:, local]
            some_dlse = None if dlse is None else dlse[:, local]
            grads = options.backward(inputs, lse, some_dlse, mine)
            if learnable_sink is not None:
                _, some_out, some_dout, *_ = inputs
                sink = learnable_sink[mine]
                dsink[mine] = sink_grad(some_dout, some_out, lse, some_dlse, sink)
            del inputs
            if leaving:
                leaving[-1].wait()
            shares = [share_q, share_k, share_k]
            leaving.append(ToRows(grads, shares, heads.group, copies_own=True))
            del grads
            start(leaving[-1].transfer, arriving.prepare())
    # Key heads that several ranks have are added up in fp32.
    several = shared(heads.all[1].heads)
    wide = compute_dtype(q.dtype) if several else q.dtype
    grads = [x.new_empty(x.shape, dtype=x.dtype if x is q else wide) for x in (q, k, v)]
    for group in leaving:
        group.store(grads)
    dq, dk, dv = grads
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsink


@ulysses_bwd.register_fake
def _(dout, dlse, out, lse_of_heads, q, k, v, alibi_slopes, learnable_sink, *_):
    dsink = q.new_empty(0) if learnable_sink is None else torch.empty_like(learnable_sink)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _setup_context(ctx, inputs, output) -> None:
    tensors, ctx.rest = inputs[:6], inputs[6:]
    out, _, lse_of_heads = output
    ctx.save_for_backward(out, lse_of_heads, *tensors)
    ctx.mark_non_differentiable(lse_of_heads)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse, _):
    out, lse_of_heads, q, k, v, alibi_slopes, sink, rng_state = ctx.saved_tensors
    check_no_tangents(dout=dout, dlse=dlse)
    dout = torch.zeros_like(out) if dout is None else dout
    with_lse = ctx.rest[8]
    dq, dk, dv, dsink = ulysses_bwd(
        *(dout, dlse if with_lse else None, out, lse_of_heads, q, k, v, alibi_slopes, sink),
        *(rng_state, *ctx.rest),
    )
    return dq, dk, dv, None, None if sink is None else dsink, None, *[None] * len(ctx.rest)


ulysses_fwd.register_autograd(_backward, setup_context=_setup_context)
