"""Runs a plan's calls: forward into a running merge, backward from the LSE of all keys.

Tensors are (batch, rows, heads, d) here, and LSE (batch, heads, rows); the tokens of varlen ones
are the rows of a batch of one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from flash_attn._call import bwd, bwd_arguments, fwd, fwd_arguments
from flash_attn._library import C
from flash_attn.backends import use_backend
from flash_attn.context_parallel.dropout import Dropout, Padding, padding_of
from flash_attn.context_parallel.merge import RunningMerge, RunningSum, compute_dtype
from flash_attn.context_parallel.plan import Call, Rectangle, share_rows


def forced_backend_again(backend: str | None) -> AbstractContextManager:
    """The use_backend block around the whole call again: the backward may run in another thread."""
    return nullcontext() if backend is None else use_backend(backend)


@dataclass(frozen=True)
class Options:
    """What all calls of one attention share."""

    softmax_scale: float
    softcap: float
    alibi_slopes: Tensor | None  # fp32 (heads_q), or (sequences, heads_q)
    deterministic: bool
    varlen: bool  # the rows are those of many sequences, which alibi_slopes may tell apart
    dropout: Dropout | None

    def of_heads(self, heads: slice) -> "Options":
        slopes, dropout = self.alibi_slopes, self.dropout
        return replace(
            self,
            alibi_slopes=None if slopes is None else slopes[..., heads],
            dropout=None if dropout is None else dropout.of_heads(heads),
        )


@dataclass(frozen=True)
class Queries:
    """What the backward needs of a rank's rows. The LSE is that of all keys, as is out."""

    q: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor | None

    def of_heads(self, heads: slice) -> "Queries":
        rows = (x[:, :, heads] for x in (self.q, self.out, self.dout))
        dlse = None if self.dlse is None else self.dlse[:, heads]
        return Queries(*rows, self.lse[:, heads], dlse)


class SumOfQueries(RunningSum):
    """dq of a rank's rows, to which the planned calls contribute.

    Where the calls of the same rows are dense ones of a GPU's kernels, these add to sums of their
    own from call to call, and compute δ = rowsum(dO ∘ O) - dLSE once. A call that cannot adds its
    part here.
    """

    def __init__(self, queries: Queries, planned: Sequence[Call]) -> None:
        super().__init__(queries.q)
        self._rows = slice(0, queries.q.size(1))
        # Whether other calls contribute to the same rows, so that parts have to come in fp32.
        self.has_parts = share_rows(planned)
        self._of_kernels = None
        alike = all(len(call) == 1 and call[0].q[0] % C.PART_ROW_MULTIPLE == 0 for call in planned)
        if self.has_parts and alike and queries.q.is_cuda:
            self._of_kernels = C.BwdParts(queries.dout, queries.dlse, queries.out, queries.lse)

    def add_keys(self, first_row: int, arguments: tuple) -> tuple[Tensor, Tensor] | None:
        """dk and dv of the op `bwd`, whose dq is added here; None: nothing is done.

        first_row: of the call's queries, among the rank's. arguments: bwd_arguments().
        """
        return self._of_kernels and self._of_kernels.add(first_row, *arguments)

    def store(self, target: Tensor) -> None:
        if self._of_kernels is None or not self._of_kernels.has_sums:
            return super().store(target)
        if self.is_empty():
            self._of_kernels.store(target)
        else:
            part = torch.empty_like(target, dtype=compute_dtype(target.dtype))
            self._of_kernels.store(part)
            self.add(self._rows, part)
            super().store(target)
        self._of_kernels = None


def _widened(x: Tensor) -> Tensor:
    """In the dtype that partial results are added in, where that is what is computed in anyway.

    On a CPU a result over some of the keys then is not rounded to 16 bits before it is merged. The
    kernels of GPUs read and write 16 bits.
    """
    return x.to(compute_dtype(x.dtype)) if x.is_cpu else x


def run_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, options: Options, merge: RunningMerge
) -> None:
    """Adds what `call` gives for some of the rows and keys to `merge`."""
    rows, keys = _extent(call)
    q, k, v = (_widened(x) for x in (q[:, rows], k[:, keys], v[:, keys]))
    arguments, lse_shift, padding = _arguments(call, q, options)
    if padding is not None:
        q, k, v = padding.pad_rows(q), padding.pad_keys(k), padding.pad_keys(v)
    if len(call) > 1:
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    out, lse, *_ = fwd(fwd_arguments(q, k, v, **arguments))
    if len(call) > 1:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    if padding is not None:
        own = padding.own_rows(rows.stop - rows.start)
        out, lse = out[:, own], lse[..., own]
    merge.add(rows, out, lse if lse_shift is None else lse - lse_shift)


def run_backward(
    call: Call,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    options: Options,
    grads: tuple[SumOfQueries, RunningSum, RunningSum],
) -> None:
    """Adds what `call` contributes to grads: dq, dk and dv."""
    dq, *of_keys = grads
    rows, keys = _extent(call)
    inputs = [_widened(x[:, rows]) for x in (queries.dout, queries.q, queries.out)]
    inputs += [_widened(x[:, keys]) for x in (k, v)]
    lse = queries.lse[..., rows]
    dlse = None if queries.dlse is None else queries.dlse[..., rows]
    arguments, lse_shift, padding = _arguments(call, inputs[1], options)
    if lse_shift is not None:
        lse = lse + lse_shift
    if padding is not None:
        inputs = [padding.pad_rows(x) for x in inputs[:3]] + [
            padding.pad_keys(x) for x in inputs[3:]
        ]
        lse, dlse = padding.pad_lse(lse), None if dlse is None else padding.pad_dlse(dlse)
    if len(call) > 1:
        inputs = [x.squeeze(0) for x in inputs]
        lse, dlse = lse.squeeze(0), None if dlse is None else dlse.squeeze(0)
    dout, q, out, k, v = inputs
    arguments.update(wide_key_gradients=True, wide_query_gradient=dq.has_parts)
    tensors = (dout, q, k, v, out, lse)
    if padding is None and len(call) == 1:
        added = dq.add_keys(rows.start, bwd_arguments(*tensors, dlse=dlse, **arguments))
        if added is not None:
            for grad, part in zip(of_keys, added, strict=True):
                grad.add(keys, part)
            return
    parts = bwd(*tensors, dlse=dlse, **arguments)
    if padding is not None:
        own_rows = padding.own_rows(rows.stop - rows.start)
        own_keys = padding.own_keys(keys.stop - keys.start)
        owns = (own_rows, own_keys, own_keys)
        parts = [part[:, own] for part, own in zip(parts, owns, strict=True)]
    for grad, part, place in zip(grads, parts, (rows, keys, keys), strict=True):
        grad.add(place, part)


def sink_grad(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor) -> Tensor:
    """-Σᵢ exp(sink - LSEᵢ) δᵢ: the sink is a key whose value is 0 (csrc/aten/bwd.cpp)."""
    wide = lse.dtype
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    p_sink = torch.exp(sink.to(wide)[:, None] - lse)
    return -(p_sink * delta).sum((0, 2)).to(sink.dtype)


def _extent(call: Call) -> tuple[slice, slice]:
    """The rows and the keys from the first to the last that the call touches."""
    first, last = call[0], call[-1]
    return slice(first.q[0], last.q[1]), slice(first.k[0], last.k[1])


def _arguments(
    call: Call, q: Tensor, options: Options
) -> tuple[dict, Tensor | None, Padding | None]:
    """The op's options; what its LSE has too much, a tensor that broadcasts to it, or None; and
    with dropout, what has to be put around its rows and keys."""
    arguments, lse_shift = _arguments_without_dropout(call, q, options)
    if options.dropout is None:
        return arguments, lse_shift, None
    (rectangle,) = call
    padding = padding_of(rectangle)
    place = (rectangle.query - padding.rows[0], rectangle.key - padding.keys[0])
    arguments |= options.dropout.arguments(rectangle.document, *place)
    arguments |= padding.arguments(arguments.get("attn_bias"), rectangle.keys, q.device)
    return arguments, lse_shift, padding


def _arguments_without_dropout(
    call: Call, q: Tensor, options: Options
) -> tuple[dict, Tensor | None]:
    first = call[0]
    arguments = dict(
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        window_size=(first.left, first.right),
        causal_alignment="top-left" if first.top_left else "bottom-right",
        deterministic=options.deterministic,
    )
    if len(call) > 1:
        lengths = _lengths(call, q.device)
        arguments |= dict(
            cu_seqlens_q=lengths.cu_seqlens_q,
            cu_seqlens_k=lengths.cu_seqlens_k,
            max_seqlen_q=lengths.max_seqlen_q,
            max_seqlen_k=lengths.max_seqlen_k,
        )
    slopes = _slopes(call, options.alibi_slopes, options.varlen)
    if slopes is None:
        return arguments, None
    if first.side == 0:
        return arguments | dict(alibi_slopes=slopes), None
    bias, lse_shift = _alibi_beside(first, slopes, compute_dtype(q.dtype))
    return arguments | dict(attn_bias=bias), lse_shift


def _slopes(call: Call, slopes: Tensor | None, varlen: bool) -> Tensor | None:
    """Those of the sequences of the call."""
    if slopes is None or slopes.dim() == 1 or not varlen:
        return slopes
    if len(call) == 1:
        return slopes[call[0].document]
    *_, documents = _sequences(call)
    return slopes[on_device(documents, torch.int64, slopes.device)]


def _alibi_beside(r: Rectangle, slopes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ALiBi of keys that all lie on one side of the diagonals, counted from the nearest pair.

    -slope · side · (j - i - distance) is a bias for each key plus a number for each row, which the
    softmax does not notice: the LSE alone has it too little, or too much.

    Returns the bias, that broadcasts to (batch, heads, rows, keys), and what has to be taken from
    the LSE, that broadcasts to (batch, heads, rows).
    """
    slope = slopes.to(dtype).unsqueeze(-1)
    nearest = 0 if r.side > 0 else r.keys - 1
    key = torch.arange(r.keys, dtype=dtype, device=slopes.device)
    row = torch.arange(r.rows, dtype=dtype, device=slopes.device)
    bias = -slope * (key - nearest).mul_(r.side)
    shift = slope * (row + (r.distance - nearest)).mul_(-r.side)
    bias, shift = (x.view(-1, *x.shape[-2:]) for x in (bias, shift))
    return bias.unsqueeze(2), shift


@dataclass(frozen=True)
class _Lengths:
    """The varlen arguments of a call; stretches that no rectangle covers are sequences, too."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _lengths(call: Call, device: torch.device) -> _Lengths:
    cu_q, cu_k, _ = _sequences(call)
    both = on_device((*cu_q, *cu_k), torch.int32, device)
    return _Lengths(
        both[: len(cu_q)],
        both[len(cu_q) :],
        max(b - a for a, b in pairwise(cu_q)),
        max(b - a for a, b in pairwise(cu_k)),
    )


@lru_cache(maxsize=256)
def _sequences(call: Call) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Where the sequences of a varlen call start, in q and in k, and the document of each."""
    (q0, _), (k0, _) = call[0].q, call[0].k
    ends, documents = [(0, 0)], []

    def sequence(end_q: int, end_k: int, document: int) -> None:
        ends.append((end_q, end_k))
        documents.append(document)

    for r in call:
        # Rows without keys and keys without rows: nobody sees anything there.
        if r.q[0] - q0 > ends[-1][0]:
            sequence(r.q[0] - q0, ends[-1][1], 0)
        if r.k[0] - k0 > ends[-1][1]:
            sequence(ends[-1][0], r.k[0] - k0, 0)
        sequence(r.q[1] - q0, r.k[1] - k0, r.document)
    cu_q, cu_k = zip(*ends, strict=True)
    return cu_q, cu_k, tuple(documents)


def on_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers there, without waiting for the device as torch.tensor(…, device=…) does.

    They are not kept from call to call: another stream would read them before they have come.
    """
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
