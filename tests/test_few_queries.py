"""Forwards of few queries beside many keys, as in generation, which run on decode's kernels."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import DECODE_CUDA, Target, each_target
from ragged import DEVICES, KEYS, SLOPES, Ragged, assert_close, tensors

import flash_attn

LENGTHS = {"lengths_q": (1, 0, 3, 1, 5), "lengths_k": (KEYS, 33, 5, 0, 300)}
RAGGED: dict[str, Ragged] = {
    name: Ragged(**(LENGTHS | changes))
    for name, changes in {
        "plain": {},
        "one query each": {"lengths_q": (1, 1, 1), "lengths_k": (KEYS, 1, 530)},
        "causal": {"options": {"causal": True}},
        "window": {"options": {"window_size": (100, 3)}},
        "used": {"used_q": (1, 0, 2, 0, 5), "used_k": (600, 0, 5, 0, 299)},
        "leftpad": {"leftpad": (100, 3, 0, 0, 7), "options": {"causal": True}},
        "sink": {"options": {"causal": True, "learnable_sink": torch.linspace(-1, 2, 4)}},
        "softcap": {"options": {"causal": True, "softcap": 4.0}},
        "alibi": {"options": {"causal": True, "alibi_slopes": SLOPES}},
        "narrow v": {"d": 192, "d_v": 128, "dtype": torch.bfloat16},
        "wide": {"d": 256, "d_v": 256, "heads": (8, 1)},
        "wider": {"d": 512, "d_v": 512},
        "fp32": {"dtype": torch.float32, "options": {"causal": True}},
        "odd d": {"d": 36, "d_v": 36},
    }.items()
}


@each_target(*DEVICES)
@pytest.mark.parametrize("page_size", [0, 12, 16])
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.plans
def test_varlen(name: str, page_size: int, target: Target) -> None:
    """Queries and keys in float64, whatever lies between the sequences."""
    problem = dataclasses.replace(RAGGED[name], page_size=page_size)
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)
    if target.backend == "cuda":
        served, plan = problem.served_by(target.device), problem.plan(target.device)
        assert served == "cuda" or name == "odd d" or "shared by heads" in plan, served


@each_target(*DEVICES)
@pytest.mark.parametrize("queries", [1, 7, 40])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_dense(d: int, queries: int, target: Target) -> None:
    """Out, lse and gradients in float64."""
    batch = 3
    inputs = [
        torch.randn(batch, n, h, d, dtype=torch.float64).to(torch.float16)
        for n, h in ((queries, 4), (KEYS, 2), (KEYS, 2))
    ]
    dout = torch.randn(batch, queries, 4, d, dtype=torch.float64).to(torch.float16)

    def run(device: str, dtype: torch.dtype):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in inputs)
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        gradients = torch.autograd.grad(out, (q, k, v), dout.to(device, dtype))
        return [x.detach().cpu().double() for x in (out, lse, *gradients)]

    assert_close(run(target.device, torch.float16), run("cpu", torch.float64), torch.float16)


@each_target(*DEVICES)
@pytest.mark.parametrize("queries", [1, 16, 40])
@pytest.mark.parametrize("shape", ["b11k", "1hqk", "bhqk", "k"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_bias(kind: str, shape: str, queries: int, target: Target) -> None:
    """A bias or a mask, broadcast in several ways, with its gradient."""
    batch = 2
    sizes = {"b": batch, "h": 4, "q": queries, "k": KEYS, "1": 1}
    q, k, v = (torch.randn(batch, n, h, 64).half() for n, h in ((queries, 4), (KEYS, 2), (KEYS, 2)))
    bias = torch.randn([sizes[x] for x in shape]).half()
    if kind == "bool":
        bias = bias > -0.5

    def run(device: str, dtype: torch.dtype):
        given = bias.to(device) if kind == "bool" else bias.to(device, dtype).requires_grad_()
        x = [y.to(device, dtype) for y in (q, k, v)]
        out, lse, _ = flash_attn.flash_attn_func(
            *x, causal=True, attn_bias=given, return_attn_probs=True
        )
        gradients = () if kind == "bool" else torch.autograd.grad(out.sum(), given)
        return [y.detach().cpu().double() for y in (out, lse, *gradients)]

    actual, expected = run(target.device, torch.float16), run("cpu", torch.float64)
    assert_close(actual[:2], expected[:2], torch.float16)
    for a, e in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2 * e.abs().max().item())


@each_target(DECODE_CUDA)
@pytest.mark.parametrize("queries", [1, 8])
def test_has_the_bits_of_decode(queries: int, target: Target) -> None:
    """Dense, and varlen with as many queries of each sequence: the same kernels, cut alike."""
    q, k, v = tensors(target.device, 2, queries)
    expected = flash_attn.flash_decode_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True), expected)
    assert flash_attn.can_use(q, k, v, causal=True).backend == "cuda"
    starts = torch.arange(3, dtype=torch.int32, device=target.device)
    actual = flash_attn.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)),
        starts * queries,
        starts * KEYS,
        queries,
        KEYS,
        causal=True,
    )
    assert torch.equal(actual.view_as(expected), expected)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.sanitize
def test_wrong_lengths(target: Target) -> None:
    """More queries than max_seqlen_q says: the last ones are right, those before are NaN. Starts
    that lie anywhere leave memory alone, also where decode takes some of the sequences."""
    q, k, v = (x.flatten(0, 1) for x in tensors(target.device, 2, 8))
    make = {"dtype": torch.int32, "device": target.device}
    starts_q = torch.tensor([0, 3, 16], **make)
    starts_k = torch.tensor([0, KEYS, 2 * KEYS], **make)
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 4, KEYS, causal=True)
    whole = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 13, KEYS, causal=True)
    torch.testing.assert_close(out[:3], whole[:3], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(out[12:], whole[12:], rtol=2e-3, atol=2e-3)
    assert out[3:12].isnan().all()
    for anywhere in ([0, 2**31 - 1, -5], [9, 3, 1], [-(2**31), 16, 2**30]):
        wrong = torch.tensor(anywhere, **make)
        for starts in ((wrong, starts_k), (starts_q, wrong), (wrong, wrong)):
            for most in (8, 300):
                flash_attn.flash_attn_varlen_func(q, k, v, *starts, most, KEYS)
    again = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 13, KEYS, causal=True)
    assert torch.equal(again, whole)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
def test_a_longest_sequence_of_no_queries(target: Target) -> None:
    """max_seqlen_q may say 0 beside queries on a GPU, where nobody looks at the lengths. The
    forward's kernels do not trust it."""
    q, k, v = (x.flatten(0, 1) for x in tensors(target.device, 2, 3))
    starts = torch.arange(3, dtype=torch.int32, device=target.device)
    call = q, k, v, starts * 3, starts * KEYS
    expected = flash_attn.flash_attn_varlen_func(*call, 3, KEYS, causal=True)
    out = flash_attn.flash_attn_varlen_func(*call, 0, KEYS, causal=True)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@each_target(DECODE_CUDA)
def test_what_decode_does_not_know(target: Target) -> None:
    """Dropout, a diagonal from the top left and a backend that was named go elsewhere."""
    q, k, v = tensors(target.device, 2, 1)
    expected = flash_attn.flash_decode_func(q, k, v)
    out = flash_attn.flash_attn_func(q, k, v, causal=True, causal_alignment="top-left")
    first = v[:, :1].repeat_interleave(2, 2)  # the only key that is seen
    torch.testing.assert_close(out, first, rtol=2e-3, atol=2e-3)
    dropped = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    assert (dropped - expected).norm() > 0.1 * expected.norm()
    for name in ("sm80", "cuda"):
        with flash_attn.use_backend(name):
            assert flash_attn.can_use(q, k, v, softcap=9.0).backend == name
            out = flash_attn.flash_attn_func(q, k, v)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@each_target(DECODE_CUDA)
def test_one_query_of_sdpa(target: Target) -> None:
    """Its diagonal is from the top left, and one query has none; its masks are of the keys."""
    q, k, v = tensors(target.device, 3, 1)
    seen = torch.arange(KEYS, device=target.device) < torch.tensor([[KEYS], [40], [1]]).to(q.device)
    for mask in (None, seen[:, None, None]):
        out = flash_attn.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), mask, enable_gqa=True
        )
        expected = flash_attn.flash_decode_func(q, k, v, attn_bias=mask)
        assert torch.equal(out.transpose(1, 2), expected)


@each_target(DECODE_CUDA)
def test_many_rows_that_do_not_count(target: Target) -> None:
    """Sequences that use one of many queries, and rows behind all of them, as graphs pad them."""
    q, k, v = (x.flatten(0, 1) for x in tensors(target.device, 2, 300))
    make = {"dtype": torch.int32, "device": target.device}
    starts_q, starts_k = torch.tensor([0, 1, 2], **make), torch.tensor([0, KEYS, 2 * KEYS], **make)
    bounds = (starts_q, starts_k, 1, KEYS)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *bounds, return_attn_probs=True)
    alone = flash_attn.flash_attn_varlen_func(q[:2], k, v, *bounds, return_attn_probs=True)
    assert torch.equal(out[:2], alone[0]) and torch.equal(lse[:, :2], alone[1])
    assert not out[2:].any() and (lse[:, 2:] == -math.inf).all()


@each_target(DECODE_CUDA)
@pytest.mark.sanitize
@pytest.mark.parametrize("problem", [RAGGED["used"], RAGGED["leftpad"]])
def test_under_a_sanitizer(problem: Ragged, target: Target) -> None:
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)
