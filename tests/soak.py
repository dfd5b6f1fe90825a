#!/usr/bin/env python3
"""A soak: random calls of every kind from many threads and streams, every result checked.

    python tests/soak.py [--device cuda] [--seconds 120] [--threads 8] [--streams 4] [--seed 0]
                         [--out FILE.json]

A thread draws a call (attention with gradients, dense or varlen, any score term; a cache with or
without an append, pages, garbage in its indices; every other function beside flash_attn_func; on a
GPU a CUDA graph, replayed on new data), runs it on the thread's stream among poisoned allocations,
and holds it against float64, or a replay against the same bits in eager. Memory has to stay flat.
What failed is printed with its seed; the exit code is then 1. FILE.json is written anew after each
epoch, so that a soak that is stopped leaves what it has seen: calls, failures, bytes held then.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from caches import EIGHT_BITS, CacheCase, CacheProblem
from cases import BIAS_SHAPES, Case, Problem, compare, expect, run

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


def attention_case(draw: random.Random) -> Case:
    varlen = draw.random() < 0.4
    lengths = [tuple(draw.choice([0, 1, 17, 64, 130]) for _ in range(3)) for _ in range(2)]
    heads_kv = draw.choice([1, 2])
    return Case(
        batch=2,
        seqlen_q=draw.choice([1, 33, 64, 129]),
        seqlen_k=draw.choice([1, 64, 100, 257]),
        lengths_q=lengths[0] if varlen else None,
        lengths_k=lengths[1] if varlen else None,
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
    backends = ["aten"]
    if device == "cuda":
        names = ["sm80", "sm90"] if torch.cuda.get_device_capability() == (9, 0) else ["sm80"]
        backends = [name for name in names if case.served_by(name)] or backends
    problem = Problem(case, seed, device)
    expected, backend = expect(problem), draw.choice(backends)
    for _ in range(ROUNDS):
        compare(problem, run(problem, backend), expected)
    return ROUNDS


def cache(draw: random.Random, device: str, seed: int) -> int:
    new = draw.choice([0, 1, 3])
    case = CacheCase(
        seqlen_q=draw.choice([1, 1, 2, 5, 40]),
        new=new,
        capacity=draw.choice([70, 200]),
        heads_q=draw.choice([2, 4, 8]),
        d=draw.choice([32, 64, 128]),
        dtype=draw.choice(["fp16", "bf16"]),
        cache=draw.choice(["", "", *EIGHT_BITS]),
        page_size=draw.choice([0, 16, 64]),
        rows=draw.random() < 0.4,
        leftpad=draw.random() < 0.3,
        rotary=draw.choice(["", "", "halves"]) if new else "",
        causal=draw.random() < 0.7,
        softcap=draw.choice([0.0, 0.0, 5.0]),
        sink=draw.random() < 0.2,
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
    }
    for name, found in results.items():
        close = torch.allclose(found.reshape(expected.shape), expected, rtol=0.02, atol=0.02)
        assert close, name
    return len(results)


KINDS: dict[str, list[Callable[[random.Random, str, int], int]]] = {
    "cpu": [attention, cache, forms],
    "cuda": [attention, cache, forms, graph],
}


def allocated() -> int:
    """Bytes of the device that this process holds, between calls, in torch's allocator, whence the
    library has all its memory. Without cuBLAS's workspaces, 32 MiB on Hopper for each thread and
    stream that ever had a product of torch's: which threads and streams had one is chance."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def resident() -> int:
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
            except Exception:
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
