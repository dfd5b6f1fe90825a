"""return_max_logits: the largest score of each head that any query sees, whatever else is asked."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    DECODE_CUDA,
    OP_TARGETS,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    each_target,
    expect,
    op_arguments,
    param,
)
from numerics import assert_close, assert_lse_close
from poison import Guarded, dirty_allocator
from test_decode import DecodeCase, DecodeProblem, each_decode
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn
from flash_attn.reference import max_logits_ref

# A sum of d products in fp32, in another order.
RELATIVE, ABSOLUTE = 1e-5, 1e-6

CASES = [
    Case(dtype="bf16", seqlen_q=333, d=64, causal=True),
    Case(dtype="fp16", seqlen_q=300, seqlen_k=428, d=128, window=(100, 20)),
    Case(dtype="bf16", seqlen_q=33, seqlen_k=1000, d=128, causal=True, spread="wide"),
    Case(dtype="bf16", seqlen_q=700, d=192, d_v=128, causal=True),
    Case(dtype="bf16", seqlen_q=257, seqlen_k=300, d=256, d_v=200),
    Case(dtype="fp16", seqlen_q=200, d=320, causal=True),
    Case(dtype="fp32", seqlen_q=130, seqlen_k=150, d=72, causal=True, top_left=True),
    Case(dtype="fp64", seqlen_q=130, seqlen_k=150, d=32, causal=True),
    Case(
        dtype="bf16", lengths_q=(200, 0, 70, 130), lengths_k=(190, 9, 0, 131), tail=3, causal=True
    ),
    Case(
        dtype="bf16", batch=3, seqlen_q=200, seqused_q=(200, 17, 0), seqused_k=(5, 200, 90), d=128
    ),
    Case(dtype="fp16", batch=2, seqlen_q=100, seqlen_k=300, leftpad_k=(7, 190), causal=True),
    Case(dtype="bf16", seqlen_q=200, heads_q=6, heads_kv=1, sink=True),
    Case(dtype="bf16", seqlen_q=200, softmax_scale=0.3, d=128),
    Case(dtype="fp16", seqlen_q=200, dropout_p=0.3, causal=True),
    Case(dtype="bf16", seqlen_q=200, softcap=2.0, causal=True),
    Case(dtype="bf16", seqlen_q=200, alibi="head", causal=True),
    Case(dtype="bf16", seqlen_q=100, seqlen_k=130, bias="inf"),
    Case(dtype="bf16", seqlen_q=100, seqlen_k=130, bias="padding", softcap=3.0),
]


def serves(target: Target, case: Case) -> bool:
    """What can_use says."""
    terms = case.softcap or case.alibi or case.bias
    refused = {SM80.backend: terms, SM90.backend: terms or case.dropout_p}
    return case.served_by(target.backend) and not refused.get(target.backend)


def largest(problem: Problem) -> torch.Tensor:
    c = problem.case
    given = {
        name: x.cpu()
        for name, x in (problem.float_tensors() | problem.index_tensors()).items()
        if name != "v"
    }
    return max_logits_ref(
        **given,
        dropout_p=c.dropout_p,
        rng_state=problem.rng,
        softmax_scale=c.softmax_scale,
        causal=c.causal,
        window_size=c.window,
        causal_alignment="top-left" if c.top_left else "bottom-right",
        softcap=c.softcap,
    )


def compare(max_logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    fp64 = dtype == torch.float64
    assert max_logits.dtype == (torch.float64 if fp64 else torch.float32)
    relative, absolute = (1e-12, 1e-12) if fp64 else (RELATIVE, ABSOLUTE)
    torch.testing.assert_close(max_logits.cpu().double(), expected, rtol=relative, atol=absolute)


def run(problem: Problem, backend: str) -> list[torch.Tensor]:
    """out, softmax_lse and max_logits of a poisoned, guarded call."""
    given = problem.float_tensors() | problem.index_tensors()
    guards = {name: Guarded(x) for name, x in given.items()}
    tensors = {name: guard.tensor for name, guard in guards.items()}
    with dirty_allocator(problem.device):
        out, lse, _, max_logits = torch.ops.flash_attn.fwd(
            **op_arguments(problem) | tensors, return_max_logits=True, backend=backend
        )
    for name, guard in guards.items():
        guard.assert_untouched(name)
    return [out, lse, max_logits]


@pytest.mark.parametrize(
    "case, target", [param(c, t) for c in CASES for t in OP_TARGETS if serves(t, c)]
)
def test_largest_logits(case: Case, target: Target, seed: int) -> None:
    check_logits(case, target, seed)


def check_logits(case: Case, target: Target, seed: int) -> None:
    """They are the reference's, and so are the call's other results."""
    problem = Problem(case, seed, target.device)
    out, lse, max_logits = run(problem, target.backend)
    expected = expect(problem, backward=False)
    compare(max_logits, largest(problem), problem.q.dtype)
    score = expected.largest_score
    wanted, condition = expected.values["out"], expected.conditions["out"]
    assert_close("out", out, wanted, condition, problem.q.dtype, largest_score=score)
    assert_lse_close(lse, expected.values["lse"], score)


SHAPES = [(64, 64), (128, 128), (192, 128), (256, 256)]


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, d_v", SHAPES)
@pytest.mark.parametrize("form", ["rising", "falling", "equal", "negative", "one"])
def test_records(form: str, d: int, d_v: int, causal: bool, target: Target, seed: int) -> None:
    """The largest score moves in every block, or ties, or comes once, among the first keys."""
    case = Case(dtype="bf16", batch=1, seqlen_q=777, d=d, d_v=d_v, causal=causal)
    problem = Problem(case, seed, target.device)
    ramp = torch.linspace(0.25, 4, 777, device=target.device)[:, None, None].to(torch.bfloat16)
    q, k = problem.q, problem.k
    if form in ("rising", "falling"):
        problem.q, problem.k = q.abs(), k.abs() * (ramp if form == "rising" else ramp.flip(0))
    elif form == "equal":
        problem.q, problem.k = torch.ones_like(q), torch.full_like(k, 0.125)
    elif form == "negative":
        problem.q, problem.k = q.abs() + 0.5, -k.abs() - 0.5
    else:
        q[0, -1] = 2 * k[0, 0].repeat_interleave(2, 0)
    out, lse, max_logits = run(problem, target.backend)
    compare(max_logits, largest(problem), q.dtype)
    expected = expect(problem, backward=False)
    assert_lse_close(lse, expected.values["lse"], expected.largest_score)


DECODE_CASES = [
    DecodeCase(),
    DecodeCase(seqlen_q=5, lengths=(199, 128, 2), dtype="fp16", window=(40, 0)),
    DecodeCase(capacity=1000, lengths=(1000, 0, 77), d=128, num_splits=7),
    DecodeCase(capacity=900, lengths=(900, 3, 77), page_size=61, d=128, heads_q=8, heads_kv=1),
    DecodeCase(capacity=300, page_size=16, d=96, sink=True, num_splits=3),
    DecodeCase(capacity=300, d=320, dtype="fp16", seqlen_q=2),
    DecodeCase(seqlen_q=40, capacity=300, d=128, causal=False),
    DecodeCase(softcap=2.0, alibi=True),
]
DECODING = (ATEN_CPU, ATEN_CUDA, DECODE_CUDA)


@each_decode([c for c in DECODE_CASES if not c.alibi], DECODING, marks=[pytest.mark.sanitize])
def test_decode(case: DecodeCase, target: Target, seed: int) -> None:
    check_decode(case, target, seed)


@each_decode([c for c in DECODE_CASES if c.alibi], (ATEN_CPU, ATEN_CUDA))
def test_decode_with_score_terms(case: DecodeCase, target: Target, seed: int) -> None:
    check_decode(case, target, seed)


def check_decode(case: DecodeCase, target: Target, seed: int) -> None:
    problem = DecodeProblem(case, seed, target.device)
    out, lse, max_logits = problem.run(target.backend, return_max_logits=True)
    problem.compare(out, lse)
    expected = max_logits_ref(
        problem.q.cpu(),
        problem.k.cpu(),
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        alibi_slopes=None if problem.slopes is None else problem.slopes.cpu(),
        seqused_k=None if problem.lengths is None else problem.lengths.cpu(),
    )
    compare(max_logits, expected, problem.q.dtype)


@each_target(*DECODING)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_caches_of_8_bits(dtype: torch.dtype, target: Target, seed: int) -> None:
    torch.manual_seed(seed)
    q = torch.randn(2, 1, 4, 64, dtype=torch.bfloat16)
    stored = (torch.randn(2, 100, 2, 64) * (1 if dtype.is_floating_point else 40)).to(dtype)
    scale = torch.tensor([0.5, 0.03])
    on_device = [x.to(target.device) for x in (q, stored, stored)]
    support = flash_attn.can_use(*on_device, op="decode", return_max_logits=True)
    reasons = "; ".join(support.reasons.get(target.backend, []))
    if "a cache of fp8 needs" in reasons:  # of code for 8.0
        pytest.skip(reasons)
    with flash_attn.use_backend(target.backend):
        _, max_logits = flash_attn.flash_decode_func(
            *on_device,
            k_descale=scale.to(target.device),
            v_descale=scale.to(target.device),
            return_max_logits=True,
        )
    k = stored.double() * scale[:, None]
    compare(max_logits, max_logits_ref(q.double(), k, causal=True), q.dtype)


@each_target(*DECODING)
def test_after_an_append(target: Target, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 3, 2, 64, dtype=torch.bfloat16).to(target.device) for _ in range(3))
    caches = torch.randn(2, 2, 50, 2, 64, dtype=torch.bfloat16).to(target.device)
    with flash_attn.use_backend(target.backend):
        out, lse, max_logits = flash_attn.flash_attn_with_kvcache(
            q,
            *caches,
            3 * k,
            v,
            cache_seqlens=20,
            causal=True,
            return_softmax_lse=True,
            return_max_logits=True,
        )
    seen = torch.cat([caches[0, :, :20], 3 * k], 1)
    assert out.shape == q.shape and lse.shape == (2, 2, 3)
    compare(max_logits, max_logits_ref(q.cpu(), seen.cpu(), causal=True), q.dtype)


@each_target(*OP_TARGETS)
def test_what_comes_back(target: Target) -> None:
    """In which order; and that neither gradients nor other results depend on it."""
    q, k, v = (
        torch.randn(1, 70, 2, 64, dtype=torch.bfloat16).to(target.device).requires_grad_()
        for _ in range(3)
    )
    with flash_attn.use_backend(target.backend):
        out, max_logits = flash_attn.flash_attn_func(q, k, v, return_max_logits=True)
        whole = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, return_max_logits=True)
        plain = flash_attn.flash_attn_func(q, k, v)
    assert max_logits.shape == (2,) and not max_logits.requires_grad
    assert len(whole) == 4 and torch.equal(whole[3], max_logits) and whole[1].shape == (1, 2, 70)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = torch.autograd.grad(plain.square().sum(), (q, k, v))
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2.0**-6, atol=2.0**-6)


@each_target(*OP_TARGETS)
def test_nothing_to_see(target: Target) -> None:
    q = torch.randn(1, 5, 2, 64, dtype=torch.bfloat16).to(target.device)
    for k in (q[:, :0], torch.full_like(q, math.nan)):
        with flash_attn.use_backend(target.backend):
            _, max_logits = flash_attn.flash_attn_func(q, k, k, return_max_logits=True)
        assert max_logits.tolist() == [-math.inf] * 2


@each_target(*OP_TARGETS)
def test_compiled(target: Target) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_attn.flash_attn_func(q, q, q, causal=True, return_max_logits=True)

    q = torch.randn(2, 90, 2, 64, dtype=torch.bfloat16).to(target.device)
    with flash_attn.use_backend(target.backend):
        _, max_logits = call(q)
    compare(max_logits, max_logits_ref(q.cpu(), q.cpu(), causal=True), q.dtype)


def test_without_it_nothing_is_kept() -> None:
    q = torch.randn(1, 5, 2, 64)
    arguments = op_arguments(Problem(Case(seqlen_q=5), 0, "cpu"))
    *_, max_logits = torch.ops.flash_attn.fwd(q, q, q, **arguments)
    assert max_logits.shape == (0,)


def test_the_form_under_tracing() -> None:
    """One number for each query head, of which there are as many as of nothing else here."""
    with FakeTensorMode():
        q, k = torch.empty(2, 5, 4, 16), torch.empty(2, 7, 1, 16)
        *_, max_logits = flash_attn.flash_attn_func(q, k, k, return_max_logits=True)
    assert max_logits.shape == (4,)
