"""The package ring_flash_attn, unchanged, on these functions: two processes on CPUs.

But for its adapter to transformers, which imports names that transformers 5 no longer has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from flash_attn import flash_attn_func
from flash_attn.context_parallel import split

with mock.patch.dict(sys.modules, {"ring_flash_attn.adapters": mock.Mock()}):
    import ring_flash_attn

RANKS = 2
# How each of its functions deals the tokens out.
LAYOUTS = {
    "ring_flash_attn_func": "contiguous",
    "zigzag_ring_flash_attn_func": "zigzag",
}


def check(rank: int, name: str, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    whole = [torch.randn(1, 64, heads, 16) for heads in (4, 2, 2, 4)]  # q, k, v, dout
    exact = [x.bfloat16().float() for x in whole]
    leaves = [x.requires_grad_() for x in exact[:3]]
    out = flash_attn_func(*leaves, causal=True)
    expected = [out, *torch.autograd.grad(out, leaves, exact[3])]

    def part(x: torch.Tensor) -> torch.Tensor:
        return split(x.detach(), layout=LAYOUTS[name]).contiguous()

    leaves = [part(x).bfloat16().requires_grad_() for x in whole[:3]]
    out = getattr(ring_flash_attn, name)(*leaves, causal=True)
    actual = [out, *torch.autograd.grad(out, leaves, part(whole[3]).bfloat16())]
    for label, a, e in zip(("out", "dq", "dk", "dv"), actual, map(part, expected), strict=True):
        error = (a.float() - e).square().mean().sqrt() / e.square().mean().sqrt()
        assert error < 1e-2, f"{label}: {error:.2g} of its size"
    dist.barrier()
    os._exit(0)  # torch's own end of gloo's threads may abort a process that has passed


@pytest.mark.parametrize("name", LAYOUTS)
def test_causal_forward_and_backward(name: str, tmp_path: Path) -> None:
    """In bf16, which it adds up in fp32."""
    processes.start_processes(
        check, (name, tmp_path / "store"), nprocs=RANKS, start_method="spawn", join=True
    )
