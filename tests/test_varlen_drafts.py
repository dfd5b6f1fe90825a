"""Varlen calls of few queries whose heads share tiles of sm90's forward, as drafts of speculative
decoding make them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import DECODE_CUDA, SM90, Target, each_target, use
from ragged import KEYS, Ragged, assert_close

import flash_attn

LONG = 3000
LENGTHS = {
    "lengths_q": (5, 0, 8, 1, 3),
    "lengths_k": (LONG, 33, 5, KEYS, 300),
    "heads": (8, 1),
    "options": {"causal": True},
}
SINKS = {"causal": True, "learnable_sink": torch.linspace(-1, 2, 14)}
USED = {"used_q": (4, 0, 8, 0, 3), "used_k": (LONG - 9, 0, 5, KEYS, 299)}
DRAFTS: dict[str, Ragged] = {
    name: Ragged(**(LENGTHS | changes))
    for name, changes in {
        "causal": {},
        "whole": {"options": {}},
        "short keys": {"lengths_k": (600, 33, 5, 590, 300)},
        "window": {"options": {"window_size": (100, 3)}},
        "used": USED,
        # The last tile of a kv head has rows that no head gets.
        "seven heads": {"heads": (14, 2), "lengths_q": (9, 1, 16, 2, 0)},
        "forty heads": {"heads": (40, 1), "lengths_q": (4, 1, 2, 2, 0)},
        "three heads": {"heads": (6, 2), "lengths_q": (33, 1, 64, 20, 64)},
        # More tokens than a head has rows of a tile.
        "many tokens": {"lengths_q": (48, 0, 20, 33, 3), "lengths_k": (LONG, 33, 50, KEYS, 300)},
        "most tokens": {"lengths_q": (80, 70, 96, 66, 75), "options": SINKS, "heads": (14, 2)},
        "sink": {"heads": (14, 2), "options": SINKS},
        "sink, used": USED | {"heads": (14, 2), "options": SINKS | {"window_size": (1500, 0)}},
        "d = 128": {"d": 128, "d_v": 128, "dtype": torch.bfloat16},
        "wide": {"d": 200, "d_v": 200, "dtype": torch.bfloat16},
        "narrow": {"d": 40, "d_v": 40},
        "many": {"lengths_q": (3, 8, 1) * 40, "lengths_k": (KEYS, 40, 130) * 40, "heads": (16, 2)},
    }.items()
}


@each_target(SM90)
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.plans
def test_heads_share_tiles(name: str, page_size: int, target: Target) -> None:
    problem = dataclasses.replace(DRAFTS[name], page_size=page_size)
    with use(target):
        assert "tiles shared by heads" in problem.plan(target.device)
        actual = problem.call(target.device)
    assert_close(actual, problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.plans
def test_leftpad(target: Target) -> None:
    problem = dataclasses.replace(DRAFTS["causal"], leftpad=(100, 3, 0, 20, 7))
    with use(target):
        assert "tiles shared by heads" in problem.plan(target.device)
        actual = problem.call(target.device)
    assert_close(actual, problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.plans
def test_rows_that_do_not_count(page_size: int, target: Target) -> None:
    """Sequences that use few of their queries, and many rows behind all, as graphs pad them."""
    problem = Ragged(
        lengths_q=(3, 60, 20, 0),
        lengths_k=(LONG, KEYS, 40, 7),
        heads=(14, 2),
        used_q=(3, 2, 0, 0),
        page_size=page_size,
        options=SINKS,
    )
    problem.q = torch.cat([problem.q, torch.full((150, *problem.q.shape[1:]), torch.nan)]).half()
    with use(target):
        assert "tiles shared by heads" in problem.plan(target.device)
        actual = problem.call(target.device)
    assert_close(actual, problem.expected(), problem.dtype)


@each_target(SM90)
@pytest.mark.real_gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("most", [3, 8])
def test_more_queries_than_the_caller_says(most: int, page_size: int, target: Target) -> None:
    """A sequence has as many tiles as it has queries, whatever max_seqlen_q says."""
    problem = Ragged(
        lengths_q=(300, 2, 9, 128),
        lengths_k=(KEYS, LONG, 33, 600),
        heads=(14, 2),
        page_size=page_size,
        options=SINKS,
    )
    tensors, options = problem.arguments(target.device)
    with use(target):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            *tensors, **options | {"max_seqlen_q": most}, return_attn_probs=True
        )
    assert_close((out.cpu().double(), lse.cpu().double()), problem.expected(), problem.dtype)


@each_target(DECODE_CUDA)
@pytest.mark.plans
def test_who_has_tiles_of_their_own(target: Target) -> None:
    """Heads that read a kv head each, score terms, and what one thread block of decode's reads once
    are left to decode."""

    def plan(**changes) -> str:
        return dataclasses.replace(DRAFTS["causal"], **changes).plan(target.device)

    assert "shared" not in plan(heads=(4, 4))
    assert "shared" not in plan(lengths_q=(2, 0, 1, 1, 1))
    assert "shared" not in plan(options={"softcap": 9.0})


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.plans
def test_many_keys_are_read_once(target: Target) -> None:
    """The choice where no backend is named: decode would read the keys four times."""
    shape = {"heads": (32, 4), "d": 128, "d_v": 128, "dtype": torch.bfloat16, "page_size": 16}
    drafts = Ragged(lengths_q=(8,) * 8, lengths_k=(16384,) * 8, **shape)
    assert "tiles shared by heads" in drafts.plan(target.device)
    assert drafts.served_by(target.device) == "sm90"


@each_target(SM90)
@pytest.mark.sanitize
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("name", ["used", "sink, used"])
def test_under_a_sanitizer(name: str, page_size: int, target: Target) -> None:
    problem = dataclasses.replace(DRAFTS[name], page_size=page_size)
    with use(target):
        actual = problem.call(target.device)
    assert_close(actual, problem.expected(), problem.dtype)
