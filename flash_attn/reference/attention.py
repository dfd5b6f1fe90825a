"""Naive attention in float64: the oracle that the tests hold every backend against.

    S = softmax_scale · Q Kᵀ → softcap → + bias, ALiBi → mask → softmax (with sink) → dropout → P V

The whole matrix S is built, sequence by sequence, from the inputs as stored (already rounded to
their dtype). What extreme scores mean is said in csrc/core/score_range.h.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn.reference.arguments import (
    Options,
    check_call,
    check_gradients,
    check_longest,
    checked,
)
from flash_attn.reference.philox import keep_probability, philox_keep_mask

# csrc/core/score_range.h
_MAX_SCORE = 2.0**26
_SLOPES = -64.0, 1024.0
_MAX_SINK = 2.358e38
_MAX_LSE, _MAX_LSE_FP64 = 2.0**22, 2.0**51
_SOFTCAPS = 1e-20, 1e30


def _max_lse(q: Tensor) -> float:
    return _MAX_LSE_FP64 if q.dtype == torch.float64 else _MAX_LSE


@dataclass
class Gradients:
    """Float64, shaped like their inputs; None where there is no such input, or none of it."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None


@dataclass
class Conditions:
    """For each element of a result, how much was added up: the unit of a fair rounding bound."""

    out: Tensor  # B_O, like out
    dv: Tensor  # B_dV, like v
    dq: Tensor  # B_dQ, like q
    dk: Tensor  # B_dK, like k
    dbias: Tensor | None  # B_dbias, like attn_bias
    dv_of_subnormals: Tensor  # F_dV, like v: what fp16's subnormals cost, by chance
    dbias_per_p: Tensor | None  # F_dbias, like attn_bias: what an underflow of P costs
    dk_of_subnormals: Tensor  # F_dK, like k
    dk_of_flushed: Tensor  # G_dK, like k: what P below the smallest number of fp32 add
    dv_of_flushed: Tensor  # G_dV, like v
    dsink: Tensor | None
    largest_score: float  # max |S| of any score, before and after softcap and bias: the LSE's unit


@dataclass
class _Sequence:
    """One sequence of the batch, heads first, in float64."""

    q: Tensor  # (heads_q, len_q, d)
    k: Tensor  # (heads_q, len_k, d): heads of K and V repeated for GQA
    v: Tensor  # (heads_q, len_k, d_v)
    alibi_slopes: Tensor | None  # (heads_q)
    attn_bias: Tensor | None  # broadcasts to (heads_q, len_q, len_k)
    kept: Tensor | None  # bool (heads_q, len_q, len_k): dropout


@dataclass
class _Attended:
    """What one sequence gives. P is normalised and undropped; weights is P after dropout."""

    out: Tensor  # (heads_q, len_q, d_v)
    lse: Tensor  # (heads_q, len_q)
    P: Tensor  # (heads_q, len_q, len_k)
    weights: Tensor  # (heads_q, len_q, len_k)
    softcap_slope: Tensor | float  # d softcap(S) / dS
    largest_score: float
    max_logits: Tensor  # (heads_q)


def _window(causal, window_size) -> tuple[int, int]:
    left, right = (-1 if side is None else int(side) for side in window_size)
    return left, 0 if causal else right


def _drop(x: Tensor, kept: Tensor, dropout_p: float) -> Tensor:
    """x, scaled, where it is kept, else 0."""
    keep = keep_probability(dropout_p)
    return x * kept / keep if keep > 0 else torch.zeros_like(x)


def _tanh(x: Tensor) -> Tensor:
    """tanh, whose gradient keeps its digits where 1 - tanh² has none."""
    beyond = x.sign() * (1 - 2 * torch.sigmoid(-2 * x.abs()))
    return torch.where(x.abs() < 1, torch.tanh(x), beyond)


def _limited(sink: Tensor) -> Tensor:
    return sink.masked_fill(sink < -_MAX_SINK, -torch.inf).clamp(max=_MAX_SINK)


def _attend(
    x: _Sequence, scale, dropout_p, window, top_left, softcap, sink: Tensor | None, max_lse: float
) -> _Attended:
    len_q, len_k = x.q.size(1), x.k.size(1)
    i = torch.arange(len_q, device=x.q.device)[:, None]
    j = torch.arange(len_k, device=x.q.device)
    diagonal = i if top_left else i + len_k - len_q
    left, right = window
    seen = torch.ones(x.q.size(0), len_q, len_k, dtype=torch.bool, device=x.q.device)
    if left >= 0:
        seen = seen & (j >= diagonal - left)
    if right >= 0:
        seen = seen & (j <= diagonal + right)
    if x.attn_bias is not None:
        is_bool = x.attn_bias.dtype == torch.bool
        seen = seen & (x.attn_bias if is_bool else ~(x.attn_bias < -_MAX_SCORE))

    # 0 · NaN is NaN: what no query sees must not take part even with weight 0.
    unseen_key = ~seen.any(1)[..., None]
    k, v = x.k.masked_fill(unseen_key, 0.0), x.v.masked_fill(unseen_key, 0.0)

    S = scale * x.q @ k.mT
    uncapped, softcap_slope = S, 1.0
    if softcap > 0:
        softcap = min(max(softcap, _SOFTCAPS[0]), _SOFTCAPS[1])
        share = S / softcap
        S, softcap_slope = softcap * _tanh(share), torch.cosh(share).square().reciprocal()
    if x.attn_bias is not None and x.attn_bias.dtype != torch.bool:
        S = S + x.attn_bias.clamp(max=_MAX_SCORE)
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes.clamp(*_SLOPES)
        S = S - slopes[:, None, None] * (diagonal - j).abs()
    S = S.masked_fill(~seen, -torch.inf)

    # softmax, where the row sum may be empty (out 0, LSE -inf) and a sink may add to it
    bounded = softcap > 0 or any(t is not None for t in (x.attn_bias, x.alibi_slopes, x.kept))
    least = -_MAX_SCORE if bounded else -torch.inf
    m = S.detach().new_full((x.q.size(0), len_q, 1), least)
    if len_k > 0:
        m = S.detach().amax(-1, keepdim=True).clamp(min=least)
    if sink is not None:
        sink = _limited(sink)
        m = torch.maximum(m, sink.detach()[:, None, None])
    m = m.masked_fill(m == -torch.inf, 0.0)
    e = torch.exp(S - m)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink[:, None, None] - m)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    P = e / total
    lse = (m + torch.log(total)).masked_fill(empty, -torch.inf).squeeze(-1)

    weights = P if x.kept is None else _drop(P, x.kept, dropout_p)
    largest = max(
        (z.abs().nan_to_num(posinf=0.0).max().item() for z in (uncapped, S) if len_q * len_k),
        default=0.0,
    )
    out = weights @ v
    has_gradient = lse.abs() <= max_lse
    out = torch.where(has_gradient[..., None], out, out.detach())
    lse = torch.where(has_gradient, lse, lse.detach())
    visible = S.ge(least) & ~S.isneginf()
    logits = uncapped.detach().masked_fill(~visible, -torch.inf).flatten(1)
    max_logits = torch.cat([logits, logits.new_full((len(logits), 1), -torch.inf)], 1).amax(1)
    return _Attended(out, lse, P, weights, softcap_slope, largest, max_logits)


@dataclass
class _Rows:
    """Where a sequence's rows lie in the flat (total, heads, d) tensors."""

    index: int
    q: slice
    k: slice


def _rows(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k) -> list[_Rows]:
    """The rows of every sequence, clamped to the tensors as the kernels clamp them."""

    def bounds(x, cu_seqlens, seqused):
        if cu_seqlens is None:
            starts = [b * x.size(1) for b in range(x.size(0) + 1)]
            total = starts[-1]
        else:
            starts, total = cu_seqlens.tolist(), x.size(0)
        for b in range(len(starts) - 1):
            start = min(max(starts[b], 0), total)
            end = min(max(starts[b + 1], start), total)
            if seqused is not None:
                end = min(end, start + max(int(seqused[b]), 0))
            yield start, end

    rows = []
    sides = bounds(q, cu_seqlens_q, seqused_q), bounds(k, cu_seqlens_k, seqused_k)
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(*sides, strict=True)):
        if leftpad_k is not None:
            k0 = min(k0 + max(int(leftpad_k[b]), 0), k1)
        rows.append(_Rows(b, slice(q0, q1), slice(k0, k1)))
    return rows


def _crop_bias(attn_bias, index, len_q, len_k):
    """Of a bias that broadcasts to (batch, heads, queries, keys), the part of one sequence."""
    if attn_bias is None:
        return None
    bias = attn_bias.reshape((1,) * (4 - attn_bias.dim()) + attn_bias.shape)
    bias = bias[index if bias.size(0) > 1 else 0]
    bias = bias[:, :len_q] if bias.size(1) > 1 else bias
    return bias[..., :len_k] if bias.size(2) > 1 else bias


class _Call:
    """An attention call in float64, taken apart into sequences."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
        o = options
        self.q, self.k, self.v = q.double(), k.double(), v.double()
        self.bias = o.attn_bias
        if o.attn_bias is not None and o.attn_bias.dtype != torch.bool:
            self.bias = o.attn_bias.double()
        self.sink = None if o.learnable_sink is None else o.learnable_sink.double()
        self.slopes = None if o.alibi_slopes is None else o.alibi_slopes.double()
        self.dropout_p, self.rng_state = o.dropout_p, o.rng_state
        self.scale = q.size(-1) ** -0.5 if o.softmax_scale is None else o.softmax_scale
        self.window = _window(o.causal, o.window_size)
        self.top_left = o.causal_alignment == "top-left"
        self.softcap = o.softcap
        self.max_lse = _max_lse(q) if o.max_lse is None else o.max_lse
        self.is_varlen = o.is_varlen
        used = o.seqused_q, o.seqused_k, o.leftpad_k
        self.rows = _rows(q, k, o.cu_seqlens_q, o.cu_seqlens_k, *used)
        self.flat_q = self.q if self.is_varlen else self.q.flatten(0, 1)
        self.flat_k = self.k if self.is_varlen else self.k.flatten(0, 1)
        self.flat_v = self.v if self.is_varlen else self.v.flatten(0, 1)
        self.heads_q, self.group = q.size(-2), q.size(-2) // k.size(-2)
        longest_q = max((r.q.stop - r.q.start for r in self.rows), default=0)
        longest_k = max((r.k.stop - r.k.start for r in self.rows), default=0)
        check_longest(o, longest_q, longest_k)
        self.max_seqlen_q = o.max_seqlen_q or (longest_q if self.is_varlen else q.size(1))
        self.max_seqlen_k = o.max_seqlen_k or (longest_k if self.is_varlen else k.size(1))

    def sequence(self, rows: _Rows) -> _Sequence:
        q = self.flat_q[rows.q].transpose(0, 1)
        k, v = (
            x[rows.k].transpose(0, 1).repeat_interleave(self.group, 0)
            for x in (self.flat_k, self.flat_v)
        )
        slopes, kept = self.slopes, None
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[rows.index]
        if self.dropout_p > 0:
            shape = range(rows.index, rows.index + 1), self.heads_q, q.size(1), k.size(1)
            kept = philox_keep_mask(self.rng_state, self.dropout_p, *shape)[0].to(q.device)
        bias = _crop_bias(self.bias, rows.index, q.size(1), k.size(1))
        return _Sequence(q, k, v, slopes, bias, kept)

    def attend(self, x: _Sequence) -> _Attended:
        terms = self.window, self.top_left, self.softcap, self.sink
        return _attend(x, self.scale, self.dropout_p, *terms, self.max_lse)

    def like_q(self, flat: Tensor) -> Tensor:
        """(total_q, …) back to (batch, seqlen_q, …), unless the call is varlen."""
        return flat if self.is_varlen else flat.unflatten(0, self.q.shape[:2])

    def like_k(self, flat: Tensor) -> Tensor:
        return flat if self.is_varlen else flat.unflatten(0, self.k.shape[:2])

    def lse_rows(self, lse: Tensor, rows: _Rows) -> Tensor:
        """One sequence's rows (heads, len_q) of an LSE laid out like the call's."""
        if self.is_varlen:
            return lse[:, rows.q]
        return lse[rows.index, :, : rows.q.stop - rows.q.start]


@checked(check_call)
def attention_ref(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Naive attention in float64; autograd differentiates it.

    Arguments:
        q, k, v: (batch, seqlen, heads, d), or (total, heads, d) with cu_seqlens; a float dtype of
            at least 16 bits.
        options: those of flash_attn_func and flash_attn_varlen_func by name, and rng_state, (seed,
            offset), which dropout_p > 0 needs.

    Returns:
        out: like q with v's head dim; 0 for a row that attends to nothing or is in no sequence.
        lse: (batch, heads_q, seqlen_q) or (heads_q, total_q); -inf for such a row (for one that
            attends to nothing but a sink: the sink).
        P: (batch, heads_q, max_seqlen_q, max_seqlen_k), the normalised probabilities before
            dropout, negative where dropped: what S_dmask must be.
    """
    call = _Call(q, k, v, Options(**options))
    out = call.flat_q.new_zeros(*call.flat_q.shape[:-1], v.size(-1))
    lse = out.new_full((call.heads_q, out.size(0)), -torch.inf)
    P = out.new_zeros(len(call.rows), call.heads_q, call.max_seqlen_q, call.max_seqlen_k)
    for rows in call.rows:
        x = call.sequence(rows)
        y = call.attend(x)
        out[rows.q] = y.out.transpose(0, 1)
        lse[:, rows.q] = y.lse
        signed = y.P if x.kept is None else torch.where(x.kept, y.P, -y.P)
        P[rows.index, :, : signed.size(1), : signed.size(2)] = signed.detach()
    if not call.is_varlen:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return call.like_q(out), lse, P


@checked(check_call)
def max_logits_ref(q: Tensor, k: Tensor, **options) -> Tensor:
    """(heads_q) the largest softmax_scale · q·k that any query of the head sees; -inf if none is.

    Arguments: as attention_ref, without v.
    """
    call = _Call(q, k, k, Options(**options))
    of_sequences = [call.attend(call.sequence(rows)).max_logits for rows in call.rows]
    return torch.stack([call.flat_q.new_full((call.heads_q,), -torch.inf), *of_sequences]).amax(0)


@checked(check_call, check_gradients)
@torch.enable_grad()
def attention_ref_grads(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None = None, **options
) -> Gradients:
    """The gradients of attention_ref in q, k, v, attn_bias and learnable_sink, by autograd.

    Arguments: as attention_ref, and what flows into its results: dout like out, dlse like lse.
    """
    inputs = {"q": q, "k": k, "v": v}
    for name in ("attn_bias", "learnable_sink"):
        if options.get(name) is not None and options[name].is_floating_point():
            inputs[name] = options[name]
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    given = {"max_lse": _max_lse(q)} | {n: x for n, x in options.items() if x is not None}
    out, lse, _ = attention_ref(**(given | leaves))
    outputs, incoming = [out], [dout.double()]
    if dlse is not None:
        outputs, incoming = [out, lse], [dout.double(), dlse.double()]
    if out.requires_grad:
        found = torch.autograd.grad(
            outputs, list(leaves.values()), incoming, materialize_grads=True
        )
    else:  # a batch of nothing
        found = [torch.zeros_like(leaf) for leaf in leaves.values()]
    by_name = dict(zip(leaves, found, strict=True))
    return Gradients(
        by_name["q"],
        by_name["k"],
        by_name["v"],
        by_name.get("attn_bias"),
        by_name.get("learnable_sink"),
    )


@checked(check_call, check_gradients)
@torch.no_grad()
def condition_tensors(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None = None, **options
) -> Conditions:
    """For each result, the sum of the magnitudes of its terms. With D = rowsum(dO ∘ O), L = dlse:

        B_O = P |V|      B_dV = Pᵀ |dO|      (P after dropout)
        F_dV = sqrt(Σ (min(P, 2⁻²⁵) |dO|)²) over P < 2⁻¹⁴
        E = P ∘ (|dP - D + L| + rowsum|dO ∘ O| + H / 64)
        B_dbias = Σ E over the dimensions that the bias broadcasts in
        F_dbias = Σ |dP - D + L| over the same
        E' = softmax_scale · E · softcap'
        B_dQ = E' |K|    B_dK = E'ᵀ |Q|
        dX = P ∘ |dP - D + L| · softcap' · (keep probability)
        F_dK = softmax_scale / (keep probability) · sqrt(Σ (min(dX, 2⁻²⁵) |Q|)²) over dX < 2⁻¹⁴
        G_dV = Pᵀ |dO|   G_dK = (softmax_scale · P ∘ |dP - D + L| · softcap')ᵀ |Q|   over P < 2⁻¹²⁶

    rowsum|dO ∘ O| is there because a flash backward takes D from the O that was stored, rounded. Of
    a bias that broadcasts the keys Σ dS is L + P_sink (D - L), so B_dbias has P_sink rowsum|dO ∘ O|
    besides, as the gradient of the sink has.
    H = |dO| |V|ᵀ where results have fp32 or more, else 0: dP is a sum that may cancel, and beside a
    sink, where O is small too, nothing hides its roundings then. The limits of such results are
    hundreds of units, of which the 64th leaves a few for each term.
    A P below the smallest number of fp32 counts as 0, and dbias = P ∘ (dP - D + L) loses that much
    of F_dbias. The sums of out and dQ hide it; dK and dV do not, of a key that all queries see so
    little of, and lose up to G. A P below 2⁻¹⁴ is rounded to a multiple of 2⁻²⁴ in fp16, which is
    more of it than of others: such a key has no larger terms in dV that hide it. So is a dX below
    2⁻¹⁴ of a key whose scores are all near the softcap, where softcap' is next to 0, or that no
    query sees more of.

    Arguments: as attention_ref_grads.
    """
    call = _Call(q.detach(), k.detach(), v.detach(), Options(**options))
    dout = dout.double() if call.is_varlen else dout.double().flatten(0, 1)
    B_out = call.flat_q.new_zeros(*call.flat_q.shape[:-1], v.size(-1))
    B_dq, B_dk, B_dv = (torch.zeros_like(x) for x in (call.flat_q, call.flat_k, call.flat_v))
    F_dv, F_dk, G_dk, G_dv = (torch.zeros_like(x) for x in (B_dv, B_dk, B_dk, B_dv))
    keep = keep_probability(call.dropout_p)
    has_dbias = call.bias is not None and call.bias.dtype != torch.bool
    B_dbias, F_dbias = (torch.zeros_like(call.bias) if has_dbias else None for _ in range(2))
    B_dsink = None if call.sink is None else torch.zeros_like(call.sink)
    largest = 0.0

    def to_kv_heads(x):
        """(heads_q, len_k, d) → (len_k, heads_kv, d): the sum over a kv head's query heads."""
        return x.unflatten(0, (-1, call.group)).sum(1).transpose(0, 1)

    for rows in call.rows:
        x = call.sequence(rows)
        y = call.attend(x)
        dO = dout[rows.q].transpose(0, 1)
        dP = dO @ x.v.mT
        if x.kept is not None:
            dP = _drop(dP, x.kept, call.dropout_p)
        D = (dO * y.out).sum(-1, keepdim=True)
        D_magnitude = (dO * y.out).abs().sum(-1, keepdim=True)
        L = 0.0 if dlse is None else call.lse_rows(dlse.double(), rows)[..., None]
        dS_per_p = (dP - D + L).abs()
        E = y.P * (dS_per_p + D_magnitude)
        if q.dtype in (torch.float32, torch.float64):
            H = dO.abs() @ x.v.abs().mT
            E += y.P * (H if x.kept is None else _drop(H, x.kept, call.dropout_p)) / 64
        E_raw = call.scale * E * y.softcap_slope

        B_out[rows.q] = (y.weights @ x.v.abs()).transpose(0, 1)
        B_dv[rows.k] = to_kv_heads(y.weights.mT @ dO.abs())
        lost = torch.where(y.P < 2.0**-14, y.P.clamp(max=2.0**-25), 0.0)
        if x.kept is not None:
            lost = _drop(lost, x.kept, call.dropout_p)
        F_dv[rows.k] = to_kv_heads(lost.square().mT @ dO.square()).sqrt()
        dX = y.P * dS_per_p * y.softcap_slope * keep
        lost = torch.where(dX < 2.0**-14, dX.clamp(max=2.0**-25), 0.0)
        lost = lost * (call.scale / keep if keep > 0 else 0.0)
        F_dk[rows.k] = to_kv_heads(lost.square().mT @ x.q.square()).sqrt()
        is_flushed = y.P < 2.0**-126
        G_dv[rows.k] = to_kv_heads((y.weights * is_flushed).mT @ dO.abs())
        flushed = call.scale * y.P * is_flushed * dS_per_p * y.softcap_slope
        G_dk[rows.k] = to_kv_heads(flushed.mT @ x.q.abs())
        B_dq[rows.q] = (E_raw @ x.k.abs()).transpose(0, 1)
        B_dk[rows.k] = to_kv_heads(E_raw.mT @ x.q.abs())
        if B_dbias is not None:
            for total, terms in ((B_dbias, E), (F_dbias, dS_per_p)):
                part = _crop_bias(total, rows.index, E.size(1), E.size(2))
                part += terms.sum_to_size(part.shape)
        if B_dsink is not None:
            P_sink = torch.exp(call.sink[:, None] - y.lse)
            B_dsink += (P_sink * ((L - D).abs() + D_magnitude).squeeze(-1)).sum(-1)
            # In a dense call of one key such a bias may also be that key's.
            several = call.is_varlen or call.max_seqlen_k > 1
            if B_dbias is not None and B_dbias.shape[-1:] in ((), (1,)) and several:
                part = _crop_bias(B_dbias, rows.index, E.size(1), E.size(2))
                part += (P_sink[..., None] * D_magnitude).sum_to_size(part.shape)
        largest = max(largest, y.largest_score)
    return Conditions(
        call.like_q(B_out),
        call.like_k(B_dv),
        call.like_q(B_dq),
        call.like_k(B_dk),
        B_dbias,
        call.like_k(F_dv),
        F_dbias,
        call.like_k(F_dk),
        call.like_k(G_dk),
        call.like_k(G_dv),
        B_dsink,
        largest,
    )
