"""torch's selective checkpointing, export and AOTInductor over our ops."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import flash_attn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


class Attention(nn.Module):
    """A layer with an unusual mask, whose weights have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.sink = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        options = dict(causal=True, window_size=(5, 0), learnable_sink=self.sink)
        return flash_attn.flash_attn_func(q, k, v, **options).flatten(2)


def save_attention(_: object, op: object, *arguments: object, **options: object):
    kept = op == torch.ops.flash_attn.fwd.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def out_and_lse(*inputs: torch.Tensor) -> torch.Tensor:
    out, lse, _ = flash_attn.flash_attn_func(*inputs, causal=True, return_attn_probs=True)
    return out + lse.transpose(1, 2).unsqueeze(-1)


@each_device
@pytest.mark.parametrize(
    "attend", [flash_attn.flash_attn_func, flash_attn.scaled_dot_product_attention, out_and_lse]
)
def test_compiled_autograd(attend, device: str) -> None:
    """The backward as torch compiles it, for two lengths: gradients of eager."""
    for length in (6, 9):
        inputs = [torch.randn(2, length, length, 8, device=device) for _ in range(3)]
        leaves = [x.requires_grad_() for x in inputs]
        attend(*leaves).square().sum().backward()
        expected = [x.grad for x in leaves]
        for x in leaves:
            x.grad = None
        with compiled_autograd._enable(functools.partial(torch.compile, backend="eager")):
            attend(*leaves).square().sum().backward()
        for x, e in zip(leaves, expected, strict=True):
            torch.testing.assert_close(x.grad, e)


@each_device
@pytest.mark.parametrize("keeps", [False, True])
def test_selective_checkpointing(keeps: bool, device: str) -> None:
    """Where the policy keeps our op's outputs, the backward recomputes all but the op."""
    model = Attention().to(device)
    x = torch.randn(2, 12, 32, device=device, requires_grad=True)
    context = functools.partial(create_selective_checkpoint_contexts, save_attention)
    options = dict(context_fn=context) if keeps else {}
    leaves = [x, *model.parameters()]
    model(x).square().sum().backward()
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    loss = checkpoint(model, x, use_reentrant=False, **options).square().sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    assert (torch.ops.flash_attn.fwd in counted) != keeps
    assert torch.ops.flash_attn.bwd in counted
    for leaf, e in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, e)


def exported(device: str) -> tuple[nn.Module, torch.export.ExportedProgram]:
    """A layer and its program, whose batch and length may change."""
    model = Attention().to(device).eval()
    dims = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", min=2, max=4096)}
    example = torch.randn(2, 12, 32, device=device)
    with torch.no_grad():
        return model, torch.export.export(model, (example,), dynamic_shapes=(dims,))


@each_device
def test_export(device: str, tmp_path: Path) -> None:
    """The program keeps one of our ops, survives a file and takes other shapes."""
    model, program = exported(device)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.flash_attn.fwd.default) == 1
    torch.export.save(program, tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2").module()
    x = torch.randn(3, 29, 32, device=device)
    torch.testing.assert_close(loaded(x), model(x))


def loads(package: str) -> bool:
    """Whether a process of its own survives loading what AOTInductor made."""
    script = "import sys, torch, flash_attn; torch._inductor.aoti_load_package(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", script, package]).returncode >= 0


def plain_package(tmp_path: Path) -> str:
    program = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    return torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "plain.pt2")
    )


@each_device
@pytest.mark.slow
def test_aot_inductor(device: str, tmp_path: Path) -> None:
    """Compiled to a library ahead of time, for shapes that are not known yet."""
    model, program = exported(device)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "attention.pt2")
    )
    if not loads(package):
        # Where g++ gives libraries a C++ runtime of their own, torch's own models crash alike.
        assert not loads(plain_package(tmp_path))
        pytest.skip("torch crashes when it loads what it compiled, whatever it is")
    compiled = torch._inductor.aoti_load_package(package)
    x = torch.randn(3, 29, 32, device=device)
    torch.testing.assert_close(compiled(x), model(x))
