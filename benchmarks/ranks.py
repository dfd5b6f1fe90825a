"""One causal sequence over the ranks of one host: how much faster than one GPU, with what memory?

    torchrun --nproc-per-node 2 -m benchmarks.ranks [--tokens 32768,131072] [--out FILE.json]

Forward and backward of 32 query and 8 key heads of d = 128 in bf16, batch 1. One GPU runs first,
then all ranks: each scheme; the ring with its transfers left out (its kernels on buffers that are
local already, with wrong results); torch's own context parallel, and ring_flash_attn's zigzag ring
where it is installed. Times are the slowest rank's, of a block of calls after one that warms up.
Memory is the allocator's peak on one rank, with q, k, v, dout and the gradients.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

from benchmarks import results
from flash_attn import context_parallel, flash_attn_func
from flash_attn.context_parallel import attention
from flash_attn.context_parallel.exchange import Transfer

HEADS_Q, HEADS_KV, D = 32, 8, 128
BLOCK_SECONDS = 1.0
SCHEMES = ("ring", "all-gather", "ulysses")

Step = Callable[[], object]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def seconds_of(step: Step, device: torch.device) -> float:
    """Of a call on all ranks, the slowest rank's."""

    def block(calls: int) -> float:
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize(device)
        return slowest((time.perf_counter() - start) / calls, device)

    return block(max(1, round(BLOCK_SECONDS / block(1))))


def peak_of(step: Step, device: torch.device) -> float | None:
    """GiB of the allocator, all that is alive included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return slowest(torch.cuda.max_memory_allocated(device), device) / 2**30


def draw(tokens: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout."""
    heads = (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    return [torch.randn(1, tokens, h, D, device=device, dtype=dtype) for h in heads]


def both_passes(attend: Callable[..., Tensor], inputs: list[Tensor]) -> Step:
    *leaves, dout = inputs
    leaves = [x.requires_grad_() for x in leaves]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def nothing_travels(group, sent, destination, received, source) -> Transfer:
    """exchange without the exchange."""
    return Transfer([], tuple(received), tuple(sent))


@contextlib.contextmanager
def torch_sdpa(device: torch.device, inputs: list[Tensor]):
    """torch's context parallel over this rank's shards (batch, rows, heads, d)."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    buffer = torch.empty(2 * dist.get_world_size(), device=device)
    with torch_context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
        yield both_passes(
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            [x.transpose(1, 2) for x in inputs],
        )


@contextlib.contextmanager
def ring_flash_attn(device: torch.device, inputs: list[Tensor]):
    from ring_flash_attn import zigzag_ring_flash_attn_func

    yield both_passes(lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True), inputs)


@contextlib.contextmanager
def ours(device: torch.device, inputs: list[Tensor], scheme: str, travel: bool = True):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel.flash_attn_func(q, k, v, causal=True, scheme=scheme)

    replace = mock.patch.object(attention, "exchange", nothing_travels)
    with contextlib.nullcontext() if travel else replace:
        yield both_passes(attend, inputs)


def contestants() -> dict[str, Callable]:
    table = {s: lambda *a, s=s: ours(*a, scheme=s) for s in SCHEMES}
    table["ring, local"] = lambda *a: ours(*a, scheme="ring", travel=False)
    return table | {"torch": torch_sdpa, "ring_flash_attn": ring_flash_attn}


def one_gpu(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[float, float | None]:
    """Every rank by itself: the slowest counts."""
    inputs = draw(tokens, device, dtype)
    step = both_passes(lambda q, k, v: flash_attn_func(q, k, v, causal=True), inputs)
    return seconds_of(step, device), peak_of(step, device)


def race(tokens: int, device: torch.device, dtype: torch.dtype) -> list[dict]:
    times, peaks = {}, {}
    times["one GPU"], peaks["one GPU"] = one_gpu(tokens, device, dtype)
    for name, contestant in contestants().items():
        inputs = draw(tokens // dist.get_world_size(), device, dtype)
        try:
            with contestant(device, inputs) as step:
                times[name], peaks[name] = seconds_of(step, device), peak_of(step, device)
        except (ImportError, RuntimeError, NotImplementedError) as error:
            times[name] = peaks[name] = None
            if dist.get_rank() == 0:
                print(f"{name} at {tokens} tokens: {str(error).splitlines()[0]}")
    shape = {"tokens": tokens, "ranks": dist.get_world_size()}
    speedups = results.ratios(times, "one GPU", [n for n in times if n != "one GPU"], "more")
    milliseconds = {name: None if t is None else 1e3 * t for name, t in times.items()}
    shares = {f"{n}/one GPU": p / peaks["one GPU"] for n, p in peaks.items() if p}
    return [
        results.record("ranks", shape, "ms", milliseconds, speedups),
        results.record("ranks.memory", shape, "GiB", peaks, shares or None),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="32768,131072,524288")
    parser.add_argument("--out", metavar="FILE.json")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    dtype = torch.bfloat16 if cuda else torch.float32
    method = f"the slowest rank, blocks of {BLOCK_SECONDS} s after one call"
    records = [results.run_record(device, method)]
    for tokens in map(int, arguments.tokens.split(",")):
        records += race(tokens, device, dtype)
    if dist.get_rank() == 0:
        print(results.show(records))
        results.write(arguments.out, records)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
