"""Varlen calls that decode and the forward share out: short sequences beside long ones, as serving
engines batch them. And those of few tiles, whose keys are cut."""

from __future__ import annotations

import dataclasses
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import (
    DECODE_CUDA,
    SM90,
    Target,
    each_target,
)
from ragged import DEVICES, KEYS, SLOPES, Ragged, assert_close, check_replay

import flash_attn

SINK = {"causal": True, "learnable_sink": torch.linspace(-1, 2, 4)}
LONG = 3000
# Some sequences have many queries, and decode has no room for these.
MIXED_LENGTHS = {
    "lengths_q": (1, 90, 3, 0, 1, 2, 1, 1),
    "lengths_k": (KEYS, 600, 33, 5, 300, 40, 0, 530),
}
MIXED: dict[str, Ragged] = {
    name: Ragged(**(MIXED_LENGTHS | changes))
    for name, changes in {
        "plain": {},
        "causal": {"options": {"causal": True}},
        "window": {"options": {"window_size": (100, 3)}},
        "used": {
            "used_q": (1, 80, 2, 0, 1, 0, 1, 1),
            "used_k": (600, 500, 5, 0, 299, 40, 0, 530),
            "options": {"causal": True},
        },
        "leftpad": {"leftpad": (100, 30, 0, 0, 7, 0, 0, 1), "options": {"causal": True}},
        # More tiles of the long ones than a GPU has multiprocessors.
        "many tiles": {
            "lengths_q": (1, 600, 1, 1, 600, 2, 1, 1, 1, 1),
            "lengths_k": (2000, 700, 9, 1100, 900, 40, 300, 5, 0, 33),
            "used_q": (1, 590, 1, 1, 600, 2, 0, 1, 1, 1),
            "heads": (16, 4),
            "d": 128,
            "d_v": 128,
            "dtype": torch.bfloat16,
            "options": {"causal": True},
        },
        # More sequences than a thread block deals out at once.
        "many sequences": {
            "lengths_q": (1,) * 140 + (90,) + (1,) * 150 + (70, 1, 1),
            "lengths_k": (520, 33) * 147,
            "used_q": (1,) * 140 + (80,) + (1,) * 150 + (70, 0, 1),
            "options": {"causal": True},
        },
        # Of a class of head dims that kernels with cut keys lack, and few sequences beside rows.
        "d = 80": {
            "lengths_q": (1, 300, 1, 2, 1, 0, 1, 1),
            "lengths_k": (KEYS, 1300, 33, 5, 300, 40, 0, 530),
            "d": 80,
            "d_v": 80,
            "options": {"causal": True},
        },
        "sink": {"options": SINK},
        "sink, used": {
            "used_q": (1, 80, 2, 0, 1, 0, 1, 1),
            "used_k": (600, 500, 5, 0, 299, 40, 0, 530),
            "options": SINK,
        },
        "softcap": {"options": {"causal": True, "softcap": 4.0}},
        "alibi": {"options": {"causal": True, "alibi_slopes": SLOPES}},
        "alibi of sequences": {
            "options": {"causal": True, "alibi_slopes": SLOPES * torch.arange(8)[:, None]}
        },
        "narrow v": {"d": 192, "d_v": 128, "dtype": torch.bfloat16},
        "wide": {"d": 256, "d_v": 256, "heads": (8, 1)},
        "wider": {"d": 512, "d_v": 512},
        "fp32": {"dtype": torch.float32, "options": {"causal": True}},
        "odd d": {"d": 36, "d_v": 36},
    }.items()
}


def with_more_short_ones(problem: Ragged) -> Ragged:
    """So many, beside so many keys, that decode takes them beside the forward, where one launch
    might take all."""
    count = 320
    changes: dict = {
        "lengths_q": problem.lengths_q + (1,) * count,
        "lengths_k": (LONG, *problem.lengths_k[1:]) + (3,) * count,
    }
    for name, more in {"used_q": 1, "used_k": 2, "leftpad": 1}.items():
        if (lengths := getattr(problem, name)) is not None:
            changes[name] = lengths + (more,) * count
    return dataclasses.replace(problem, **changes)


# Calls that sm90 serves in one launch, until short sequences are many. There heads share tiles of
# what decode leaves.
BESIDE = {
    name: with_more_short_ones(problem)
    for name, problem in {
        **{
            name: MIXED[name]
            for name in (
                *("plain", "causal", "used", "leftpad", "many tiles"),
                *("d = 80", "sink", "sink, used"),
            )
        },
        # So wide that decode still has much to read.
        "window": Ragged(
            lengths_q=MIXED_LENGTHS["lengths_q"],
            lengths_k=(KEYS, 1300, 33, 5, 300, 40, 0, 530),
            options={"window_size": (1000, 3)},
        ),
        "eight heads": Ragged(**MIXED_LENGTHS, heads=(8, 1), options={"causal": True}),
        "seven heads, used": Ragged(
            **MIXED_LENGTHS,
            heads=(14, 2),
            used_q=(1, 80, 2, 0, 1, 0, 1, 1),
            used_k=(600, 500, 5, 0, 299, 40, 0, 530),
            options={"causal": True, "learnable_sink": torch.linspace(-1, 2, 14)},
        ),
        # The host guesses that decode has room for all but one.
        "a wrong guess": Ragged(
            lengths_q=(1, 90) + (12,) * 20,
            lengths_k=(KEYS, 600) + (100,) * 20,
            heads=(8, 1),
            options={"causal": True},
        ),
    }.items()
}

# Few tiles of queries beside long keys, which sm90's kernels cut into pieces.
CUT = {
    name: Ragged(**({"lengths_q": (40, 0, 130, 20), "lengths_k": (LONG, 5, 700, 0)} | changes))
    for name, changes in {
        "plain": {},
        "causal": {"options": {"causal": True}},
        "window": {"options": {"causal": True, "window_size": (1500, 0)}},
        "used": {
            "used_q": (33, 0, 128, 20),
            "used_k": (LONG - 7, 0, 600, 0),
            "options": {"causal": True},
        },
        "leftpad": {"leftpad": (100, 0, 30, 0), "options": {"causal": True}},
        # It joins one piece, also of a row that sees no key of that piece.
        "sink": {"options": SINK},
        "sink, used": {
            "used_q": (33, 0, 128, 20),
            "used_k": (LONG - 7, 0, 600, 0),
            "options": SINK | {"window_size": (1500, 0)},
        },
        "d = 128": {"d": 128, "d_v": 128, "dtype": torch.bfloat16, "options": {"causal": True}},
        "wide": {"d": 256, "d_v": 256, "heads": (4, 1), "options": {"causal": True}},
        "odd d": {"d": 36, "d_v": 36},
        # Blocks that merge several rows each, the last of them fewer.
        "many rows": {
            "lengths_q": (40, 0, 250, 21),
            "heads": (8, 2),
            "d": 96,
            "d_v": 96,
            "dtype": torch.bfloat16,
            "options": {"causal": True, "learnable_sink": torch.linspace(-1, 2, 8)},
        },
        "beside short ones": {
            "lengths_q": (1, 1, 1, 1, 130, 1, 2, 0),
            "lengths_k": (LONG, 40, 1, 0, LONG, 900, 33, 5),
            "options": {"causal": True},
        },
    }.items()
}


@each_target(*DEVICES)
@pytest.mark.parametrize("page_size", [0, 12, 16])
@pytest.mark.parametrize("kind, name", [("mixed", n) for n in MIXED] + [("cut", n) for n in CUT])
def test_where_the_forward_takes_part(kind: str, name: str, page_size: int, target: Target) -> None:
    """Short sequences beside a long one, which decode and the forward share out; cut keys."""
    problem = dataclasses.replace((MIXED if kind == "mixed" else CUT)[name], page_size=page_size)
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


@each_target(DECODE_CUDA)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("name", [name for name in BESIDE if name != "many tiles"])
@pytest.mark.plans
def test_decode_beside_the_forward(name: str, page_size: int, target: Target) -> None:
    problem = dataclasses.replace(BESIDE[name], page_size=page_size)
    plan = problem.plan(target.device)
    if not (problem.leftpad and page_size):  # such pages are copied first
        assert re.search("fwd.*queries: up to [248].*by cuda: decode", plan), plan
        shared = "tiles shared by heads" in plan
        assert shared == (problem.served_by(target.device) == "sm90"), plan
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_decode_takes_the_short_ones(page_size: int, target: Target) -> None:
    """Both kernels run; a named backend has the whole call, and so has the forward where sequences
    attend to themselves."""

    def kernels(problem: Ragged) -> str:
        tensors, options = problem.arguments(target.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flash_attn.flash_attn_varlen_func(*tensors, **options)
            torch.cuda.synchronize()
        return " ".join(event.key for event in profile.key_averages())

    problem = dataclasses.replace(BESIDE["causal"], page_size=page_size)
    ran = kernels(problem)
    assert "gather_queries" in ran and "decode" in ran and "fwd" in ran, ran
    with flash_attn.use_backend("sm80"):
        assert "decode" not in kernels(problem)
    alike = (1,) * 7 + (600,)
    assert "decode" not in kernels(Ragged(lengths_q=alike, lengths_k=alike))


@each_target(DECODE_CUDA)
@pytest.mark.plans
def test_short_ones_alone_have_no_company(target: Target) -> None:
    short = Ragged(lengths_q=(1, 0, 3), lengths_k=(KEYS, 33, 5), options={"causal": True})
    tensors, options = short.arguments(target.device)
    assert "up to" not in flash_attn.can_use(*tensors, **options).plan


@each_target(SM90)
@pytest.mark.real_gpu
@pytest.mark.plans
def test_few_short_ones_may_fill_the_tiles_of_many(target: Target) -> None:
    """There is room for the longest of each sequence, but each short one would take a tile of every
    head."""

    def plan(keys: int) -> str:
        few = Ragged(lengths_q=(1, 1, 1, 100), lengths_k=(keys,) * 4, heads=(64, 64))
        tensors, options = few.arguments(target.device)
        return flash_attn.can_use(*tensors, **options).plan

    assert "listed" in plan(2048)
    assert "listed" not in plan(1024)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.sanitize
def test_wrong_starts_of_mixed_sequences(target: Target) -> None:
    """cu_seqlens_q is on the device and may hold anything. Sequences that overlap have more tiles
    than there is room for, and memory stays safe."""
    problem = BESIDE["causal"]
    tensors, options = problem.arguments(target.device)
    starts = options["cu_seqlens_q"]
    total = int(starts[-1])
    wrong = torch.tensor([0, total, 0, total, -5, 2**31 - 1, 0, total, total])
    starts[: len(wrong)] = wrong.to(starts)
    out = flash_attn.flash_attn_varlen_func(*tensors, **options)
    assert out.shape == tensors[0].shape
    assert_close(problem.call(target.device), problem.expected(), torch.float16)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.plans
def test_longer_than_the_caller_says_beside_decode(page_size: int, target: Target) -> None:
    """The list of what decode leaves counts queries on the device, whatever max_seqlen_q says."""
    problem = dataclasses.replace(BESIDE["eight heads"], page_size=page_size)
    tensors, options = problem.arguments(target.device)
    options |= {"max_seqlen_q": 60}
    assert "by cuda: decode" in flash_attn.can_use(*tensors, **options).plan
    out, lse, _ = flash_attn.flash_attn_varlen_func(*tensors, **options, return_attn_probs=True)
    assert_close((out.cpu().double(), lse.cpu().double()), problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.real_gpu
@pytest.mark.plans
def test_what_has_its_keys_cut(target: Target) -> None:
    """Few tiles, beside long keys; no term that the merge does not know."""

    def plan(problem: Ragged) -> str:
        tensors, options = problem.arguments(target.device)
        return flash_attn.can_use(*tensors, **options).plan

    for name in ("causal", "sink"):
        assert "pieces" in plan(CUT[name])
    assert "pieces" not in plan(dataclasses.replace(CUT["causal"], options={"softcap": 4.0}))
    assert "pieces" not in plan(Ragged(lengths_q=(9000, 1), lengths_k=(LONG, LONG)))


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.parametrize(
    "captured, replayed",
    [((1, 1, 1), (1, 0, 1)), ((1, 90, 1, 2), (2, 1, 60, 30)), ((90, 2, 1, 1), (1, 2, 1, 1))],
    ids=["short", "another is long", "none is long"],
)
def test_a_graph_reads_the_lengths_of_its_replay(
    captured: tuple[int, ...], replayed: tuple[int, ...], target: Target
) -> None:
    check_replay(target.device, (4, 2), captured, replayed)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
def test_threads_beside_a_capture(target: Target) -> None:
    """The two kernels of a call run on two streams. While one thread captures a graph, calls of
    others get none of its streams."""
    tensors, options = BESIDE["many tiles"].arguments(target.device)

    def attend() -> torch.Tensor:
        return flash_attn.flash_attn_varlen_func(*tensors, **options)

    def of_a_thread(_: int) -> torch.Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            out = attend()
        stream.synchronize()
        return out

    expected = attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(4) as pool:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = [attend(), attend()]
            others = list(pool.map(of_a_thread, range(8)))
        for out in captured:
            out.fill_(math.nan)
        graph.replay()
        others += pool.map(of_a_thread, range(8))
    torch.cuda.synchronize()
    for out in captured + others:
        assert torch.equal(out, expected)


@each_target(DECODE_CUDA)
@pytest.mark.sanitize
@pytest.mark.parametrize("problem", [BESIDE["used"], CUT["used"], CUT["sink, used"]])
def test_under_a_sanitizer(problem: Ragged, target: Target) -> None:
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)
