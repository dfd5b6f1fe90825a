"""Forward against float64: lengths, head dims, masks, score terms, memory of any content."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    BITWISE_TARGETS,
    Case,
    Problem,
    Target,
    check,
    each_case,
    each_target,
    run,
    sample,
    use,
)

import flash_attn
from flash_attn.reference import attention_ref

EDGES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 79, 80, 81, 95, 96, 97, 111, 112, 113]
EDGES += [127, 128, 129, 175, 176, 177, 191, 192, 193, 255, 256, 257]
HEADS = [(1, 1), (2, 1), (4, 4), (6, 2), (5, 1), (8, 1), (6, 6)]
KERNEL_CHOICES = dict(
    batch=[1, 2, 3],
    seqlen_q=EDGES,
    seqlen_k=EDGES,
    heads=HEADS,
    d=[32, 48, 64, 72, 80, 96, 128, 160, 192, 256, 264, 512],
    dtype=["fp16", "bf16"],
    causal=[False, True],
    top_left=[False, True],
    window=[(-1, -1), (-1, -1), (0, 0), (7, 9), (64, 0), (-1, 16), (128, 65)],
    spread=["normal", "wide"],
)
TERM_CHOICES = dict(
    batch=[1, 2],
    seqlen_q=[1, 5, 16, 33, 64, 100, 129],
    seqlen_k=[1, 8, 31, 64, 77, 128, 140],
    heads=HEADS,
    d=[8, 13, 32, 64, 96],
    d_v=[None, 16, 40],
    dtype=["fp16", "bf16", "fp32", "fp64"],
    causal=[False, True],
    top_left=[False, True],
    window=[(-1, -1), (-1, -1), (3, 5), (32, 0)],
    softcap=[0.0, 0.0, 5.0],
    alibi=["", "head", "batch"],
    bias=["", "full", "head", "batch", "key", "row", "matrix", "scalar", "bool", "padding", "inf"],
    bias_fp32=[False, True],
    sink=[False, True],
    dropout_p=[0.0, 0.25],
)


# Of these kernels serve some.
SCORE_CHOICES = KERNEL_CHOICES | dict(
    softcap=[0.0, 5.0, 300.0],
    alibi=["", "head", "batch"],
    sink=[False, True],
)


def cases_of(points: list[dict]) -> list[Case]:
    made = []
    for point in points:
        heads_q, heads_kv = point.pop("heads")
        made.append(Case(heads_q=heads_q, heads_kv=heads_kv, **point))
    return made


@each_case(cases_of(sample(90, seed=1, **KERNEL_CHOICES)))
def test_lengths_and_masks(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed, backward=False)


@each_case(cases_of(sample(60, seed=3, **SCORE_CHOICES)))
def test_softcap_alibi_sinks(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed, backward=False)


@each_case(cases_of(sample(90, seed=2, **TERM_CHOICES)))
def test_score_terms(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed, backward=False)


HEAD_DIMS = [*range(8, 257, 8), 1, 3, 59, 111, 257, 264, 320, 384, 456, 512]
HEAD_DIM_CASES = [
    Case(batch=1, d=d, dtype=("fp16", "bf16")[i % 2], seqlen_q=70, seqlen_k=90, causal=i % 3 > 0)
    for i, d in enumerate(HEAD_DIMS)
]
VALUE_DIM_CASES = [
    Case(batch=1, d=d, d_v=d_v, dtype="bf16", seqlen_q=66, seqlen_k=40)
    for d, d_v in [
        (192, 128),
        (64, 256),
        (128, 96),
        (96, 128),
        (40, 24),
        (17, 33),
        (256, 64),
        (48, 8),
        (24, 45),
        (80, 32),
        (72, 64),
        (56, 75),
        (88, 80),
        (512, 256),
        (64, 512),
        (320, 264),
        (257, 8),
    ]
]


@each_case(HEAD_DIM_CASES + VALUE_DIM_CASES)
def test_head_dims(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed, backward=False)


@each_case([Case(d=d, seqlen_q=20, heads_q=2) for d in (257, 320, 576)], [ATEN_CPU, ATEN_CUDA])
def test_head_dims_above_256(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(
    [
        Case(
            heads_q=2 * group, heads_kv=2, dtype="fp16", seqlen_q=17, seqlen_k=65, causal=True, d=32
        )
        for group in (1, 2, 3, 5, 6, 7, 8, 16, 71)
    ]
)
def test_query_heads_of_one_kv_head(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed, backward=False)


@each_case(
    [
        Case(batch=1, dtype=dtype, seqlen_q=n_q, seqlen_k=n_k, d=d, spread=spread, causal=causal)
        for dtype, n_q, n_k, d, causal in [
            ("fp16", 512, 1024, 64, True),
            ("bf16", 512, 513, 128, True),
            ("bf16", 640, 512, 64, False),
            ("fp32", 513, 700, 64, True),
        ]
        for spread in ("normal", "wide")
    ]
)
def test_long_rows(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed, backward=False)


@each_case(
    [
        Case(
            batch=1,
            seqlen_q=1030,
            seqlen_k=seqlen_k,
            d=d,
            dtype=dtype,
            heads_q=2,
            heads_kv=1,
            causal=causal,
            window=window,
        )
        for d, dtype in (
            (40, "fp16"),
            (48, "bf16"),
            (64, "bf16"),
            (72, "bf16"),
            (80, "fp16"),
            (88, "bf16"),
        )
        for seqlen_k, causal, window in (
            (1030, True, (-1, -1)),
            (300, False, (-1, -1)),
            (1100, False, (150, 20)),
        )
    ]
)
def test_many_queries(case: Case, target: Target, seed: int) -> None:
    """sm90 has tiles of their own for them."""
    check(case, target, seed, backward=False)


def window_cases() -> list[Case]:
    cases = []
    for seqlen_q, seqlen_k in ((96, 96), (40, 150), (150, 40)):
        tile, longest = 64, max(seqlen_q, seqlen_k)
        sides = [-1, 0, 1, tile - 1, tile, tile + 1, longest - 2, longest - 1, longest, 2 * longest]
        sides.append(2**31 - 1)
        for point in sample(14, seed=seqlen_q, left=sides, right=sides, top_left=[False, True]):
            left, right = point.pop("left"), point.pop("right")
            cases.append(
                Case(
                    seqlen_q=seqlen_q,
                    seqlen_k=seqlen_k,
                    window=(left, right),
                    dtype="fp16",
                    batch=1,
                    d=32,
                    **point,
                )
            )
    return cases


@each_case(window_cases())
def test_windows(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed, backward=False)


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(130, 130), (30, 130), (130, 30)])
def test_causal_is_a_window(seqlen_q: int, seqlen_k: int, target: Target, seed: int) -> None:
    """causal == (-1, 0) == (S - 1, 0) == (S, 0), bit for bit."""
    longest = max(seqlen_q, seqlen_k)
    case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype="bf16", causal=True)
    expected = run(Problem(case, seed, target.device), target.backend)
    for window in ((-1, 0), (longest - 1, 0), (longest, 0), (longest + 7, 0)):
        problem = Problem(case.with_(causal=False, window=window), seed, target.device)
        actual = run(problem, target.backend)
        for name in ("out", "lse", "dk", "dv"):
            assert torch.equal(actual[name], expected[name]), f"window {window}: {name}"


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("right", [-1, 5])
def test_causal_overrides_the_right_side(right: int, target: Target, seed: int) -> None:
    case = Case(dtype="fp16", causal=True, window=(20, 0), seqlen_q=50, seqlen_k=70)
    expected = run(Problem(case, seed, target.device), target.backend, backward=False)
    problem = Problem(case.with_(window=(20, right)), seed, target.device)
    actual = run(problem, target.backend, backward=False)
    assert torch.equal(actual["out"], expected["out"])


@each_case(
    [
        Case(dtype="bf16", seqlen_q=65, seqlen_k=100, causal=True),
        Case(dtype="fp16", lengths_q=(3, 0, 40), lengths_k=(9, 5, 33), tail=4),
        Case(dtype="fp32", seqlen_q=33, bias="head", sink=True, softcap=3.0, dropout_p=0.2),
    ]
)
@pytest.mark.parametrize("pattern", ["inf", "huge"])
def test_what_memory_held_before_does_not_matter(
    pattern: str, case: Case, target: Target, seed: int
) -> None:
    problem = Problem(case, seed, target.device)
    expected = run(problem, target.backend, deterministic=True)
    actual = run(problem, target.backend, pattern=pattern, deterministic=True)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@each_case(
    [
        Case(dtype="bf16", seqlen_q=200, seqlen_k=300, causal=True, d=128),
        Case(dtype="fp16", lengths_q=(70, 3, 129), lengths_k=(70, 190, 1), d=64),
        Case(dtype="fp32", seqlen_q=100, bias="row", dropout_p=0.1, sink=True),
    ]
)
def test_same_bits_every_time(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    first = run(problem, target.backend, backward=False)
    for _ in range(5):
        again = run(problem, target.backend, backward=False)
        assert all(torch.equal(again[name], first[name]) for name in first)


@each_target(*BITWISE_TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d, queries", [(64, 64), (64, 1100), (96, 64), (128, 64), (256, 64)])
@pytest.mark.parametrize("d_v", [8, None], ids=["one-piece", "pieces"])
@pytest.mark.parametrize("ratio", [2.2, 6.0, 1e4])
def test_keys_that_outweigh_all_before_them(
    ratio: float, d_v: int | None, d: int, queries: int, dtype: torch.dtype, target: Target
) -> None:
    """From the end on, one of every 192 keys has `ratio` times the weight of the one before it. The
    others' values cancel the heaviest one's, so the rounding of its P would be all that is left.
    Every other eight rows, which share lanes with the rest, have one heavy key, and early. Where
    d_v is d, sm90 may cut the keys of so few queries into pieces. (aten on a GPU, a simulated one
    too, is not among the targets: its tiles hold several of the keys, and round all but one.)"""
    records, apart = 5, 192
    q = torch.zeros(1, queries, 1, d, dtype=dtype, device=target.device)
    k = torch.zeros(1, records * apart, 1, d, dtype=dtype, device=target.device)
    v = torch.full((1, records * apart, 1, d_v or d), 1 - ratio, dtype=dtype, device=target.device)
    early = torch.arange(queries, device=target.device) // 8 % 2 == 1
    q[0, ~early, 0, 0], q[0, early, 0, 2] = 1, 1
    q[0, :, 0, 1] = torch.linspace(0, 0.05, queries, device=target.device)
    number = torch.arange(records, device=target.device).flip(0)
    k[..., 0], k[..., 2] = -30, -30
    k[0, apart - 1 :: apart, 0, 0] = (number * math.log(ratio)).to(dtype)
    k[0, apart - 1 :: apart, 0, 1] = number.to(dtype)
    k[0, -1, 0, 2], k[0, (records - 1) * apart - 1, 0, 2] = 0, 6 * math.log(ratio)
    v[0, apart - 1] = 1
    with use(target):
        out = flash_attn.flash_attn_func(q, k, v, softmax_scale=1.0)
    wanted, *_ = attention_ref(q.double(), k.double(), v.double(), softmax_scale=1.0)
    error = (out.double() - wanted)[0, ~early].abs().max().item()
    assert error < torch.finfo(dtype).eps / 16
