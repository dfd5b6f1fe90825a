"""Extreme scores: what csrc/core/score_range.h says, in every dtype, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from cases import ATEN_CPU, ATEN_CUDA, DTYPES, Target, each_target, use

import flash_attn
from flash_attn.reference import attention_ref, attention_ref_grads

TARGETS = each_target(ATEN_CPU, ATEN_CUDA)
ROWS, KEYS, HEADS = 6, 7, 2
HIDING = {
    "fp32's": torch.finfo(torch.float32).min,
    "bf16's": torch.finfo(torch.bfloat16).min,
    "fp64's": torch.finfo(torch.float64).min,
    "the border": -2.359e38,
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


@pytest.mark.parametrize("value", HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@TARGETS
def test_a_mask_of_the_lowest_number_is_a_bool_mask(
    target: Target, dtype: torch.dtype, value: float
) -> None:
    tensors, hidden = inputs(target, dtype), hidden_keys().to(target.device)
    # fp16 has no such number, but a bias need not have q's dtype.
    wide = torch.float64 if value < torch.finfo(torch.float32).min else torch.float32
    bias = torch.zeros(ROWS, KEYS, device=target.device, dtype=torch.promote_types(dtype, wide))
    bias = bias.masked_fill(hidden, value)
    with use(target):
        found, expected = run(tensors, attn_bias=bias), run(tensors, attn_bias=~hidden)
    for a, e in zip(found, expected, strict=True):
        assert torch.equal(a, e)
    out, lse, dq, *_ = found
    assert not out[:, 0].any() and not dq[:, 0].any() and (lse[..., 0] == -math.inf).all()
    assert lse[..., 1:].isfinite().all()


@TARGETS
def test_a_nan_behind_such_a_mask_stays_there(target: Target) -> None:
    q, k, v = (x.detach() for x in inputs(target, torch.float32))
    bias = torch.zeros(ROWS, KEYS, device=target.device)
    bias[:, 2] = torch.finfo(torch.float32).min
    with use(target):
        expected = run([x.clone().requires_grad_() for x in (q, k, v)], attn_bias=bias)
        k[:, 2], v[:, 2] = math.nan, math.inf
        found = run([x.clone().requires_grad_() for x in (q, k, v)], attn_bias=bias)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e)


@TARGETS
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


# For all keys of row 2, or of one key of it.
EXTREMES = [-math.inf, -3e38, -2e38, -1e30, -1e9, 1e9, 1e30, 2e38, 3e38, math.inf]
OPTIONS = {f"softcap {x:g}": dict(softcap=x) for x in (5e-324, 1e-45, 1e-30, 1e30, 3e38, 1e308)}
for _x in EXTREMES:
    OPTIONS[f"sink {_x:g}"] = dict(learnable_sink=[_x, 0.5])
    OPTIONS[f"slope {_x:g}"] = dict(alibi_slopes=[_x, 0.5])
    OPTIONS[f"row {_x:g}"] = dict(attn_bias=[[0.0] * KEYS] * 2 + [[_x] * KEYS] + [[0.0] * KEYS] * 3)
    OPTIONS[f"key {_x:g}"] = dict(attn_bias=[[0.0, _x] + [0.0] * (KEYS - 2)])
OPTIONS["sink and key"] = dict(learnable_sink=[3e38, math.inf], attn_bias=[[3e38] * KEYS])
OPTIONS["slope and key"] = dict(alibi_slopes=[-math.inf, 3e38], attn_bias=[[-3e38] * KEYS])


# fp32 scores lose Q Kᵀ beside these, which the float64 reference still keeps.
COARSE = {f"{what} {x:g}" for what in ("row", "key", "slope") for x in (-1e9, 1e9)}
# And where two keys tie, an ulp decides.
COARSE.add("slope -1e+30")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@TARGETS
def test_extreme_terms_make_no_nan(target: Target, dtype: str, name: str) -> None:
    tensors = inputs(target, DTYPES[dtype])

    def value(option: str, x: object) -> object:
        if option == "softcap":
            return x
        slopes = option == "alibi_slopes"
        wide = torch.float64 if dtype == "fp64" and not slopes else torch.float32
        return torch.tensor(x, device=target.device, dtype=wide, requires_grad=not slopes)

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
    tolerance = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 0.05}[dtype]

    def close(a: torch.Tensor, e: torch.Tensor) -> None:
        torch.testing.assert_close(a.cpu().double(), e, atol=tolerance, rtol=tolerance)

    close(out, expected)
    close(lse, expected_lse)
    by_option = {"learnable_sink": ref.dsink, "attn_bias": ref.dbias}
    wanted = [ref.dq, ref.dk, ref.dv, *(by_option[n] for n in options if n in by_option)]
    for a, e in zip(gradients, wanted, strict=True):
        close(a, e)


@pytest.mark.parametrize("bias", [-1e9, -2e38, 1e9, 1e30])
@TARGETS
def test_a_query_whose_lse_is_too_coarse_gives_no_gradient(target: Target, bias: float) -> None:
    q, k, v = inputs(target, torch.float32)
    mask = torch.zeros(ROWS, KEYS, device=target.device)
    mask[2] = bias
    with use(target):
        out, lse, dq, dk, dv = run([q, k, v], attn_bias=mask)
        others = [x for x in range(ROWS) if x != 2]
        rest, _, dq_rest, dk_rest, dv_rest = run_rows(q, k, v, others)
    low, high = v.amin(1)[0], v.amax(1)[0]
    assert (out[0, 2] >= low - 1e-5).all() and (out[0, 2] <= high + 1e-5).all()
    assert not dq[0, 2].any() and lse[0, :, 2].isfinite().all()
    torch.testing.assert_close(out[:, others], rest)
    torch.testing.assert_close(dq[:, others], dq_rest)
    torch.testing.assert_close(dk, dk_rest)
    torch.testing.assert_close(dv, dv_rest)


def run_rows(q, k, v, rows: list[int]) -> list[torch.Tensor]:
    """run() of some queries alone, with the same gradient of out in them."""
    part = q.detach()[:, rows].requires_grad_()
    out, lse, _ = flash_attn.flash_attn_func(part, k, v, return_attn_probs=True)
    torch.manual_seed(2)
    dout = torch.randn(q.shape).to(out)[:, rows]
    return [out, lse, *torch.autograd.grad(out, (part, k, v), dout)]
