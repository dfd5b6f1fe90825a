"""Where a test runs: a device and a backend, on this machine's GPU or on a simulated one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

import flash_attn


@dataclass(frozen=True)
class Target:
    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.device}-{self.backend}"

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        if self.device == "cuda":
            return [pytest.mark.gpu]
        served = self.backend != "sm90" or SIMULATED == "90"
        return [pytest.mark.simulated] if SIMULATED and served else []


# "80" or "90": the library is that of a simulated GPU (csrc/simulator), whose kernels take tensors
# of the CPU. Set by dev.py test --simulator.
SIMULATED = os.environ.get("FLASH_ATTN_SIMULATED", "")
KERNEL_DEVICE = "cpu" if SIMULATED else "cuda"
# A simulated GPU has eight multiprocessors where FLASH_ATTN_SIMULATED_SMS says nothing else. Then
# plans are not those of an H200, which has 132.
FEW_SMS = bool(SIMULATED) and int(os.environ.get("FLASH_ATTN_SIMULATED_SMS", "8")) < 132

ATEN_CPU = Target("cpu", "aten")
ATEN_CUDA = Target("cuda", "aten")
SM80 = Target(KERNEL_DEVICE, "sm80")
# What its backward lacks comes from sm80, given its out and LSE.
SM90 = Target(KERNEL_DEVICE, "sm90")
DECODE_CUDA = Target(KERNEL_DEVICE, "cuda")
ATTENTION_TARGETS = (ATEN_CPU, ATEN_CUDA, SM80)
OP_TARGETS = (*ATTENTION_TARGETS, SM90)  # what run() serves
SPLIT_TARGETS = (ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
PREFILL_TARGETS = (SM80, SM90)  # of decode: the kernels for many new tokens
DECODE_TARGETS = (*SPLIT_TARGETS, *PREFILL_TARGETS)


def pads(target: Target) -> bool:
    """aten on a device, a simulated one too, pads sequences whose lengths only the device knows:
    that changes the shapes of its products, and with them the algorithms of cuBLAS and MKL."""
    return target == ATEN_CUDA or (bool(SIMULATED) and target == ATEN_CPU)


def skip_copies_of_missing_pages(by_sm80: bool) -> None:
    """Of a call that sm80 serves: it reads copies, in which missing pages are cleared of a GPU's
    tensors alone. A simulated GPU's are the CPU's, and their copies may hold what nobody sees."""
    if SIMULATED and by_sm80:
        pytest.skip("the copy is for a real GPU's kernels")


BITWISE_TARGETS = tuple(target for target in OP_TARGETS if not pads(target))


def each_target(*targets: Target) -> pytest.MarkDecorator:
    params = [pytest.param(t, id=str(t), marks=t.marks) for t in targets]
    return pytest.mark.parametrize("target", params)


def use(target: Target):
    return flash_attn.use_backend(target.backend)


def leaves_of(target: Target, *shape: int, dtype: torch.dtype = torch.bfloat16, count: int = 3):
    return [
        torch.randn(*shape, device=target.device, dtype=dtype, requires_grad=True)
        for _ in range(count)
    ]
