#!/usr/bin/env python3
"""Whether a deterministic backward gives the same bits every time, some of them beside another
kernel.

    python tests/repeats.py [--repeats 1000] [--beside 200] [--device cuda] [--out FILE.jsonl]

Of each form's repeats, the last ones run while a kernel on another stream holds a third of the
multiprocessors: tiles that wait for others then start in another order. A line of JSON for each
form: how many repeats there were, how many of them beside that kernel and on how many
multiprocessors it was, and how many had a gradient, or an output, of other bits than the first
call. The exit code is 1 where there is one. It calls flash_attn's functions alone, by the backend
that they choose.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import flash_attn

CLASSES = {"64": 64, "80": 80, "96": 96, "128": 128, "192": 192, "192,128": (192, 128), "256": 256}
LONGEST_SPIN = 20  # seconds, whatever becomes of this process
# A thread block has so many threads that none of the backward's fits beside it.
SPIN_THREADS = 1024
SPIN = """
extern "C" __global__ void spin(const volatile int* stop, int* multiprocessors, int longest_ms) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  if (threadIdx.x == 0) {
    int multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    multiprocessors[blockIdx.x] = multiprocessor;
    __threadfence();
  }
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (*stop == 0 && now - begin < longest_ms * 1000000ull);
}
"""


@dataclass(frozen=True)
class Form:
    """lengths: of sequences side by side, else batch sequences of seqlen tokens."""

    batch: int = 1
    seqlen: int = 2048
    heads: int = 16
    heads_kv: int = 16
    causal: bool = False
    lengths: tuple[int, ...] = ()


FORMS = {
    "full": Form(),
    "causal": Form(causal=True),
    "varlen": Form(lengths=(1500, 129, 0, 64, 2048, 777), heads=12, heads_kv=12, causal=True),
    "gqa": Form(heads_kv=2, causal=True),
    "gqa full": Form(heads_kv=4),
    "short": Form(batch=8, seqlen=500),
    "long": Form(seqlen=4096, heads=8, heads_kv=8, causal=True),
}


def step_of(form: Form, head_dims: int | tuple[int, int], device: str) -> Callable:
    """A call with its gradients, on data of its own."""
    d, d_v = head_dims if isinstance(head_dims, tuple) else (head_dims, head_dims)
    rows = (sum(form.lengths),) if form.lengths else (form.batch, form.seqlen)
    options = dict(device=device, dtype=torch.bfloat16)
    q, dout = (torch.randn(*rows, form.heads, width, **options) for width in (d, d_v))
    k, v = (torch.randn(*rows, form.heads_kv, width, **options) for width in (d, d_v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, *form.lengths], device=device).cumsum(0).int()
    longest = max(form.lengths, default=0)

    def step() -> list[torch.Tensor]:
        call = dict(causal=form.causal, deterministic=True)
        if form.lengths:
            more = (ends, ends, longest, longest)
            out = flash_attn.flash_attn_varlen_func(*leaves, *more, **call)
        else:
            out = flash_attn.flash_attn_func(*leaves, **call)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return step


def differing(step: Callable, first: list[torch.Tensor], repeats: int) -> torch.Tensor:
    """How many repeats differ, without a wait for the device."""
    count = torch.zeros((), device=first[0].device, dtype=torch.int64)
    for _ in range(repeats):
        different = [
            (a.view(torch.int16) != e.view(torch.int16)).any()
            for a, e in zip(step(), first, strict=True)
        ]
        count += torch.stack(different).any()
    return count


class Holder:
    """Holds multiprocessors inside of a `with`."""

    def __init__(self) -> None:
        count = torch.cuda.get_device_properties(0).multi_processor_count // 3
        self.kernel = torch.cuda._compile_kernel(SPIN, "spin")
        self.stop = torch.zeros(1, device="cuda", dtype=torch.int32)
        self.places = torch.full((count,), -1, device="cuda", dtype=torch.int32)
        self.stream, self.other = torch.cuda.Stream(), torch.cuda.Stream()
        # What runs beside it is loaded before: a load may wait for the whole device.
        with torch.cuda.stream(self.other):
            self.stop.fill_(0)
            self.is_held()

    def is_held(self) -> bool:
        return not (self.places < 0).any()

    def __enter__(self) -> Holder:
        self.stop.zero_()
        self.places.fill_(-1)
        torch.cuda.synchronize()
        arguments = [self.stop, self.places, LONGEST_SPIN * 1000]
        shape = dict(grid=(self.places.numel(), 1, 1), block=(SPIN_THREADS, 1, 1))
        with torch.cuda.stream(self.stream):
            self.kernel(**shape, args=arguments, stream=self.stream)
        with torch.cuda.stream(self.other):  # until all of its thread blocks run
            while not self.is_held():
                time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        with torch.cuda.stream(self.other):
            self.stop.fill_(1)
        torch.cuda.synchronize()

    def multiprocessors(self) -> int:
        """How many it holds, as long as it does."""
        assert not self.stream.query(), "it ended before the repeats"
        with torch.cuda.stream(self.other):
            return len(set(self.places.tolist()))


def report_of(form: str, head_dims: str, device: str, repeats: int, beside: int) -> dict:
    step = step_of(FORMS[form], CLASSES[head_dims], device)
    first = step()
    report = {"form": f"{head_dims} {form}", "repeats": repeats, "beside": beside}
    begin = time.perf_counter()
    wrong = int(differing(step, first, repeats - beside))
    if beside:
        with Holder() as holder:
            count = differing(step, first, beside)
            torch.cuda.current_stream().synchronize()
            report["held"] = holder.multiprocessors()
        report["differing_beside"] = int(count)
        wrong += int(count)
    return report | {"differing": wrong, "seconds": round(time.perf_counter() - begin, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--beside", type=int, default=200)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--out", help="a file for the lines")
    arguments = parser.parse_args()
    beside = arguments.beside if arguments.device == "cuda" else 0
    lines, wrong = [], 0
    for head_dims in arguments.classes:
        for form in arguments.forms:
            torch.manual_seed(0)
            report = report_of(form, head_dims, arguments.device, arguments.repeats, beside)
            wrong += report["differing"]
            lines.append(json.dumps(report))
            print(lines[-1], flush=True)
            if arguments.out:
                with open(arguments.out, "w") as file:
                    file.write("\n".join(lines) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
