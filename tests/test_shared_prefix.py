"""Sequences that share leading pages: the result of a call is that of the pages which it names,
whichever kernel reads them; find_shared_prefix finds what a block table says."""

from __future__ import annotations

import pytest
import torch
from caches import CacheCase, CacheProblem, each_cache, skip_unless_served
from cases import DECODE_CUDA, DECODE_TARGETS, Target, each_target
from test_cache_forms import FORMS, PLAIN, cache_cases, check

import flash_attn

SHARED = dict(shared=[True], page_size=[1, 3, 16, 64])


@each_cache(cache_cases(40, 5, **FORMS | SHARED))
def test_any_form(case: CacheCase, target: Target, seed: int) -> None:
    check(case, target, seed)


# What a GPU reads once: a cache of q's dtype, no term of the score, no leftpad.
ONCE = (
    PLAIN
    | SHARED
    | dict(
        batch=[3, 9, 20],
        seqlen_q=[1, 1, 2, 5],
        new=[0, 0, 1, 3],
        capacity=[33, 130],
        heads=[(4, 2), (6, 1), (2, 2), (8, 1)],
        d=[32, 64, 72, 128, 160, 192],
        dtype=["bf16", "fp16"],
        rows=[False, True],
        causal=[True, True, False],
        window=[(-1, -1), (-1, -1), (60, 0), (16, 9)],
        sink=[False, True],
        num_splits=[0, 0, 2],
        garbage=[False, False, True],
    )
)


@each_cache(cache_cases(48, 6, **ONCE), DECODE_TARGETS)
@pytest.mark.plans
def test_read_once(case: CacheCase, target: Target, seed: int) -> None:
    problem = CacheProblem(case, seed, target.device)
    skip_unless_served(problem, target)
    with flash_attn.use_backend(target.backend):
        plan = problem.support().plan
    assert ("shared keys read once" in plan) == (target.backend == "cuda"), plan
    problem.compare(*problem.run(target.backend))


@each_target(DECODE_CUDA)
@pytest.mark.parametrize(("tokens", "heads", "once"), [(16, 8, True), (13, 10, False)])
def test_rows_of_a_tile(target: Target, tokens: int, heads: int, once: bool, seed: int) -> None:
    """A sequence with more rows than a thread block takes reads as if nothing was shared."""
    case = CacheCase(shared=True, page_size=16, seqlen_q=tokens, heads_q=heads, heads_kv=2, d=64)
    problem = CacheProblem(case, seed, target.device)
    with flash_attn.use_backend(target.backend):
        assert ("shared keys read once" in problem.support().plan) == once
    problem.compare(*problem.run(target.backend))


def brute_force(table: list[list[int]], lengths: list[int], page: int, least: int):
    """(source, lens) as lists."""
    full = [row[: length // page] for row, length in zip(table, lengths, strict=True)]
    sources = []
    for row in full:
        alike = (i for i, o in enumerate(full) if len(o) >= least and o[:least] == row[:least])
        sources.append(next(alike, len(full)) if len(row) >= least else len(full))

    def common(a: list[int], b: list[int]) -> int:
        pairs = zip(a, b, strict=False)
        return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

    lens = []
    for i, source in enumerate(sources):
        if source == len(full):
            lens.append(0)
        elif source == i:
            others = (j for j, s in enumerate(sources) if s == i and j != i)
            lens.append(page * max((common(full[i], full[j]) for j in others), default=0))
        else:
            lens.append(page * common(full[source], full[i]))
    return sources, lens


@each_target(*DECODE_TARGETS)
@pytest.mark.parametrize("least", [1, 2])
def test_find(target: Target, least: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for batch, columns, page in ((1, 4, 16), (6, 5, 4), (40, 9, 2), (3, 1, 16)):
        # Few numbers, so that many rows begin alike.
        table = torch.randint(2, (batch, columns), generator=generator, dtype=torch.int32)
        lengths = torch.randint(columns * page + 1, (batch,), generator=generator)
        source, lens = flash_attn.find_shared_prefix(
            table.to(target.device), lengths.int().to(target.device), page, least
        )
        wanted, wanted_lens = brute_force(table.tolist(), lengths.tolist(), page, least)
        assert lens.tolist() == wanted_lens
        assert [s for s, n in zip(source.tolist(), wanted_lens, strict=True) if n] == [
            s for s, n in zip(wanted, wanted_lens, strict=True) if n
        ]


def test_nothing_in_common() -> None:
    """Missing pages are no common ones, nor are those that a length does not fill."""
    table = torch.tensor([[-1, 1], [-1, 2], [5, 6], [5, 7]], dtype=torch.int32)
    lengths = torch.tensor([32, 32, 15, 32], dtype=torch.int32)
    assert flash_attn.find_shared_prefix(table, lengths, 16).lens.tolist() == [0, 0, 0, 0]
    wide = flash_attn.find_shared_prefix(table, lengths, 16, least_pages=3)
    assert wide.lens.tolist() == [0, 0, 0, 0]


@each_target(DECODE_CUDA)
def test_graphs_see_what_is_shared(target: Target, seed: int) -> None:
    """A replay reads table, lengths and what is shared anew, the search for it in the graph too."""
    case = CacheCase(batch=9, page_size=16, capacity=200, heads_q=8, d=64)
    problem = CacheProblem(case, seed, target.device)
    problem.lengths.fill_(190)
    problem.make_tensors()
    q, k, v = (x.to(target.device) for x in (problem.q, problem.k_pool, problem.v_pool))
    table, lengths = problem.table.to(target.device), problem.lengths.to(target.device)
    alone = table.clone()

    def call():
        shared = flash_attn.find_shared_prefix(table, lengths, 16)
        options = dict(block_table=table, return_softmax_lse=True)
        return flash_attn.flash_decode_func(q, k, v, lengths, shared_prefix=shared, **options)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for common in (0, 4, 11, 2):
        table.copy_(alone)
        table[3:, :common] = alone[3, :common]
        graph.replay()
        problem.table = table.cpu()
        problem.compare(out, lse)


@each_target(*DECODE_TARGETS)
def test_refusals(target: Target) -> None:
    problem = CacheProblem(CacheCase(page_size=16, shared=True), 0, target.device)
    tensors = [x.to(target.device) for x in (problem.q, problem.k_pool, problem.v_pool)]
    options = problem.options()
    source, lens = options.pop("shared_prefix")
    for shared, words in (
        ((source[:2], lens), "shared_prefix.source"),
        ((source, lens.long()), "shared_prefix.lens: expected dtype int32"),
        ((source, None), "source and lens together"),
    ):
        with pytest.raises(RuntimeError, match=words):
            shared = flash_attn.SharedPrefix(*shared)
            flash_attn.flash_decode_func(*tensors, shared_prefix=shared, **options)
    with pytest.raises(TypeError, match="shared_prefix: expected SharedPrefix or None, got 3"):
        flash_attn.flash_decode_func(*tensors, shared_prefix=3, **options)
    del options["block_table"]
    with pytest.raises(RuntimeError, match="shared_prefix: expected with block_table"):
        shared = flash_attn.SharedPrefix(source, lens)
        flash_attn.flash_decode_func(*tensors, shared_prefix=shared, **options)
    table, lengths = problem.table, problem.lengths
    for arguments, words in (
        ((table[0], lengths, 16), "block_table: expected 2 dimensions"),
        ((table, lengths[1:], 16), "cache_seqlens: expected shape"),
        ((table.long(), lengths, 16), "block_table: expected dtype int32"),
        ((table, lengths, 0), "page_size: expected at least 1"),
        ((table, lengths, 16, 0), "least_pages: expected at least 1"),
    ):
        with pytest.raises(RuntimeError, match=words):
            flash_attn.find_shared_prefix(*arguments)
