"""NaN wherever nothing has been written yet, so that reading it shows.

A kernel that reads memory nobody wrote passes in a fresh process and fails in a used one. Here each
call runs with NaN in what allocations return and in guard zones round the inputs.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch

GUARD_BYTES = 4096
LARGE_POISON_BYTES = 64 << 20
SMALL_POISON_BYTES = 512 << 10  # torch serves requests below 1 MiB from a pool of their own


def fill_value(dtype: torch.dtype, pattern: str) -> float:
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min if pattern == "nan" else torch.iinfo(dtype).max
    return {"nan": float("nan"), "inf": float("-inf"), "huge": torch.finfo(dtype).max}[pattern]


@contextlib.contextmanager
def dirty_allocator(device: str, pattern: str = "nan") -> Iterator[None]:
    """Allocations inside hold the pattern: on CPU torch fills them, on CUDA they reuse blocks
    filled here."""
    if pattern == "nan" and "FLASH_ATTN_SIMULATED" in os.environ:
        yield  # its library fills all new memory, and torch's way asks for deterministic kernels
        return
    if device == "cpu" and pattern == "nan":
        before = torch.are_deterministic_algorithms_enabled()
        before_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*deterministic.*")
                yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=before_warn_only)
        return
    value = fill_value(torch.float32, pattern)
    blocks = [torch.full((LARGE_POISON_BYTES // 4,), value, device=device)]
    blocks += [torch.full((SMALL_POISON_BYTES // 4,), value, device=device) for _ in range(16)]
    del blocks
    yield


class Guarded:
    """A copy of a tensor inside a larger poisoned buffer. `tensor` is the view to pass on."""

    def __init__(self, tensor: torch.Tensor, pattern: str = "nan", row_padding: int = 0) -> None:
        *outer, inner = tensor.shape if tensor.dim() else (1,)
        guard = GUARD_BYTES // tensor.element_size()
        rows = 1
        for size in outer:
            rows *= size
        pitch = inner + row_padding
        value = fill_value(tensor.dtype, pattern) if tensor.dtype != torch.bool else True
        self.buffer = tensor.new_full((2 * guard + rows * pitch,), value)
        body = self.buffer[guard : guard + rows * pitch].view(*outer, pitch)
        self.tensor = body[..., :inner].view(tensor.shape) if not row_padding else body[..., :inner]
        self.tensor.copy_(tensor)
        self.before = self.buffer.clone()

    def assert_untouched(self, name: str) -> None:
        same = torch.equal(self.buffer.view(torch.uint8), self.before.view(torch.uint8))
        assert same, f"{name}: the call wrote to its input or to the memory round it"
