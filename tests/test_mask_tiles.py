"""Masks of many tiles: which come first, are looked at together, or wait for others."""

from __future__ import annotations

import pytest
from cases import SM80, SM90, Case, Target
from test_masks import check_mask, each_mask

FEW_OF_MANY = [
    Case(batch=1, seqlen_q=150, seqlen_k=9000, heads_q=4, heads_kv=2, dtype="bf16", d=128),
    Case(batch=2, seqlen_q=4500, seqlen_k=150, heads_q=4, heads_kv=2, dtype="fp16", d=64),
    Case(batch=1, seqlen_q=150, seqlen_k=4500, heads_q=2, heads_kv=1, dtype="fp16", d=208),
    Case(batch=1, seqlen_q=4500, seqlen_k=150, heads_q=2, dtype="bf16", d=192, d_v=128),
]


@each_mask(["few-blocks"], FEW_OF_MANY)
def test_few_tiles_of_many(case: Case, name: str, target: Target) -> None:
    """More tiles in a row than a kernel looks at together, most of these groups hidden; and more
    than run at once, so that those with the most blocks come first."""
    check_mask(case, name, target)


# With more tiles than run at once.
MANY_TILES = [
    Case(d=d, dtype="bf16", batch=12, heads_q=4, heads_kv=4, seqlen_q=260, seqlen_k=330)
    for d in (64, 128, 256)
]


@pytest.mark.sanitize
@each_mask(["causal-documents", "blocks", "few-heads"], MANY_TILES, (SM80, SM90))
def test_order_of_many_tiles(case: Case, name: str, target: Target) -> None:
    check_mask(case, name, target)


@each_mask(
    ["few-causal-blocks", "causal-documents"],
    [
        Case(batch=1, seqlen_q=150, seqlen_k=9000, heads_q=4, heads_kv=2, dtype="bf16", d=128),
        Case(batch=1, seqlen_q=2200, heads_q=8, heads_kv=8, dtype="bf16", d=64),
    ],
    (SM90,),
)
def test_order_of_a_long_head(case: Case, name: str, target: Target) -> None:
    """More tiles of keys, or blocks of queries, than a warp has lanes, or a thread block warps. The
    backward has an order with causal masks alone."""
    check_mask(case, name, target)


@pytest.mark.real_gpu
@pytest.mark.slow
@each_mask(
    ["causal-documents", "blocks", "few-blocks", "few-heads", "nothing"],
    [case.with_(batch=60, heads_q=4 * group) for case in MANY_TILES for group in (1, 2)],
    (SM90,),
)
def test_more_heads_than_places_of_a_pool(case: Case, name: str, target: Target) -> None:
    """The sums of dq of some heads wait for those of others to become rows."""
    check_mask(case, name, target)
