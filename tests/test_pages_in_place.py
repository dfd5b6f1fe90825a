"""Varlen calls and prefill on pages that sm90's kernels read where they lie, without gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from cases import (
    ATEN_CPU,
    OP_TARGETS,
    SM90,
    Target,
    each_target,
    pads,
    skip_copies_of_missing_pages,
    use,
)

import flash_attn
from flash_attn import _call

NO_PAGE = (-1, 10**6, -(2**31))


@dataclass
class Paged:
    """On the CPU: sequences, their keys in float64, and in scattered pages."""

    q: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor
    lengths_q: list[int]
    lengths_k: list[int]
    page_size: int

    @classmethod
    def make(
        cls,
        page_size: int,
        d: int,
        d_v: int,
        dtype: torch.dtype,
        lengths_q: tuple[int, ...],
        lengths_k: tuple[int, ...],
        heads: tuple[int, int] = (4, 2),
    ) -> Paged:
        """What no sequence has is NaN; entries that no length needs name no page."""
        q = torch.randn(sum(lengths_q), heads[0], d, dtype=torch.float64).to(dtype)
        k, v = (
            [torch.randn(n, heads[1], e, dtype=torch.float64).to(dtype) for n in lengths_k]
            for e in (d, d_v)
        )
        counts = [-(-n // page_size) for n in lengths_k]
        pages = torch.randperm(sum(counts) + 3)
        columns = max(counts) + 2
        table = torch.tensor(NO_PAGE).repeat(len(counts) * columns)[: len(counts) * columns]
        table = table.view(len(counts), columns).int()
        pools = [
            torch.full((len(pages), page_size, heads[1], e), math.nan, dtype=dtype)
            for e in (d, d_v)
        ]
        used = 0
        for b, count in enumerate(counts):
            table[b, :count] = pages[used : used + count]
            for pool, rows in zip(pools, (k[b], v[b]), strict=True):
                for i, piece in enumerate(rows.split(page_size)):
                    pool[pages[used + i], : len(piece)] = piece
            used += count
        return cls(q, k, v, *pools, table, list(lengths_q), list(lengths_k), page_size)

    def starts(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int()

    def call(self, target: Target, table: torch.Tensor | None = None, **options: object):
        """The arguments of flash_attn_varlen_func on a device."""
        tensors = [x.to(target.device) for x in (self.q, self.k_pages, self.v_pages)]
        given = dict(
            cu_seqlens_q=self.starts(self.lengths_q).to(target.device),
            cu_seqlens_k=self.starts(self.lengths_k).to(target.device),
            max_seqlen_q=max(self.lengths_q),
            max_seqlen_k=max(self.lengths_k),
            block_table=(self.table if table is None else table).to(target.device),
        )
        moved = {n: x.to(target.device) if torch.is_tensor(x) else x for n, x in options.items()}
        return tensors, given | moved

    def expected(self, missing: list[tuple[int, int]] = (), **options: object):
        """Of each sequence out and lse in float64, without the keys of missing (sequence, page)."""
        results = []
        sinks = options.pop("learnable_sink", None)
        for b, q in enumerate(self.q.double().split(self.lengths_q)):
            k, v = self.k[b].double(), self.v[b].double()
            exists = torch.ones(len(k), dtype=torch.bool)
            for sequence, page in missing:
                if sequence == b:
                    exists[page * self.page_size : (page + 1) * self.page_size] = False
            extra = {} if sinks is None else dict(learnable_sink=sinks)
            out, lse, _ = flash_attn.flash_attn_func(
                q[None],
                k[None],
                v[None],
                attn_bias=exists[None, None, None],
                return_attn_probs=True,
                **extra,
                **options,
            )
            results.append((out[0], lse[0]))
        return torch.cat([x for x, _ in results]), torch.cat([x for _, x in results], 1)


def assert_right(actual, expected, dtype: torch.dtype) -> None:
    error = 2e-2 if dtype == torch.bfloat16 else 4e-3
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=error, atol=error)


def attend(tensors, given):
    out, lse, _ = flash_attn.flash_attn_varlen_func(*tensors, **given, return_attn_probs=True)
    return out, lse


def stays_in_pages(tensors, given) -> bool:
    """Whether the op itself gets the table."""
    return _call.fwd_arguments(*tensors, **given)[8] is not None


LENGTHS = ((33, 1, 200, 64, 5), (300, 77, 200, 1, 129))
DIMS = {
    (64, 64): (torch.float16, torch.bfloat16),
    (40, 40): (torch.float16,),
    (80, 72): (torch.bfloat16,),
    (96, 96): (torch.float16,),
    (128, 128): (torch.float16, torch.bfloat16),
    (144, 160): (torch.float16,),
    (192, 128): (torch.bfloat16,),
    (256, 256): (torch.float16,),
}


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 256])
@pytest.mark.parametrize(("dims", "dtype"), [(x, y) for x, kinds in DIMS.items() for y in kinds])
@pytest.mark.parametrize("causal", [False, True])
def test_pages(
    causal: bool,
    dims: tuple[int, int],
    dtype: torch.dtype,
    page_size: int,
    target: Target,
) -> None:
    """Out and lse by float64; on sm90 no page is copied."""
    problem = Paged.make(page_size, *dims, dtype, *LENGTHS)
    tensors, given = problem.call(target, causal=causal)
    with use(target):
        actual = attend(tensors, given)
        assert stays_in_pages(tensors, given) == (target.backend == "sm90")
    assert_right(actual, problem.expected(causal=causal), dtype)


SLOPES = torch.linspace(0.1, 0.3, 4)
OPTIONS: dict[str, dict] = {
    "sink": dict(learnable_sink=torch.linspace(-1, 2, 4)),
    "top-left": dict(causal=True, causal_alignment="top-left"),
    "right window": dict(window_size=(-1, 20)),
    "window": dict(window_size=(40, 0)),
    "window and sink": dict(window_size=(127, 0), learnable_sink=torch.linspace(-1, 2, 4)),
    "scale": dict(softmax_scale=0.3),
    "softcap": dict(softcap=5.0),
    "softcap, window": dict(softcap=5.0, window_size=(40, 0)),
    "alibi": dict(alibi_slopes=SLOPES, causal=True),
    "alibi, window": dict(alibi_slopes=SLOPES, window_size=(40, 30)),
    "softcap and alibi": dict(softcap=5.0, alibi_slopes=SLOPES, window_size=(60, 0)),
}
COPIED: dict[str, dict] = {
    "short window": dict(window_size=(6, 0)),
    "top-left window": dict(window_size=(40, 0), causal_alignment="top-left"),
}


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("name", [*OPTIONS, *COPIED])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_options(d: int, name: str, target: Target) -> None:
    options = (OPTIONS | COPIED)[name]
    problem = Paged.make(32, d, d, torch.float16, *LENGTHS)
    tensors, given = problem.call(target, **options)
    with use(target):
        actual = attend(tensors, given)
        in_place = target.backend == "sm90" and name in OPTIONS
        assert stays_in_pages(tensors, given) == in_place
    assert_right(actual, problem.expected(**options), torch.float16)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("window", [(20, 0), (100, 30), (9, -1), (7, 0)])
@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_windows(d: int, page_size: int, window: tuple[int, int], target: Target) -> None:
    """Of many sizes beside those of boxes, pages and blocks of keys."""
    problem = Paged.make(page_size, d, d, torch.bfloat16, *LENGTHS)
    tensors, given = problem.call(target, window_size=window)
    with use(target):
        actual = attend(tensors, given)
        assert stays_in_pages(tensors, given) == (target.backend == "sm90")
    assert_right(actual, problem.expected(window_size=window), torch.bfloat16)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("name", ["", "softcap", "alibi", "softcap and alibi"])
def test_what_windows_leave_behind(name: str, d: int, page_size: int, target: Target) -> None:
    """Pages whose keys no query sees any more may be gone, and hidden keys may be NaN."""
    skip_copies_of_missing_pages(target.backend == "sm80")
    problem = Paged.make(page_size, d, d, torch.float16, (33, 7), (300, 130))
    terms = {"softcap": 5.0, "alibi": SLOPES}
    options = {"alibi_slopes" if n == "alibi" else n: x for n, x in terms.items() if n in name}
    options |= dict(window_size=(50, 0))
    with use(target):
        whole = attend(*problem.call(target, **options))
    for b, (queries, keys) in enumerate(zip(problem.lengths_q, problem.lengths_k, strict=True)):
        hidden = keys - queries - 50
        gone = hidden // page_size
        for pool in (problem.k_pages, problem.v_pages):
            pool[problem.table[b, :gone].long()] = math.nan
            pool[problem.table[b, gone], : hidden % page_size] = math.nan
        problem.table[b, :gone] = -1
    with use(target):
        actual = attend(*problem.call(target, **options))
    if target.backend == "sm90":
        for a, e in zip(actual, whole, strict=True):
            assert torch.equal(a, e)
    else:  # a copy that lacks pages has a mask, with which other kernels run
        assert_right(actual, [x.cpu().double() for x in whole], torch.float16)


@each_target(SM90)
@pytest.mark.real_gpu
def test_a_window_beside_memory_that_nobody_owns(target: Target) -> None:
    """TMA touches the first byte of its map where a box begins outside it. Tensors of this size
    begin where their allocation does."""
    problem = Paged.make(16, 64, 64, torch.float16, (33, 7), (300, 130))
    tensors, given = problem.call(target, window_size=(50, 0))
    pools = []
    for pages in tensors[1:]:
        pool = torch.zeros(1 << 14, *pages.shape[1:], dtype=pages.dtype, device=target.device)
        pool[: len(pages)] = pages
        pools.append(pool)
    with use(target):
        actual = attend([tensors[0], *pools], given)
    assert_right(actual, problem.expected(window_size=(50, 0)), torch.float16)


@each_target(*OP_TARGETS)
def test_lengths_beside_cu_seqlens(target: Target) -> None:
    """seqused_k says how many keys count, seqused_q how many queries."""
    problem = Paged.make(16, 64, 64, torch.float16, *LENGTHS)
    used_k, used_q = [123, 0, 200, 1, 16], [33, 1, 7, 64, 0]
    tensors, given = problem.call(
        target,
        seqused_k=torch.tensor(used_k).int(),
        seqused_q=torch.tensor(used_q).int(),
        causal=True,
    )
    with use(target):
        out, lse = attend(tensors, given)
    rows = torch.cat([torch.arange(n) < m for n, m in zip(problem.lengths_q, used_q, strict=True)])
    problem.k = [x[:n] for x, n in zip(problem.k, used_k, strict=True)]
    problem.v = [x[:n] for x, n in zip(problem.v, used_k, strict=True)]
    parts = problem.q.split(problem.lengths_q)
    problem.q = torch.cat([x[:n] for x, n in zip(parts, used_q, strict=True)])
    problem.lengths_q = used_q
    expected = problem.expected(causal=True)
    assert_right((out[rows.to(out.device)], lse[:, rows.to(lse.device)]), expected, torch.float16)
    assert not out[~rows.to(out.device)].any()
    assert (lse[:, ~rows.to(lse.device)] == -math.inf).all()


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (120, 0)])
def test_missing_pages(window: tuple[int, int], d: int, target: Target) -> None:
    """Sequences that lack one are right, and the others have the bits that they have without."""
    skip_copies_of_missing_pages(target.backend == "sm80")
    problem = Paged.make(16, d, d, torch.float16, *LENGTHS)
    missing = [(0, 0), (2, 7), (4, 8)]
    table = problem.table.clone()
    for (b, page), nothing in zip(missing, NO_PAGE, strict=True):
        table[b, page] = nothing
    with use(target):
        whole = attend(*problem.call(target, window_size=window))
        actual = attend(*problem.call(target, table, window_size=window))
    assert_right(actual, problem.expected(missing, window_size=window), torch.float16)
    if target == ATEN_CPU and pads(target):
        return  # aten has a mask where pages are missing, and on a simulated GPU MKL rounds anew
    starts = problem.starts(problem.lengths_q).tolist()
    for b in (1, 3):
        rows = slice(starts[b], starts[b + 1])
        assert torch.equal(actual[0][rows], whole[0][rows])
        assert torch.equal(actual[1][:, rows], whole[1][:, rows])


@each_target(SM90)
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("d", [64, 128, 192])
def test_pages_change_no_bit(d: int, page_size: int, target: Target) -> None:
    """A copy of the pages goes through the same kernels: what a gradient is wanted of is copied.
    Kernels with d = d_v alone, which round in another order, may be chosen for one of the two."""
    problem = Paged.make(page_size, d, d - 16, torch.float16, *LENGTHS)
    tensors, given = problem.call(target, causal=True)
    with use(target):
        in_place = attend(tensors, given)
        copied = attend([x.clone().requires_grad_() for x in tensors], given)
    for a, e in zip(in_place, copied, strict=True):
        assert torch.equal(a, e)


@each_target(*OP_TARGETS)
def test_largest_logits(target: Target) -> None:
    skip_copies_of_missing_pages(target.backend == "sm80")
    problem = Paged.make(16, 64, 64, torch.float16, *LENGTHS)
    table = problem.table.clone()
    table[2, 3] = -1
    tensors, given = problem.call(target, table, causal=True, return_max_logits=True)
    with use(target):
        *_, largest = flash_attn.flash_attn_varlen_func(*tensors, **given)
    wanted = torch.full((4,), -math.inf, dtype=torch.float64)
    for b, q in enumerate(problem.q.double().split(problem.lengths_q)):
        k = problem.k[b].double().repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(k) - len(q))
        if b == 2:
            seen[:, 48:64] = False
        wanted = torch.maximum(wanted, scores.masked_fill(~seen, -math.inf).amax((1, 2)))
    torch.testing.assert_close(largest.cpu().double(), wanted, rtol=2e-3, atol=2e-3)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("name", ["heads first", "one pool", "padded"])
def test_strides_of_a_pool(name: str, target: Target) -> None:
    """Pages as engines keep them: with heads before keys, K and V in one tensor, in wider rows."""
    problem = Paged.make(16, 64, 64, torch.bfloat16, *LENGTHS)
    tensors, given = problem.call(target)
    q, k, v = tensors
    if name == "heads first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif name == "one pool":
        k, v = torch.stack([k, v], 1).unbind(1)
    else:
        k, v = (torch.nn.functional.pad(x, (0, 8), value=math.nan)[..., :64] for x in (k, v))
    with use(target):
        actual = attend((q, k, v), given)
        assert stays_in_pages((q, k, v), given) == (target.backend == "sm90")
    assert_right(actual, problem.expected(), torch.bfloat16)


@each_target(SM90)
def test_what_is_copied(target: Target) -> None:
    """Pages of other sizes, keys that a gradient is wanted of, and backends that were named."""
    for page_size in (8, 12):
        problem = Paged.make(page_size, 64, 64, torch.float16, *LENGTHS)
        tensors, given = problem.call(target)
        with use(target):
            assert stays_in_pages(tensors, given) == (page_size == 8)
            actual = attend(tensors, given)
            wanted = [tensors[0].clone().requires_grad_(), *tensors[1:]]
            assert not stays_in_pages(wanted, given)
            with torch.no_grad():
                assert stays_in_pages(wanted, given) == (page_size == 8)
        assert_right(actual, problem.expected(), torch.float16)
        with flash_attn.use_backend("sm80"):
            assert not stays_in_pages(tensors, given)


@each_target(SM90)
@pytest.mark.parametrize("window", [(-1, 0), (100, 0)])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_prefill(d: int, page_size: int, window: tuple[int, int], target: Target) -> None:
    """flash_attn_with_kvcache of many tokens: some appended, rows of the table chosen, a page
    missing; the same numbers from dense rows."""
    # Room for so many keys that they are cut into pieces.
    batch, tokens, new, columns = 3, 150, 20, 1536 // page_size
    make = dict(device=target.device, dtype=torch.float16)
    q = torch.randn(batch, tokens, 4, d, **make)
    k, v = torch.randn(2, batch, new, 2, d, **make)
    pools = torch.randn(2, batch * columns + 2, page_size, 2, d, **make)
    pools[:, -2:] = math.nan
    table = torch.randperm(batch * columns).int().view(batch, columns).to(target.device)
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=target.device)
    lengths = torch.tensor([311, 480, 130], dtype=torch.int32, device=target.device)
    dense = [x[table.long()].flatten(1, 2).contiguous() for x in pools]
    common = dict(cache_seqlens=lengths, cache_batch_idx=rows, window_size=window)
    with use(target):
        out = flash_attn.flash_attn_with_kvcache(
            q, *pools.clone(), k, v, block_table=table, **common
        )
        expected = flash_attn.flash_attn_with_kvcache(q, *dense, k, v, **common)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
        lacking = table.clone()
        missing = 1 if window[0] < 0 else 300 // page_size  # one that is seen
        lacking[0, missing] = -1  # of sequence 1
        actual = flash_attn.flash_attn_with_kvcache(
            q, *pools.clone(), k, v, block_table=lacking, **common
        )
    assert torch.equal(actual[[0, 2]], out[[0, 2]])
    exists = torch.ones(500, dtype=torch.bool)
    exists[missing * page_size : (missing + 1) * page_size] = False
    keys = [
        torch.cat([x[0, :480], y[1]])[None].cpu().double()
        for x, y in zip(dense, (k, v), strict=True)
    ]
    wanted = flash_attn.flash_attn_func(
        q[1:2].cpu().double(), *keys, window_size=window, attn_bias=exists[None, None, None]
    )
    torch.testing.assert_close(actual[1:2].cpu().double(), wanted, rtol=4e-3, atol=4e-3)


@each_target(SM90)
@pytest.mark.real_gpu
def test_a_graph_reads_the_table_of_its_replay(target: Target) -> None:
    """Entries that change, pages that go missing, lengths that grow."""
    problem = Paged.make(16, 128, 128, torch.float16, *LENGTHS)
    used = torch.tensor([100, 77, 150, 1, 60]).int()
    tensors, given = problem.call(target, seqused_k=used, causal=True)
    with use(target):
        attend(tensors, given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(tensors, given)
        given["seqused_k"].copy_(torch.tensor(problem.lengths_k).int())
        given["block_table"][2, 4] = -1
        graph.replay()
    assert_right(captured, problem.expected([(2, 4)], causal=True), torch.float16)


@each_target(SM90)
@pytest.mark.sanitize
def test_under_a_sanitizer(target: Target) -> None:
    problem = Paged.make(16, 64, 64, torch.float16, (33, 1, 70), (150, 77, 16))
    table = problem.table.clone()
    table[1, 2] = -1
    with use(target):
        actual = attend(*problem.call(target, table, causal=True))
    assert_right(actual, problem.expected([(1, 2)], causal=True), torch.float16)
