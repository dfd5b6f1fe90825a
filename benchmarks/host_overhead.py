"""Host time of one call: what Python, checks, autograd and the launch cost before any work.

    python -m benchmarks.host_overhead [--device cuda] [--backend NAME] [--out FILE.json]

Inputs of 1 x 1 x 1 x 64 in bf16. Ours is what a user gets, whichever backend the library chooses:
flash_attn_func and ("ours as sdpa") scaled_dot_product_attention, beside torch's as a user calls it
and held to its flash backend.
"""

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from benchmarks import results
from flash_attn.cli.common import forced_backend
from flash_attn.cli.measure import synchronize
from flash_attn.cli.peers import SDPA

CALLS, BLOCKS = 200, 25  # the device is synchronised after each block, outside the clock

# What stands around a block of calls, and the call.
Contestant = tuple[Callable[[], AbstractContextManager], Callable]


def host_times(
    contestants: dict[str, Contestant], call_of: Callable, device: torch.device
) -> dict[str, float]:
    """Microseconds a call, the median of the blocks, in which the contestants take turns: a host's
    clock rises while a process runs, and whoever came first would pay for it."""
    calls = {name: (around, call_of(attend)) for name, (around, attend) in contestants.items()}
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BLOCKS + 2):
        for name, (around, call) in calls.items():
            with around():
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                blocks[name].append((time.perf_counter() - start) / CALLS * 1e6)
                synchronize(device)
    # The first two warm up.
    return {name: statistics.median(taken[2:]) for name, taken in blocks.items()}


def measure(
    contestants: dict[str, Contestant], shape: tuple[int, ...], device: torch.device
) -> dict[str, dict[str, float]]:
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))

    def forward(attend: Callable) -> Callable:
        return lambda: attend(q, k, v)

    result = {}
    with torch.no_grad():
        result["forward, no grad"] = host_times(contestants, forward, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    result["forward with a graph"] = host_times(contestants, forward, device)
    dout = torch.ones_like(q)
    result["forward and backward"] = host_times(
        contestants,
        lambda attend: lambda: torch.autograd.grad(attend(q, k, v), leaves, dout),
        device,
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="ours (default: the library's choice)")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    from flash_attn import can_use, flash_attn_func, scaled_dot_product_attention

    device = torch.device(args.device)
    shape = (1, 1, 1, 64)  # either layout
    with forced_backend(args.backend):
        q = torch.empty(shape, device=device, dtype=torch.bfloat16)
        serving = {op: can_use(q, q, q, op=op).backend for op in ("fwd", "bwd")}
    by_name = functools.partial(forced_backend, args.backend)
    torchs = F.scaled_dot_product_attention
    contestants = {
        "ours": (by_name, flash_attn_func),
        "ours as sdpa": (by_name, scaled_dot_product_attention),
        "sdpa": (contextlib.nullcontext, torchs),
        "sdpa flash": (lambda: sdpa_kernel(SDPA["flash"]), torchs),
    }
    method = f"median of {BLOCKS} blocks of {CALLS} calls, in turns"
    records = [results.run_record(device, method)]
    for what, values in measure(contestants, shape, device).items():
        ratio = {
            f"{mine}/{peer}": values[mine] / values[peer]
            for mine in ("ours", "ours as sdpa")
            for peer in ("sdpa", "sdpa flash")
        }
        call = {"call": what, "forward": serving["fwd"]}
        if "backward" in what:
            call["backward"] = serving["bwd"]
        records.append(results.record("host", call, "us", values, ratio))
    results.write(args.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
