"""Attention over disjoint sets of keys, put together again by the log-sum-exp of each.

LSE = log Σᵢ exp(LSEᵢ)          O = Σᵢ exp(LSEᵢ − LSE) Oᵢ
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn._errors import expect, explained


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    expect(len(outs) > 0, "outs", "at least one partial result", "none")
    expect(len(lses) == len(outs), "lses", f"{len(outs)} tensors as in outs", len(lses))
    first = outs[0]
    expect(first.dim() >= 3, "outs", "shape (…, seqlen, heads, d_v)", tuple(first.shape))
    rows = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for out, lse in zip(outs, lses, strict=True):
        same = out.shape == first.shape and out.dtype == first.dtype
        expect(
            same,
            "outs",
            f"{first.dtype} of shape {tuple(first.shape)} as the first",
            f"{out.dtype} of shape {tuple(out.shape)}",
        )
        expect(tuple(lse.shape) == rows, "lses", f"shape {rows}", tuple(lse.shape))


@explained(of_torch=True)
def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the result over each; differentiable.

        LSE = log Σᵢ exp(LSEᵢ)          O = Σᵢ exp(LSEᵢ − LSE) Oᵢ

    The formula is that of split-KV decoding and of ring attention (Liu et al. 2023). It is computed
    in fp32, in fp64 where a tensor is fp64, relative to the largest LSEᵢ, so that nothing
    overflows. A row whose LSEᵢ is -inf takes nothing from that Oᵢ, whatever it holds.

    Arguments:
        outs: one or more tensors (batch, seqlen, heads, d_v) or (total, heads, d_v) of one dtype:
            the output of the same queries over different keys.
        lses: as many tensors (batch, heads, seqlen) or (heads, total), natural logarithm: the
            softmax_lse that belongs to each (flash_attn_func with return_attn_probs returns it).

    A learnable sink enters once: give it to one of the calls only.

    Returns:
        out: shaped like each of outs, of their dtype. A row with nothing to attend to gives 0.
        softmax_lse: shaped like each of lses, fp32 or fp64; -inf for such a row.

    Raises:
        RuntimeError: no tensors, not as many lses as outs, or shapes or dtypes that do not fit.
    """
    _check_partials(outs, lses)
    wide = compute_dtype(torch.promote_types(outs[0].dtype, lses[0].dtype))
    scores = torch.stack([lse.to(wide) for lse in lses])
    highest = scores.detach().amax(0)
    highest = highest.masked_fill(highest.isneginf(), 0)
    weights = torch.exp(scores - highest)
    total = weights.sum(0)
    # Rows without keys take the other branch of both `where`s, whose gradient is 0 and not 0 / 0.
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, float("-inf"), highest + total.log())

    out = 0
    for part, weight in zip(outs, weights / total, strict=True):
        weight = weight.transpose(-1, -2).unsqueeze(-1)
        out = out + weight * torch.where(weight == 0, 0, part.to(wide))
    return out.to(outs[0].dtype), lse


class RunningMerge:
    """merge_attention of results that come one after the other, without gradient.

        wᵢ = 1 / (1 + exp(LSE − LSEᵢ))     O ← (1 − wᵢ) O + wᵢ Oᵢ     LSE ← log(exp LSE + exp LSEᵢ)

    The first results of rows are the state, as they came; without any it is that of a row without
    keys, and with a sink that of a row whose only key is the sink, which has no value. From there
    on a result is merged when the next one comes, the last one straight into the output: the sum of
    two results, as two ranks have, is rounded once and never lies there in fp32.
    """

    def __init__(self, out: Tensor, sink: Tensor | None) -> None:
        """out: (batch, rows, heads, d_v), takes the result in the end; sink: (heads) or None."""
        self._out, self._sink = out, sink
        self._wide = compute_dtype(out.dtype)
        self._first: list[tuple[slice, Tensor, Tensor]] = []
        self._state: tuple[Tensor, Tensor] | None = None
        self._waiting: tuple[slice, Tensor, Tensor] | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Takes out (batch, n, heads, d_v) and lse (batch, heads, n) of some rows, for itself."""
        first = self._state is None and self._waiting is None and self._sink is None
        if first and _are_behind(rows, self._first):
            self._first.append((rows, out, lse))
            return
        if self._waiting is not None:
            self._merge()
        self._waiting = rows, out, lse

    def _start(self, out: Tensor) -> None:
        """Writes the state before the result that waits to `out`, unless it lies somewhere."""
        if self._state is not None:
            return
        if len(self._first) == 1 and self._first[0][1].shape == out.shape:
            self._state = self._first[0][1:]
        else:
            batch, rows, heads, _ = out.shape
            lse = out.new_empty(batch, heads, rows, dtype=self._wide)
            missing = float("-inf") if self._sink is None else self._sink.to(self._wide)
            _assemble([(rows, part) for rows, part, _ in self._first], out, 0)
            _assemble([(rows, part.mT) for rows, _, part in self._first], lse.mT, missing)
            self._state = out, lse
        self._first = []

    def _weights(self, rows: slice, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Of the state's rows and of the part, 1 together; the state's LSE becomes that of both."""
        lse = self._state[1][..., rows]
        both = torch.logaddexp(lse, part_lse)
        # The difference alone, as exp(lse - both) has the rounding error of a large LSE.
        more = (part_lse - lse).masked_fill_(both.isneginf(), 0)
        lse.copy_(both)
        return _by_row(torch.sigmoid(-more)), _by_row(torch.sigmoid(more))

    def _merge(self) -> None:
        """The result that waits becomes a part of the state."""
        self._start(torch.empty_like(self._out, dtype=self._wide))
        out, lse = self._state
        self._state = out.to(self._wide), lse
        rows, part, part_lse = self._waiting
        kept, added = self._weights(rows, part_lse)
        self._state[0][:, rows].mul_(kept).addcmul_(added, part)
        self._waiting = None

    def result(self) -> tuple[Tensor, Tensor]:
        """out, softmax_lse."""
        self._start(self._out)
        out, lse = self._state
        if self._waiting is not None:
            rows, part, part_lse = self._waiting
            kept, added = self._weights(rows, part_lse)
            torch.addcmul(out[:, rows] * kept, added, part, out=self._out[:, rows])
            if out is not self._out:
                _copy_others(out, self._out, rows)
        elif out is not self._out:
            self._out.copy_(out)
        return self._out, lse


class RunningSum:
    """The sum of what calls contribute to a gradient (batch, rows, heads, d), in fp32, or fp64.

    The first contributions to rows are the sum so far, as they came. From there on one is added
    when the next one comes, or the sum is wanted; the last one straight into where it is stored.
    """

    def __init__(self, gradient_of: Tensor) -> None:
        # Not the tensor itself, whose memory may be wanted before the sum's.
        self._shape, self._device = gradient_of.shape, gradient_of.device
        self._dtype = compute_dtype(gradient_of.dtype)
        self._first: list[tuple[slice, Tensor]] = []
        self._sum: Tensor | None = None
        self._waiting: tuple[slice, Tensor] | None = None

    def add(self, rows: slice, part: Tensor) -> None:
        """Takes part: (batch, n, heads, d) of some rows, for itself."""
        first = self._sum is None and self._waiting is None
        if first and _are_behind(rows, self._first):
            self._first.append((rows, part))
            return
        if self._waiting is not None:
            self.value()
        self._waiting = rows, part

    def _start(self) -> Tensor:
        """The sum before the contribution that waits."""
        if self._sum is None:
            if len(self._first) == 1 and self._first[0][1].shape == self._shape:
                self._sum = self._first[0][1]
            else:
                empty = torch.empty(self._shape, dtype=self._dtype, device=self._device)
                self._sum = _assemble(self._first, empty, 0)
            self._first = []
        return self._sum

    def is_empty(self) -> bool:
        """Whether nothing has come."""
        return self._sum is None and self._waiting is None and not self._first

    def value(self) -> Tensor:
        """The sum so far, contiguous."""
        self._sum = self._start().to(self._dtype).contiguous()
        if self._waiting is not None:
            rows, part = self._waiting
            self._sum[:, rows] += part
            self._waiting = None
        return self._sum

    def store(self, target: Tensor) -> None:
        """Writes the sum to a tensor of its shape, and gives it up."""
        if self._waiting is not None:
            rows, part = self._waiting
            before = self._start()
            torch.add(before[:, rows], part, out=target[:, rows])
            _copy_others(before, target, rows)
        elif self._sum is None:
            _assemble(self._first, target, 0)
        else:
            target.copy_(self._sum)
        self._first, self._sum, self._waiting = [], None, None


def _are_behind(rows: slice, parts: list) -> bool:
    """Whether the rows lie behind those of all parts, which follow one another."""
    return not parts or parts[-1][0].stop <= rows.start


def _assemble(parts: list[tuple[slice, Tensor]], target: Tensor, missing: float | Tensor) -> Tensor:
    """Writes parts that follow one another to `target` (batch, rows, …), and `missing` to rows of
    none."""
    end = 0
    for rows, part in parts:
        target[:, end : rows.start] = missing
        target[:, rows] = part
        end = rows.stop
    target[:, end:] = missing
    return target


def _copy_others(source: Tensor, target: Tensor, rows: slice) -> None:
    """Copies all rows but those."""
    for others in (slice(0, rows.start), slice(rows.stop, None)):
        target[:, others] = source[:, others]


def _by_row(x: Tensor) -> Tensor:
    """(batch, heads, rows) as a factor of (batch, rows, heads, d)."""
    return x.transpose(1, 2).unsqueeze(-1)
