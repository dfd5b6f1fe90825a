"""Dropout: the mask is Philox of the element's place, bit for bit, on every backend and in every
tiling."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    Case,
    Problem,
    Target,
    check,
    each_case,
    each_target,
    run,
    use,
)
from philox import keep_mask, philox4x32

import flash_attn
from flash_attn.reference import philox_keep_mask

# The known answers that come with the authors' implementation (Random123, kat_vectors).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == words
    reference = flash_attn.reference.philox4x32(tuple(map(torch.tensor, counter)), key)
    assert tuple(int(word) for word in reference) == words


STATES = [(0, 0), (1, 2), (2**63 - 1, 2**40 + 5), (-1, -(2**62)), (1 << 32, 1 << 32)]


@pytest.mark.parametrize("state", STATES)
def test_the_reference_draws_the_same_mask(state: tuple[int, int]) -> None:
    ours = keep_mask(state, 0.3, range(3), 5, 17, 23)
    assert torch.equal(philox_keep_mask(state, 0.3, 3, 5, 17, 23), ours)


def sign_mask(problem: Problem, backend: str) -> torch.Tensor:
    """True where S_dmask says kept. Every probability is positive: no mask but dropout."""
    probs = run(problem, backend, backward=False, return_probs=True)["probs"].cpu()
    assert probs.abs().min() > 0
    return probs > 0


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (70, 131), (129, 66)])
def test_mask_bits(
    seqlen_q: int, seqlen_k: int, state: tuple[int, int], target: Target, seed: int
) -> None:
    case = Case(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dropout_p=0.3, d=16)
    problem = Problem(case, seed, target.device)
    problem.rng_state = torch.tensor(state, device=target.device)
    expected = keep_mask(state, 0.3, range(2), 4, seqlen_q, seqlen_k)
    assert torch.equal(sign_mask(problem, target.backend), expected)


@each_target(ATEN_CPU, ATEN_CUDA)
def test_mask_depends_on_the_place_alone(target: Target, seed: int) -> None:
    """Other data, dtypes, masks and lengths: the same bits at the same (batch, head, query,
    key)."""
    full = keep_mask((5, 6), 0.5, range(2), 4, 200, 200)
    for case in (
        Case(seqlen_q=200, seqlen_k=30, dropout_p=0.5, d=16),
        Case(seqlen_q=3, seqlen_k=200, dropout_p=0.5, dtype="bf16", d=80),
        Case(seqlen_q=64, seqlen_k=64, dropout_p=0.5, dtype="fp64", heads_kv=4),
    ):
        problem = Problem(case, seed, target.device)
        problem.rng_state = torch.tensor((5, 6), device=target.device)
        expected = full[:, :, : case.seqlen_q, : case.keys]
        assert torch.equal(sign_mask(problem, target.backend), expected)


@each_target(ATEN_CPU, ATEN_CUDA)
def test_varlen_mask_counts_inside_its_sequence(target: Target, seed: int) -> None:
    case = Case(lengths_q=(20, 0, 70), lengths_k=(33, 4, 65), dropout_p=0.4)
    problem = Problem(case, seed, target.device)
    probs = run(problem, target.backend, backward=False, return_probs=True)["probs"].cpu()
    for b, (n_q, n_k) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        expected = keep_mask(problem.rng, 0.4, b, 4, n_q, n_k)
        assert torch.equal(probs[b, :, :n_q, :n_k] > 0, expected)


def test_words_are_fair() -> None:
    """Kept fraction, and independence of batch, head, query, key, seed and offset neighbours: 6
    sigma."""
    n, p = 128, 0.17

    def draw(state: tuple[int, int]) -> torch.Tensor:
        return keep_mask(state, p, range(4), 8, n, n).double()

    base = draw((7, 9))
    count = base.numel()
    sigma = math.sqrt(p * (1 - p) / count)
    assert abs(base.mean() - (1 - p)) < 6 * sigma
    pairs = [(base, draw((8, 9))), (base, draw((7, 10)))]
    pairs += [
        (base.narrow(d, 0, base.size(d) - 1), base.narrow(d, 1, base.size(d) - 1)) for d in range(4)
    ]
    for a, b in pairs:
        correlation = ((a - (1 - p)) * (b - (1 - p))).mean() / (p * (1 - p))
        assert abs(correlation) < 6 / math.sqrt(a.numel())


@each_case(
    [
        Case(dropout_p=p, dtype=dtype, seqlen_q=70, seqlen_k=90, causal=True, lse_grad=True)
        for p in (1e-6, 0.1, 0.83, 0.999)
        for dtype in ("fp32", "bf16")
    ],
    [ATEN_CPU, ATEN_CUDA],
)
def test_forward_and_backward_use_one_mask(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_target(ATEN_CPU, ATEN_CUDA)
def test_lse_ignores_dropout(target: Target, seed: int) -> None:
    case = Case(dropout_p=0.5)
    dropped = run(Problem(case, seed, target.device), target.backend, backward=False)
    plain = run(
        Problem(case.with_(dropout_p=0.0), seed, target.device), target.backend, backward=False
    )
    assert torch.equal(dropped["lse"], plain["lse"])
    assert not torch.equal(dropped["out"], plain["out"])


@each_target(ATEN_CPU, ATEN_CUDA)
def test_generator(target: Target) -> None:
    """manual_seed repeats a call; calls differ; without dropout the generator stays where it is."""
    q = torch.randn(2, 33, 4, 32, device=target.device)

    def attend(p: float) -> torch.Tensor:
        with use(target):
            return flash_attn.flash_attn_func(q, q, q, dropout_p=p)

    torch.manual_seed(3)
    first, second = attend(0.5), attend(0.5)
    torch.manual_seed(3)
    attend(0.0)
    again = attend(0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@each_target(ATEN_CPU, ATEN_CUDA)
def test_returned_mask_belongs_to_the_output(target: Target) -> None:
    """out is what S_dmask says: its positive part, normalised and scaled, times v."""
    q, k, v = torch.randn(3, 2, 40, 2, 16, device=target.device)
    with use(target):
        out, _, probs = flash_attn.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)
    assert torch.equal(probs.abs().amax(-1), torch.ones_like(probs[..., 0]))
    probs = probs / probs.abs().sum(-1, keepdim=True)
    expected = torch.einsum("bhij,bjhd->bihd", probs.clamp(min=0) / 0.7, v)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_expectation_is_attention_without_dropout() -> None:
    q, k, v = torch.randn(3, 1, 8, 1, 8, dtype=torch.float64)
    problem = Problem(
        Case(batch=400, seqlen_q=8, heads_q=1, heads_kv=1, d=8, dtype="fp64", dropout_p=0.3),
        1,
        "cpu",
    )
    problem.q, problem.k, problem.v = (x.expand(400, 8, 1, 8) for x in (q, k, v))
    out = run(problem, "aten", backward=False)["out"]
    mean, sigma = out.mean(0), out.std(0) / math.sqrt(400)
    plain = flash_attn.flash_attn_func(q, k, v)[0]
    assert ((mean - plain).abs() < 6 * sigma).all()
