"""Attention over disjoint sets of keys, put together again by the log-sum-exp of each.

LSE = log Σᵢ exp(LSEᵢ)          O = Σᵢ exp(LSEᵢ − LSE) Oᵢ
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn._call import expect


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
    """merge_attention of results that come one after the other, in place and without gradient.

        m'  = max(m, LSEᵢ)
        l   ← exp(m − m') l   + exp(LSEᵢ − m')
        acc ← exp(m − m') acc + exp(LSEᵢ − m') Oᵢ             LSE = m + log l,  O = acc / l

    The state starts as that of a row without keys, or with the sink as its only key, which has no
    value. Where the first result covers all rows, it is the state.
    """

    def __init__(self, out: Tensor, sink: Tensor | None) -> None:
        """out: (batch, rows, heads, d_v), takes the result in the end; sink: (heads) or None."""
        self._out, self._sink = out, sink
        self._wide = compute_dtype(out.dtype)
        self._acc: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Takes out (batch, n, heads, d_v) and lse (batch, heads, n) of some rows."""
        if self._acc is None:
            if self._sink is None and out.shape == self._out.shape:
                self._acc = out.to(self._wide)
                self._m, self._l = lse, lse.ne(float("-inf")).to(lse.dtype)
                return
            self._start()
        m, l, acc = self._m[..., rows], self._l[..., rows], self._acc[:, rows]
        new = torch.maximum(m, lse)
        finite = new.masked_fill(new.isneginf(), 0)
        kept, added = torch.exp(m - finite), torch.exp(lse - finite)
        l.mul_(kept).add_(added)
        acc.mul_(_by_row(kept)).addcmul_(_by_row(added), out)
        m.copy_(new)

    def _start(self) -> None:
        batch, rows, heads, _ = self._out.shape
        self._acc = torch.zeros_like(self._out, dtype=self._wide)
        self._m = self._acc.new_full((batch, heads, rows), float("-inf"))
        self._l = torch.zeros_like(self._m)
        if self._sink is not None:
            self._m[:] = self._sink.to(self._wide)[:, None]
            self._l.fill_(1)

    def result(self) -> tuple[Tensor, Tensor]:
        """out, softmax_lse."""
        if self._acc is None:
            self._start()
        lse = self._m + self._l.log()
        total = self._l.masked_fill(self._l == 0, 1)
        return torch.div(self._acc, _by_row(total), out=self._out), lse


class RunningSum:
    """The sum of what calls contribute to a gradient (batch, rows, heads, d), in fp32, or fp64.

    A first contribution to all rows is the sum so far: it saves filling with zeros, and a reading.
    """

    def __init__(self, gradient_of: Tensor) -> None:
        # Not the tensor itself, whose memory may be wanted before the sum's.
        self._shape, self._device = gradient_of.shape, gradient_of.device
        self._dtype = compute_dtype(gradient_of.dtype)
        self._sum: Tensor | None = None

    def add(self, rows: slice, part: Tensor) -> None:
        """part: (batch, n, heads, d) of some rows. It may become the sum's own."""
        if self._sum is None and part.shape == self._shape:
            self._sum = part.to(self._dtype).contiguous()
        else:
            self.value()[:, rows] += part

    def value(self) -> Tensor:
        """The sum so far, contiguous."""
        if self._sum is None:
            self._sum = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._sum


def _by_row(x: Tensor) -> Tensor:
    """(batch, heads, rows) as a factor of (batch, rows, heads, d)."""
    return x.transpose(1, 2).unsqueeze(-1)
