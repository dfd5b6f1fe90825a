"""fp32 on kernels: exact to fp32's rounding, and rounded to TF32 only where torch allows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cases import (
    ATEN_CPU,
    DECODE_CUDA,
    SM80,
    Case,
    Problem,
    Target,
    each_case,
    each_target,
    expect,
    run,
)
from numerics import rms_error
from test_decode import DecodeCase, DecodeProblem, each_decode
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn
from flash_attn.reference import attention_ref

NAMES = ("out", "dq", "dk", "dv")
# One product of numbers rounded to TF32 gives 3e-4.
EXACT, TF32 = 1e-6, (5e-5, 2e-3)

CASES = [
    Case(seqlen_q=300, seqlen_k=428, d=64, causal=True),
    Case(seqlen_q=333, d=128, window=(100, 20), deterministic=True),
    Case(seqlen_q=257, seqlen_k=300, d=256, d_v=200, causal=True),
    Case(lengths_q=(200, 70, 130), lengths_k=(190, 140, 130), d=72, heads_kv=1, causal=True),
    Case(seqlen_q=200, seqlen_k=260, d=64, bias="head", causal=True),
    Case(seqlen_q=200, seqlen_k=260, d=128, bias="batch"),
    Case(seqlen_q=130, seqlen_k=150, d=128, bias="full"),
    Case(seqlen_q=130, seqlen_k=150, d=64, dropout_p=0.2, causal=True, softcap=20.0),
    Case(seqlen_q=90, seqlen_k=210, d=128, dropout_p=0.2, heads_kv=2, deterministic=True),
    Case(seqlen_q=130, seqlen_k=150, d=256, dropout_p=0.2, alibi="head"),
    Case(seqlen_q=257, seqlen_k=300, d=256, d_v=200, causal=True, deterministic=True),
    Case(seqlen_q=100, seqlen_k=75, d=192, softcap=20.0, deterministic=True),
    Case(seqlen_q=130, seqlen_k=150, d=256, bias="head", causal=True),
]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def errors(problem: Problem, target: Target) -> dict[str, float]:
    expected = expect(problem).values
    results = run(problem, target.backend)
    names = NAMES if problem.attn_bias is None else (*NAMES, "dbias")
    return {name: rms_error(results[name].cpu(), expected[name]) for name in names}


@each_case(CASES, [ATEN_CPU, SM80])
def test_exact_to_the_rounding_of_fp32(case: Case, target: Target, seed: int) -> None:
    with matmul_precision("highest"):
        found = errors(Problem(case, seed, target.device), target)
    assert max(found.values()) <= EXACT, found


@each_decode(
    [
        DecodeCase(dtype="fp32", capacity=300, lengths=(0, 77, 300), d=d, **form)
        for d in (64, 128, 192, 256)
        for form in (
            dict(heads_q=8),
            dict(heads_q=6, seqlen_q=3, num_splits=5, page_size=16),
            dict(heads_q=40, softcap=4.0, sink=True),
            dict(seqlen_q=70, window=(100, 20)),
        )
    ],
    [DECODE_CUDA, SM80],
)
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_decode_is_exact_whatever_torch_allows(
    case: DecodeCase, precision: str, target: Target, seed: int
) -> None:
    """Reading the cache is what takes the time."""
    problem = DecodeProblem(case, seed, target.device)
    with matmul_precision(precision):
        out, _ = problem.run(target.backend)
    assert rms_error(out.cpu(), attention_ref(**problem.reference())[0]) <= EXACT


@each_case(CASES, [SM80])
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_tf32_where_torch_allows_it(case: Case, precision: str, target: Target, seed: int) -> None:
    with matmul_precision(precision):
        found = errors(Problem(case, seed, target.device), target)
    assert all(TF32[0] <= error <= TF32[1] for error in found.values()), found


@each_target(SM80)
def test_the_switch_of_the_matmul_backend(target: Target, seed: int) -> None:
    """It is read anew in each call, in the backward too."""
    problem = Problem(Case(seqlen_q=200, d=64), seed, target.device)
    expected = expect(problem).values
    q, k, v = (x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = False
        with flash_attn.use_backend(target.backend):
            out = flash_attn.flash_attn_func(q, k, v)
        matmul.allow_tf32 = True
        dv = torch.autograd.grad(out, v, problem.dout)[0]
    finally:
        matmul.allow_tf32 = before
    assert rms_error(out.detach().cpu(), expected["out"]) <= EXACT
    assert rms_error(dv.cpu(), expected["dv"]) >= TF32[0]


@each_target(SM80)
@pytest.mark.real_gpu
@pytest.mark.parametrize("q_scale", [1.0, 20.0])  # |S| up to 100 with the second
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_less_exact_than_torch(d: int, q_scale: float, target: Target, seed: int) -> None:
    problem = Problem(Case(seqlen_q=512, d=d, heads_kv=4, causal=True), seed, target.device)
    problem.q *= q_scale
    with matmul_precision("highest"):
        ours = errors(problem, target)
        inputs = [
            x.transpose(1, 2).detach().requires_grad_() for x in (problem.q, problem.k, problem.v)
        ]
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        gradients = torch.autograd.grad(out, inputs, problem.dout.transpose(1, 2))
    expected = expect(problem).values
    for name, theirs in zip(NAMES, (out.detach(), *gradients), strict=True):
        error = rms_error(theirs.transpose(1, 2).cpu(), expected[name])
        assert ours[name] <= error, f"{name}: {ours[name]:.2g}, torch {error:.2g}"
