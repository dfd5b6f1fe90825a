"""Anything that a call may have beside anything else: features, shapes, dtypes and strides drawn at
random, every result held against float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from caches import EIGHT_BITS, CacheCase, CacheProblem
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    BIAS_SHAPES,
    BOOL_BIASES,
    SIMULATED,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    compare,
    expect,
    run,
)
from soak import some_lengths
from test_layouts import LAYOUTS
from test_max_logits import compare as compare_logits
from test_max_logits import largest
from test_max_logits import serves as keeps_logits

CALLS = 20  # of a test
TESTS = {ATEN_CPU: 15, ATEN_CUDA: 10, SM80: 45, SM90: 45}  # 300 calls on a CPU, 2,000 on Hopper


def random_case(draw: random.Random) -> Case:
    """Each feature is as likely whatever else the call has, but for the spread of the scores.

    N(0, 9) inputs give nearly all of a row to one key, which is left out in three cases. Beside a
    softcap the derivative is rounding alone. Where dropout takes that key, the other P of the row
    are subnormal in fp16. Above a head dim of 128 sm90 stores P in 16 bits on the way to dS, which
    makes the smallest 0. Scales above 0.1 would do to N(0, 1) inputs what N(0, 9) does.
    """
    varlen = draw.random() < 0.4
    lengths_q, lengths_k = (
        tuple(draw.choice([0, 1, 17, 64, 65, 130]) for _ in range(2)) for _ in "qk"
    )
    seqlen_q, seqlen_k = draw.choice([1, 33, 64, 129]), draw.choice([1, 64, 100, 257])
    most_q, most_k = (lengths_q, lengths_k) if varlen else ((seqlen_q,) * 2, (seqlen_k,) * 2)
    heads_kv, d = draw.choice([1, 2]), draw.choice([8, 32, 40, 64, 72, 80, 96, 128, 192, 256])
    bias = draw.choice(["", "", "", "", *BIAS_SHAPES])
    softcap = draw.choice([0.0, 0.0, 0.0, 7.0, 50.0])
    d_v = draw.choice([None, None, None, 16, 64, 128])
    dropout_p = draw.choice([0.0, 0.0, 0.0, 0.2])
    is_calm = bool(softcap or dropout_p or d > 128)
    spreads = ["normal", "normal", "normal" if is_calm else "wide"]
    return Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        lengths_q=lengths_q if varlen else None,
        lengths_k=lengths_k if varlen else None,
        tail=draw.choice([0, 0, 5]) if varlen else 0,
        seqused_q=some_lengths(draw, most_q),
        seqused_k=some_lengths(draw, most_k),
        leftpad_k=some_lengths(draw, most_k),
        heads_q=heads_kv * draw.choice([1, 2, 3]),
        heads_kv=heads_kv,
        d=d,
        d_v=d_v,
        dtype=draw.choice(["fp16", "fp16", "bf16", "bf16", "fp32"]),
        causal=draw.random() < 0.5,
        window=draw.choice([(-1, -1), (-1, -1), (20, 5), (0, -1), (-1, 70)]),
        top_left=draw.random() < 0.3,
        softcap=softcap,
        alibi=draw.choice(["", "", "", "head", "batch"]),
        bias=bias,
        bias_fp32=bias not in ("", *BOOL_BIASES) and draw.random() < 0.2,
        sink=draw.random() < 0.3,
        dropout_p=dropout_p,
        lse_grad=draw.random() < 0.3,
        softmax_scale=draw.choice([None, None, None, 0.02, 0.1]),
        spread=draw.choice(spreads),
        deterministic=draw.random() < 0.3,
    )


def random_views(draw: random.Random, case: Case) -> dict[str, Callable]:
    """Other strides for some of q, k, v and dout."""

    def of_rows(layout: Callable) -> Callable:
        """For varlen tensors, which have no dimension of sequences."""
        return lambda x: layout(x[None])[0]

    names = [name for name in ("q", "k", "v", "dout") if draw.random() < 0.4]
    layouts = {name: LAYOUTS[draw.choice(list(LAYOUTS))] for name in names}
    return {n: of_rows(x) if case.is_varlen else x for n, x in layouts.items()}


def served_case(draw: random.Random, target: Target) -> Case:
    while not (case := random_case(draw)).served_by(target.backend):
        pass
    return case


@pytest.mark.parametrize(
    "target, number",
    [
        pytest.param(target, number, id=f"{target}-{number}", marks=target.marks)
        for target, count in TESTS.items()
        for number in range(count)
        if target.device == "cuda" or not SIMULATED
    ],
)
def test_random_combinations(target: Target, number: int) -> None:
    draw = random.Random(f"{target} {number}")
    for _ in range(CALLS):
        case, seed = served_case(draw, target), draw.randrange(1 << 20)
        views = random_views(draw, case)
        asks_for_logits = draw.random() < 0.4 and keeps_logits(target, case)
        problem = Problem(case, seed, target.device)
        try:
            results = run(problem, target.backend, views=views, return_max_logits=asks_for_logits)
            expected = expect(problem)
            compare(problem, results, expected)
            if asks_for_logits:
                compare_logits(
                    results["max_logits"], largest(problem), problem.q.dtype, expected.largest_score
                )
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{case}, seed {seed}, views of {list(views)}") from error


def random_cache_case(draw: random.Random) -> CacheCase:
    """A call against a cache. An append and pages bring what goes with them."""
    heads_kv, d = draw.choice([1, 2]), draw.choice([16, 32, 64, 72, 96, 128, 192, 256, 512, 576])
    new, page_size = draw.choice([0, 0, 1, 3]), draw.choice([0, 0, 8, 16, 64])
    dtype = draw.choice(["fp16", "bf16", "bf16", "fp32"])
    bias = draw.choice(["", "", "", "same", "fp32", "bool"])
    cache = "" if dtype == "fp32" else draw.choice(["", "", *EIGHT_BITS])
    latent = not cache and not new and draw.random() < 0.3
    return CacheCase(
        seqlen_q=max(new, draw.choice([1, 1, 2, 5, 40])),
        new=new,
        capacity=draw.choice([70, 200]),
        heads_q=heads_kv * draw.choice([1, 2, 4, 7, 40]),
        heads_kv=heads_kv,
        d=d,
        d_v=d - d // 64 * 8 if latent else draw.choice([None, None, None, 64, 128]),
        dtype=dtype,
        cache=cache,
        latent=latent,
        page_size=page_size,
        shared=page_size > 0 and draw.random() < 0.4,
        rows=draw.random() < 0.4,
        leftpad=draw.random() < 0.3,
        rotary=draw.choice(["", "interleaved", "halves"]) if new and d >= 32 else "",
        causal=draw.random() < 0.7,
        window=draw.choice([(-1, -1), (-1, -1), (20, 5), (-1, 70)]),
        softcap=draw.choice([0.0, 0.0, 5.0]),
        alibi=draw.random() < 0.2,
        sink=draw.random() < 0.2,
        bias=bias,
        bias_shape=draw.choice(["bhqk", "hqk", "bk"]),
        tree="" if bias else draw.choice(["", "", "one", "each"]),
        num_splits=draw.choice([0, 0, 3]),
        batch_invariant=draw.random() < 0.2,
        garbage=draw.random() < 0.3,
    )


@pytest.mark.parametrize(
    "device, number",
    [
        pytest.param(device, number, id=f"{device}-{number}", marks=marks)
        for device, count, marks in (("cpu", 5, ()), ("cuda", 25, pytest.mark.gpu))
        for number in range(count)
        if device == "cuda" or not SIMULATED
    ],
)
def test_random_calls_against_caches(device: str, number: int) -> None:
    draw = random.Random(f"cache {device} {number}")
    for _ in range(CALLS):
        case, seed = random_cache_case(draw), draw.randrange(1 << 20)
        problem = CacheProblem(case, seed, device)
        wanted = {"return_max_logits": True} if draw.random() < 0.4 else {}
        try:
            backend = problem.support(**wanted).backend
            problem.compare(*problem.run(backend, **wanted))
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{case}, seed {seed}") from error


def test_draws_are_unlike() -> None:
    """Each feature is drawn, and beside each other one."""
    draw = random.Random(0)
    features = ("softcap", "alibi", "bias", "sink", "dropout_p", "lse_grad", "causal", "lengths_q")
    seen = {
        (a, b)
        for case in [random_case(draw) for _ in range(300)]
        for a in features
        for b in features
        if getattr(case, a) and getattr(case, b)
    }
    assert len(seen) == len(features) ** 2
