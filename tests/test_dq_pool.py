"""Sums of dq that take turns in the places of a pool (csrc/sm90/bwd_dq_pool.cuh)."""

from __future__ import annotations

import random

import pytest
import torch
from cases import (
    DIFFERENTIABLE,
    SM90,
    Case,
    Problem,
    Target,
    check,
    compare,
    each_case,
    expect,
    op_arguments,
    run,
    starts,
)
from poison import dirty_allocator

# csrc/sm90/bwd_config.h: the sums of dq are a pool where at most so many queries see a tile, and a
# query sees so many keys in the mean. A longer head has stretches, but in the narrowest class.
POOLED_QUERIES = 4096
POOLED_KEYS = {48: 4096, 64: 3072, 80: 4096, 96: 4096, 128: 4096}
NARROW_HEAD_DIM, NARROW_POOLED_KEYS = 32, 1024
POOLED_OF_GROUP, LARGEST_POOLED_GROUP = 1024, 2
POOLED_IN_ORDER, SEEN_IN_ORDER = {128: 1024}, 576
STRETCH = 1024
SMS = 132  # of Hopper's largest; with fewer, a pool has fewer places


def pool_class(case: Case) -> int:
    return next(c for c in POOLED_KEYS if case.d <= c and (c > 48 or case.d > 32))


def pool_rounds(case: Case) -> float:
    """A pool has places for so many times the tiles that run at a time."""
    return 3 if case.d <= 64 else 2.5


def is_pooled(case: Case) -> bool:
    most = POOLED_QUERIES
    keys, queries = (seen_pairs(case) / n for n in (case.seqlen_q, case.keys))
    if case.deterministic:
        most = POOLED_IN_ORDER.get(pool_class(case), 0)
        if max(keys, queries) > SEEN_IN_ORDER:
            return False
    else:
        shares_much = case.heads_q > LARGEST_POOLED_GROUP * case.heads_kv
        narrow = case.d <= NARROW_HEAD_DIM
        if shares_much or keys > (NARROW_POOLED_KEYS if narrow else POOLED_KEYS[pool_class(case)]):
            return False
        if case.heads_q > case.heads_kv:
            most = min(most, POOLED_OF_GROUP)
    has_stretches = pool_class(case) > 48 and case.heads_q == case.heads_kv
    has_stretches &= not case.deterministic
    return (queries_of_tile(case) if has_stretches else case.seqlen_q) <= most


def seen_pairs(case: Case) -> int:
    """How many (query, key) pairs one head has."""
    (left, right), diagonal = case.window, 0 if case.top_left else case.keys - case.seqlen_q
    right = 0 if case.causal else right
    seen = 0
    for query in range(diagonal, diagonal + case.seqlen_q):
        begin = 0 if left < 0 else min(max(query - left, 0), case.keys)
        end = case.keys if right < 0 else min(max(query + right + 1, 0), case.keys)
        seen += end - begin
    return seen


def queries_of_tile(case: Case) -> int:
    left, right = case.window
    return case.seqlen_q if min(left, right) < 0 else min(case.seqlen_q, left + right + 128)


def with_more_heads_than_places(case: Case, sms: int = SMS) -> Case:
    """Three and a half times as many kv heads as the pool has places for: enough for one."""
    rounds = pool_rounds(case)
    heads = rounds * sms / -(-case.keys // 128)
    places, stretches = heads + 2, 1
    if case.seqlen_q > POOLED_QUERIES and is_pooled(case):
        places = rounds * sms * 128 / STRETCH
        places += (heads + 1) * (queries_of_tile(case) // STRETCH + 3)
        stretches = -(-case.seqlen_q // STRETCH)
    return case.with_(batch=-(-7 * int(places) // (2 * case.heads_kv * stretches)))


POOL_CASES = [
    with_more_heads_than_places(
        Case(dtype=dtype, seqlen_q=n_q, seqlen_k=n_k, heads_q=h_q, heads_kv=h_kv, d=d, **mask)
    )
    for dtype, n_q, n_k, h_q, h_kv, d, mask in [
        ("bf16", 1100, None, 2, 2, 32, {}),
        ("bf16", 511, None, 2, 2, 40, {"causal": True}),
        ("bf16", 1025, None, 2, 2, 48, {}),
        ("fp16", 2047, None, 2, 2, 48, {"causal": True}),
        ("bf16", 4200, None, 1, 1, 48, {"window": (500, 0)}),
        ("bf16", 500, None, 2, 2, 64, {}),
        ("fp16", 901, None, 2, 2, 64, {}),
        ("bf16", 1537, None, 2, 2, 56, {"causal": True}),
        ("bf16", 1990, None, 2, 2, 64, {"causal": True}),
        ("fp16", 1200, 1301, 2, 2, 64, {"causal": True}),
        ("bf16", 1200, 3001, 2, 2, 64, {"causal": True}),
        ("fp16", 1000, 3100, 2, 2, 64, {}),
        ("fp16", 2047, None, 2, 2, 64, {"window": (700, 90)}),
        ("fp16", 4097, 900, 2, 2, 64, {"causal": True, "top_left": True}),
        ("fp16", 729, None, 2, 2, 72, {}),
        ("bf16", 577, None, 2, 2, 80, {}),
        ("bf16", 2048, None, 2, 2, 80, {"causal": True}),
        ("fp16", 4500, None, 1, 1, 80, {"window": (600, 0)}),
        ("bf16", 4096, 4200, 1, 1, 72, {}),
        ("fp16", 700, None, 2, 2, 88, {}),
        ("bf16", 1025, None, 2, 2, 96, {"causal": True}),
        ("bf16", 4300, None, 1, 1, 96, {"window": (2047, 0)}),
        ("fp16", 500, None, 2, 2, 96, {"deterministic": True}),
        ("bf16", 1101, None, 2, 2, 128, {"causal": True}),
        ("fp16", 2049, None, 2, 2, 128, {}),
        ("bf16", 2500, 1301, 2, 2, 128, {"causal": True}),
        ("fp16", 3001, None, 2, 2, 120, {"causal": True}),
        ("bf16", 4095, 4000, 1, 1, 128, {"causal": True, "top_left": True}),
        ("fp16", 4096, None, 1, 1, 128, {"causal": True}),
        ("bf16", 4096, None, 1, 1, 128, {}),
        ("bf16", 4097, None, 1, 1, 128, {"causal": True}),
        ("bf16", 1023, None, 6, 2, 64, {}),
        ("fp16", 1024, None, 4, 2, 64, {"causal": True}),
        ("bf16", 1025, None, 4, 2, 64, {"causal": True}),
        ("bf16", 1024, None, 4, 2, 128, {"causal": True}),
        ("fp16", 1025, None, 6, 2, 128, {}),
        ("bf16", 4100, None, 2, 2, 64, {"window": (500, 0)}),
        ("fp16", 4501, 4601, 2, 2, 64, {"window": (0, 900)}),
        ("bf16", 4501, 4601, 2, 2, 64, {"window": (0, 1900)}),
        ("fp16", 5000, 4000, 1, 1, 64, {"window": (900, 0)}),
        ("bf16", 4200, None, 2, 2, 128, {"window": (1024, 0)}),
        ("fp16", 5121, None, 1, 1, 128, {"window": (3000, 900)}),
        ("bf16", 4500, 5300, 1, 1, 128, {"window": (30, 60), "top_left": True}),
        ("bf16", 5000, None, 1, 1, 128, {"window": (4000, 0)}),
        ("fp16", 1500, None, 4, 2, 80, {"window": (500, 0)}),
        ("bf16", 511, None, 2, 2, 64, {"deterministic": True}),
        ("bf16", 1000, 900, 2, 2, 128, {"causal": True, "deterministic": True}),
        ("bf16", 1000, 1400, 2, 2, 128, {"causal": True, "deterministic": True}),
        ("fp16", 513, None, 2, 2, 128, {"deterministic": True}),
        ("bf16", 577, None, 2, 2, 128, {"deterministic": True}),
        ("bf16", 500, 512, 6, 2, 128, {"deterministic": True}),
        ("bf16", 512, 1300, 2, 2, 128, {"deterministic": True}),
        ("fp16", 1024, 800, 2, 2, 120, {"window": (300, 40), "deterministic": True}),
        ("bf16", 1025, None, 2, 2, 128, {"causal": True, "deterministic": True}),
        ("fp16", 2100, None, 2, 2, 128, {"window": (500, 0), "deterministic": True}),
        ("bf16", 2500, None, 6, 2, 128, {"deterministic": True}),
        ("bf16", 1600, None, 8, 2, 128, {"causal": True, "deterministic": True}),
        ("fp16", 1601, None, 8, 1, 64, {"causal": True, "deterministic": True}),
    ]
]


def run_and_measure(
    arguments: dict, leaves: list[torch.Tensor], dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], int]:
    """out, lse, the gradients of the leaves, and how many bytes more the backward took."""
    with dirty_allocator(dout.device.type):
        out, lse, *_ = torch.ops.flash_attn.fwd(**arguments)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(out, leaves, dout)
        workspace = torch.cuda.max_memory_allocated() - before
    return out, lse, gradients, workspace - sum(x.numel() * x.element_size() for x in gradients)


@each_case(POOL_CASES, [SM90], marks=[pytest.mark.real_gpu, pytest.mark.slow])
def test_more_heads_than_places_of_a_pool(case: Case, target: Target, seed: int) -> None:
    """Sums of dq take turns in the places of a pool. One sequence has a reference; the others are
    the same, and so is what they give, but for the order in which dq is summed, unless that is the
    same, too."""
    problem = Problem(case.with_(batch=1), seed, target.device)
    expected = expect(problem, device=target.device)
    alike = {name: x.repeat(case.batch, 1, 1, 1) for name, x in problem.float_tensors().items()}
    leaves = [x.requires_grad_() for x in alike.values()]
    dout = problem.dout.repeat(case.batch, 1, 1, 1)
    arguments = op_arguments(problem) | alike | {"backend": target.backend}
    out, lse, gradients, workspace = run_and_measure(arguments, leaves, dout)
    all_sums = 4 * case.batch * case.heads_q * case.seqlen_q * case.d
    assert (workspace < 0.6 * all_sums) if is_pooled(case) else (workspace > all_sums)

    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {DIFFERENTIABLE[n]: g for n, g in zip(alike, gradients, strict=True)}
    for name in ("out", "lse", "dk", "dv", *(["dq"] if case.deterministic else [])):
        assert torch.equal(results[name], results[name][:1].expand_as(results[name])), name
    compare(problem, {name: x[:1] for name, x in results.items()}, expected)
    for dq in results["dq"].split(1):
        compare(problem, {"lse": results["lse"][:1], "dq": dq}, expected)


@each_case(
    [
        Case(dtype=dtype, batch=64, heads_q=10, heads_kv=10, seqlen_q=70, seqlen_k=150, d=d, **mask)
        for dtype, d in (("bf16", 64), ("fp16", 128))
        for mask in (dict(seqused_k=(150, 0) * 32), dict(seqused_q=(70, 0, 0, 0) * 16))
        for mask in (mask, mask | dict(deterministic=True))
    ],
    [SM90],
    marks=[pytest.mark.real_gpu],
)
def test_heads_without_sums_in_a_pool(case: Case, target: Target, seed: int) -> None:
    """A head that nobody adds to leaves alone whose place it has."""
    check(case, target, seed)


# Enough sequences that their pool is less than the sums of all.
SEQUENCES, SHORTEST, LONGEST = 256, 40, 192


def lengths(seed: int, shortest: int = SHORTEST) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randint(shortest, LONGEST) for _ in range(SEQUENCES - 1)) + (LONGEST,)


def varlen_case(dtype: str = "bf16", d: int = 64, **rest: object) -> Case:
    given = {"lengths_q": lengths(1), "lengths_k": lengths(1)} | rest
    return Case(dtype=dtype, d=d, heads_q=4, heads_kv=4, **given)


LONG = tuple(450 + 37 * i % 301 for i in range(60))  # of long heads (kBwdLongPooledQueries)


def check_that_it_pools(problem: Problem, target: Target) -> None:
    case, alike = problem.case, problem.float_tensors()
    leaves = [x.requires_grad_() for x in alike.values()]
    arguments = op_arguments(problem) | problem.index_tensors() | alike
    *_, workspace = run_and_measure(arguments | {"backend": target.backend}, leaves, problem.dout)
    assert workspace < 0.8 * 4 * problem.q.size(0) * case.heads_q * case.d


@each_case(
    [
        varlen_case(),
        varlen_case("fp16", causal=True),
        varlen_case("fp16", 56, lengths_k=lengths(2), causal=True, tail=77),
        varlen_case("bf16", 40),
        varlen_case("bf16", 48, lengths_q=LONG, lengths_k=LONG),
        varlen_case("bf16", 64, lengths_q=LONG, lengths_k=LONG),
        varlen_case("bf16", 72, causal=True),
        varlen_case("fp16", 80, lengths_k=lengths(2), tail=9),
        varlen_case("bf16", 96, lengths_q=lengths(4, 0), causal=True),
        varlen_case("bf16", 128, causal=True),
        varlen_case("fp16", 128, lengths_k=lengths(3, 0), tail=5),
        varlen_case("bf16", 120, lengths_q=lengths(4, 0), window=(50, 9)),
        varlen_case(lengths_k=(150, 0) * (SEQUENCES // 2)),
        varlen_case(d=128, seqused_q=(30, 0, 1, 40) * (SEQUENCES // 4), causal=True),
        varlen_case("fp16", seqused_k=(40, 7) * (SEQUENCES // 2), leftpad_k=(9, 0, 30, 5) * 64),
    ],
    [SM90],
    marks=[pytest.mark.real_gpu, pytest.mark.slow],
)
def test_varlen_sequences_share_a_pool(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    expected = expect(problem, device=target.device)
    compare(problem, run(problem, target.backend), expected)
    check_that_it_pools(problem, target)


@each_case(
    [varlen_case(), varlen_case("bf16", 80), varlen_case("fp16", 128)],
    [SM90],
    marks=[pytest.mark.real_gpu],
)
def test_rows_outside_of_varlen_sequences_in_a_pool(case: Case, target: Target, seed: int) -> None:
    """Before the first sequence and behind the last: their dq is 0."""
    problem = Problem(case, seed, target.device)
    index = problem.index_tensors()
    for name, first, last in (("cu_seqlens_q", 9, 3), ("cu_seqlens_k", 5, 17)):
        index[name][0] += first
        index[name][-1] -= last
    problem.index_tensors = lambda: index
    results = run(problem, target.backend)
    assert (results["dq"][:9] == 0).all() and (results["dq"][-3:] == 0).all()
    compare(problem, results, expect(problem, device=target.device))


@each_case([varlen_case(), varlen_case("fp16", 128)], [SM90], marks=[pytest.mark.real_gpu])
def test_a_sequence_too_long_for_its_place_in_a_pool(case: Case, target: Target, seed: int) -> None:
    """Its dq is NaN, never 0. All else is right."""
    most = 128
    problem = Problem(case, seed, target.device)
    results = run(problem, target.backend, max_seqlen_q=most)
    expected = expect(problem, device=target.device)
    begins = starts(case.lengths_q)
    for begin, length in zip(begins, case.lengths_q, strict=False):
        if length > most:
            lost = slice(begin, begin + length)
            assert results["dq"][lost].isnan().all()
            results["dq"][lost] = expected.values["dq"][lost].to(results["dq"])
    compare(problem, results, expected)


@each_case(
    [
        varlen_case(),
        varlen_case("fp16", 128),
        varlen_case().with_(heads_kv=2),
        varlen_case(deterministic=True),
    ],
    [SM90],
    marks=[pytest.mark.real_gpu],
)
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k", "both"])
def test_many_sequences_that_overlap_wait_for_nobody(
    which: str, case: Case, target: Target, seed: int
) -> None:
    """An error of the caller without a right result; the next call is right."""
    problem = Problem(case, seed, target.device)
    right = problem.index_tensors()
    names = ["cu_seqlens_q", "cu_seqlens_k"] if which == "both" else [which]
    rng = random.Random(seed)
    orders = [list(range(SEQUENCES, -1, -1)), rng.sample(range(SEQUENCES + 1), SEQUENCES + 1)]
    for order in orders:
        problem.index_tensors = lambda order=order: right | {n: right[n][order] for n in names}
        run(problem, target.backend)
    problem.index_tensors = lambda: right
    compare(problem, run(problem, target.backend), expect(problem, device=target.device))
