"""Calls on a GPU that is not the current one: they run there, and leave the current one alone."""

from __future__ import annotations

import pytest
import torch
from cases import ATEN_CUDA, DECODE_CUDA, SM80, SM90, Target, each_target, use

import flash_attn

SHAPE = (2, 130, 4, 64)


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")


def inputs(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(SHAPE, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for _ in "qkv"
    ]


@each_target(ATEN_CUDA, SM80)
def test_forward_and_backward(target: Target) -> None:
    results = {}
    with use(target):
        for device in ("cuda:0", "cuda:1"):
            leaves = inputs(device)
            options = {"causal": True, "deterministic": target.backend == "sm80"}
            out = flash_attn.flash_attn_func(*leaves, **options)
            results[device] = (out, *torch.autograd.grad(out.float().square().sum(), leaves))
            assert torch.cuda.current_device() == 0
    for first, second in zip(*results.values(), strict=True):
        assert second.device == torch.device("cuda:1")
        assert torch.equal(first.cpu(), second.cpu())


@each_target(SM90)
def test_forward(target: Target) -> None:
    with use(target), torch.no_grad():
        results = [flash_attn.flash_attn_func(*inputs(f"cuda:{i}"), causal=True) for i in (0, 1)]
    assert torch.equal(results[0].cpu(), results[1].cpu())
    assert results[1].device == torch.device("cuda:1") and torch.cuda.current_device() == 0


@each_target(ATEN_CUDA, DECODE_CUDA)
def test_decode(target: Target) -> None:
    results = []
    with use(target), torch.no_grad():
        for device in ("cuda:0", "cuda:1"):
            q, k, v = inputs(device)
            lengths = torch.tensor([130, 77], dtype=torch.int32, device=device)
            results.append(flash_attn.flash_decode_func(q[:, :1], k, v, lengths, num_splits=3))
    assert torch.equal(results[0].cpu(), results[1].cpu())
    assert results[1].device == torch.device("cuda:1") and torch.cuda.current_device() == 0


@each_target(SM80)
def test_tensors_of_two_devices_are_refused(target: Target) -> None:
    q, k, v = inputs("cuda:1")
    with (
        use(target),
        pytest.raises(RuntimeError, match="flash_attn: k: expected device cuda:1"),
    ):
        flash_attn.flash_attn_func(q, inputs("cuda:0")[1], v)
