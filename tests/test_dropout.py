"""Dropout: the mask is Philox of the element's place, bit for bit, on every backend and in every
tiling."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
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
    run,
    use,
)
from philox import draw, keep_mask, keep_probability, philox2x32, philox4x32

import flash_attn
from flash_attn.reference import attention_ref, philox_keep_mask

# The known answers that come with the authors' implementation (Random123, kat_vectors).
KNOWN_ANSWERS_4 = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


KNOWN_ANSWERS_2 = [
    ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    ((0xFFFFFFFF,) * 2, 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS_4)
def test_philox4x32_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == words
    reference = flash_attn.reference.philox4x32(tuple(map(torch.tensor, counter)), key)
    assert tuple(int(word) for word in reference) == words


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS_2)
def test_philox2x32_known_answers(counter: tuple, key: int, words: tuple) -> None:
    assert tuple(int(word) for word in philox2x32(counter, key)) == words
    reference = flash_attn.reference.philox2x32(tuple(map(torch.tensor, counter)), key)
    assert tuple(int(word) for word in reference) == words


# What queries and keys 0, 7, 8, 15, 16 and 19 draw for seed 1, offset 2, batch 1, head 3 of 4: the
# definition in numbers, which must never change.
PLACES = [0, 7, 8, 15, 16, 19]
NUMBERS = [
    [161, 47, 94, 65, 162, 241],
    [81, 249, 25, 84, 126, 225],
    [194, 254, 20, 238, 52, 189],
    [104, 116, 110, 147, 18, 68],
    [253, 101, 53, 185, 83, 150],
    [6, 245, 232, 62, 161, 175],
]


def test_numbers_stay_what_they_were() -> None:
    assert draw((1, 2), 1, 4, 20, 20)[3][PLACES][:, PLACES].tolist() == NUMBERS
    for p in (0.25, 0.75):
        kept = philox_keep_mask((1, 2), p, 2, 4, 20, 20)[1, 3][PLACES][:, PLACES]
        numbers = torch.tensor(NUMBERS)
        assert torch.equal(kept, numbers >= 2**6 if p == 0.25 else numbers < 2**6)


STATES = [(0, 0), (1, 2), (2**63 - 1, 2**40 + 5), (-1, -(2**62)), (1 << 32, 1 << 32)]
# No threshold, the lowest, those about the one from which on numbers below it are kept, the highest
# that keeps something, one that keeps nothing; and numbers that are half way between two.
STEP = 2.0**-8
PROBABILITIES = [1e-6, STEP, 0.5 - STEP, 0.5, 0.5 + STEP, 1 - STEP, 1 - STEP / 4]
PROBABILITIES += [1.5 * STEP, 2.5 * STEP, 0.5 + STEP / 2]


@pytest.mark.parametrize("state", STATES)
def test_the_reference_draws_the_same_mask(state: tuple[int, int]) -> None:
    for p in (0.0, 0.3, *PROBABILITIES, 1.0):
        ours = keep_mask(state, p, range(3), 5, 17, 39)
        assert torch.equal(philox_keep_mask(state, p, 3, 5, 17, 39), ours)


@pytest.mark.parametrize("p", [0.0, 0.1, *PROBABILITIES, 1.0])
def test_kept_fraction(p: float) -> None:
    """Within 4 sigma of the probability as rounded, which differs from 1 - p by half a step at
    most."""
    probability = flash_attn.reference.keep_probability(p)
    assert probability == keep_probability(p)
    assert abs(probability - (1 - p)) <= STEP / 2
    kept = philox_keep_mask((3, 4), p, 4, 4, 512, 512).double()
    sigma = math.sqrt(probability * (1 - probability) / kept.numel())
    assert abs(kept.mean() - probability) <= 4 * sigma


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


@each_case(
    [
        Case(d=d, dtype="bf16", dropout_p=0.2, seqlen_q=70, seqlen_k=200, window=(30, 10))
        for d in (64, 128, 256)
    ],
    [ATEN_CPU, ATEN_CUDA, SM80, SM90],
)
def test_nan_in_front_of_a_window(case: Case, target: Target, seed: int) -> None:
    """Keys are drawn for in blocks of 32: one that begins in front of the window reads nothing
    there."""
    problem = Problem(case, seed, target.device)
    clean = run(problem, target.backend, backward=False)
    first_seen = case.keys - case.seqlen_q - case.window[0]
    problem.k[:, :first_seen] = math.nan
    problem.v[:, :first_seen] = math.nan
    dirty = run(problem, target.backend, backward=False)
    assert torch.equal(dirty["out"], clean["out"]) and torch.equal(dirty["lse"], clean["lse"])


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("p", PROBABILITIES)
def test_thresholds(p: float, target: Target, seed: int) -> None:
    case = Case(seqlen_q=40, seqlen_k=150, dropout_p=p, d=16)
    problem = Problem(case, seed, target.device)
    expected = keep_mask(problem.rng, p, range(case.batch), case.heads_q, 40, 150)
    assert torch.equal(sign_mask(problem, target.backend), expected)


MASK_CASES = [
    Case(d=d, dtype=dtype, heads_q=4, heads_kv=2, dropout_p=p, deterministic=p > 0.5, **lengths)
    for d in (64, 128, 256)
    for dtype, p in (("fp16", 0.1), ("bf16", 0.7), ("fp32", 0.2), ("fp32", 0.6))
    for lengths in (
        dict(seqlen_q=77, seqlen_k=150),
        dict(seqlen_q=130, seqlen_k=33, causal=True, top_left=True),
        dict(lengths_q=(20, 0, 70), lengths_k=(33, 4, 131), tail=3),
        dict(seqlen_q=200, seqlen_k=355, window=(41, 5), batch=1),
    )
]


# The first sequence, head, query and key of a part of a call, and how many heads that call has.
PLACES_OF_PARTS = [None, (0, 0, 4, 0, 0), (3, 1, 7, 48, 96), (0, 2, 6, 16, 32)]


@pytest.mark.parametrize("part", PLACES_OF_PARTS, ids=str)
@each_case(MASK_CASES, [ATEN_CPU, ATEN_CUDA, SM80, SM90])
def test_mask_read_out_of_the_results(
    case: Case, target: Target, part: tuple[int, ...] | None, seed: int
) -> None:
    """With equal scores and one-hot rows of v and dout, what is not 0 of out and of dv is what is
    kept: bit for bit, forward and backward, whatever the tiles. A part of a call draws its part of
    that call's mask."""
    problem = Problem(case, seed, target.device)
    problem.q.zero_()
    seen = expect(problem, backward=False).probs != 0
    sequences = zip(case.lengths_q, case.lengths_k, strict=True) if case.is_varlen else None
    lengths = list(sequences or [(case.seqlen_q, case.keys)] * case.batch)
    longest = max(max(pair) for pair in lengths)
    out, dv = {}, {}
    for first in range(0, longest, case.d):
        for side, x in enumerate((problem.dout, problem.v)):
            counts = [pair[side] for pair in lengths] if case.is_varlen else [x.size(1)]
            place = torch.cat([torch.arange(count) for count in (*counts, case.tail)])
            one_hot = place[:, None] - first == torch.arange(case.d)
            x.copy_(one_hot[:, None].expand(x.shape[-3:]))
        results = run(problem, target.backend, dropout_place=part)
        out[first], dv[first] = (results[name].cpu() != 0 for name in ("out", "dv"))
    row_q = row_k = 0
    sequence, head, heads, query, key = part or (0, 0, case.heads_q, 0, 0)
    for b, (n_q, n_k) in enumerate(lengths):
        ends = (query + n_q, key + n_k)
        kept = keep_mask(problem.rng, case.dropout_p, sequence + b, heads, *ends)
        kept = kept[head : head + case.heads_q, query:, key:]
        kept = kept & seen[b, :, :n_q, :n_k]
        of_q = (slice(row_q, row_q + n_q),) if case.is_varlen else (b,)
        of_k = (slice(row_k, row_k + n_k),) if case.is_varlen else (b,)
        row_q, row_k = row_q + n_q, row_k + n_k
        if n_q == 0 or n_k == 0:
            continue
        forward = torch.cat([x[of_q] for x in out.values()], -1)[..., :n_k].transpose(0, 1)
        assert torch.equal(forward, kept), f"forward, sequence {b}"
        # dv adds up the query heads of a kv head.
        group = kept.unflatten(0, (case.heads_kv, -1)).any(1)
        backward = torch.cat([x[of_k] for x in dv.values()], -1)[..., :n_q].permute(1, 2, 0)
        assert torch.equal(backward, group), f"backward, sequence {b}"


@each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
def test_nothing_kept_gives_zeros(target: Target, seed: int) -> None:
    """Not infinity times zero, where the probability rounds to 1."""
    case = Case(dropout_p=1 - STEP / 4, dtype="bf16")
    results = run(Problem(case, seed, target.device), target.backend)
    for name in ("out", "dq", "dk", "dv"):
        assert not results[name].count_nonzero(), name
    assert results["lse"].isfinite().all()


@each_target(ATEN_CPU, ATEN_CUDA)
def test_one_number_kept(target: Target, seed: int) -> None:
    """The least probability of keeping: what is kept of 2^18 weights counts 2^15 times."""
    case = Case(seqlen_q=256, seqlen_k=256, dropout_p=1 - STEP, batch=1, d=16)
    problem = Problem(case, seed, target.device)
    results, expected = run(problem, target.backend), expect(problem)
    assert expected.values["out"].count_nonzero() and expected.values["dq"].count_nonzero()
    compare(problem, results, expected)


def correlation(a: torch.Tensor, b: torch.Tensor, p: float) -> float:
    """Of two masks, in units of its standard deviation."""
    keep = keep_probability(p)
    covariance = ((a - keep) * (b - keep)).mean()
    return float(covariance / (keep * (1 - keep)) * math.sqrt(a.numel()))


@pytest.mark.parametrize("p", [0.17, 0.5, 0.8])
def test_places_are_independent(p: float) -> None:
    """Queries, keys and both at distances up to 128, heads, sequences, seeds and offsets: 4
    sigma."""
    n = 512

    def mask(state: tuple[int, int]) -> torch.Tensor:
        return philox_keep_mask(state, p, 2, 4, n, n).double()

    base = mask((7, 9))
    found = {
        "seed": correlation(base, mask((8, 9)), p),
        "offset": correlation(base, mask((7, 10)), p),
        "high word of the seed": correlation(base, mask((7 + (1 << 32), 9)), p),
        "high word of the offset": correlation(base, mask((7, 9 + (1 << 32))), p),
        "batch": correlation(base[0], base[1], p),
        "head": correlation(base[:, :-1], base[:, 1:], p),
    }
    for lag in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128):
        for i, j in ((lag, 0), (0, lag), (lag, lag)):
            moved = base[..., i:, j:]
            found[f"lag {i}, {j}"] = correlation(base[..., : n - i, : n - j], moved, p)
    assert {name: sigmas for name, sigmas in found.items() if abs(sigmas) > 4} == {}


@pytest.mark.parametrize("p", [0.3, 0.5])
def test_rectangles_are_independent(p: float) -> None:
    """Rows share a word, and so do columns: the corners of rectangles must show nothing of it, 5
    sigma."""
    n, keep = 512, keep_probability(p)
    places = (philox_keep_mask((11, 12), p, 4, 4, n, n).double() - keep) / math.sqrt(
        keep * (1 - keep)
    )
    found = {}
    for i in (1, 2, 8, 16, 37):
        for j in (1, 2, 8, 16, 24, 32, 51):
            corners = places[..., i:, j:] * places[..., :-i, :-j]
            corners *= places[..., i:, :-j] * places[..., :-i, j:]
            found[i, j] = float(corners.mean() * math.sqrt(corners.numel()) / corners.std())
    assert {lags: sigmas for lags, sigmas in found.items() if abs(sigmas) > 5} == {}


@each_case(
    [
        Case(dropout_p=p, dtype=dtype, seqlen_q=70, seqlen_k=90, causal=True, lse_grad=True)
        for p in (1e-6, 0.1, 0.83, 1 - STEP, 1 - STEP / 4)
        for dtype in ("fp32", "bf16")
    ],
    [ATEN_CPU, ATEN_CUDA, SM80, SM90],
)
def test_forward_and_backward_use_one_mask(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
def test_lse_ignores_dropout(target: Target, seed: int) -> None:
    """Both calls with a cap, so that both run on the same kernels."""
    case = Case(dropout_p=0.5, dtype="fp16", softcap=30.0)
    dropped = run(Problem(case, seed, target.device), target.backend, backward=False)
    plain = run(
        Problem(case.with_(dropout_p=0.0), seed, target.device), target.backend, backward=False
    )
    assert torch.equal(dropped["lse"], plain["lse"])
    assert not torch.equal(dropped["out"], plain["out"])


@each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
def test_generator(target: Target) -> None:
    """manual_seed repeats a call; calls differ; without dropout the generator stays where it is."""
    q = torch.randn(2, 33, 4, 32, device=target.device).half()

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
    expected = torch.einsum("bhij,bjhd->bihd", probs.clamp(min=0) / keep_probability(0.3), v)
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


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("keys", [1, 2, 513, 1025])
def test_returned_probabilities_are_complete(keys: int, target: Target, seed: int) -> None:
    """Of every key, also of one that is a block of its own."""
    problem = Problem(Case(seqlen_q=3, seqlen_k=keys, dropout_p=0.2), seed, target.device)
    q, k, v = problem.q, problem.k, problem.v
    with use(target):
        _, _, probs = flash_attn.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
    expected = attention_ref(*(x.cpu() for x in (q, k, v)))[2]
    expected /= expected.amax(-1, keepdim=True)
    torch.testing.assert_close(probs.abs().cpu().double(), expected, atol=1e-5, rtol=1e-4)
