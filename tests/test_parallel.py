"""torch's parallel tools over our ops, on two CPU processes: DTensor, FSDP2, tensor parallel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flash_attn
from flash_attn.integrations import dtensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
WORLD = 2


def in_processes(check, folder: Path) -> None:
    """check(rank) on two processes, whose first failure is raised here."""
    processes.start_processes(
        _begin, (check, folder / "store"), nprocs=WORLD, start_method="spawn", join=True
    )


def _begin(rank: int, check, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    dtensor.register()
    torch.manual_seed(1)  # the same numbers on every process
    check()
    dist.barrier()  # a process that leaves early takes the connections of the other with it
    os._exit(0)  # torch's own end of gloo's threads once aborted a process that had passed


def distributed(tensors: dict, places: dict, mesh) -> dict:
    return {
        name: distribute_tensor(x, mesh, [places.get(name, Replicate())]).requires_grad_(
            x.requires_grad
        )
        if isinstance(x, torch.Tensor)
        else x
        for name, x in tensors.items()
    }


def compare(function, tensors: dict, places: dict, mesh, communicates: bool = False) -> None:
    """Output and every gradient, beside one process; and whether a shard needs the others."""
    leaves = [name for name, x in tensors.items() if getattr(x, "requires_grad", False)]
    expected = function(**tensors)
    dout = torch.randn_like(expected)
    expected = [expected, *torch.autograd.grad(expected, [tensors[n] for n in leaves], dout)]
    shards = distributed(tensors, places, mesh)
    with CommDebugMode() as communication:
        out = function(**shards)
    assert (communication.get_total_counts() > 0) == communicates, communication.get_comm_counts()
    sharded_dout = distribute_tensor(dout, mesh, out.placements)
    actual = [out, *torch.autograd.grad(out, [shards[n] for n in leaves], sharded_dout)]
    for name, a, e in zip(["out", *leaves], actual, expected, strict=True):
        assert isinstance(a, DTensor)
        torch.testing.assert_close(a.full_tensor(), e, msg=lambda m, name=name: f"{name}: {m}")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def check_attention() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    dense = dict(q=leaf(2, 9, 4, 8), k=leaf(2, 7, 2, 8), v=leaf(2, 7, 2, 8))
    heads = dict.fromkeys("qkv", Shard(2))
    batch = dict.fromkeys("qkv", Shard(0))
    terms = dense | dict(learnable_sink=leaf(4), alibi_slopes=torch.rand(2, 4), causal=True)
    attend = flash_attn.flash_attn_func
    for places in (heads, batch, {}):
        compare(attend, dense, places, mesh)
        for bias in (leaf(2, 4, 9, 7), leaf(4, 1, 7), leaf(2, 1, 9, 7), leaf(9, 7)):
            compare(attend, terms | dict(attn_bias=bias), places, mesh)
        compare(attend, dense | dict(attn_bias=torch.rand(2, 1, 9, 7) > 0.2), places, mesh)
    compare(attend, terms, heads | dict(learnable_sink=Shard(0), alibi_slopes=Shard(1)), mesh)
    compare(attend, dense, dict.fromkeys("qkv", Shard(1)), mesh, communicates=True)
    three = dict(q=leaf(2, 9, 6, 8), k=leaf(2, 7, 3, 8), v=leaf(2, 7, 3, 8))
    compare(attend, three, heads, mesh, communicates=True)

    cu_q, cu_k = torch.tensor([[0, 4, 9], [0, 5, 7]], dtype=torch.int32)
    varlen = dict(q=leaf(9, 4, 8), k=leaf(7, 2, 8), v=leaf(7, 2, 8))
    varlen |= dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=5)
    compare(flash_attn.flash_attn_varlen_func, varlen, dict.fromkeys("qkv", Shard(1)), mesh)
    sdpa = dict(query=leaf(2, 4, 9, 8), key=leaf(2, 4, 7, 8), value=leaf(2, 4, 7, 8))
    compare(flash_attn.scaled_dot_product_attention, sdpa, dict.fromkeys(sdpa, Shard(1)), mesh)

    torch.manual_seed(2)
    expected = attend(**dense, dropout_p=0.4)
    torch.manual_seed(2)
    dropped = attend(**distributed(dense, heads, mesh), dropout_p=0.4)
    torch.testing.assert_close(dropped.full_tensor(), expected)


def test_attention_of_dtensors(tmp_path: Path) -> None:
    in_processes(check_attention, tmp_path)


def check_upstreams_ops() -> None:
    """torch.ops.flash_attn._flash_attn_forward and its sisters, which write the gradients."""
    mesh = init_device_mesh("cpu", (WORLD,))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    tensors = dict(q=(4, 8), k=(2, 8), v=(2, 8), dout=(4, 8))
    for infix, rows, lengths in (("", (2, 9), ()), ("_varlen", (9,), (cu, cu, 5, 5))):
        forward = getattr(torch.ops.flash_attn, f"_flash_attn{infix}_forward")
        backward = getattr(torch.ops.flash_attn, f"_flash_attn{infix}_backward")
        options = (0.0, 0.3, True, 3, 0, 0.0, torch.rand(4))
        given = {name: torch.randn(*rows, *shape) for name, shape in tensors.items()}
        q, k, v, dout = given.values()
        out, lse, *_ = forward(q, k, v, *lengths, *options, False)
        expected = [torch.empty_like(x) for x in (q, k, v)]
        saved = (dout, q, k, v, out, lse)
        softmax_d = backward(*saved, *expected, *lengths, *options, False)
        for dim in (len(rows),) if lengths else (0, len(rows)):
            places = dict.fromkeys(given, Shard(dim))
            q, k, v, dout = distributed(given, places, mesh).values()
            others = distributed(dict(enumerate((*lengths, *options))), {}, mesh).values()
            with CommDebugMode() as communication:
                sharded = forward(q, k, v, *others, False)
                gradients = [torch.empty_like(x) for x in (q, k, v)]
                saved = (dout, q, k, v, *sharded[:2])
                sharded_d = backward(*saved, *gradients, *others, False)
            assert communication.get_total_counts() == 0, communication.get_comm_counts()
            results = zip(
                (*sharded[:2], sharded_d, *gradients), (out, lse, softmax_d, *expected), strict=True
            )
            for a, e in results:
                torch.testing.assert_close(a.full_tensor(), e)
        elsewhere = [distribute_tensor(x, mesh, [Shard(len(rows) + 1)]) for x in expected]
        with pytest.raises(RuntimeError, match="dq, dk, dv: expected all replicated, or sharded"):
            backward(*saved, *elsewhere, *others, False)


def test_upstreams_ops_of_dtensors(tmp_path: Path) -> None:
    in_processes(check_upstreams_ops, tmp_path)


def check_decode() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    lengths = torch.tensor([11, 5], dtype=torch.int32)
    table = torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32)
    q, new = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    for paged in (False, True):
        shape = (6, 4, 2, 8) if paged else (2, 12, 2, 8)
        for dim in (2,) if paged else (2, 0):
            caches = dict(k_cache=torch.randn(shape), v_cache=torch.randn(shape))
            call = dict(q=q, cache_seqlens=lengths) | caches
            call |= dict(block_table=table) if paged else {}
            places = dict.fromkeys(("q", "k", "v", *caches), Shard(dim))
            places |= dict(cache_seqlens=Shard(0)) if dim == 0 else {}
            sharded = distributed(call | dict(k=new, v=new), places, mesh)
            read = {name: sharded[name] for name in call}
            actual = flash_attn.flash_decode_func(**read).full_tensor()
            torch.testing.assert_close(actual, flash_attn.flash_decode_func(**call))
            appended = flash_attn.flash_attn_with_kvcache(**sharded).full_tensor()
            expected = flash_attn.flash_attn_with_kvcache(**call, k=new, v=new)
            torch.testing.assert_close(appended, expected)
            for name, cache in caches.items():
                assert torch.equal(sharded[name].full_tensor(), cache), "written in place"
    wrong = distributed(call | dict(k=new, v=new), dict(k_cache=Shard(1)), mesh)
    with pytest.raises(RuntimeError, match="k_cache, v_cache: expected both replicated"):
        flash_attn.flash_attn_with_kvcache(**wrong)


def test_decode_of_dtensors(tmp_path: Path) -> None:
    in_processes(check_decode, tmp_path)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        return x + self.out(flash_attn.flash_attn_func(q, k, v, causal=True).flatten(2))


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def check_training() -> None:
    """FSDP2 over one dimension of the mesh, tensor parallel over the other: weights as on one."""
    x = torch.randn(4, 9, 32)
    torch.manual_seed(3)
    expected = train(nn.Sequential(Block(), Block()), x)
    for shape in ((WORLD, 1), (1, WORLD)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(3)
        model = nn.Sequential(Block(), Block())
        for block in model:
            plan = dict.fromkeys(("q", "k", "v"), ColwiseParallel(use_local_output=False))
            parallelize_module(block, mesh["tp"], plan | dict(out=RowwiseParallel()))
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        mine = x.chunk(shape[0])[mesh["dp"].get_local_rank()]
        for actual, e in zip(train(model, mine), expected, strict=True):
            torch.testing.assert_close(actual, e, rtol=1e-4, atol=1e-6)


def test_fsdp_with_tensor_parallel(tmp_path: Path) -> None:
    in_processes(check_training, tmp_path)
