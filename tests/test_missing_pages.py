"""Forwards in pieces, where a block_table lacks pages: their keys do not count, whatever lies in
the memory that is read in their place."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import (
    DECODE_CUDA,
    FEW_SMS,
    SIMULATED,
    SM90,
    Target,
    each_target,
    skip_copies_of_missing_pages,
    use,
)
from ragged import Ragged, assert_close
from test_mixed_batches import BESIDE, CUT, MIXED
from test_varlen_drafts import DRAFTS

import flash_attn

NO_PAGE = torch.tensor([-1, 2**31 - 1, -(2**31), 10**6], dtype=torch.int32)


def nan_around(pages: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes the nearest page for one that is missing."""
    nothing = torch.full_like(pages[:1], math.nan)
    return torch.cat([nothing, pages, nothing])


def lacking(table: torch.Tensor) -> torch.Tensor:
    """The table for nan_around(), without some pages, and for the last sequence but one without
    any."""
    chosen = torch.rand(table.shape, generator=torch.Generator().manual_seed(5)) < 0.15
    chosen[-2] = True
    nothing = NO_PAGE.repeat(-(-table.numel() // len(NO_PAGE)))[: table.numel()].view(table.shape)
    return torch.where(chosen.to(table.device), nothing.to(table.device), table + 1)


def check(problem: Ragged, device: str) -> None:
    (q, *pages), options = problem.arguments(device)
    pages = [nan_around(x) for x in pages]
    options["block_table"] = lacking(options["block_table"])
    options["return_attn_probs"] = True
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, *pages, **options)
    cpu = {n: x.cpu() if torch.is_tensor(x) else x for n, x in options.items()}
    tensors = [x.cpu().float() for x in (q, *pages)]
    with flash_attn.use_backend("aten"):
        expected = flash_attn.flash_attn_varlen_func(*tensors, **cpu)
    assert_close((out.cpu().float(), lse.cpu()), expected[:2], problem.dtype)


@each_target(SM90)
@pytest.mark.sanitize
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("name", ["causal", "window", "sink", "d = 128", "wide", "many"])
@pytest.mark.plans
def test_shared_tiles(name: str, page_size: int, target: Target) -> None:
    problem = dataclasses.replace(DRAFTS[name], page_size=page_size)
    with use(target):
        assert "tiles shared by heads" in problem.plan(target.device)
        check(problem, target.device)


@each_target(SM90)
@pytest.mark.sanitize
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("name", ["plain", "window", "sink, used", "d = 128", "wide", "many rows"])
@pytest.mark.plans
def test_keys_in_pieces(name: str, page_size: int, target: Target) -> None:
    problem = dataclasses.replace(CUT[name], page_size=page_size)
    with use(target):
        assert FEW_SMS or "pieces" in problem.plan(target.device)
        check(problem, target.device)


@each_target(DECODE_CUDA)
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["causal", "window", "d = 80", "sink, used"])
def test_mixed_sequences(name: str, target: Target) -> None:
    """Short and long ones lack pages, or keys at the end."""
    skip_copies_of_missing_pages(SIMULATED == "80")
    # A simulated GPU takes minutes for many sequences.
    check(dataclasses.replace((MIXED if SIMULATED else BESIDE)[name], page_size=16), target.device)


@each_target(SM90)
@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [8, 100])
@pytest.mark.parametrize("d", [64, 128])
def test_a_cache(d: int, tokens: int, target: Target) -> None:
    problem = Ragged(
        lengths_q=(tokens,) * 4,
        lengths_k=(900, 33, 128, 600),
        d=d,
        d_v=d,
        page_size=16,
        heads=(8, 1),
    )
    tensors, options = problem.arguments(target.device)
    q = tensors[0][2:-3].view(4, tokens, 8, d)
    pages = [nan_around(x) for x in tensors[1:]]
    lengths = torch.tensor(problem.lengths_k, dtype=torch.int32, device=target.device)
    given = {"block_table": lacking(options["block_table"]), "causal": True}
    with use(target):
        out, lse = flash_attn.flash_decode_func(
            q, *pages, lengths, return_softmax_lse=True, **given
        )
    with flash_attn.use_backend("aten"):
        expected = flash_attn.flash_decode_func(
            q.cpu().float(),
            *(x.cpu().float() for x in pages),
            lengths.cpu(),
            return_softmax_lse=True,
            causal=True,
            block_table=given["block_table"].cpu(),
        )
    assert_close((out.cpu().float(), lse.cpu()), expected, problem.dtype)
