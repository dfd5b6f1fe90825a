"""context_parallel beside the rest of torch: torch.compile, checkpointing, autocast, time-outs,
torch's own context_parallel."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, place
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import context_parallel

SCHEMES = ["ring", "all-gather", "ulysses"]


def inputs(device: str, dtype=torch.float64, seqlen: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(1, seqlen, heads, 8, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for heads in (4, 2, 2)
    ]


def grads_of(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves)


def check_compiled(scheme: str | None, device: str) -> None:
    device, group = place(2, device)
    if group is None:
        return
    whole = inputs(device)
    out = flash_attn.flash_attn_func(*whole, causal=True)
    grads = grads_of(out, whole)
    parts = [context_parallel.split(x, group).detach().requires_grad_() for x in whole]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        options = dict(causal=True, group=group, scheme=scheme)
        return context_parallel.flash_attn_func(2 * q, k, v, softmax_scale=8**-0.5 / 2, **options)

    actual = attend(*parts)
    torch.testing.assert_close(actual, context_parallel.split(out, group))
    for grad, wanted in zip(grads_of(actual, parts), grads, strict=True):
        torch.testing.assert_close(grad, context_parallel.split(wanted, group))


@pytest.mark.parametrize("scheme", [*SCHEMES, None])
def test_compile(scheme: str | None, pool: Pool) -> None:
    """One graph without a break, forward and backward."""
    pool.run(check_compiled, scheme, pool.device)


def check_checkpointed(scheme: str, device: str) -> None:
    device, group = place(4, device)
    parts = [context_parallel.split(x, group).detach().requires_grad_() for x in inputs(device)]

    def attend(q, k, v):
        options = dict(causal=True, group=group, scheme=scheme)
        return context_parallel.flash_attn_func(q.sin(), k, v, **options)

    expected = grads_of(attend(*parts), parts)
    again = grads_of(checkpoint(attend, *parts, use_reentrant=False), parts)
    for grad, wanted in zip(again, expected, strict=True):
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activation_checkpointing(scheme: str, pool: Pool) -> None:
    pool.need(4)
    pool.run(check_checkpointed, scheme, pool.device)


def check_autocast(scheme: str, device: str) -> None:
    device, group = place(4, device)
    kind = torch.device(device).type
    parts = [context_parallel.split(x, group) for x in inputs(device, torch.float32)]
    with torch.autocast(kind, torch.bfloat16):
        out = context_parallel.flash_attn_func(*parts, group=group, scheme=scheme)
    half = [x.bfloat16() for x in parts]
    assert out.dtype == torch.bfloat16
    wanted = context_parallel.flash_attn_func(*half, group=group, scheme=scheme)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast(scheme: str, pool: Pool) -> None:
    pool.need(4)
    pool.run(check_autocast, scheme, pool.device)


def check_slow_rank(scheme: str) -> None:
    """Rank 1 does not come; rank 0 hears of it from its group."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        parts = [context_parallel.split(x, group) for x in inputs("cpu")]
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)timed out|connection closed"):
            context_parallel.flash_attn_func(*parts, group=group, scheme=scheme)
        assert time.monotonic() - start < 20


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slow_rank(scheme: str, pool: Pool) -> None:
    if pool.device == "cuda":
        pytest.skip("NCCL's watchdog ends the process")
    pool.run(check_slow_rank, scheme)


def check_dead_rank() -> None:
    parts = [context_parallel.split(x) for x in inputs("cpu")]
    out = context_parallel.flash_attn_func(*parts, scheme="ring")
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="(?i)timed out|connection closed|reset by peer"):
        grads_of(out, parts)


def test_dead_rank() -> None:
    """A rank that is gone before the backward: an error in its neighbour's, no wrong gradient."""
    pool = Pool(2, "cpu", seconds=20)
    try:
        outcomes = pool.outcomes(check_dead_rank)
        assert outcomes == [(True, None), (False, "the process has ended")]
    finally:
        pool.close()
