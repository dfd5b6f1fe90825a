#!/usr/bin/env python3
"""A soak: random calls of every kind from many threads and streams, every result checked.

    python tests/soak.py [--device cuda] [--seconds 120] [--threads 8] [--streams 4] [--seed 0]
                         [--out FILE.json]

A thread draws a call, runs it on the thread's stream among poisoned allocations, and holds it
against float64:

    attention  with gradients, dense or varlen, any score term, seqused and leftpad
    masked     with gradients and a mask of flash_attn.masks: documents, windows, blocks, bool, …
    logits     return_max_logits
    garbage    anything in cu_seqlens, seqused or leftpad of a varlen call, with gradients
    cache      with or without an append, pages, shared prefixes, garbage in its indices
    forms      packed, paged, SDPA's and decode's functions, against flash_attn_func
    graph      on a GPU: a CUDA graph replayed on new data, against the same bits in eager

Not drawn are the functions outside of flash_attn's own namespace, and find_shared_prefix. Memory
has to stay flat. What failed is printed with its seed; the exit code is then 1. FILE.json is
written anew after each epoch, so that a soak that is stopped leaves what it has seen: calls,
failures, bytes held then.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import resource
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from caches import EIGHT_BITS, CacheCase, CacheProblem
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    BIAS_SHAPES,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    compare,
    expect,
    run,
)
from test_masks import MASKS, PACKED, check_mask, is_served
from test_max_logits import CASES as LOGITS_CASES
from test_max_logits import check_logits, serves
from test_varlen import INDICES, check_garbage

import flash_attn

ROUNDS = 6  # calls of one problem, whose reference is the larger part of the time
EPOCHS, EPOCH_SECONDS = 10, 30  # at least so many, at most so long: after each, memory is measured
DEVICE_GROWTH, HOST_GROWTH = 2 << 20, 96 << 20  # bytes, from the middle of a soak to its end
CAPTURE = threading.Lock()  # one capture at a time: it begins by waiting for the device


@dataclass
class Report:
    calls: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)  # after each epoch
    host_bytes: list[int] = field(default_factory=list)

    def growth(self) -> tuple[int, int]:
        """Bytes of the device and of the host, from the middle on."""
        return tuple(x[-1] - x[len(x) // 2] for x in (self.device_bytes, self.host_bytes))

    def values(self) -> dict[str, int]:
        device, host = self.growth()
        checked = {"failures": len(self.failures)} | dict(sorted(self.calls.items()))
        return checked | {"device bytes grown": device, "host bytes grown": host}

    def complaints(self) -> list[str]:
        device, host = self.growth()
        grown = [f"device memory grew by {device} bytes"] * (device > DEVICE_GROWTH)
        grown += [f"host memory grew by {host} bytes"] * (host > HOST_GROWTH)
        return self.failures + grown


def target_of(draw: random.Random, device: str, serves: Callable[[Target], bool]) -> Target:
    """A family of kernels that serves the call, where one does."""
    if device == "cpu":
        return ATEN_CPU
    kernels = [SM80, SM90] if torch.cuda.get_device_capability() == (9, 0) else [SM80]
    return draw.choice([target for target in kernels if serves(target)] or [ATEN_CUDA])


def some_lengths(draw: random.Random, most: Sequence[int]) -> tuple[int, ...] | None:
    """For seqused or leftpad, which are clamped: mostly None."""
    if draw.random() < 0.8:
        return None
    return tuple(draw.choice([-7, 1000, *(draw.randint(0, n) for _ in range(4))]) for n in most)


def attention_case(draw: random.Random) -> Case:
    varlen = draw.random() < 0.4
    lengths = [tuple(draw.choice([0, 1, 17, 64, 130]) for _ in range(3)) for _ in range(2)]
    heads_kv = draw.choice([1, 2])
    seqlen_q, seqlen_k = draw.choice([1, 33, 64, 129]), draw.choice([1, 64, 100, 257])
    most_q, most_k = lengths if varlen else ([seqlen_q] * 2, [seqlen_k] * 2)
    return Case(
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        lengths_q=lengths[0] if varlen else None,
        lengths_k=lengths[1] if varlen else None,
        seqused_q=some_lengths(draw, most_q),
        seqused_k=some_lengths(draw, most_k),
        leftpad_k=some_lengths(draw, most_k),
        heads_q=heads_kv * draw.choice([1, 2]),
        heads_kv=heads_kv,
        d=draw.choice([32, 64, 80, 128, 192, 256]),
        dtype=draw.choice(["fp16", "bf16", "bf16", "fp32"]),
        causal=draw.random() < 0.5,
        window=draw.choice([(-1, -1), (-1, -1), (20, 5)]),
        softcap=draw.choice([0.0, 0.0, 0.0, 7.0]),
        alibi=draw.choice(["", "", "", "head"]),
        bias=draw.choice(["", "", "", "", *BIAS_SHAPES]),
        sink=draw.random() < 0.2,
        dropout_p=draw.choice([0.0, 0.0, 0.0, 0.2]),
        deterministic=draw.random() < 0.3,
    )


def attention(draw: random.Random, device: str, seed: int) -> int:
    case = attention_case(draw)
    target = target_of(draw, device, lambda target: case.served_by(target.backend))
    problem = Problem(case, seed, device)
    expected = expect(problem)
    for _ in range(ROUNDS):
        compare(problem, run(problem, target.backend), expected)
    return ROUNDS


def masked(draw: random.Random, device: str, seed: int) -> int:
    name = draw.choice([*MASKS, *PACKED])
    packed = name in PACKED  # of as many queries as keys, and some of them
    case = Case(
        seqlen_q=draw.choice([64, 200, 300] if packed else [1, 70, 129, 200]),
        seqlen_k=None if packed else draw.choice([64, 150, 257]),
        d=draw.choice([32, 64, 80, 128, 192]),
        dtype=draw.choice(["fp16", "bf16", "bf16", "fp32"]),
        causal=draw.random() < 0.3,
        window=draw.choice([(-1, -1), (-1, -1), (100, 20)]),
        top_left=draw.random() < 0.3,
        sink=draw.random() < 0.2,
        lse_grad=draw.random() < 0.3,
    )
    target = target_of(draw, device, lambda target: is_served(case, target))
    check_mask(case, name, target, seed)
    return 1


def logits(draw: random.Random, device: str, seed: int) -> int:
    # The reference of the longest holds more than what counts as growth.
    case = draw.choice([case for case in LOGITS_CASES if case.seqlen_q < 500])
    check_logits(case, target_of(draw, device, lambda target: serves(target, case)), seed)
    return 1


def garbage(draw: random.Random, device: str, seed: int) -> int:
    check_garbage(draw.choice(INDICES), target_of(draw, device, lambda target: True), seed)
    return 1


def cache(draw: random.Random, device: str, seed: int) -> int:
    new, page_size = draw.choice([0, 1, 3]), draw.choice([0, 16, 64])
    bias = draw.choice(["", "", "", "same", "fp32", "bool"])
    latent = not new and draw.random() < 0.2
    case = CacheCase(
        seqlen_q=draw.choice([1, 1, 2, 5, 40]),
        new=new,
        capacity=draw.choice([70, 200]),
        heads_q=draw.choice([2, 4, 8]),
        d=576 if latent else draw.choice([32, 64, 128]),
        d_v=512 if latent else None,
        latent=latent,
        dtype=draw.choice(["fp16", "bf16"]),
        cache="" if latent else draw.choice(["", "", *EIGHT_BITS]),
        page_size=page_size,
        shared=page_size > 0 and draw.random() < 0.4,
        rows=draw.random() < 0.4,
        leftpad=draw.random() < 0.3,
        rotary=draw.choice(["", "", "halves"]) if new else "",
        causal=draw.random() < 0.7,
        softcap=draw.choice([0.0, 0.0, 5.0]),
        sink=draw.random() < 0.2,
        bias=bias,
        bias_shape=draw.choice(["bhqk", "hqk", "bk"]),
        tree="" if bias else draw.choice(["", "", "one", "each"]),
        num_splits=draw.choice([0, 0, 3]),
        batch_invariant=draw.random() < 0.2,
        garbage=draw.random() < 0.5,
    )
    problem = CacheProblem(case, seed, device)
    problem.compare(*problem.run(problem.support().backend))
    return 1


def graph(draw: random.Random, device: str, seed: int) -> int:
    """A captured step, replayed on other data and lengths: the bits that eager gives. The current
    stream must be the thread's own: what anyone else launches on it would be captured, too."""
    # Torch's own generator serves nobody while any thread's capture holds it.
    generator = torch.Generator(device).manual_seed(seed)
    place = dict(device=device, generator=generator)
    make = place | dict(dtype=draw.choice([torch.float16, torch.bfloat16]))
    d = draw.choice([64, 128])
    kind = draw.choice(["dense", "varlen", "decode"])
    if kind == "decode":
        q, *pools = (torch.randn(n, 40, 2, d, **make) for n in (3, 9, 9))
        q = q[:, :1].repeat(1, 1, 2, 1)
        table = torch.randperm(9, **place).int().view(3, 3)
        lengths = torch.randint(1, 121, (3,), dtype=torch.int32, **place)
        inputs = [q, *pools]

        def step() -> list[torch.Tensor]:
            out = flash_attn.flash_decode_func(*inputs, lengths, block_table=table)
            return [out]
    else:
        shape = (100, 2, d) if kind == "varlen" else (2, 50, 2, d)
        inputs = [torch.randn(shape, **make, requires_grad=True) for _ in range(3)]
        lengths = torch.tensor([0, draw.randint(1, 99), 100], device=device, dtype=torch.int32)
        packed = (lengths, lengths, 100, 100) if kind == "varlen" else ()
        name = "flash_attn_varlen_func" if kind == "varlen" else "flash_attn_func"
        function = getattr(flash_attn, name)

        def step() -> list[torch.Tensor]:
            out = function(*inputs, *packed, causal=True, deterministic=True)
            return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    for _ in range(2):
        step()
    stream, captured = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    stream.synchronize()
    with CAPTURE, torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
        results = step()
    for _ in range(ROUNDS):
        with torch.no_grad():
            for x in inputs:
                x.normal_(generator=generator)
            lengths[1] = draw.randint(1, 99)
        captured.replay()
        for a, e in zip(results, step(), strict=True):
            assert torch.equal(a, e), kind
    return ROUNDS


def forms(draw: random.Random, device: str, seed: int) -> int:
    """Each other function, of the same q, k and v: what flash_attn_func gives."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, d = draw.choice([torch.float16, torch.bfloat16]), draw.choice([32, 64, 128])
    shape = (2, 60, 3, 2, d)
    qkv = torch.randn(shape, device=device, dtype=dtype, generator=generator)
    (q, k, v), causal = qkv.unbind(2), draw.random() < 0.5
    cu = torch.tensor([0, 60, 120], device=device, dtype=torch.int32)
    table = torch.arange(6, device=device, dtype=torch.int32).view(2, 3)
    packed, rows = qkv.flatten(0, 1), [x.flatten(0, 1) for x in (q, k, v)]
    pages = [x.unflatten(0, (6, 20)) for x in rows[1:]]
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    mask = flash_attn.masks.causal() if causal else None
    fa, given = flash_attn, dict(causal=causal)
    expected = fa.flash_attn_func(q, k, v, **given)
    results = {
        "qkvpacked": fa.flash_attn_qkvpacked_func(qkv, **given),
        "kvpacked": fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **given),
        "varlen_qkvpacked": fa.flash_attn_varlen_qkvpacked_func(packed, cu, 60, **given),
        "varlen_kvpacked": fa.flash_attn_varlen_kvpacked_func(
            rows[0], packed[:, 1:], cu, cu, 60, 60, **given
        ),
        "pages": fa.flash_attn_varlen_func(
            rows[0], *pages, cu, cu, 60, 60, block_table=table, **given
        ),
        "sdpa": fa.scaled_dot_product_attention(*turned, is_causal=causal).transpose(1, 2),
        "mask": fa.flash_attn_func(q, k, v, attn_bias=mask),
        "decode": fa.flash_decode_func(q, k, v, **given),
    }
    for name, found in results.items():
        close = torch.allclose(found.reshape(expected.shape), expected, rtol=0.02, atol=0.02)
        assert close, name
    return len(results)


KINDS: dict[str, list[Callable[[random.Random, str, int], int]]] = {
    "cpu": [attention, masked, logits, garbage, cache, forms],
    "cuda": [attention, masked, logits, garbage, cache, forms, graph],
}


def has_little_shared_memory() -> bool:
    """Less than Hopper's 227 KB a thread block, or a GPU that plays one with less."""
    of_block = torch.cuda.get_device_properties().shared_memory_per_block_optin
    return "FLASH_ATTN_SMEM_LIMIT" in os.environ or of_block < 227 << 10


def allocated() -> int:
    """Bytes of the device that this process holds, between calls, in torch's allocator, whence the
    library has all its memory. Without cuBLAS's workspaces, 32 MiB on Hopper for each thread and
    stream that ever had a product of torch's: which threads and streams had one is chance."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def resident() -> int:
    """Bytes of the host, without what glibc keeps of freed memory: how much that is is chance."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def soak(
    device: str = "cuda",
    seconds: float = 120,
    threads: int = 8,
    streams: int = 4,
    seed: int = 0,
    after_epoch: Callable[[Report], None] = lambda report: None,
) -> Report:
    report, lock = Report(), threading.Lock()
    on_gpu = device == "cuda"
    # torch hands out 32 streams in turn: these are all different.
    ways = [torch.cuda.Stream() for _ in range(streams)] if on_gpu else []
    own = [torch.cuda.Stream() for _ in range(threads)] if on_gpu else []
    numbers = iter(range(seed * 10**9, (seed + 1) * 10**9))

    def work(worker: int, until: float) -> None:
        while time.monotonic() < until and not report.failures:
            with lock:
                number = next(numbers)
            draw = random.Random(number)
            kind = draw.choice(KINDS[device])
            stream = None
            if on_gpu:
                stream = own[worker] if kind is graph else ways[worker % streams]
            try:
                with torch.cuda.stream(stream):  # of None: nothing
                    calls = kind(draw, device, number % 2**31)
            except Exception as error:
                # The backward of wide heads in fp32.
                lacks = re.search(r"needs a GPU with \d+ KB of shared memory", str(error))
                if lacks and has_little_shared_memory():
                    continue
                with lock:
                    words = traceback.format_exc(limit=-3)
                    report.failures.append(f"{kind.__name__}, number {number}: {words}")
                return
            with lock:
                report.calls[kind.__name__] += calls

    # Poison on a CPU is a flag of the whole process, which threads would turn off under each other.
    flags = torch.are_deterministic_algorithms_enabled()
    if device == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with ThreadPoolExecutor(threads) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            epochs = max(EPOCHS, round(seconds / EPOCH_SECONDS))
            for _ in range(epochs):
                until = time.monotonic() + seconds / epochs
                list(pool.map(work, range(threads), [until] * threads))
                gc.collect()
                report.device_bytes.append(allocated() if on_gpu else 0)
                report.host_bytes.append(resident())
                after_epoch(report)
    finally:
        torch.use_deterministic_algorithms(flags)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    shape = {"seconds": args.seconds, "threads": args.threads, "streams": args.streams}
    started = time.monotonic()

    def save(report: Report) -> None:
        record = {"kind": "soak", "shape": shape, "unit": "calls", "values": report.values()}
        memory = {"device_bytes": report.device_bytes, "host_bytes": report.host_bytes}
        seen = {"seconds_run": round(time.monotonic() - started), "failed": report.failures}
        if args.out:
            text = json.dumps([record | {"ratio": None} | memory | seen])
            Path(args.out).write_text(text)
        print(seen["seconds_run"], "s:", record["values"], flush=True)

    report = soak(args.device, args.seconds, args.threads, args.streams, args.seed, save)
    print(", ".join(f"{value} {name}" for name, value in report.values().items()))
    for complaint in report.complaints():
        print(complaint)
    return 1 if report.complaints() else 0


if __name__ == "__main__":
    sys.exit(main())
