"""What must hold without any reference, at shapes of any size: algebra of attention, and equal
bits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    BITWISE_TARGETS,
    DECODE_CUDA,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    each_case,
    each_target,
    run,
)
from einops import rearrange, repeat
from numerics import UNIT_ROUNDOFF, assert_close

import flash_attn

BASE = Case(batch=3, seqlen_q=130, seqlen_k=200, dtype="bf16", causal=True, d=64)
VARIANTS = [
    BASE,
    BASE.with_(dtype="fp16", causal=False, d=128, heads_q=6),
    BASE.with_(seqlen_q=200, window=(70, 0), causal=False),
    BASE.with_(dtype="fp16", d=256, d_v=64, seqlen_q=65),
    BASE.with_(seqlen_q=300, seqlen_k=400),  # blocks enough for the order of their sums to show
]


@each_case(VARIANTS)
def test_constant_values(case: Case, target: Target, seed: int) -> None:
    """V = 1 everywhere: the weights of a row add up to 1."""
    problem = Problem(case, seed, target.device)
    problem.v = torch.ones_like(problem.v)
    results = run(problem, target.backend, backward=False)
    out = results["out"].double()
    has_keys = ~results["lse"].isneginf().transpose(1, 2)
    error = (out - has_keys[..., None].double()).abs().max()
    assert error <= 1.5 * UNIT_ROUNDOFF[problem.q.dtype]


@each_case([case.with_(seqlen_k=32, d_v=32) for case in VARIANTS[:2]])
def test_one_hot_values_show_the_weights(case: Case, target: Target, seed: int) -> None:
    """V = identity: the output is P. It is positive where the mask lets through and 0 elsewhere."""
    problem = Problem(case.with_(seqlen_q=32), seed, target.device)
    eye = torch.eye(32, device=target.device, dtype=problem.v.dtype)
    problem.v = repeat(eye, "k d -> b k h d", b=3, h=case.heads_kv).contiguous()
    out = run(problem, target.backend, backward=False)["out"]
    weights = rearrange(out, "b q h k -> b h q k")
    seen = torch.ones(32, 32, dtype=torch.bool, device=target.device)
    seen = seen.tril() if case.causal else seen
    assert torch.equal(weights > 0, seen.expand_as(weights))
    q, k = (
        problem.q.double(),
        problem.k.double().repeat_interleave(case.heads_q // case.heads_kv, 2),
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * case.d**-0.5
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    unit = 2 * UNIT_ROUNDOFF[problem.q.dtype]
    assert ((weights - expected).abs() <= unit * (expected + 2.0**-14)).all()


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_exact_average(dtype: str, target: Target, seed: int) -> None:
    """Q = 0 and small integers in V, a power of two of keys: the mean, exactly."""
    problem = Problem(Case(dtype=dtype, seqlen_q=70, seqlen_k=256, d=64), seed, target.device)
    problem.q = torch.zeros_like(problem.q)
    problem.v = torch.randint(-1, 2, problem.v.shape, device=target.device).to(problem.v.dtype)
    results = run(problem, target.backend, backward=False)
    mean = problem.v.double().mean(1, keepdim=True).repeat_interleave(2, 2)
    assert torch.equal(results["out"], mean.to(problem.v.dtype).expand_as(results["out"]))
    assert (results["lse"] - math.log(256)).abs().max() <= 1e-6


@each_target(*ATTENTION_TARGETS)
def test_gradient_of_v_conserves_dout(target: Target, seed: int) -> None:
    """Every row's weights add up to 1: the sum of dV over keys is the sum of dO over queries."""
    problem = Problem(
        Case(dtype="bf16", seqlen_q=200, seqlen_k=300, causal=True), seed, target.device
    )
    dv = run(problem, target.backend)["dv"].double().sum(1)
    dout = rearrange(problem.dout.double(), "b q (h g) d -> b (q g) h d", g=2).sum(1)
    assert (dv - dout).abs().max() <= 6 * UNIT_ROUNDOFF[torch.bfloat16] * 400**0.5


@each_target(*ATTENTION_TARGETS)
def test_constant_keys_give_no_gradient_to_q(target: Target, seed: int) -> None:
    problem = Problem(Case(dtype="bf16", seqlen_q=130, seqlen_k=130), seed, target.device)
    problem.k = problem.k[:, :1].expand_as(problem.k).contiguous()
    results = run(problem, target.backend)
    weight, scale = 1.0 / 130, 64**-0.5
    group = problem.v.repeat_interleave(2, 2).double()
    dp = torch.einsum("bqhd,bkhd->bhqk", problem.dout.double(), group)
    spread = scale * weight * (dp - dp.mean(-1, keepdim=True)).abs().sum(-1)
    row = (problem.dout.double() * results["out"].double()).abs().sum(-1).transpose(1, 2)
    condition = rearrange(spread + scale * row, "b h q -> b q h 1")
    condition = condition * problem.k[:, :1].repeat_interleave(2, 2).double().abs()
    assert_close("dq", results["dq"], torch.zeros_like(condition), condition, torch.bfloat16)


@each_target(*ATTENTION_TARGETS)
def test_shifted_keys_move_the_lse_alone(target: Target, seed: int) -> None:
    """k + c adds scale q.c to every score of a row: the LSE moves by it, the weights do not."""
    problem = Problem(Case(dtype="bf16", seqlen_q=66, seqlen_k=100, d=64), seed, target.device)
    steps = (problem.k.float() * 8).round().clamp(-24, 24) / 8  # sums below are exact in 8 bits
    problem.k = steps.to(torch.bfloat16)
    before = run(problem, target.backend, backward=False)
    shift = torch.randint(-4, 5, (64,), device=target.device).to(torch.bfloat16)
    shifted = (problem.k + shift).float()
    assert torch.equal(shifted, problem.k.float() + shift.float())
    problem.k = shifted.to(torch.bfloat16)
    after = run(problem, target.backend, backward=False)
    moved = torch.einsum("bqhd,d->bhq", problem.q.float(), shift.float()) * 64**-0.5
    torch.testing.assert_close(after["lse"], before["lse"] + moved, rtol=0, atol=1e-4)
    assert (after["out"].float() - before["out"].float()).abs().max() <= 2.0**-6


@each_case([VARIANTS[0].with_(causal=False), VARIANTS[1]])
def test_order_of_keys(case: Case, target: Target, seed: int) -> None:
    """Attention without a mask is blind to the order of the keys."""
    problem = Problem(case, seed, target.device)
    before = run(problem, target.backend)
    order = torch.randperm(case.keys, generator=problem.generator)
    problem.k, problem.v = problem.k[:, order], problem.v[:, order]
    after = run(problem, target.backend)
    unit = UNIT_ROUNDOFF[problem.q.dtype]
    for name in ("out", "dq"):
        assert (after[name].double() - before[name].double()).abs().max() <= 4 * unit, name
    for name in ("dk", "dv"):
        difference = after[name].double() - before[name][:, order].double()
        assert difference.abs().max() <= 4 * unit * (1 + before[name].double().abs().max()), name


@each_case(VARIANTS)
def test_order_of_batch_and_heads(case: Case, target: Target, seed: int) -> None:
    """Bit for bit."""
    problem = Problem(case, seed, target.device)
    before = run(problem, target.backend, deterministic=True)
    group = case.heads_q // case.heads_kv

    def reorder(x: torch.Tensor, heads_per_kv: int) -> torch.Tensor:
        x = rearrange(x, "b s (h g) d -> b s h g d", g=heads_per_kv).flip(0, 2)
        return rearrange(x, "b s h g d -> b s (h g) d").contiguous()

    for name, per_kv in (("q", group), ("k", 1), ("v", 1), ("dout", group)):
        setattr(problem, name, reorder(getattr(problem, name), per_kv))
    after = run(problem, target.backend, deterministic=True)
    for name, per_kv in (("out", group), ("dq", group), ("dk", 1), ("dv", 1)):
        assert torch.equal(after[name], reorder(before[name], per_kv)), name


def check_a_sequence_alone(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    together = run(problem, target.backend, deterministic=True)
    alone = Problem(case.with_(batch=1), seed, target.device)
    for name in ("q", "k", "v", "dout"):
        setattr(alone, name, getattr(problem, name)[1:2].contiguous())
    results = run(alone, target.backend, deterministic=True)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(results[name], together[name][1:2]), name


@each_case(VARIANTS)
def test_a_sequence_alone_has_the_same_bits(case: Case, target: Target, seed: int) -> None:
    check_a_sequence_alone(case, target, seed)


@each_case(
    [BASE.with_(batch=17, seqlen_q=1600, seqlen_k=1600, heads_q=8, d=128)],
    [SM90],
    marks=[pytest.mark.real_gpu],
)
def test_a_sequence_alone_has_the_same_bits_in_many_tiles(
    case: Case, target: Target, seed: int
) -> None:
    check_a_sequence_alone(case, target, seed)


@each_target(*BITWISE_TARGETS)
@pytest.mark.parametrize("draw", range(4))
def test_a_varlen_sequence_does_not_depend_on_its_neighbours(
    draw: int, target: Target, seed: int
) -> None:
    """The first and the last sequence keep their bits while one between them grows over the tile
    edges."""
    rng = random.Random(seed)
    ends = [(rng.randint(1, 200), rng.randint(1, 200)) for _ in range(2)]

    def outcome(middle: int) -> list[torch.Tensor]:
        lengths_q, lengths_k = zip(ends[0], (middle, middle + 1), ends[1], strict=True)
        case = Case(lengths_q=lengths_q, lengths_k=lengths_k, dtype="bf16", causal=True, d=64)
        problem = Problem(case, seed, target.device)
        for i, name in enumerate(("q", "k", "v", "dout")):
            generator = torch.Generator().manual_seed(seed + i)
            x = getattr(problem, name)
            for rows in (slice(0, ends[0][i in (1, 2)]), slice(-ends[1][i in (1, 2)], None)):
                shape = x[rows].shape
                x[rows] = torch.randn(shape, generator=generator).to(x)
        results = run(problem, target.backend, deterministic=True)
        kept = []
        for name, side in (("out", 0), ("dq", 0), ("dk", 1), ("dv", 1)):
            kept += [results[name][: ends[0][side]], results[name][-ends[1][side] :]]
        return kept

    expected = outcome(1)
    for middle in (rng.choice([8, 9, 63, 64]), rng.choice([65, 127, 128]), rng.choice([129, 300])):
        for actual, e in zip(outcome(middle), expected, strict=True):
            assert torch.equal(actual, e), middle


@each_case(VARIANTS[:2])
def test_two_halves_of_the_keys_merge_by_their_lse(case: Case, target: Target, seed: int) -> None:
    case = case.with_(causal=False)
    problem = Problem(case, seed, target.device)
    whole = run(problem, target.backend, backward=False)
    halves = []
    for part in (slice(0, 77), slice(77, None)):
        half = Problem(case, seed, target.device)
        half.k, half.v = problem.k[:, part].contiguous(), problem.v[:, part].contiguous()
        half.max_k = half.k.size(1)
        halves.append(run(half, target.backend, backward=False))
    lses = torch.stack([half["lse"] for half in halves])
    torch.testing.assert_close(lses.logsumexp(0), whole["lse"], rtol=0, atol=2e-5)
    weights = rearrange((lses - lses.logsumexp(0)).exp(), "n b h q -> n b q h 1")
    merged = sum(w * half["out"].float() for w, half in zip(weights, halves, strict=True))
    unit = UNIT_ROUNDOFF[problem.q.dtype]
    size = sum(w * half["out"].float().abs() for w, half in zip(weights, halves, strict=True))
    assert ((merged - whole["out"].float()).abs() <= 3 * unit * (size + 1)).all()


@each_target(SM80, SM90)
def test_heads_that_do_not_fit_the_cache_together(target: Target, seed: int) -> None:
    """The scheduler takes them in sections, here one and two: bit for bit what each gives alone."""
    case = Case(batch=1, seqlen_q=130, seqlen_k=16384, d=256, dtype="bf16", causal=True)
    problem = Problem(case.with_(heads_q=3, heads_kv=3), seed, target.device)
    together = run(problem, target.backend, backward=False)
    for head in range(3):
        alone = Problem(case.with_(seqlen_k=1, heads_q=1, heads_kv=1), seed, target.device)
        one = slice(head, head + 1)
        alone.q, alone.k, alone.v = (x[:, :, one] for x in (problem.q, problem.k, problem.v))
        alone.max_k = problem.max_k
        results = run(alone, target.backend, backward=False)
        assert torch.equal(results["out"], together["out"][:, :, one])
        assert torch.equal(results["lse"], together["lse"][:, one])


TERMS_THAT_MATTER = {
    "causal": dict(causal=True),
    "window left": dict(window=(5, -1)),
    "window right": dict(window=(-1, 5)),
    "softmax_scale": dict(softmax_scale=0.3),
    "softcap": dict(softcap=2.0),
    "alibi": dict(alibi="head"),
    "bias": dict(bias="head"),
    "bool bias": dict(bias="bool"),
    "sink": dict(sink=True),
    "dropout": dict(dropout_p=0.2),
    "seqused_q": dict(seqused_q=(10, 20)),
    "seqused_k": dict(seqused_k=(10, 20)),
    "leftpad_k": dict(leftpad_k=(3, 7)),
}


@pytest.mark.parametrize("term", TERMS_THAT_MATTER)
@each_target(*ATTENTION_TARGETS)
def test_every_argument_changes_the_result(target: Target, term: str, seed: int) -> None:
    """None is accepted and ignored, neither forward nor backward."""
    plain = Case(seqlen_q=40, seqlen_k=50, dtype="fp16", d=32)
    case = plain.with_(**TERMS_THAT_MATTER[term])
    if not case.served_by(target.backend):
        pytest.skip(f"{target.backend} refuses it")
    changed = run(Problem(case, seed, target.device), target.backend)
    before = run(Problem(plain, seed, target.device), target.backend)
    for name in ("out", "dq", "dk", "dv"):
        assert not torch.equal(changed[name], before[name]), name


@pytest.mark.parametrize("term", ["causal", "window left", "window right", "alibi"])
@each_target(*ATTENTION_TARGETS)
def test_alignment_moves_causal_window_and_alibi(target: Target, term: str, seed: int) -> None:
    case = Case(seqlen_q=40, seqlen_k=50, dtype="fp16", d=32, **TERMS_THAT_MATTER[term])
    if not case.served_by(target.backend):
        pytest.skip(f"{target.backend} refuses it")
    one = run(Problem(case, seed, target.device), target.backend)
    other = run(Problem(case.with_(top_left=True), seed, target.device), target.backend)
    for name in ("out", "dq", "dk", "dv"):
        assert not torch.equal(one[name], other[name]), name


@each_target(ATEN_CPU, ATEN_CUDA, SM90, DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.parametrize("softcap", [1e30, 1e38, 1e300])
def test_a_softcap_far_above_all_scores_changes_nothing(softcap: float, target: Target) -> None:
    """Beyond the range of fp32, too."""
    dtype = torch.float32 if target.device == "cpu" else torch.bfloat16
    q, k, v = torch.randn(3, 2, 40, 2, 64, device=target.device, dtype=dtype)
    call = flash_attn.flash_decode_func if target == DECODE_CUDA else flash_attn.flash_attn_func
    with flash_attn.use_backend(target.backend):
        expected, out = call(q, k, v), call(q, k, v, softcap=softcap)
    # Another kernel than the one without a softcap, or other instructions of it.
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(out, expected, **close)
