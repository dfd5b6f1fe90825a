"""The package ring_flash_attn, unchanged, on these functions: two processes on CPUs.

But for its adapter to transformers, which imports names that transformers 5 no longer has: an empty
module stands in its place.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from flash_attn import flash_attn_varlen_func

with mock.patch.dict(sys.modules, {"ring_flash_attn.adapters": mock.Mock()}):
    import ring_flash_attn

RANKS, TOKENS = 2, 64
DOCUMENTS = (0, 24, 64)  # each is cut for the ranks, or they all together


def contiguous(tokens: Tensor, rank: int) -> Tensor:
    return tokens.chunk(RANKS)[rank]


def zigzag(tokens: Tensor, rank: int) -> Tensor:
    parts = tokens.chunk(2 * RANKS)
    return torch.cat([parts[rank], parts[-1 - rank]])


def striped(tokens: Tensor, rank: int) -> Tensor:
    return tokens[rank::RANKS]


def of_each_document(deal):
    return lambda tokens, rank: torch.cat(
        [deal(tokens[first:last], rank) for first, last in pairwise(DOCUMENTS)]
    )


# How each of its functions deals the tokens out.
LAYOUTS = {
    "ring_flash_attn_func": contiguous,
    "zigzag_ring_flash_attn_func": zigzag,
    "stripe_flash_attn_func": striped,
    "ring_flash_attn_varlen_func": of_each_document(contiguous),
    "zigzag_ring_flash_attn_varlen_func": of_each_document(zigzag),
    "llama3_flash_attn_varlen_func": contiguous,
}


def attend(name: str, rank: int, *qkv: Tensor) -> Tensor:
    """Its function, of tensors (rows of this rank, heads, d)."""
    function, cu = getattr(ring_flash_attn, name), torch.tensor(DOCUMENTS, dtype=torch.int32)
    if "varlen" not in name:
        return function(*(x[None] for x in qkv), causal=True)[0]
    if name.startswith("llama3"):
        lengths = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, RANKS)
        *lengths, keys = lengths
        options = dict(heads_k_stride=1, local_k_slice=keys)
        return function(*qkv, *lengths, **options, causal=True)
    cu = cu // RANKS
    return function(*qkv, cu, int(cu.diff().max()), causal=True)


def check(rank: int, name: str, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    whole = [torch.randn(TOKENS, heads, 16) for heads in (4, 2, 2, 4)]  # q, k, v, dout
    exact = [x.bfloat16().float() for x in whole]
    leaves = [x.requires_grad_() for x in exact[:3]]
    ends = DOCUMENTS if "varlen" in name else (0, TOKENS)
    cu = torch.tensor(ends, dtype=torch.int32)
    out = flash_attn_varlen_func(*leaves, cu, cu, TOKENS, TOKENS, causal=True)
    expected = [out, *torch.autograd.grad(out, leaves, exact[3])]
    mine = LAYOUTS[name](torch.arange(TOKENS), rank)

    leaves = [x[mine].bfloat16().requires_grad_() for x in whole[:3]]
    out = attend(name, rank, *leaves)
    actual = [out, *torch.autograd.grad(out, leaves, whole[3][mine].bfloat16())]
    for label, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        e = e[mine]
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
