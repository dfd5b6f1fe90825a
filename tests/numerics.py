"""How close is close enough: one standard for every backend, against float64 on the stored inputs.

An attention output is a sum, so its error is measured against what was added up, not against the
sum: with u the unit roundoff of the dtype, the condition tensors B say how large the terms were
(B_O = P|V|, B_dV = P^T|dO|, ...: flash_attn.reference.condition_tensors).

    any input:
    comp  max |x - ref| / (u (|ref| + B) + eta (4 + rms B)); rounding theory says about 1

    N(0, 1) and N(0, 9) inputs:
    rms   ||x - ref|| / ||ref|| in units of u, of the whole tensor and of each head
    row   max over rows of rms(error) / (rms(ref) + kappa rms(B)) in units of u
    bias  |mean(error)| <= 6 rms(error) / sqrt(n): rounding is fair, truncation is not

eta is what an underflow of P or dS can cost. A P below the accumulator's normal range may count as
0: in dbias, which is dS, that costs as much of |dP - delta| besides, and in dK and dV what such P
add, of a key that no query sees more of. There fp16's subnormal P cost dV, and its subnormal dS
dK, what chance makes of their rounding. Positions of NaN and infinities, and zeros where nothing
was added up, are compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
# The smallest normal number of a backend's accumulator, in which it keeps P.
LEAST_NORMAL = {
    torch.bfloat16: 2.0**-126,
    torch.float16: 2.0**-126,
    torch.float32: 2.0**-126,
    torch.float64: 2.0**-1022,
}
# The smallest P or dS a backend can hold: fp16's last subnormal, else that.
UNDERFLOW = LEAST_NORMAL | {torch.float16: 2.0**-24}


@dataclass(frozen=True)
class Limits:
    comp: float
    rms: dict[str, float]  # by the spread of the inputs
    row: dict[str, float]
    row_floor: float = 0.0  # kappa


LIMITS_16_BIT = {
    "out": Limits(1.25, {"normal": 0.75, "wide": 0.75}, {"normal": 1.25, "wide": 1.25}, 0.01),
    "dv": Limits(1.5, {"normal": 0.8, "wide": 0.8}, {"normal": 2.0, "wide": 2.0}, 0.01),
    "dq": Limits(1.25, {"normal": 0.9, "wide": 1.8}, {"normal": 4.0, "wide": 8.0}, 0.05),
    "dk": Limits(1.25, {"normal": 0.9, "wide": 1.8}, {"normal": 4.0, "wide": 8.0}, 0.05),
    "dbias": Limits(1.5, {"normal": 0.9, "wide": 1.8}, {}),
    "dsink": Limits(1.5, {}, {}),
}
# fp32 and fp64 have no 16-bit operand to hide behind: 512 u covers the length of the sums and the
# exponential. A score s (and the LSE) is held to u |s|, which the exponential turns into a relative
# error of P.
COMP_WIDE_TYPES = 512.0
COMP_PER_SCORE = 16.0
RMS_WIDE_TYPES = {torch.float32: 1e-5, torch.float64: 1e-5 * 2.0**-29}
LSE_LIMITS = {torch.float32: (1e-5, 1e-6), torch.float64: (1e-5 * 2.0**-29, 1e-6 * 2.0**-29)}

# What chance adds up to of roundings whose squares, at their largest, sum to 1: their deviation is
# 3^-0.5, and a limit of 1.5 allows five of it.
CHANCE = 2.0

# Fewer numbers than this are too few for a statement about their distribution.
MIN_SAMPLES = 1024
MIN_ROW = 32


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def comp_error(
    actual: torch.Tensor,
    expected: torch.Tensor,
    condition: torch.Tensor,
    unit: float,
    underflow: float,
    besides: torch.Tensor | float = 0.0,
) -> float:
    """The largest error in units of what rounding may cost; `expected` and `condition` are
    float64."""
    if not actual.numel():
        return 0.0
    allowed = unit * (expected.abs() + condition) + underflow * (4 + rms(condition)) + besides
    error = (actual.double() - expected).abs()
    return torch.where(error == 0, 0.0, error / allowed).max().item()


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (
        torch.linalg.vector_norm(actual.double() - expected) / torch.linalg.vector_norm(expected)
    ).item()


def row_error(
    actual: torch.Tensor,
    expected: torch.Tensor,
    condition: torch.Tensor,
    floor: float,
    unit: float,
    underflow: float,
) -> float:
    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean(-1).sqrt()

    error = of_rows(actual.double() - expected)
    size = unit * (of_rows(expected) + floor * of_rows(condition)) + underflow * (
        4 + rms(condition)
    )
    return torch.where(error == 0, 0.0, error / size).max().item()


def assert_fair_rounding(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The mean signed error is what chance leaves of it."""
    error = actual.double() - expected
    mean, allowed = error.mean().abs().item(), 6 * rms(error) / math.sqrt(error.numel())
    assert mean <= allowed, f"{name}: mean error {mean:.3g}, chance explains {allowed:.3g}"


def assert_same_anomalies(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN, +inf and -inf stand at the same places."""
    for kind, is_kind in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = is_kind(actual) != is_kind(expected)
        assert not wrong.any(), (
            f"{name}: {kind} at {int(is_kind(actual).sum())} places, expected"
            f" {int(is_kind(expected).sum())}, first difference at {wrong.nonzero()[0].tolist()}"
        )


def assert_close(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    condition: torch.Tensor,
    dtype: torch.dtype,
    spread: str | None = None,
    largest_score: float = 0.0,
    besides: torch.Tensor | float = 0.0,
    few_rows: bool = True,
) -> None:
    """The standard above for one tensor.

    name: "out", "dq", "dk", "dv", "dbias" or "dsink". dtype: of the attention inputs. spread:
    "normal" or "wide" for N(0, 1) and N(0, 9) inputs, else only `comp` and the exact checks apply.
    largest_score: max |score|, whose rounding in the fp32 accumulator bounds what the exponential
    can give. besides: what more each element may be off by (underflow_of). few_rows: hold the worst
    row to `row`, too. A row of two or three keys comes close to it, so among very many rows or
    draws one exceeds it by chance.
    """
    actual, condition = actual.detach().to(expected.device), condition.to(expected.device)
    assert actual.shape == expected.shape, (
        f"{name}: shape {actual.shape}, expected {expected.shape}"
    )
    assert_same_anomalies(name, actual, expected)
    finite = torch.isfinite(expected)
    if not finite.all():
        actual, expected, condition = (
            torch.where(finite, x, 0) for x in (actual, expected, condition)
        )

    stray = (actual != 0) & (condition == 0) & (expected == 0)
    assert not stray.any(), (
        f"{name}: {int(stray.sum())} elements that nothing contributes to are not zero, first at"
        f" {stray.nonzero()[0].tolist()}"
    )

    unit = UNIT_ROUNDOFF[dtype]
    limits = LIMITS_16_BIT[name]
    wide_type = dtype in RMS_WIDE_TYPES
    comp_limit = max(COMP_WIDE_TYPES, COMP_PER_SCORE * largest_score) if wide_type else limits.comp
    score_unit = 0.0 if wide_type else UNIT_ROUNDOFF[torch.float32]
    comp = comp_error(
        actual,
        expected,
        condition,
        unit + score_unit * largest_score,
        UNDERFLOW[dtype],
        besides,
    )
    assert comp <= comp_limit, f"{name}: comp error {comp:.3f}, limit {comp_limit}"
    if spread is None or not expected.count_nonzero():
        return

    rms_limit = RMS_WIDE_TYPES[dtype] if wide_type else limits.rms.get(spread, math.inf) * unit
    parts = {name: (actual, expected)}
    if name in ("out", "dq", "dk", "dv"):
        for head in range(actual.size(-2)):
            parts[f"{name} head {head}"] = (actual[..., head, :], expected[..., head, :])
    for part, (x, ref) in parts.items():
        if ref.numel() >= MIN_SAMPLES and ref.count_nonzero():
            error = rms_error(x, ref)
            assert error <= rms_limit, (
                f"{part}: rms error {error / unit:.3f} u, limit {rms_limit / unit:.3f} u"
            )
    if few_rows and not wide_type and spread in limits.row and actual.size(-1) >= MIN_ROW:
        row = row_error(actual, expected, condition, limits.row_floor, unit, UNDERFLOW[dtype])
        assert row <= limits.row[spread], (
            f"{name}: worst row {row:.3f} u, limit {limits.row[spread]} u"
        )
    if not wide_type and actual.numel() >= MIN_SAMPLES:
        assert_fair_rounding(name, actual, expected)


def underflow_of(
    name: str, conditions: dict[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor | float:
    """What the underflow of single P costs each element of a result, for assert_close."""
    if name == "dbias":
        return LEAST_NORMAL[dtype] * conditions["dbias_per_p"]
    if name not in ("dk", "dv") or dtype == torch.float64:
        return 0.0
    flushed = conditions[f"{name}_of_flushed"]
    if dtype == torch.float16:
        return flushed + CHANCE * conditions[f"{name}_of_subnormals"]
    return flushed


def assert_rounded_otherwise(narrow: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> None:
    """dq, dk and dv in fp32 are what another call gives rounded to its dtype."""
    assert [x.dtype for x in wide] == [torch.float32] * 3
    assert [x.shape for x in wide] == [x.shape for x in narrow]
    for rounded, x in zip(narrow[1:], wide[1:], strict=True):
        assert torch.equal(x.to(rounded.dtype), rounded)
    # dq is a sum in any order, so two calls may differ in the last place.
    limit = max(torch.finfo(narrow[0].dtype).eps, 1e-6)
    assert narrow[0].count_nonzero() and rms_error(wide[0], narrow[0].double()) <= limit


def assert_lse_close(actual: torch.Tensor, expected: torch.Tensor, largest_score: float) -> None:
    """|error| <= 1e-5 + 1e-6 max |score| (fp32), and -inf exactly where a row has nothing to attend
    to."""
    actual = actual.detach().to(expected.device)
    assert actual.shape == expected.shape, f"lse: shape {actual.shape}, expected {expected.shape}"
    assert_same_anomalies("lse", actual, expected)
    absolute, relative = LSE_LIMITS[actual.dtype]
    limit = absolute + relative * largest_score
    difference = torch.where(torch.isfinite(expected), actual.double() - expected, 0.0)
    worst = difference.abs().max().item() if difference.numel() else 0.0
    assert worst <= limit, f"lse: error {worst:.3g}, limit {limit:.3g}"
