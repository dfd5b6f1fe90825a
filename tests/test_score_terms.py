"""Score terms on the kernels, forward and backward: each term, and all at once, in each head-dim
class, dtype, layout and mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import (
    ATEN_CPU,
    DIFFERENTIABLE,
    DTYPES,
    OP_TARGETS,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    check,
    compare,
    each_case,
    each_target,
    expect,
    op_arguments,
    run,
)
from numerics import LSE_LIMITS, UNIT_ROUNDOFF, assert_close, underflow_of
from test_kernels import SHAPES

TERMS = {
    "softcap": dict(softcap=5.0),
    "beyond the cap": dict(softcap=1.0),
    "far from the cap": dict(softcap=300.0, spread="wide"),
    "ALiBi": dict(alibi="head"),
    "ALiBi of each sequence": dict(alibi="batch"),
    "sink": dict(sink=True),
    "dropout": dict(dropout_p=0.2),
    "little kept": dict(dropout_p=0.83),
    "bias": dict(bias="full"),
    "mask": dict(bias="bool"),
    "all": dict(
        softcap=20.0, alibi="batch", bias="head", sink=True, lse_grad=True, softmax_scale=0.3
    ),
    "all with dropout": dict(
        softcap=9.0, alibi="head", bias="full", bias_fp32=True, dropout_p=0.7, sink=True
    ),
}
HEAD_DIMS = (64, 128, 256)


def term_cases() -> list[Case]:
    cases = []
    for t, term in enumerate(TERMS.values()):
        for i, d in enumerate(HEAD_DIMS):
            for j, shape in enumerate(SHAPES.values()):
                for k, dtype in enumerate(("fp16", "bf16")):
                    more = dict(deterministic=(t + i + j + k) % 2 == 1, heads_q=4, heads_kv=2)
                    cases.append(Case(d=d, dtype=dtype, **more | shape | term))
    return cases


def odd_cases() -> list[Case]:
    """Head dims between the classes, top-left diagonals, groups of one, three and eight query
    heads, more queries than keys, rows longer than any tile."""
    every = dict(softcap=8.0, alibi="head", sink=True, bias="batch", dropout_p=0.1)
    masked = every | dict(bias="bool")
    return [
        Case(d=96, dtype="bf16", seqlen_q=65, seqlen_k=129, causal=True, **every),
        Case(d=192, dtype="fp16", seqlen_q=129, seqlen_k=65, window=(17, 3), **every),
        Case(d=40, d_v=24, dtype="bf16", seqlen_q=33, seqlen_k=20, causal=True, **every),
        Case(d=80, d_v=200, dtype="fp16", seqlen_q=33, seqlen_k=40, deterministic=True, **every),
        Case(d=64, dtype="fp16", seqlen_q=200, seqlen_k=70, causal=True, top_left=True, **every),
        Case(d=128, dtype="bf16", seqlen_q=70, seqlen_k=200, top_left=True, **every),
        Case(d=64, dtype="bf16", heads_q=3, heads_kv=3, seqlen_q=90, seqlen_k=90, **every),
        Case(d=128, dtype="fp16", heads_q=6, heads_kv=2, seqlen_q=90, seqlen_k=90, **every),
        Case(d=64, dtype="fp16", heads_q=8, heads_kv=1, seqlen_q=260, seqlen_k=90, **every),
        Case(d=64, dtype="bf16", batch=1, seqlen_q=700, seqlen_k=900, causal=True, **every),
        Case(d=128, dtype="bf16", batch=1, seqlen_q=700, seqlen_k=900, causal=True, **every),
        Case(d=256, dtype="fp16", batch=1, seqlen_q=500, seqlen_k=600, window=(90, 0), **every),
        # A mask instead of a bias, which needs no gradient.
        Case(d=64, dtype="bf16", heads_q=8, heads_kv=1, seqlen_q=260, seqlen_k=90, **masked),
        Case(d=128, dtype="fp16", heads_q=6, heads_kv=2, seqlen_q=300, seqlen_k=90, **masked),
        Case(d=64, dtype="fp16", batch=1, seqlen_q=700, seqlen_k=900, causal=True, **masked),
        Case(d=128, dtype="bf16", batch=1, seqlen_q=700, seqlen_k=900, window=(90, 9), **masked),
    ]


@each_case(term_cases() + odd_cases(), [SM80, SM90])
def test_score_terms(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


def one_term_cases() -> list[Case]:
    """Each term alone over many blocks, which have kernels of their own: keys on both sides of the
    diagonal, scores on both sides of where a softcap becomes a polynomial."""
    terms = [
        dict(softcap=2.0),
        dict(softcap=12.0, softmax_scale=0.5),
        dict(softcap=200.0),
        dict(alibi="head"),
        dict(softcap=10.0, alibi="batch"),
        dict(dropout_p=0.2),
        dict(bias="bool"),
    ]
    return [
        Case(d=d, batch=2, seqlen_q=440, seqlen_k=520, dtype=dtype, **mask | term)
        for d, dtype in ((64, "bf16"), (128, "fp16"), (80, "bf16"))
        for mask in (dict(), dict(causal=True), dict(window=(150, 20)))
        for term in terms
    ]


@each_case(one_term_cases(), [SM80, SM90])
def test_one_term(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_target(ATEN_CPU, SM80, SM90)
@pytest.mark.parametrize("mask", [dict(), dict(causal=True), dict(window=(150, 20))])
@pytest.mark.parametrize("shape", ["b h q k", "1 h q k", "b 1 q k", "1 1 q k", "hidden"])
@pytest.mark.parametrize("d", [40, 64, 128])
def test_bias_in_tiles(d: int, shape: str, mask: dict, target: Target, seed: int) -> None:
    """A bias of q's dtype whose rows start at multiples of 16 bytes, without a gradient; hidden:
    with keys that no query sees, and queries that see no key."""
    case = Case(d=d, batch=2, seqlen_q=440, seqlen_k=520, dtype="bf16", bias="full", **mask)
    problem = Problem(case, seed, target.device)
    bias = problem.normal(2, case.heads_q, 440, 520).to(problem.q.dtype)
    if shape == "hidden":
        bias[..., 100:300] = -torch.inf
        bias[:, :, 70:200] = -torch.inf
    else:
        sizes = shape.split()
        bias = bias[: 1 if sizes[0] == "1" else 2, : 1 if sizes[1] == "1" else None].contiguous()
    problem.attn_bias = bias
    tensors = problem.float_tensors()
    arguments = op_arguments(problem) | tensors | {"backend": target.backend}
    del tensors["attn_bias"]
    for x in tensors.values():
        x.requires_grad_()
    out, lse, *_ = torch.ops.flash_attn.fwd(**arguments)
    gradients = torch.autograd.grad(out, list(tensors.values()), problem.dout)
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {DIFFERENTIABLE[n]: g for n, g in zip(tensors, gradients, strict=True)}
    compare(problem, results, expect(problem))


@each_target(SM80, SM90)
@pytest.mark.parametrize("mask", [dict(), dict(causal=True)])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "shape"),
    [
        pytest.param(6, 12, 1, "1 h q k", marks=pytest.mark.real_gpu),
        (3, 4, 2, "b 1 q k"),
        (5, 2, 1, "1 1 q k"),
        (3, 4, 2, "1 h q k"),
    ],
)
@pytest.mark.parametrize("d", [64, 128])
def test_a_bias_that_many_share(
    d: int, batch: int, heads: int, group: int, shape: str, mask: dict, target: Target, seed: int
) -> None:
    """On Hopper, tiles of sequences or heads that share a bias come side by side, up to four at a
    time. The first case has more of them than a GPU takes at once."""
    case = Case(
        d=d,
        batch=batch,
        heads_q=heads,
        heads_kv=heads // group,
        seqlen_q=200,
        seqlen_k=136,
        dtype="bf16" if d == 64 else "fp16",
        bias="full",
        **mask,
    )
    problem = Problem(case, seed, target.device)
    sizes = [{"b": batch, "h": heads, "q": 200, "k": 136, "1": 1}[size] for size in shape.split()]
    problem.attn_bias = problem.normal(*sizes).to(problem.q.dtype)
    compare(problem, run(problem, target.backend), expect(problem))


@each_case(
    [
        Case(d=d, dtype="bf16", seqlen_q=40, seqlen_k=50, softcap=softcap, softmax_scale=scale)
        for d in HEAD_DIMS
        for softcap, scale in ((1e-6, 0.1), (3.0, 20.0), (1e35, 0.1), (3.0, 1e-6))
    ],
    [ATEN_CPU, SM80, SM90],
)
def test_extreme_caps(case: Case, target: Target, seed: int) -> None:
    """Caps that all scores are at, and caps that none comes near. There is no gradient beside a cap
    that is less than a score's rounding. Beside one that all scores are at, 1 - tanh² has no digits
    left for it, but sm80 has the slope otherwise."""
    is_far = case.softcap > 1e6 or case.softmax_scale < 1e-3
    has_slopes = target.backend == "sm80" and case.softcap > 1e-3
    check(case, target, seed, backward=is_far or has_slopes)


# On both sides of 64, up to which the backward has no tanh of small scores.
LARGE_CAPS = (30.0, 50.0, 64.0, 64.01, 1e3, 1e6)


def large_caps() -> list[Case]:
    return [
        Case(d=d, dtype=dtype, batch=1, seqlen_q=130, seqlen_k=400, softcap=cap, **mask)
        for cap in LARGE_CAPS
        for d, dtype, mask in (
            (64, "bf16", dict()),
            (128, "fp16", dict()),
            (64, "fp16", dict(causal=True)),
            (128, "bf16", dict(causal=True)),
        )
    ]


def scaled_to_the_cap(share: float) -> list[Case]:
    """Scores whose deviation is this share of the cap. Of 1e6 that would leave fp32 no digits."""
    return [
        case.with_(softmax_scale=share * case.softcap * case.d**-0.5)
        for case in large_caps()
        if case.softcap < 1e6
    ]


def keeps_gradients(case: Case, largest_score: float) -> bool:
    """Whether P is not off by more than a rounding where LSE is off by what it may be."""
    score = min(largest_score, case.softcap)
    return LSE_LIMITS[torch.float32][1] * score <= UNIT_ROUNDOFF[DTYPES[case.dtype]]


@each_case(large_caps() + scaled_to_the_cap(0.04) + scaled_to_the_cap(1.0))
def test_large_caps(case: Case, target: Target, seed: int) -> None:
    """Scores that are small beside the cap, that lie on both sides of where a polynomial ends, and
    that are as large as the cap."""
    largest = 5 * (case.softmax_scale or case.d**-0.5) * case.d**0.5
    check(case, target, seed, backward=keeps_gradients(case, largest))


def beyond_the_cap(share: float) -> list[Case]:
    """Scores whose deviation is this many caps. Few queries see the last keys, whose slopes are
    then all next to 0, where 1 - tanh² has no digits."""
    return [
        Case(
            d=d, dtype=dtype, batch=1, seqlen_q=130, seqlen_k=200, causal=True, softcap=cap, **term
        )
        for cap in (5.0, 30.0)
        for d, dtype, term in (
            (64, "fp32", dict()),
            (128, "fp32", dict(alibi="head")),
            (64, "bf16", dict()),
            (64, "fp16", dict()),
        )
        for term in (term | dict(softmax_scale=share * cap * d**-0.5),)
    ]


@each_case(beyond_the_cap(3.0), [SM80])
def test_slopes_near_the_cap(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(
    [
        case.with_(dtype=dtype, d=d, alibi="head", seqlen_k=130)
        for case in beyond_the_cap(3.0)[::4]
        for dtype, d in (("bf16", 64), ("bf16", 128))
    ],
    [SM90],
)
def test_slopes_near_the_cap_beside_other_terms(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(large_caps())
@pytest.mark.parametrize("score", [20.0, 1e4])
def test_a_key_far_from_the_cap(score: float, case: Case, target: Target, seed: int) -> None:
    """Of small scores that of one key is this or its negative: it makes up a row, or has no part in
    it."""
    if target.backend == "sm90" and case.softcap > 100:
        pytest.skip("LSE is off by 2^-23 of the cap (docs/kernels/score-terms.md)")
    problem = Problem(case, seed, target.device)
    signs = problem.place(problem.random(problem.q.shape[:-1]).sign())
    problem.q[..., :8] = signs[..., None].to(problem.q.dtype)
    problem.k[:, 70] = 0
    problem.k[:, 70, :, :8] = score * case.d**0.5 / 8
    backward = keeps_gradients(case, score)
    results, expected = run(problem, target.backend, backward), expect(problem, backward)
    compare(problem, {n: x for n, x in results.items() if n not in ("dq", "dk")}, expected)
    if not backward:
        return
    # The key's slope 1 - tanh² is off by the last places of 1, which next to 0 is all of it. sm80
    # has the slope otherwise.
    lengths = [x.double().norm(dim=-1) for x in (problem.dout, problem.v, problem.q, problem.k)]
    of_dout, of_v, of_q, of_k = (x.max().item() for x in lengths)
    of_slope = 0.0 if target.backend == "sm80" else 2.0**-22
    of_row = of_slope * case.d**-0.5 * 2 * of_dout * of_v
    is_key = (torch.arange(case.keys) == 70)[:, None, None]
    dtype = problem.q.dtype
    for name, least in (
        ("dq", of_row * of_k * (signs > 0)[..., None].cpu()),
        ("dk", of_row * of_q * case.seqlen_q * case.heads_q / case.heads_kv * is_key),
    ):
        condition = expected.conditions[name] + least / UNIT_ROUNDOFF[dtype]
        underflow = underflow_of(name, expected.conditions, dtype)
        terms = dict(largest_score=expected.largest_score, besides=underflow)
        assert_close(name, results[name], expected.values[name], condition, dtype, **terms)


AXES = "bhqk"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dims", [4, 3, 2, 1])
@pytest.mark.parametrize("sizes", list(itertools.product((False, True), repeat=4)))
@each_target(ATEN_CPU, SM80)
def test_each_way_to_broadcast(
    sizes: tuple, dims: int, dtype: str, target: Target, seed: int
) -> None:
    """The gradient of a bias with each subset of its dimensions, of any rank, with all other
    terms: the sum of dS over the others."""
    if any(sizes[: 4 - dims]):
        pytest.skip("a dimension that is not there")
    case = Case(
        dtype=dtype,
        batch=3,
        seqlen_q=71,
        seqlen_k=90,
        d=(64, 128)[sizes[0]] if dtype == "bf16" else (64, 128, 256)[sum(sizes) % 3],
        bias="scalar",
        sink=True,
        softcap=10.0,
        dropout_p=0.1,
        lse_grad=True,
        causal=sizes[1],
        deterministic=sizes[2],
    )
    problem = Problem(case, seed, target.device)
    full = (3, case.heads_q, 71, 90)
    shape = [n if whole else 1 for n, whole in zip(full, sizes, strict=True)][4 - dims :]
    problem.attn_bias = problem.normal(*shape)
    results = run(problem, target.backend)
    assert results["dbias"].shape == problem.attn_bias.shape
    compare(problem, results, expect(problem))


@each_target(ATEN_CPU, SM80, SM90)
@pytest.mark.parametrize("draw", range(3))
@pytest.mark.parametrize("bias", ["full", "row", "matrix"])
@pytest.mark.parametrize("seqlen_q", [1, 129])
def test_a_bias_of_one_key_beside_a_sink(
    seqlen_q: int, bias: str, draw: int, target: Target, seed: int
) -> None:
    """Its gradient is as exact as dS, where delta comes from an out that was rounded."""
    case = Case(dtype="fp16", batch=2, seqlen_q=seqlen_q, seqlen_k=1, d=64, bias=bias, sink=True)
    check(case, target, seed)


@each_target(ATEN_CPU, SM80, SM90)
@pytest.mark.parametrize("draw", range(3))
def test_a_bias_of_one_key_in_varlen_beside_a_sink(draw: int, target: Target, seed: int) -> None:
    """Nobody trusts max_seqlen_k, so this bias broadcasts the keys, and its gradient is as exact as
    delta."""
    lengths = dict(lengths_q=(130, 130, 64), lengths_k=(0, 1, 0))
    check(Case(dtype="fp16", d=32, bias="batch", sink=True, **lengths), target, seed)


@each_target(ATEN_CPU, SM80, SM90)
@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", ["bhqk", "bhkq", "qkhb", "kbqh", "expanded", "sliced"])
def test_strides_and_dtypes_of_a_bias(
    order: str, dtype: torch.dtype, has_gradient: bool, target: Target, seed: int
) -> None:
    """Any strides, an odd number of keys, numbers that begin at an odd place."""
    if has_gradient and target == SM90:
        pytest.skip("sm80 serves the gradient of a bias")
    case = Case(dtype="bf16", seqlen_q=40, seqlen_k=67, bias="full", bias_fp32=True, d=48)
    problem = Problem(case, seed, target.device)
    bias = problem.attn_bias.to(dtype)
    if order == "expanded":
        bias = bias[:1, :, :, :1].expand(bias.shape)
    elif order == "sliced":
        bias = torch.nn.functional.pad(bias, (1, 2))[..., 1:-2]
    else:
        axes = [AXES.index(axis) for axis in order]
        bias = bias.permute(axes).contiguous().permute([order.index(axis) for axis in AXES])
    problem.attn_bias = bias
    tensors = problem.float_tensors()
    arguments = op_arguments(problem) | tensors | {"backend": target.backend}
    if not has_gradient:
        del tensors["attn_bias"]
    for x in tensors.values():
        x.requires_grad_()
    out, lse, *_ = torch.ops.flash_attn.fwd(**arguments)
    gradients = torch.autograd.grad(out, list(tensors.values()), problem.dout)
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {DIFFERENTIABLE[n]: g for n, g in zip(tensors, gradients, strict=True)}
    if has_gradient:
        assert results["dbias"].dtype == dtype
        results["dbias"] = results["dbias"].bfloat16()
    compare(problem, results, expect(problem))


@each_target(ATEN_CPU, SM80)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_the_least_number(dtype: torch.dtype, target: Target, seed: int) -> None:
    """Programs hide keys by the least finite number: as good as -inf."""
    case = Case(dtype="bf16", seqlen_q=40, seqlen_k=66, bias="inf", bias_fp32=True)
    problem = Problem(case, seed, target.device)
    problem.attn_bias[..., 5] = 0.0  # no row without keys
    expected = expect(problem)
    problem.attn_bias = problem.attn_bias.clamp(min=torch.finfo(dtype).min).to(dtype)
    if dtype == torch.bfloat16:
        infinite = problem.attn_bias == torch.finfo(dtype).min
        exact = Problem(case, seed, target.device)
        exact.attn_bias = problem.attn_bias.masked_fill(infinite, float("-inf"))
        expected = expect(exact)
    compare(problem, run(problem, target.backend), expected)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("bias", ["matrix", "key", "scalar"])
def test_a_gradient_that_thousands_add_to(bias: str, target: Target, seed: int) -> None:
    """4,096 heads of all sequences share each number of a bias in bf16, or 128 heads do, and all
    scores a number that broadcasts everything."""
    case = Case(dtype="bf16", batch=32, heads_q=128, seqlen_q=5, seqlen_k=9, d=32, bias=bias)
    check(case, target, seed)


@each_target(ATEN_CPU, SM80)
@pytest.mark.parametrize("deterministic", [False, True])
def test_shared_biases_sum_in_one_order(deterministic: bool, target: Target, seed: int) -> None:
    """The same bits of the bias's gradient every time, asked for or not."""
    for form in ("head", "batch", "matrix", "key", "row", "full"):
        case = Case(dtype="bf16", batch=5, seqlen_q=150, seqlen_k=140, bias=form, sink=True, d=64)
        problem = Problem(case.with_(deterministic=deterministic), seed, target.device)
        first = run(problem, target.backend)["dbias"]
        for _ in range(3):
            assert torch.equal(run(problem, target.backend)["dbias"], first), form
