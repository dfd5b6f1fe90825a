"""context_parallel beside the rest of torch: torch.compile, checkpointing, autocast, time-outs,
torch's own context_parallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import TWO_DIMENSIONS, Pool, place
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


def check_compiled(scheme: str | None, ranks: int, device: str) -> None:
    device, group = place(ranks, device)
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


@pytest.mark.parametrize(
    "scheme, ranks", [*((s, 4) for s in SCHEMES), ("ring", TWO_DIMENSIONS), (None, 4)]
)
def test_compile(scheme: str | None, ranks: int, pool: Pool) -> None:
    """One graph without a break, forward and backward."""
    pool.need(4)
    pool.run(check_compiled, scheme, ranks, pool.device)


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
