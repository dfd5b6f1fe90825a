"""Time and peak memory of a call, on CPU and on CUDA."""

import ctypes
import ctypes.util
import time
from collections.abc import Callable
from pathlib import Path

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_block(fn: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds a call, ``calls`` of them timed as one block, by CUDA events or the wall clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - start) / calls
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def calls_for(fn: Callable[[], object], device: torch.device, seconds: float) -> int:
    """How many calls fill ``seconds``: by one call after a warm-up, then by 20 ms of them."""
    fn()
    synchronize(device)
    each = max(time_block(fn, device, 1), 1e-7)
    if each < 0.02 and seconds > 0.02:
        each = max(time_block(fn, device, min(1000, int(0.02 / each) + 1)), 1e-7)
    return max(1, round(seconds / each))


def time_call(fn: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    """Seconds a call: warm up, then the fastest of three blocks that take ``seconds`` in all.

    Short bursts, good for a first look. A GPU's clock depends on what ran before:
    ``benchmarks/timing.py`` settles it.
    """
    calls = calls_for(fn, device, seconds / 3)
    return min(time_block(fn, device, calls) for _ in range(3))


def peak_memory(fn: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that ``fn`` needs at its peak above what was in use; None where nothing can tell.

    CUDA: torch's allocator. CPU: the process's resident set (Linux), after freed memory went back
    to the system.
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _reset_resident_peak():
        fn()
        return None
    before = _status_bytes("VmRSS")
    fn()
    return max(0, _status_bytes("VmHWM") - before)


def _reset_resident_peak() -> bool:
    try:
        # Freed blocks that malloc keeps would be reused unseen: the peak would read too low.
        ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM to VmRSS
        return True
    except (OSError, AttributeError, TypeError):
        return False


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
