"""The ladder and the oracle: all stable forms agree, the naive one overflows, torch says the
same."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Problem, compare, expect
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from flash_attn import reference
from flash_attn.reference import Partial, attention_ref, attention_ref_grads, condition_tensors

STABLE_SOFTMAX = [reference.safe_softmax, reference.online_softmax]
ATTENTION = {
    "standard": lambda q, k, v: reference.standard_attention(q, k, v),
    "one pass": reference.one_pass_attention,
    "FlashAttention-1": reference.flash_attention_1,
    "FlashAttention-1, odd tiles": lambda q, k, v: reference.flash_attention_1(q, k, v, 7, 5),
    "FlashAttention-2": lambda q, k, v: reference.flash_attention_2(q, k, v)[0],
    "FlashAttention-2, odd tiles": lambda q, k, v: reference.flash_attention_2(q, k, v, 7, 5)[0],
    "split-KV": lambda q, k, v: reference.split_kv(q, k, v)[0],
    "split-KV, more pieces than keys": lambda q, k, v: reference.split_kv(q, k, v, 99)[0],
}


@pytest.mark.parametrize("softmax", STABLE_SOFTMAX, ids=lambda f: f.__name__)
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_stable_softmax(softmax, offset: float) -> None:
    x = torch.randn(5, 33, dtype=torch.float64) * 3 + offset
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), rtol=1e-10, atol=0)


def test_naive_softmax_overflows() -> None:
    x = torch.randn(5, 33)
    torch.testing.assert_close(reference.naive_softmax(x), torch.softmax(x, -1))
    assert reference.naive_softmax(x + 100).isnan().any()
    assert reference.naive_softmax(x.half() * 0 + 12).isnan().any()
    assert not any(softmax(x + 100).isnan().any() for softmax in STABLE_SOFTMAX)


@pytest.mark.parametrize("form", ATTENTION)
@pytest.mark.parametrize(
    "n, m, d, d_v, spread", [(33, 50, 16, 16, 1), (1, 1, 8, 8, 1), (70, 200, 8, 24, 30)]
)
def test_every_rung_is_attention(
    form: str, n: int, m: int, d: int, d_v: int, spread: float
) -> None:
    q = torch.randn(n, d, dtype=torch.float64) * spread
    k, v = torch.randn(m, d, dtype=torch.float64), torch.randn(m, d_v, dtype=torch.float64)
    expected = torch_sdpa(q[None], k[None], v[None])[0]
    torch.testing.assert_close(ATTENTION[form](q, k, v), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("function", [reference.flash_attention_2, reference.split_kv])
def test_lse(function) -> None:
    q, k, v = torch.randn(3, 40, 8, dtype=torch.float64)
    expected = (q @ k.mT / 8**0.5).logsumexp(-1)
    torch.testing.assert_close(function(q, k, v)[1], expected, rtol=1e-12, atol=1e-12)


def partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    s = q @ k.mT
    if k.size(0) == 0:
        return Partial(
            torch.zeros(len(q), v.size(1)),
            torch.zeros(len(q), 1),
            torch.full((len(q), 1), -torch.inf),
        )
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    return Partial(p @ v, p.sum(-1, keepdim=True), m)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_combine_takes_pieces_in_any_order(lengths: list[int], order) -> None:
    """Associative, commutative, with the empty piece as its neutral element."""
    q, k, v = (torch.randn(n, 4).double() for n in (3, sum(lengths), sum(lengths)))
    pieces = [partial(q, a, b) for a, b in zip(k.split(lengths), v.split(lengths), strict=True)]
    whole = partial(q, k, v)
    while len(pieces) > 1:
        order.shuffle(pieces)
        pieces = [reference.combine(pieces[0], pieces[1]), *pieces[2:]]
    for actual, expected in zip(pieces[0], whole, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_against_torch(causal: bool) -> None:
    """attention_ref, its gradients and its LSE against torch's own float64 attention."""
    q = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 13, 2, 8, dtype=torch.float64)
    bias = torch.randn(1, 4, 9, 13, dtype=torch.float64)
    dout, dlse = (
        torch.randn(2, 9, 4, 8, dtype=torch.float64),
        torch.randn(2, 4, 9, dtype=torch.float64),
    )

    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    wide_k, wide_v = (x.repeat_interleave(2, 2) for x in leaves[1:3])
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], wide_k) / 8**0.5 + leaves[3]
    if causal:
        scores = scores.masked_fill(torch.ones(9, 13).triu(13 - 9 + 1).bool(), -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), wide_v)
    expected = torch.autograd.grad([out, lse], leaves, [dout, dlse])

    options = dict(attn_bias=bias, causal=causal)
    actual_out, actual_lse, P = attention_ref(q, k, v, **options)
    torch.testing.assert_close(actual_out, out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual_lse, lse.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(P, scores.softmax(-1).detach(), rtol=1e-12, atol=1e-12)
    gradients = attention_ref_grads(dout, q, k, v, dlse=dlse, **options)
    for a, e in zip(
        (gradients.dq, gradients.dk, gradients.dv, gradients.dbias), expected, strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
    assert gradients.dsink is None


def test_oracle_sink_is_one_more_key() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64)
    sink = torch.randn(2, dtype=torch.float64)
    zero_v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    bias = torch.zeros(1, 2, 1, 7, dtype=torch.float64)
    bias[0, :, 0, 6] = sink
    wide_k = torch.cat([k, torch.zeros_like(k[:, :1])], 1)
    expected = attention_ref(q, wide_k, zero_v, attn_bias=bias)
    actual = attention_ref(q, k, v, learnable_sink=sink)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])


def test_condition_tensors_bound_the_results() -> None:
    """A sum is no larger than the sum of its terms' sizes."""
    q, k, v, dout = torch.randn(4, 2, 20, 2, 8, dtype=torch.float64)
    options = dict(causal=True, softcap=3.0, window_size=(5, 0))
    out, _, _ = attention_ref(q, k, v, **options)
    gradients = vars(attention_ref_grads(dout, q, k, v, **options))
    conditions = vars(condition_tensors(dout, q, k, v, **options))
    for name, value in {"out": out, **gradients}.items():
        if value is not None:
            assert (value.abs() <= conditions[name] * (1 + 1e-9)).all(), name


def test_a_flushed_probability_is_within_the_standard(seed: int) -> None:
    """A P below the accumulator's normal range may count as 0 in dbias, one of 2^-120 may not."""
    case = Case(dtype="bf16", batch=1, seqlen_k=200, alibi="head", bias="full", d=128)
    problem = Problem(case, seed, "cpu")
    problem.alibi_slopes.fill_(0.7)
    expected = expect(problem)
    exact, P = expected.values["dbias"], expected.probs

    def flushed(limit: float) -> dict:
        assert ((P > 0) & (limit > P) & (limit / 4 < P)).any()
        return {"lse": expected.values["lse"].float(), "dbias": exact.where(limit <= P, 0.0)}

    compare(problem, flushed(2.0**-126), expected)
    with pytest.raises(AssertionError, match="dbias: comp error"):
        compare(problem, flushed(2.0**-120), expected)


def test_a_key_of_flushed_probabilities_is_within_the_standard(seed: int) -> None:
    """Likewise in dK and dV, of a key that no query sees more of."""
    case = Case(
        dtype="bf16", batch=1, seqlen_q=200, seqlen_k=800, alibi="head", heads_q=2, heads_kv=2, d=64
    )
    problem = Problem(case, seed, "cpu")
    problem.alibi_slopes.fill_(0.15)
    expected = expect(problem)
    P, dout = expected.probs, problem.dout.double().transpose(1, 2)
    dP = dout @ problem.v.double().transpose(1, 2).mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * 0.125

    def flushed(limit: float) -> dict:
        kept = limit <= P
        dk = (dS * kept).mT @ problem.q.double().transpose(1, 2)
        results = {"dk": dk, "dv": (P * kept).mT @ dout}
        results = {name: x.transpose(1, 2).bfloat16() for name, x in results.items()}
        return {"lse": expected.values["lse"].float()} | results

    compare(problem, flushed(2.0**-126), expected)
    with pytest.raises(AssertionError, match="dk: comp error"):
        compare(problem, flushed(2.0**-122), expected)


def test_the_rounding_of_a_sum_that_cancels_is_within_the_standard(seed: int) -> None:
    """In fp32, of dP beside a sink that leaves little of P and of O."""
    options = dict(seqlen_q=400, seqlen_k=1, heads_q=1, heads_kv=1, d=256, sink=True, bias="full")
    problem = Problem(Case(dtype="fp32", batch=1, **options), seed, "cpu")
    problem.learnable_sink.fill_(20.0)
    expected = expect(problem)
    dout, v = problem.dout.double().transpose(1, 2), problem.v.double().transpose(1, 2)
    roundings = 2.0**-24 * expected.probs * (dout.abs() @ v.abs().mT)

    def off_by(units: int) -> dict:
        dbias = expected.values["dbias"] + units * roundings
        return {"lse": expected.values["lse"].float(), "dbias": dbias.float()}

    compare(problem, off_by(2), expected)
    with pytest.raises(AssertionError, match="dbias: comp error"):
        compare(problem, off_by(64), expected)


def test_the_rounding_of_out_beside_a_sink_is_within_the_standard(seed: int) -> None:
    """The gradient of a bias that broadcasts the keys comes from out, which was rounded."""
    options = dict(seqlen_q=400, seqlen_k=2, heads_q=1, heads_kv=1, d=64, sink=True, bias="row")
    problem = Problem(Case(dtype="bf16", batch=1, **options), seed, "cpu")
    problem.learnable_sink.fill_(6.0)
    expected = expect(problem)
    out, exact = expected.values["out"], expected.values["dbias"]
    p_sink = torch.exp(problem.learnable_sink.double() - expected.values["lse"])

    def off_by(units: int) -> dict:
        delta = (problem.dout.double() * (out.bfloat16().double() - out)).sum(-1)  # of D
        error = units * (p_sink * delta.transpose(1, 2))[..., None]
        return {"lse": expected.values["lse"].float(), "dbias": (exact + error).bfloat16()}

    compare(problem, off_by(1), expected)
    with pytest.raises(AssertionError, match="dbias: comp error"):
        compare(problem, off_by(32), expected)


def test_the_rounding_of_subnormals_is_within_the_standard() -> None:
    """fp16 holds a P below 2^-14 in multiples of 2^-24. Of some key here no query sees more; four
    times as coarse is an error."""
    options = dict(seqlen_q=440, seqlen_k=520, d=128, softcap=10.0, alibi="batch")
    problem = Problem(Case(dtype="fp16", **options), 2298484859, "cpu")
    expected = expect(problem)
    P = expected.probs.unflatten(1, (2, 2))  # of kv heads
    dout = problem.dout.double().unflatten(2, (2, 2))

    def rounded(multiple: float) -> dict:
        operand = torch.where(P < 2.0**-14, (P / multiple).round() * multiple, P.half().double())
        dv = torch.einsum("bhgij,bihgd->bjhd", operand, dout)
        return {"lse": expected.values["lse"].float(), "dv": dv.half()}

    compare(problem, rounded(2.0**-24), expected)
    with pytest.raises(AssertionError, match="dv: comp error"):
        compare(problem, rounded(2.0**-22), expected)


def test_the_rounding_of_subnormal_gradients_is_within_the_standard() -> None:
    """Likewise a dS below 2^-14, as of a key whose scores are all near a softcap; eight times as
    coarse is an error."""
    options = dict(seqlen_q=130, seqlen_k=400, d=64, causal=True, softcap=64.01, softmax_scale=8.0)
    problem = Problem(Case(dtype="fp16", batch=1, **options), 2, "cpu")
    expected = expect(problem)
    q, dout = (x.double().unflatten(2, (2, 2)) for x in (problem.q, problem.dout))  # of kv heads
    P = expected.probs.unflatten(1, (2, 2))
    dP = torch.einsum("bihgd,bjhd->bhgij", dout, problem.v.double())
    S = torch.einsum("bihgd,bjhd->bhgij", q, problem.k.double()) * 8.0
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) / torch.cosh(S / 64.01) ** 2

    def rounded(multiple: float) -> dict:
        operand = torch.where(dS.abs() < 2.0**-14, (dS / multiple).round() * multiple, dS.half())
        dk = 8.0 * torch.einsum("bhgij,bihgd->bjhd", operand, q)
        return {"lse": expected.values["lse"].float(), "dk": dk.half()}

    compare(problem, rounded(2.0**-24), expected)
    with pytest.raises(AssertionError, match="dk: comp error"):
        compare(problem, rounded(2.0**-21), expected)
