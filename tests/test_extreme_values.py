"""Forward and gradients of extreme scores, rows without keys, and numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    OP_TARGETS,
    Case,
    Problem,
    Target,
    check,
    compare,
    each_case,
    each_target,
    expect,
    run,
)
from numerics import assert_close

EXTREMES = {
    "scores-of-minus-51200": lambda q, k, v: (q * 0 + 80, k * 0 - 80, v),
    "scores-of-51200": lambda q, k, v: (q * 0 + 80, k * 0 + 80, v),
    "all-1000": lambda q, k, v: (q * 0 + 1000, k * 0 + 1000, v * 0 + 1000),
    "values-near-65504": lambda q, k, v: (q, k, v * 0 + 65000),
    "maximum-rises": lambda q, k, v: (q * 0 + 1, ramp(k), v),
    "maximum-falls": lambda q, k, v: (q * 0 + 1, -ramp(k), v),
    "one-key-takes-all": lambda q, k, v: (q * 0 + 8, one_hot_key(k), v),
}


def ramp(k: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(k.size(1), device=k.device, dtype=k.dtype)
    return (steps / 256)[None, :, None, None].expand_as(k).contiguous()


def one_hot_key(k: torch.Tensor) -> torch.Tensor:
    spike = torch.zeros_like(k)
    spike[:, k.size(1) // 3] = 8
    return spike


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "data, d",  # aten sums up 192 products of a million with more error than the standard grants
    [(x, 64) for x in EXTREMES] + [(x, 192) for x in EXTREMES if x != "all-1000"],
)
def test_extreme_scores(data: str, d: int, dtype: str, target: Target, seed: int) -> None:
    shape = dict(seqlen_q=70, seqlen_k=200, batch=1, d=d)
    case = Case(dtype=dtype, causal=data != "all-1000", spread=data, **shape)
    if not case.served_by(target.backend):
        pytest.skip(f"{target.backend} has no {dtype}")
    problem = Problem(case, seed, target.device)
    problem.q, problem.k, problem.v = EXTREMES[data](problem.q, problem.k, problem.v)
    results, expected = run(problem, target.backend), expect(problem)
    compare(problem, results, expected)
    # The common size of the scores cancels in the forward: there the plain rule holds.
    assert_close(
        "out", results["out"], expected.values["out"], expected.conditions["out"], problem.q.dtype
    )


@each_target(*ATTENTION_TARGETS)
def test_subnormal_values_survive(target: Target, seed: int) -> None:
    problem = Problem(Case(dtype="fp16", seqlen_q=40, seqlen_k=64), seed, target.device)
    problem.v = torch.full_like(problem.v, 2.0**-20)
    out = run(problem, target.backend, backward=False)["out"]
    assert (out.double() / 2.0**-20 - 1).abs().max() <= 2.0**-4, "off by more than a last bit"


EMPTY_ROW_CASES = [
    Case(seqlen_q=100, seqlen_k=30, causal=True, dtype="fp16"),
    Case(seqlen_q=200, seqlen_k=3, causal=True, dtype="bf16", heads_q=6),
    Case(seqlen_q=30, seqlen_k=150, window=(-1, 0), top_left=True, dtype="fp16"),
    Case(seqlen_q=150, seqlen_k=40, window=(5, 5), top_left=True, dtype="bf16"),
    Case(seqlen_q=150, seqlen_k=70, window=(0, 0), dtype="fp16"),
    Case(seqlen_q=0, seqlen_k=10, dtype="fp16"),
    Case(seqlen_q=10, seqlen_k=0, dtype="bf16"),
    Case(seqlen_q=10, seqlen_k=0, dtype="bf16", causal=True, lse_grad=True),
    Case(seqlen_q=0, seqlen_k=0, dtype="fp16"),
    Case(batch=0, dtype="bf16"),
    Case(seqlen_q=10, seqlen_k=0, sink=True),
    Case(seqlen_q=90, seqlen_k=20, causal=True, sink=True, lse_grad=True),
    Case(seqlen_q=90, seqlen_k=20, causal=True, sink=True, softcap=5.0, alibi="head", bias="full"),
]


@each_case(EMPTY_ROW_CASES)
def test_rows_without_keys(case: Case, target: Target, seed: int) -> None:
    """out 0, LSE -inf (or the sink), gradients 0: the exact part of the standard."""
    check(case, target, seed)


def tiles(n: int, hidden: range) -> torch.Tensor:
    keep = torch.ones(n, dtype=torch.bool)
    for tile in hidden:
        keep[64 * tile : 64 * (tile + 1)] = False
    return keep


HIDDEN_TILES = {
    "first": range(0, 3),
    "last": range(2, 5),
    "even": range(0, 5, 2),
    "odd": range(1, 5, 2),
    "all": range(0, 5),
}


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("form", ["bool", "-inf"])
@pytest.mark.parametrize("hidden", list(HIDDEN_TILES))
def test_hidden_tiles(hidden: str, form: str, target: Target, seed: int) -> None:
    problem = Problem(
        Case(seqlen_q=40, seqlen_k=320, dtype="fp32", bias="key"), seed, target.device
    )
    keep = tiles(320, HIDDEN_TILES[hidden]).to(target.device).expand(2, 1, 1, 320)
    bias = problem.attn_bias
    problem.attn_bias = keep.clone() if form == "bool" else bias.masked_fill(~keep, -torch.inf)
    compare(problem, run(problem, target.backend), expect(problem))


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_of_the_lowest_finite_bias(dtype: str, target: Target, seed: int) -> None:
    """finfo.min hides a key. A row of nothing else is empty, or uniform as the number says; never
    NaN."""
    problem = Problem(Case(seqlen_q=20, seqlen_k=80, dtype=dtype, bias="full"), seed, target.device)
    lowest = torch.finfo(problem.attn_bias.dtype).min
    problem.attn_bias[:, :, ::2] = lowest
    problem.attn_bias[:, :, 1::2, :70] = lowest
    results, expected = run(problem, target.backend), expect(problem)
    for name, x in results.items():
        assert x.isfinite().all() or name == "lse", name
    out, condition = expected.values["out"], expected.conditions["out"]
    if results["lse"][0, 0, 0].isneginf():
        assert (
            not results["out"][:, ::2].count_nonzero() and not results["dq"][:, ::2].count_nonzero()
        )
        out[:, ::2] = 0
    assert_close("out", results["out"], out, condition, problem.q.dtype)


INVISIBLE = [
    Case(seqlen_q=70, seqlen_k=200, causal=True, top_left=True, dtype="fp16"),
    Case(seqlen_q=70, seqlen_k=200, window=(30, 10), dtype="bf16"),
    Case(seqlen_q=70, seqlen_k=200, seqused_k=(130, 67), dtype="fp16"),
    Case(seqlen_q=70, seqlen_k=200, leftpad_k=(130, 67), dtype="fp16", causal=True),
    Case(seqlen_q=70, seqlen_k=200, bias="padding", dtype="fp32"),
    Case(seqlen_q=70, seqlen_k=200, bias="padding", dtype="bf16", sink=True, causal=True),
]


@each_case(INVISIBLE, ATTENTION_TARGETS)
def test_nan_in_keys_that_nobody_sees(case: Case, target: Target, seed: int) -> None:
    """Same bits as without the NaNs, forward and backward, and gradient 0 for those keys.

    sm80's backward reads keys that only the mask hides, so there the forward alone is held; sm90
    reads them in the forward too. Kernels read every key that a bias hides: 0 times NaN is NaN.
    """
    if case.bias and target.backend != "aten":
        pytest.skip("kernels read what a bias hides")
    problem = Problem(case, seed, target.device)
    expected = expect(problem)
    unseen = (expected.conditions["dv"] == 0).all(-1).all(-1)
    assert 0 < unseen.sum() < unseen.numel()
    clean = run(problem, target.backend, deterministic=True)
    problem.k[unseen] = math.nan
    problem.v[unseen] = math.nan
    dirty = run(problem, target.backend, deterministic=True)
    masked = case.window != (-1, -1) or (case.causal and case.top_left)
    forward_only = masked and target.backend != "aten"
    for name in ("out", "lse") if forward_only else ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(dirty[name], clean[name]), name
    if not forward_only:
        compare(problem, dirty, expected)


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_infinite_key_without_weight(dtype: str, target: Target, seed: int) -> None:
    """Its score is -inf, and so P and dS are 0: infinity times 0 reaches one column of dQ."""
    problem = Problem(Case(dtype=dtype, seqlen_q=200, causal=True, d=16), seed, target.device)
    problem.q[..., 5] = -0.1 - problem.q[..., 5].abs()
    problem.k[:, 75, :, 5] = 1e30
    clean = run(problem, target.backend)
    problem.k[:, 75, :, 5] = torch.inf
    dirty = run(problem, target.backend)
    hit = torch.zeros_like(clean["dq"], dtype=torch.bool)
    hit[:, 75:, :, 5] = True
    assert torch.equal(dirty["dq"].isnan(), hit)
    assert torch.equal(dirty["dq"][~hit], clean["dq"][~hit])
    for name in ("out", "lse", "dk", "dv"):
        assert torch.equal(dirty[name], clean[name]), name


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_infinite_gradient_of_a_row(dtype: str, target: Target, seed: int) -> None:
    """Both dP and delta are inf, and their difference is NaN, for keys that the row sees alone."""
    problem = Problem(Case(dtype=dtype, seqlen_q=200, causal=True, d=16), seed, target.device)
    problem.v[..., 5] = problem.v[..., 5].abs() + 0.1
    clean = run(problem, target.backend)
    problem.dout[0, 150, 1, 5] = torch.inf
    dirty = run(problem, target.backend)
    hit = {name: torch.zeros_like(clean[name], dtype=torch.bool) for name in ("dq", "dk", "dv")}
    hit["dq"][0, 150, 1] = True
    hit["dk"][0, :151, 0] = True
    hit["dv"][0, :151, 0, 5] = True
    for name, places in hit.items():
        wrong = dirty[name].isposinf() if name == "dv" else dirty[name].isnan()
        assert torch.equal(wrong, places), name
        assert torch.equal(dirty[name][~places], clean[name][~places]), name


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_in_use_propagates(where: str, target: Target, seed: int) -> None:
    """A NaN reaches the rows and heads that use it and no other."""
    case = Case(dtype="fp16", seqlen_q=70, seqlen_k=100, heads_q=4, heads_kv=2)
    problem = Problem(case, seed, target.device)
    clean = run(problem, target.backend, backward=False)["out"]
    hit = torch.zeros(clean.shape, dtype=torch.bool)
    if where == "q":
        problem.q[1, 33, 2, 5] = math.nan
        hit[1, 33, 2] = True
    elif where == "k":
        problem.k[1, 50, 1, 5] = math.nan
        hit[1, :, 2:] = True
    else:
        problem.v[1, 50, 1, 5] = math.nan
        hit[1, :, 2:, 5] = True
    out = run(problem, target.backend, backward=False)["out"]
    assert torch.equal(out.isnan().cpu(), hit)
    assert torch.equal(out[~hit.to(out.device)], clean[~hit.to(out.device)])


@each_target(*ATTENTION_TARGETS)
def test_nan_key_below_the_diagonal(target: Target, seed: int) -> None:
    """Rows above the diagonal of a NaN key keep their bits, the others are NaN."""
    problem = Problem(Case(dtype="bf16", seqlen_q=130, causal=True, batch=1), seed, target.device)
    clean = run(problem, target.backend, backward=False)["out"]
    problem.k[:, 75] = math.nan
    out = run(problem, target.backend, backward=False)["out"]
    assert torch.equal(out[:, :75], clean[:, :75])
    assert out[:, 75:].isnan().all()
