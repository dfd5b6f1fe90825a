"""Varlen calls of unlike sequences in one launch of sm90's forward, whose tiles a list has. Heads
that read one kv head share them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import FEW_SMS, SM90, Target, each_target
from ragged import KEYS, Ragged, assert_close, check_replay
from test_missing_pages import check

import flash_attn

LENGTHS = {
    "lengths_q": (1, 90, 3, 0, 1, 2, 1, 1),
    "lengths_k": (KEYS, 600, 33, 5, 300, 40, 0, 530),
    "heads": (8, 1),
    "options": {"causal": True},
}
SINKS = {"causal": True, "learnable_sink": torch.linspace(-1, 2, 14)}
USED = {
    "used_q": (1, 80, 2, 0, 1, 0, 1, 1),
    "used_k": (600, 500, 5, 0, 299, 40, 0, 530),
}
LISTED: dict[str, Ragged] = {
    name: Ragged(**(LENGTHS | changes))
    for name, changes in {
        "causal": {},
        "whole": {"options": {}},
        "window": {"options": {"window_size": (100, 3)}},
        "used": USED,
        # The last tile of a kv head has rows that no head gets.
        "seven heads": {"heads": (14, 2)},
        # More heads than a tile has rows.
        "many heads": {"heads": (130, 1), "lengths_q": (1, 20, 3, 0, 1, 2, 1, 1)},
        "a head each": {"heads": (2, 2)},
        "sink, used": USED | {"heads": (14, 2), "options": SINKS | {"window_size": (1500, 0)}},
        "d = 128": {"d": 128, "d_v": 128, "dtype": torch.bfloat16},
        "wide": {"d": 200, "d_v": 200, "dtype": torch.bfloat16},
        "narrow": {"d": 40, "d_v": 40},
        # More sequences than a thread block deals out at once.
        "many sequences": {
            "lengths_q": (1,) * 140 + (90,) + (1,) * 150 + (70, 1, 1),
            "lengths_k": (520, 33) * 147,
            "used_q": (1,) * 140 + (80,) + (1,) * 150 + (70, 0, 1),
        },
        # Few tiles, whose keys are cut.
        "cut": {"lengths_q": (1, 90, 3, 0, 1), "lengths_k": (3000, 2000, 33, 5, 700)},
        "cut, used": {
            "lengths_q": (1, 90, 3, 0, 1),
            "lengths_k": (3000, 2000, 33, 5, 700),
            "used_q": (0, 80, 2, 0, 1),
            "used_k": (2900, 1990, 5, 0, 700),
            "heads": (14, 2),
            "options": SINKS | {"window_size": (1500, 0)},
        },
    }.items()
}


@each_target(SM90)
@pytest.mark.sanitize
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("name", LISTED)
@pytest.mark.plans
def test_short_and_long_sequences(name: str, page_size: int, target: Target) -> None:
    problem = dataclasses.replace(LISTED[name], page_size=page_size)
    described = problem.plan(target.device)
    if not FEW_SMS:  # for which decode beside may be faster
        assert "listed" in described
        assert "pieces" in described or not name.startswith("cut")
        assert "pieces" not in described or name != "many sequences"
        assert ("tiles shared by heads" in described) == (problem.heads[0] > problem.heads[1])
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


PROMPTS = {
    "lengths_q": (100, 30, 128, 5, 77, 0, 128, 1),
    "lengths_k": (600, 512, 700, 300, 640, 5, 512, 530),
    "heads": (64, 8),
    "d": 128,
    "d_v": 128,
    "options": {"causal": True},
}
TEXTS = (20, 200, 90, 150, 33, 0, 120, 64, 180, 71, 128, 46, 199, 16, 110, 160)
WITHOUT_DECODE = {
    "prompts": Ragged(**PROMPTS),
    "prompts in pages": Ragged(**PROMPTS, page_size=16),
    "window": Ragged(**PROMPTS | {"options": {"window_size": (300, 3)}}, page_size=16),
    "used": Ragged(
        **PROMPTS,
        used_q=(90, 30, 128, 0, 77, 0, 127, 1),
        used_k=(590, 510, 33, 299, 640, 0, 512, 3),
        page_size=64,
    ),
    "texts": Ragged(**PROMPTS | {"lengths_q": TEXTS, "lengths_k": TEXTS, "options": {}}),
    "top left": Ragged(
        **PROMPTS
        | {
            "lengths_q": TEXTS,
            "lengths_k": TEXTS[::-1],
            "options": {"causal": True, "causal_alignment": "top-left"},
        },
        dtype=torch.bfloat16,
    ),
}


@each_target(SM90)
@pytest.mark.sanitize
@pytest.mark.parametrize("name", WITHOUT_DECODE)
@pytest.mark.plans
def test_no_decode_beside(name: str, target: Target) -> None:
    """Sequences are not so unlike that decode would take part, and a list saves empty tiles."""
    problem = WITHOUT_DECODE[name]
    described = problem.plan(target.device)
    assert FEW_SMS or ("shared by heads" in described and "listed" in described), described
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.plans
def test_leftpad(target: Target) -> None:
    problem = dataclasses.replace(LISTED["causal"], leftpad=(100, 30, 0, 0, 7, 0, 0, 1))
    assert "listed" in problem.plan(target.device)
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["causal", "window", "cut", "cut, used", "d = 128", "wide"])
@pytest.mark.plans
def test_missing_pages(name: str, target: Target) -> None:
    problem = dataclasses.replace(LISTED[name], page_size=16)
    assert "listed" in problem.plan(target.device)
    check(problem, target.device)


@each_target(SM90)
@pytest.mark.parametrize("name", ["used", "sink, used"])
@pytest.mark.plans
def test_rows_behind_all(name: str, target: Target) -> None:
    """As graphs pad them."""
    problem = dataclasses.replace(LISTED[name])
    problem.q = torch.cat([problem.q, torch.full((70, *problem.q.shape[1:]), torch.nan)])
    problem.q = problem.q.to(problem.dtype)
    assert "listed" in problem.plan(target.device)
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.real_gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.plans
def test_longer_than_the_caller_says(page_size: int, target: Target) -> None:
    """The list counts queries on the device, whatever max_seqlen_q says."""
    problem = dataclasses.replace(LISTED["sink, used"], used_q=None, page_size=page_size)
    tensors, options = problem.arguments(target.device)
    options |= {"max_seqlen_q": 60}
    assert "listed" in flash_attn.can_use(*tensors, **options).plan
    out, lse, _ = flash_attn.flash_attn_varlen_func(*tensors, **options, return_attn_probs=True)
    assert_close((out.cpu().double(), lse.cpu().double()), problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.real_gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["causal", "cut"])
def test_wrong_starts(name: str, target: Target) -> None:
    """cu_seqlens_q is on the device and may hold anything. Sequences that overlap have more tiles
    than there is room for, and memory stays safe."""
    problem = LISTED[name]
    tensors, options = problem.arguments(target.device)
    starts = options["cu_seqlens_q"]
    total = int(starts[-1])
    wrong = torch.tensor([0, total, 0, total, -5, 2**31 - 1, 0, total, total])
    starts.copy_(wrong[: len(starts)])
    out = flash_attn.flash_attn_varlen_func(*tensors, **options)
    assert out.shape == tensors[0].shape
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.real_gpu
@pytest.mark.parametrize("heads", [(8, 1), (2, 2)])
def test_a_graph_reads_the_lengths_of_its_replay(heads: tuple[int, int], target: Target) -> None:
    check_replay(target.device, heads, (1, 90, 1, 2, 1), (2, 1, 60, 30, 0), plan="listed")
