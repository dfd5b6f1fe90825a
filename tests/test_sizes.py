"""Sizes: sequences of 2^20, more than 2^31 elements, more than 65,535 of each.

The results are too large for a reference of the whole: picked rows, those at the far ends among
them, agree with float64 on their own keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    DECODE_CUDA,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    each_target,
    run,
    use,
)
from numerics import assert_close, assert_lse_close

import flash_attn
from flash_attn.reference import attention_ref

pytestmark = pytest.mark.real_gpu

MILLION = 2**20
ALL = slice(None)


@dataclass(frozen=True)
class Rows:
    """Queries of one sequence that see the same keys."""

    batch: int
    queries: list[int]
    keys: slice


def dtype_on(target: Target) -> torch.dtype:
    return torch.float32 if target.device == "cpu" else torch.bfloat16


def picked(count: int, ends: tuple[int, ...] = ()) -> list[int]:
    """Rows of `count`: the first, the last, the given ones, their neighbours, some between."""
    near = {end + step for end in (*ends, 0, count) for step in (-1, 0, 1)}
    between = torch.randint(count, (12,)).tolist()
    return sorted(row for row in near | set(between) if 0 <= row < count)


def check_rows(
    picks: list[Rows],
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spread: str | None = None,
    heads: list[int] | slice = ALL,
) -> None:
    """The picked rows of out (batch, row, heads, d) and lse (batch, heads, row) against float64.

    heads: of q, and where not all, of k and v as well.
    """
    found, found_lse, expected, conditions, expected_lse, largest = [], [], [], [], [], 0.0
    for rows in picks:
        own_q = q[rows.batch, rows.queries][:, heads]
        own_k, own_v = (x[rows.batch, rows.keys][:, heads] for x in (k, v))
        both = torch.cat([own_v, own_v.abs()], -1)
        row_out, row_lse, _ = attention_ref(own_q[None], own_k[None], both[None])
        sums = row_out[0].chunk(2, -1)  # P V, P |V|
        expected.append(sums[0])
        conditions.append(sums[1])
        expected_lse.append(row_lse[0].T)
        found.append(out[rows.batch, rows.queries][:, heads])
        found_lse.append(lse[rows.batch][heads][:, rows.queries].T)
        longest = [x.float().norm(dim=-1).max().item() for x in (own_q, own_k)]
        largest = max(largest, longest[0] * longest[1] * q.size(-1) ** -0.5)
    assert_lse_close(torch.cat(found_lse), torch.cat(expected_lse), largest)
    values = [torch.cat(x) for x in (found, expected, conditions)]
    assert_close("out", *values, q.dtype, spread, largest)


def skip_unless_free(gigabytes: int) -> None:
    """Takes the memory at once and leaves it to torch's allocator, which parts it among the tensors
    that come: so no other process takes it meanwhile. Some is left to these."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    try:
        if free >= (gigabytes + 4) << 30:
            torch.empty(gigabytes << 30, device="cuda", dtype=torch.uint8)
            return
    except torch.OutOfMemoryError:
        pass
    pytest.skip(f"needs {gigabytes + 4} GB of free GPU memory")


@each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
@pytest.mark.slow
def test_a_million_queries(target: Target) -> None:
    options = dict(device=target.device, dtype=dtype_on(target))
    q = torch.randn(1, MILLION + 3, 2, 64, **options)
    k, v = torch.randn(2, 1, 100, 1, 64, **options)
    with use(target):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    check_rows([Rows(0, picked(q.size(1), (2**16, MILLION)), ALL)], out, lse, q, k, v, "normal")


@each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
@pytest.mark.slow
def test_a_million_keys(target: Target) -> None:
    """N(0, 9): a few keys make up a row, wherever they lie. A mean of all would be next to 0."""
    options = dict(device=target.device, dtype=dtype_on(target))
    keys = MILLION + 5 if target.device == "cuda" else MILLION // 8 + 5
    q = torch.randn(1, 65, 2, 64, **options) * 3
    k, v = torch.randn(2, 1, keys, 1, 64, **options) * 3
    with use(target):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    check_rows([Rows(0, [0, 17, 63, 64], ALL)], out, lse, q, k, v, "wide")


@each_target(ATEN_CUDA, SM80, SM90)
@pytest.mark.slow
def test_a_million_of_both_with_a_window(target: Target) -> None:
    left = 300
    q = torch.randn(1, MILLION + 7, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, MILLION + 7, 2, 128, device="cuda", dtype=torch.bfloat16)
    with use(target):
        out, lse, _ = flash_attn.flash_attn_func(
            q, k, v, causal=True, window_size=(left, 0), return_attn_probs=True
        )
    queries = picked(q.size(1), (left, 2**16, MILLION))
    picks = [Rows(0, [query], slice(max(query - left, 0), query + 1)) for query in queries]
    check_rows(picks, out, lse, q, k, v)


# (batch, rows, heads, d) and the strides, None: contiguous. Strides at which the last entry begins
# beyond 2^31 elements.
LARGE = {
    "batch": ((2**31 // (64 * 8 * 128) + 3, 64, 8, 128), None),
    "heads": ((2, 260, 2**15 + 1, 128), None),
    "batch stride": ((2, 70, 8, 128), (2**31, 1024, 128, 1)),
    "row stride": ((1, 70, 8, 128), (0, 2**25, 128, 1)),
    "head stride": ((1, 70, 3, 128), (0, 128, 2**30, 1)),
}


@each_target(SM80, SM90)
@pytest.mark.slow
@pytest.mark.parametrize("where", LARGE)
def test_more_than_2_31_elements(where: str, target: Target) -> None:
    shape, strides = LARGE[where]
    skip_unless_free(24)
    if strides is None:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    else:
        extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        assert extent > 2**31
        buffer = torch.full((extent + 2**20,), torch.nan, device="cuda", dtype=torch.float16)
        q, k, v = (buffer.as_strided(shape, strides, i * 2**18) for i in range(3))
        for view in (q, k, v):
            view.normal_()
    with use(target):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.isfinite().all()
    last = shape[0] - 1
    picks = [Rows(batch, [0, shape[1] - 1], ALL) for batch in {0, last // 2, last}]
    check_rows(picks, out, lse, q, k, v, "normal", picked(shape[2]))


@each_target(SM80, SM90)
@pytest.mark.slow
def test_more_than_2_31_elements_of_varlen(target: Target) -> None:
    skip_unless_free(24)
    left, lengths = 200, [300_000, 5, 0, 700_001, 70_000]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = int(starts[-1])
    assert total * 16 * 128 > 2**31
    q, k, v = (torch.randn(total, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu_seqlens = starts.int().cuda()
    with use(target):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            *(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths)),
            causal=True,
            window_size=(left, 0),
            return_attn_probs=True,
        )
    assert out.isfinite().all()
    picks = []
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        for query in picked(length) if length else []:
            keys = slice(begin + max(query - left, 0), begin + query + 1)
            picks.append(Rows(0, [begin + query], keys))
    check_rows(picks, out[None], lse[None], *(x[None] for x in (q, k, v)))


@each_target(SM80, SM90)
@pytest.mark.slow
@pytest.mark.parametrize("where", ["batch", "stride"])
def test_offsets_of_gradients_beyond_32_bits(where: str, target: Target) -> None:
    """More than 2^31 elements, and strides above 2^31: the far end has the bits of the same call
    alone."""
    skip_unless_free(80)
    if where == "batch":
        batch = (2**31) // (64 * 8 * 128) + 3
        q, k, v = (
            torch.randn(batch, 64, 8, 128, device="cuda", dtype=torch.float16) for _ in range(3)
        )
    else:
        buffer = torch.empty(2**31 + 2**24, device="cuda", dtype=torch.float16)
        shape, strides = (2, 64, 8, 128), (2**31, 1024, 128, 1)
        views = [buffer.as_strided(shape, strides, i * 2**20) for i in range(3)]
        for view in views:
            view.normal_()
        q, k, v = views
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with use(target):
        out = flash_attn.flash_attn_func(*leaves, causal=True, deterministic=True)
        gradients = torch.autograd.grad(out.narrow(0, out.size(0) - 1, 1).sum(), leaves)
        last = [x[-1:].contiguous().requires_grad_() for x in (q, k, v)]
        expected = flash_attn.flash_attn_func(*last, causal=True, deterministic=True)
        expected_gradients = torch.autograd.grad(expected.sum(), last)
    assert torch.equal(out[-1:], expected)
    for actual, e in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(actual[-1:], e)
        assert not actual[:-1].count_nonzero()


@each_target(SM80, SM90)
@pytest.mark.slow
@pytest.mark.parametrize("is_varlen", [False, True], ids=["dense", "varlen"])
def test_an_incoming_gradient_of_tokens_far_apart(is_varlen: bool, target: Target) -> None:
    """A view whose last tokens begin beyond 2^31 elements: the bits of its contiguous copy."""
    skip_unless_free(6)
    tokens, apart = 150, 2**24
    buffer = torch.full((tokens * apart,), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert (tokens - 1) * apart > 2**31
    options = dict(causal=True, deterministic=True)
    cu_seqlens = torch.tensor([0, 13, tokens], device="cuda", dtype=torch.int32)
    for d, d_v in ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)):
        q, k, v = (
            torch.randn(tokens, 4, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for width in (d, d, d_v)
        )
        dout = buffer.as_strided((tokens, 4, d_v), (apart, d_v, 1)).normal_()
        with use(target):
            if is_varlen:
                lengths = (cu_seqlens, cu_seqlens, tokens, tokens)
                out = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **options)
            else:
                out = flash_attn.flash_attn_func(*(x[None] for x in (q, k, v)), **options)
                dout = dout[None]
            found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            expected = torch.autograd.grad(out, (q, k, v), dout.contiguous())
        for name, a, e in zip(("dq", "dk", "dv"), found, expected, strict=True):
            assert torch.equal(a, e), f"{name} of d = {d}, {d_v}"
            assert e.count_nonzero()


@each_target(SM80, SM90)
@pytest.mark.slow
def test_many_batches_heads_and_tiles(target: Target, seed: int) -> None:
    """More than 65,535 of each: a grid's y and z dimension end there."""
    for case in (
        Case(batch=66_000, seqlen_q=1, seqlen_k=2, heads_q=1, heads_kv=1, d=32, dtype="fp16"),
        Case(batch=1, seqlen_q=1, seqlen_k=2, heads_q=66_000, heads_kv=1, d=32, dtype="fp16"),
    ):
        problem = Problem(case, seed, "cuda")
        q, k, v = problem.q.float(), problem.k.float(), problem.v.float()
        p = torch.einsum("bihd,bjkd->bhij", q, k).mul(case.d**-0.5).softmax(-1)
        expected = torch.einsum("bhij,bjkd->bihd", p, v)
        results = run(problem, target.backend)
        torch.testing.assert_close(results["out"].float(), expected, rtol=1e-2, atol=2e-3)
        assert all(results[name].isfinite().all() for name in ("dq", "dk", "dv"))
    tall = torch.randn(1, 65_536 * 64 + 70, 1, 32, device="cuda", dtype=torch.float16)
    with use(target):
        out = flash_attn.flash_attn_func(tall, tall[:, :9], tall[:, :9])
        end = flash_attn.flash_attn_func(tall[:, -6:], tall[:, :9], tall[:, :9])
    torch.testing.assert_close(out[:, -6:], end, rtol=1e-2, atol=1e-3)


@each_target(DECODE_CUDA)
@pytest.mark.slow
def test_pieces_of_many_sequences(target: Target, seed: int) -> None:
    """More sequences than a grid's z dimension has blocks, each in pieces: the last ones have the
    bits of a call of their own."""
    batch = 2**16 + 5
    options = dict(device="cuda", dtype=torch.float16)
    q = torch.randn(batch, 1, 2, 32, **options)
    k, v = torch.randn(2, batch, 300, 1, 32, **options)
    lengths = torch.randint(1, 301, (batch,), device="cuda", dtype=torch.int32)
    call = dict(softcap=2.0, num_splits=2)
    with use(target):
        out = flash_attn.flash_decode_func(q, k, v, lengths, **call)
        end = [x[-9:] for x in (q, k, v, lengths)]
        assert torch.equal(out[-9:], flash_attn.flash_decode_func(*end, **call))
