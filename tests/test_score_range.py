"""Extreme scores: what csrc/core/score_range.h says, in every dtype, forward and backward."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    DECODE_CUDA,
    DTYPES,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    compare,
    each_case,
    each_target,
    expect,
    param,
    use,
)
from cases import run as run_case
from numerics import assert_close, assert_lse_close, rms_error

import flash_attn
from flash_attn.reference import attention_ref, attention_ref_grads, condition_tensors

TARGETS = each_target(ATEN_CPU, ATEN_CUDA)
KERNELS = each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
ROWS, KEYS, HEADS = 6, 7, 2
HIDING = {
    "fp32's": torch.finfo(torch.float32).min,
    "bf16's": torch.finfo(torch.bfloat16).min,
    "fp64's": torch.finfo(torch.float64).min,
    "programs'": -1e9,
    "the border": -6.8e7,
    "-inf": -math.inf,
}


def inputs(target: Target, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (1, ROWS, HEADS, 8), (1, KEYS, HEADS, 8), (1, KEYS, HEADS, 8)
    return [torch.randn(*shape).to(target.device, dtype).requires_grad_() for shape in shapes]


def hidden_keys() -> torch.Tensor:
    """bool (ROWS, KEYS): row 0 has nothing left, row 1 one key, the last one all."""
    torch.manual_seed(1)
    hidden = torch.rand(ROWS, KEYS) < 0.5
    hidden[0], hidden[1], hidden[-1] = True, True, False
    hidden[1, 3] = False
    return hidden


def run(tensors: list[torch.Tensor], **options) -> list[torch.Tensor]:
    """out, lse and the gradients of q, k, v and of what else requires one."""
    leaves = [*tensors, *(x for x in options.values() if getattr(x, "requires_grad", False))]
    out, lse, _ = flash_attn.flash_attn_func(*tensors, **options, return_attn_probs=True)
    torch.manual_seed(2)
    dout = torch.randn(out.shape).to(out)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


def each_dtype(*names: str) -> pytest.MarkDecorator:
    """(dtype, target) for each of these dtypes on each backend that serves it, by name."""
    pairs = [
        param(name, target)
        for name in names
        for target in (ATEN_CPU, ATEN_CUDA, SM80, SM90)
        if target.backend == "aten"
        or name in ("fp16", "bf16")
        or (name == "fp32" and target == SM80)
    ]
    return pytest.mark.parametrize("dtype, target", pairs)


@pytest.mark.parametrize("value", HIDING.values(), ids=HIDING)
@each_dtype(*DTYPES)
def test_a_mask_of_the_lowest_number_is_a_bool_mask(
    target: Target, dtype: str, value: float
) -> None:
    tensors, hidden = inputs(target, DTYPES[dtype]), hidden_keys().to(target.device)
    # fp16 has no such number, but a bias need not have q's dtype.
    wide = torch.float64 if value < torch.finfo(torch.float32).min else torch.float32
    wide = torch.promote_types(DTYPES[dtype], wide)
    bias = torch.zeros(ROWS, KEYS, device=target.device, dtype=wide)
    bias = bias.masked_fill(hidden, value)
    with use(target):
        found, expected = run(tensors, attn_bias=bias), run(tensors, attn_bias=~hidden)
    for a, e in zip(found, expected, strict=True):
        assert torch.equal(a, e)
    out, lse, dq, *_ = found
    assert not out[:, 0].any() and not dq[:, 0].any() and (lse[..., 0] == -math.inf).all()
    assert lse[..., 1:].isfinite().all()


@TARGETS
@pytest.mark.parametrize("seen", [0, -(2**26)])  # the least that hides nothing
def test_a_nan_behind_such_a_mask_stays_there(seen: int, target: Target) -> None:
    q, k, v = (x.detach() for x in inputs(target, torch.float32))
    bias = torch.full((ROWS, KEYS), float(seen), device=target.device)
    bias[:, 2] = torch.finfo(torch.float32).min
    with use(target):
        expected = run([x.clone().requires_grad_() for x in (q, k, v)], attn_bias=bias)
        k[:, 2], v[:, 2] = math.nan, math.inf
        found = run([x.clone().requires_grad_() for x in (q, k, v)], attn_bias=bias)
    assert expected[0].any()
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e)


@KERNELS
def test_the_lowest_fp16_number_is_a_number(target: Target) -> None:
    tensors = inputs(target, torch.float16)
    bias = torch.zeros(ROWS, KEYS, device=target.device, dtype=torch.float16)
    bias[2] = torch.finfo(torch.float16).min
    with use(target):
        out, lse, *gradients = run(tensors, attn_bias=bias)
        plain_out, plain_lse, *plain = run(tensors, attn_bias=torch.zeros_like(bias))
    # A bias that all keys share leaves their weights; fp32 scores of 65504 keep 2^-8.
    torch.testing.assert_close(out, plain_out, atol=0.02, rtol=0)
    torch.testing.assert_close(lse[..., 2], plain_lse[..., 2] - 65504, atol=0.02, rtol=0)
    for a, e in zip(gradients, plain, strict=True):
        torch.testing.assert_close(a, e, atol=0.1, rtol=0)


# For all keys of row 2, or of one key of every row.
EXTREMES = [-math.inf, -3e38, -2e38, -1e30, -1e9, -1e7, 1e7, 1e9, 1e30, 2e38, 3e38, math.inf]
OPTIONS = {f"softcap {x:g}": dict(softcap=x) for x in (5e-324, 1e-45, 1e-30, 1e30, 3e38, 1e308)}
for _x in EXTREMES:
    OPTIONS[f"sink {_x:g}"] = dict(learnable_sink=[_x, 0.5])
    OPTIONS[f"slope {_x:g}"] = dict(alibi_slopes=[_x, 0.5])
    OPTIONS[f"row {_x:g}"] = dict(attn_bias=[[0.0] * KEYS] * 2 + [[_x] * KEYS] + [[0.0] * KEYS] * 3)
    OPTIONS[f"key {_x:g}"] = dict(attn_bias=[[0.0, _x] + [0.0] * (KEYS - 2)])
OPTIONS["sink and key"] = dict(learnable_sink=[3e38, math.inf], attn_bias=[[3e38] * KEYS])
OPTIONS["slope and key"] = dict(alibi_slopes=[-math.inf, 3e38], attn_bias=[[-3e38] * KEYS])


# fp32 scores lose Q Kᵀ beside these, which the float64 reference still keeps.
COARSE = {f"row {x:g}" for x in EXTREMES if x >= -1e7}
# And fp64 keeps it to 2^-27 beside 2^26.
BESIDE_LARGE = {f"key {x:g}" for x in EXTREMES if x >= 1e7}


@pytest.mark.parametrize("name", OPTIONS)
@each_dtype("fp32", "bf16", "fp64", "fp16")
def test_extreme_terms_make_no_nan(target: Target, dtype: str, name: str) -> None:
    tensors = inputs(target, DTYPES[dtype])

    def value(option: str, x: object) -> object:
        if option == "softcap":
            return x
        constant = option == "alibi_slopes" or (option == "attn_bias" and target == SM90)
        wide = torch.float64 if dtype == "fp64" and option != "alibi_slopes" else torch.float32
        if dtype == "bf16" and option == "attn_bias":
            wide = torch.bfloat16
        return torch.tensor(x, device=target.device, dtype=wide, requires_grad=not constant)

    if target == SM90 and dtype == "fp16" and "slope" in name:
        pytest.skip("sm80 serves the backward of slopes in fp16")
    options = {option: value(option, x) for option, x in OPTIONS[name].items()}
    with use(target):
        out, lse, *gradients = run(tensors, **options)
    assert out.isfinite().all() and not lse.isnan().any() and not lse.isposinf().any()
    assert all(x.isfinite().all() for x in gradients)
    if name in COARSE:
        return
    cpu = {n: x.detach().cpu() if torch.is_tensor(x) else x for n, x in options.items()}
    cpu_tensors = [x.detach().cpu() for x in tensors]
    expected, expected_lse, _ = attention_ref(*cpu_tensors, **cpu)
    torch.manual_seed(2)
    dout = torch.randn(out.shape).to(out.dtype)
    ref = attention_ref_grads(dout, *cpu_tensors, **cpu)
    fp64 = 1e-7 if name in BESIDE_LARGE else 1e-10
    tolerance = {"fp64": fp64, "fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}[dtype]

    def close(a: torch.Tensor, e: torch.Tensor) -> None:
        torch.testing.assert_close(a.cpu().double(), e, atol=tolerance, rtol=tolerance)

    close(out, expected)
    close(lse, expected_lse)
    by_option = {"learnable_sink": ref.dsink, "attn_bias": ref.dbias}
    leaves = [n for n in by_option if getattr(options.get(n), "requires_grad", False)]
    wanted = [ref.dq, ref.dk, ref.dv, *(by_option[n] for n in options if n in leaves)]
    for a, e in zip(gradients, wanted, strict=True):
        close(a, e)


@pytest.mark.parametrize("bias", [-6e7, -1e7, 1e7, 1e9, 1e30])
@each_dtype("fp32", "bf16", "fp16")
def test_a_query_whose_lse_is_too_coarse_gives_no_gradient(
    target: Target, dtype: str, bias: float
) -> None:
    q, k, v = inputs(target, DTYPES[dtype])
    mask = torch.zeros(ROWS, KEYS, device=target.device)
    mask[2] = bias
    with use(target):
        out, lse, dq, dk, dv = run([q, k, v], attn_bias=mask)
        others = [x for x in range(ROWS) if x != 2]
        rest, _, dq_rest, dk_rest, dv_rest = run_rows(q, k, v, others)
    low, high = v.amin(1)[0], v.amax(1)[0]
    slack = {"fp32": 1e-5, "bf16": 0.04, "fp16": 0.01}[dtype]
    assert (out[0, 2] >= low - slack).all() and (out[0, 2] <= high + slack).all()
    assert not dq[0, 2].any() and lse[0, :, 2].isfinite().all()
    close = partial(torch.testing.assert_close, atol=slack, rtol=slack)
    close(out[:, others], rest)
    close(dq[:, others], dq_rest)
    close(dk, dk_rest)
    close(dv, dv_rest)


def run_rows(q, k, v, rows: list[int]) -> list[torch.Tensor]:
    """run() of some queries alone, with the same gradient of out in them."""
    part = q.detach()[:, rows].requires_grad_()
    out, lse, _ = flash_attn.flash_attn_func(part, k, v, return_attn_probs=True)
    torch.manual_seed(2)
    dout = torch.randn(q.shape).to(out)[:, rows]
    return [out, lse, *torch.autograd.grad(out, (part, k, v), dout)]


@pytest.mark.parametrize("scale", [0.35, 3.5])
@pytest.mark.parametrize("value", [-3e38, -1e9, -6e7, 1e9, math.inf])
@pytest.mark.parametrize("is_whole", [False, True])
@each_dtype("fp32", "bf16", "fp16")
def test_many_keys_of_which_few_are_left(
    target: Target, dtype: str, is_whole: bool, value: float, scale: float
) -> None:
    """Whole tiles of such keys, before and behind those that count: nothing of them is left,
    whatever their sum was, and the error is that of a call without them. With one above all others,
    that is all that is left. A whole bias broadcasts nothing, and TMA can read it."""
    torch.manual_seed(0)
    shapes = (1, 150, HEADS, 64), (1, 700, HEADS, 64), (1, 700, HEADS, 64)
    q, k, v = (torch.randn(*x).to(target.device, DTYPES[dtype]).requires_grad_() for x in shapes)
    left = slice(300, 301) if value > 0 else slice(290, 333)
    of_bias = torch.bfloat16 if dtype == "bf16" else torch.float32
    rest = 0.0 if value > 0 else value
    shape = (1, 700)
    if is_whole:
        shape, of_bias = (1, HEADS, 150, 704), DTYPES[dtype]  # rows of a multiple of 16 bytes
    bias = torch.full(shape, rest, device=target.device, dtype=torch.float64)
    bias[..., left] = value if value > 0 else 0.0
    bias = bias.to(of_bias)[..., :700]  # beyond fp16's range it is infinite
    with use(target):
        found = run([q, k, v], attn_bias=bias, softmax_scale=scale)
        part = [x.detach()[:, left].requires_grad_() for x in (k, v)]
        out, lse, dq, dk, dv = run([q, *part], softmax_scale=scale)
    slack = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.004}[dtype]
    if value > 0:
        # The LSE of such rows is beyond their gradient.
        torch.testing.assert_close(found[0], out, atol=slack, rtol=slack)
        assert not any(x.any() for x in found[2:])
        return
    for i in (3, 4):
        hidden = found[i].clone()
        hidden[:, left] = 0
        assert not hidden.any()
        found[i] = found[i][:, left]
    if dtype == "fp32":
        for a, e in zip(found, [out, lse, dq, dk, dv], strict=True):
            torch.testing.assert_close(a, e, atol=slack, rtol=slack)
        return
    # The keys lie elsewhere in their tiles, so P rounds otherwise, and so do the sums of dS, which
    # at the larger scale are small beside what is added. Neither call is the better one.
    torch.manual_seed(2)
    dout = torch.randn(out.shape).to(out.dtype)
    cpu = [x.detach().cpu() for x in (q, *part)]
    expected, expected_lse, _ = attention_ref(*cpu, softmax_scale=scale)
    gradients = attention_ref_grads(dout, *cpu, softmax_scale=scale)
    conditions = condition_tensors(dout, *cpu, softmax_scale=scale)
    assert_lse_close(found[1], expected_lse, conditions.largest_score)
    wanted = {"out": expected, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    for (name, e), a, alone in zip(
        wanted.items(), (found[0], *found[2:]), (out, dq, dk, dv), strict=True
    ):
        size = dict(largest_score=conditions.largest_score)
        assert_close(name, a, e, getattr(conditions, name), DTYPES[dtype], **size)
        assert rms_error(a.cpu(), e) <= 1.1 * rms_error(alone.cpu(), e), name


@pytest.mark.parametrize(
    "name", [n for n in OPTIONS if n.split()[0] in ("softcap", "sink", "slope")]
)
@each_dtype("bf16", "fp16", "fp32")
def test_extreme_terms_of_decode(target: Target, dtype: str, name: str) -> None:
    """The same against a cache, in one piece and in several."""
    if target == SM90 or "and" in name:
        pytest.skip("decode has kernels of its own, and no bias")
    target = DECODE_CUDA if target == SM80 else target
    torch.manual_seed(0)
    shapes = (2, 3, HEADS, 64), (2, 600, HEADS, 64), (2, 600, HEADS, 64)
    q, k, v = (torch.randn(*x).to(target.device, DTYPES[dtype]) for x in shapes)
    options = {n: x if n == "softcap" else torch.tensor(x) for n, x in OPTIONS[name].items()}
    expected, expected_lse, _ = attention_ref(q.cpu(), k.cpu(), v.cpu(), causal=True, **options)
    placed = {n: x if n == "softcap" else x.to(target.device) for n, x in options.items()}
    for splits in (1, 3):
        with use(target):
            out, lse = flash_attn.flash_decode_func(
                q, k, v, causal=True, num_splits=splits, return_softmax_lse=True, **placed
            )
        slack = 1e-4 if dtype == "fp32" else 0.03
        close = partial(torch.testing.assert_close, atol=slack, rtol=slack)
        close(out.cpu().double(), expected)
        close(lse.cpu().double(), expected_lse)


# Not in fp16 at d = 256: tensor cores round a sum of so many like products to 1.2e-6 of itself, and
# LSE's limit is 1e-6.
@each_case(
    [
        Case(dtype=dtype, d=d, d_v=d_v, spread="shifted", **lengths)
        for dtype in ("bf16", "fp16")
        for d, d_v in [(d, None) for d in (64, 80, 96, 128, 192, 256)] + [(192, 128)]
        for lengths in (
            dict(seqlen_q=70, seqlen_k=75),
            dict(lengths_q=(130, 0, 200), lengths_k=(75, 9, 140), heads_kv=1),
        )
        if (dtype, d) != ("fp16", 256)
    ]
)
def test_all_scores_far_below_zero(case: Case, target: Target, seed: int) -> None:
    """What a kernel computes of keys behind the last, whose scores are 0, overflows: none of it may
    reach a gradient."""
    problem = Problem(case, seed, target.device)
    for x, middle in ((problem.q, 4), (problem.k, -4)):
        x.mul_(0.1).add_(middle)
    expected = expect(problem)
    assert expected.values["lse"].max() < -88
    compare(problem, run_case(problem, target.backend), expected)


def case_of_scale(dtype: str, d: int, scale: float, **options: object) -> Case:
    """Two blocks of queries and of keys. Deterministic at d = 64, where sm90's other kernel for so
    few queries has no columns of LSE."""
    shape = dict(batch=1, seqlen_q=70, seqlen_k=140, heads_q=2, heads_kv=1, d=d)
    options = options | dict(softmax_scale=scale, spread="shifted", deterministic=d == 64)
    return Case(dtype=dtype, **shape, **options)


# 0 in fp32, what no LSE could be divided by, and more; a sink makes LSE as large as itself.
NEAR_ZERO = [(1e-60, None), (1e-60, 4e6), (1e-33, 60.0), (1e-20, 60.0)]


@KERNELS
@pytest.mark.parametrize("d", [64, 96, 128, 192])
@pytest.mark.parametrize("scale, sink", NEAR_ZERO)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_a_scale_near_zero(
    dtype: str, scale: float, sink: float | None, d: int, target: Target, seed: int
) -> None:
    """P is the same for all keys, however large LSE is: a kernel that divides LSE by the scale may
    not leave its numbers' range."""
    case = case_of_scale(dtype, d, scale, sink=sink is not None)
    problem = Problem(case, seed, target.device)
    if sink is not None:  # beyond fp16's numbers
        problem.learnable_sink = torch.full((2,), sink, device=target.device)
    expected = expect(problem)
    assert expected.values["lse"].max() >= (math.log(140) if sink is None else sink)
    compare(problem, run_case(problem, target.backend), expected)


@KERNELS
@pytest.mark.parametrize("d", [64, 96, 128, 192])
@pytest.mark.parametrize(
    "dtype, scale", [("bf16", 1e-20), ("bf16", 1e-33), ("bf16", 1e20), ("fp16", 1e-3)]
)
def test_gradients_of_products_far_from_one(
    dtype: str, scale: float, d: int, target: Target, seed: int
) -> None:
    """Products as large as the scale is small, or the other way round: scores and LSE as ever."""
    problem = Problem(case_of_scale(dtype, d, scale), seed, target.device)
    problem.q.copy_(problem.q.double() / scale * d**-0.5 * 5)
    expected = expect(problem)
    assert expected.values["lse"].max() > 10
    compare(problem, run_case(problem, target.backend), expected)


@KERNELS
@pytest.mark.parametrize(
    "d, d_v, rows, keys",
    [(d, d, 70, 140) for d in (64, 96, 128, 192, 256)]
    + [(192, 128, 70, 140), (256, 256, 200, 200), (256, 256, 140, 900)],
)
@pytest.mark.parametrize("scale", [0.0, -0.2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_a_scale_of_zero_or_below(
    dtype: str, scale: float, d: int, d_v: int, rows: int, keys: int, target: Target
) -> None:
    """scaled_dot_product_attention takes one, as torch's does."""
    q, k, v, dout = (
        torch.randn(1, n, 2, width).to(DTYPES[dtype])
        for n, width in ((rows, d), (keys, d), (keys, d_v), (rows, d_v))
    )
    leaves = [x.transpose(1, 2).to(target.device).requires_grad_() for x in (q, k, v)]
    with use(target):
        out = flash_attn.scaled_dot_product_attention(*leaves, scale=scale)
        found = torch.autograd.grad(out, leaves, dout.transpose(1, 2).to(target.device))
    gradients = attention_ref_grads(dout, q, k, v, softmax_scale=scale)
    conditions = condition_tensors(dout, q, k, v, softmax_scale=scale)
    for name, x in zip(("dq", "dk", "dv"), found, strict=True):
        wanted, size = getattr(gradients, name), getattr(conditions, name)
        largest = conditions.largest_score
        assert_close(name, x.transpose(1, 2), wanted, size, q.dtype, largest_score=largest)


@each_case(
    [
        Case(dtype="fp16", seqlen_q=70, seqlen_k=140, d=d, d_v=d_v, causal=d == 96, spread="large")
        for d, d_v in [(d, None) for d in (64, 80, 96, 128, 192, 256)] + [(192, 128)]
    ]
    + [Case(dtype="fp16", batch=1, seqlen_q=140, seqlen_k=140, d=256, spread="large")]
)
def test_a_query_whose_dS_overflows_fp16(case: Case, target: Target, seed: int) -> None:
    """Its dq, and dk of the keys that it overflows at, are no numbers, or they are right: a dS kept
    in fp32 is finite. Neither reaches dv, other keys, other queries or other heads."""
    problem = Problem(case, seed, target.device)
    problem.v.mul_(32)
    problem.dout[0, 33, 1] = problem.dout[0, 33, 1].clamp(-3, 3) * 20000
    expected, results = expect(problem), run_case(problem, target.backend)

    q, k, v, dout = (x.cpu().double() for x in (problem.q, problem.k, problem.v, problem.dout))
    keys = case.keys - case.seqlen_q + 34 if case.causal else case.keys
    key_head = 1 // (case.heads_q // case.heads_kv)
    scores = k[0, :keys, key_head] @ q[0, 33, 1] * case.d**-0.5
    dP = v[0, :keys, key_head] @ dout[0, 33, 1]
    P = scores.softmax(0)
    overflows = (P * (dP - P @ dP)).abs() > 65000
    assert 0 < overflows.sum() < keys

    may_overflow = {name: torch.zeros(results[name].shape[:-1]).bool() for name in ("dq", "dk")}
    may_overflow["dq"][0, 33, 1] = True
    may_overflow["dk"][0, :keys, key_head] = overflows
    for name, where in may_overflow.items():
        lost = where[..., None] & ~results[name].cpu().isfinite()
        results[name][lost.to(target.device)] = 0
        expected.values[name][lost] = 0
    compare(problem, results, expected)
