"""return_max_logits: the largest score of each head that any query sees, whatever else is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from caches import CacheCase, each_cache
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
    use,
)
from cases import compare as compare_with_gradients
from cases import run as run_with_gradients
from numerics import assert_close, assert_lse_close
from poison import Guarded, dirty_allocator
from test_cache_forms import cache_cases
from test_cache_forms import check as check_cache
from test_decode import DecodeCase, DecodeProblem, each_decode
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn
from flash_attn.reference import attention_ref, max_logits_ref

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
    Case(dtype="fp16", seqlen_q=150, alibi="batch", softcap=5.0, dropout_p=0.2, sink=True, d=128),
    Case(dtype="fp16", seqlen_q=100, seqlen_k=300, d=192, d_v=128, softcap=1.0, window=(90, 3)),
    Case(dtype="bf16", seqlen_q=130, d=256, d_v=200, alibi="head", dropout_p=0.1),
    Case(dtype="fp16", seqlen_q=70, d=320, softcap=2.0, causal=True),
    Case(dtype="fp32", seqlen_q=70, d=72, softcap=2.0, alibi="head", dropout_p=0.3),
    Case(dtype="bf16", seqlen_q=33, d=20, d_v=12, softcap=2.0),
    Case(
        dtype="bf16",
        lengths_q=(200, 0, 70, 130),
        lengths_k=(190, 9, 0, 131),
        tail=3,
        softcap=2.0,
        alibi="batch",
        causal=True,
    ),
    Case(
        dtype="bf16",
        batch=3,
        seqlen_q=200,
        seqused_q=(200, 17, 0),
        seqused_k=(5, 200, 90),
        softcap=4.0,
    ),
    Case(
        dtype="fp16",
        batch=2,
        seqlen_q=100,
        seqlen_k=300,
        leftpad_k=(7, 190),
        alibi="head",
        dropout_p=0.2,
    ),
    Case(dtype="bf16", seqlen_q=100, seqlen_k=130, bias="inf"),
    Case(dtype="fp16", seqlen_q=100, seqlen_k=130, bias="inf", softcap=2.0, causal=True),
    Case(dtype="fp16", seqlen_q=100, d=128, bias="full", bias_fp32=True, alibi="head"),
    Case(dtype="bf16", seqlen_q=100, bias="key", dropout_p=0.2),
    Case(dtype="fp32", seqlen_q=70, bias="matrix"),
    Case(dtype="bf16", seqlen_q=70, d=320, bias="bool"),
    Case(dtype="bf16", seqlen_q=100, seqlen_k=130, bias="bool", dropout_p=0.2),
    Case(dtype="bf16", seqlen_q=100, seqlen_k=130, bias="padding", softcap=3.0),
    Case(dtype="bf16", lengths_q=(70, 130), lengths_k=(90, 131), bias="padding", softcap=3.0),
]
WITH_TERMS = [c for c in CASES if c.softcap or c.alibi or c.bias or c.dropout_p]


def serves(target: Target, case: Case) -> bool:
    """What can_use says."""
    # Of a varlen call with a mask of the keys, sm90 leaves only the sequences that lack some.
    refused = case.bias and not (case.is_varlen and case.bias == "padding")
    return case.served_by(target.backend) and not (target == SM90 and refused)


def each_served(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case, target", [param(c, t) for c in cases for t in OP_TARGETS if serves(t, c)]
    )


def largest(problem: Problem) -> torch.Tensor:
    c = problem.case
    given = {
        name: x.cpu()
        for name, x in (problem.float_tensors() | problem.index_tensors()).items()
        if name != "v"
    }
    return max_logits_ref(
        **given,
        max_seqlen_q=problem.max_q,
        max_seqlen_k=problem.max_k,
        dropout_p=c.dropout_p,
        rng_state=problem.rng,
        softmax_scale=c.softmax_scale,
        causal=c.causal,
        window_size=c.window,
        causal_alignment="top-left" if c.top_left else "bottom-right",
        softcap=c.softcap,
    )


def compare(
    max_logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, largest_score: float = 1.0
) -> None:
    """largest_score: of all, where the largest of few may be a sum in which little is left."""
    fp64 = dtype == torch.float64
    assert max_logits.dtype == (torch.float64 if fp64 else torch.float32)
    relative, absolute = (1e-12, 1e-12) if fp64 else (RELATIVE, ABSOLUTE)
    absolute *= max(largest_score, 1.0)
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


@each_served(CASES)
def test_largest_logits(case: Case, target: Target, seed: int) -> None:
    check_logits(case, target, seed)


@each_served(WITH_TERMS)
def test_other_results_beside_terms(case: Case, target: Target, seed: int) -> None:
    """They are the bits of a call that asks for nothing else: the same backend, the same mask of
    dropout."""
    problem = Problem(case, seed, target.device)
    given = op_arguments(problem) | problem.float_tensors() | problem.index_tensors()
    results = torch.ops.flash_attn.fwd(**given, return_max_logits=True, backend=target.backend)
    alone = torch.ops.flash_attn.fwd(**given, backend=target.backend)
    assert torch.equal(results[0], alone[0]) and torch.equal(results[1], alone[1])


@each_served([c for c in WITH_TERMS if c.gradients_served_by(SM90.backend)])
def test_gradients_beside_terms(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    results = run_with_gradients(problem, target.backend, return_max_logits=True)
    compare_with_gradients(problem, results, expect(problem))


@each_target(SM80, SM90, DECODE_CUDA)
@pytest.mark.parametrize(
    "terms", [{}, {"softcap": 2.0}, {"attn_bias": 0}, {"dropout_p": 0.1}], ids=str
)
def test_a_kernel_serves_it(terms: dict, target: Target) -> None:
    q = torch.empty(1, 70, 2, 64, dtype=torch.bfloat16, device=target.device)
    if "attn_bias" in terms:
        terms = {"attn_bias": torch.zeros(70, 70, device=target.device)}
    op = "decode" if target == DECODE_CUDA else "fwd"
    if op == "decode" and "dropout_p" in terms:
        pytest.skip("there is no dropout")
    support = flash_attn.can_use(q, q, q, op=op, return_max_logits=True, **terms)
    assert support.backend != "aten"
    has_reasons = bool(support.reasons.get(target.backend))
    assert has_reasons == (target == SM90 and "attn_bias" in terms)


def free_on_sm90(target: Target) -> AbstractContextManager:
    """Of calls with a bias: sm90 refuses them, if it has to serve them alone."""
    return nullcontext() if target == SM90 else use(target)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("form", ["expanded", "transposed", "one number", "finfo.min", "NaN"])
def test_biases(form: str, target: Target, seed: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 2, 60, 4, 64, dtype=torch.bfloat16).to(target.device)
    bias = torch.randn(2, 4, 60, 60)
    hidden = torch.rand(2, 1, 1, 60) < 0.5
    if form == "expanded":
        bias = bias[:, :1, :1].masked_fill(hidden, -torch.inf).expand(2, 4, 60, 60)
    elif form == "transposed":
        bias = bias.masked_fill(hidden, -torch.inf).mT
    elif form == "one number":
        bias = torch.tensor(-3.0)
    else:
        bias = bias.masked_fill(hidden, torch.finfo(bias.dtype).min if form != "NaN" else torch.nan)
    with free_on_sm90(target):
        _, max_logits = flash_attn.flash_attn_func(
            q, k, k, attn_bias=bias.to(target.device), return_max_logits=True
        )
    seen = bias.expand(2, 4, 60, 60) >= -(2**26)
    compare(max_logits, max_logits_ref(q.cpu(), k.cpu(), attn_bias=seen), q.dtype)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_masks_of_tiles(softcap: float, target: Target, seed: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 2, 300, 2, 64, dtype=torch.bfloat16).to(target.device)
    mask = flash_attn.masks.prefix_lm(70)
    with free_on_sm90(target):
        out, lse, _, max_logits = flash_attn.flash_attn_func(
            *(q, k, k),
            attn_bias=mask,
            softcap=softcap,
            return_attn_probs=True,
            return_max_logits=True,
        )
    at = torch.arange(300)
    options = dict(attn_bias=(at < 70) | (at <= at[:, None]), softcap=softcap)
    compare(max_logits, max_logits_ref(q.cpu(), k.cpu(), **options), q.dtype)
    expected, expected_lse, _ = attention_ref(q.cpu(), k.cpu(), k.cpu(), **options)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2.0**-6, atol=2.0**-6)
    assert_lse_close(lse, expected_lse, 60.0)


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
    DecodeCase(capacity=300, page_size=16, d=96, sink=True, softcap=2.0, num_splits=3),
    DecodeCase(capacity=300, d=320, dtype="fp16", seqlen_q=2, alibi=True),
    DecodeCase(capacity=300, dtype="fp32", seqlen_q=2, softcap=2.0),
    DecodeCase(seqlen_q=40, capacity=300, d=128, softcap=1.0, alibi=True),
]
DECODING = (ATEN_CPU, ATEN_CUDA, DECODE_CUDA)


@each_decode(DECODE_CASES, DECODING, marks=[pytest.mark.sanitize])
def test_decode(case: DecodeCase, target: Target, seed: int) -> None:
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


FORMS = dict(
    seqlen_q=[1, 1, 2, 5, 19],
    new=[0, 1, 3],
    capacity=[70, 33, 300],
    heads=[(4, 2), (6, 1), (3, 3), (40, 2)],
    d=[48, 64, 96, 128, 256],
    d_v=[None, None, 64],
    dtype=["bf16", "fp16", "fp32"],
    cache=["", "", "int8"],
    page_size=[0, 0, 3, 16],
    lengths=["tensor", "tensor", "int"],
    rows=[False, True],
    leftpad=[False, False, True],
    rotary=["", "", "halves"],
    causal=[True, True, False],
    window=[(-1, -1), (-1, -1), (40, 0)],
    softcap=[0.0, 4.0],
    alibi=[False, True],
    sink=[False, True],
    num_splits=[0, 0, 3],
    batch_invariant=[False, False, True],
    rotary_dim=[32, 16],
    descale=["head"],
)


@each_cache(
    cache_cases(24, 41, **FORMS)
    + cache_cases(16, 42, **FORMS | dict(bias=["same", "fp32", "bool"], bias_shape=["bhqk", "bk"]))
    + cache_cases(12, 43, **FORMS | dict(tree=["one", "each"]))
    + cache_cases(8, 44, **FORMS | dict(shared=[True], page_size=[16]))
    + [
        # Without terms, shared pages would be read once.
        CacheCase(shared=True, page_size=16, d=64, softcap=4.0, seqlen_q=2),
        CacheCase(shared=True, page_size=16, d=64, alibi=True, new=2, seqlen_q=2, rotary="halves"),
    ],
    DECODING,
)
def test_any_cache(case: CacheCase, target: Target, seed: int) -> None:
    """Appended to once, whatever the number of launches."""
    check_cache(case, target, seed, return_max_logits=True)


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
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_what_comes_back(softcap: float, target: Target) -> None:
    """In which order; and that neither gradients nor other results depend on it."""
    q, k, v = (
        torch.randn(1, 70, 2, 64, dtype=torch.bfloat16).to(target.device).requires_grad_()
        for _ in range(3)
    )
    with flash_attn.use_backend(target.backend):
        call = partial(flash_attn.flash_attn_func, q, k, v, softcap=softcap)
        out, max_logits = call(return_max_logits=True)
        whole = call(return_attn_probs=True, return_max_logits=True)
        plain = call()
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
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_compiled(softcap: float, target: Target) -> None:
    options = dict(causal=True, softcap=softcap, return_max_logits=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_attn.flash_attn_func(q, q, q, **options)

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
