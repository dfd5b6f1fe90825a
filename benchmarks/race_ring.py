"""The race of one rank's backward in a ring: its calls, without the keys' way from rank to rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import race_caches, results
from benchmarks.contest import Race, progress
from flash_attn.context_parallel.calls import (
    Options,
    Queries,
    SumOfQueries,
    run_backward,
    run_forward,
)
from flash_attn.context_parallel.merge import RunningMerge, RunningSum
from flash_attn.context_parallel.plan import Call, Documents, Mask, calls
from flash_attn.context_parallel.shards import Shards


@dataclass(frozen=True)
class RingCase:
    """The rank in the middle of a causal ring, each rank with `rows` tokens of a zigzag layout."""

    heads: int
    heads_kv: int
    head_dim: int
    ranks: int
    rows: int
    batch: int = 1

    def shape(self) -> dict:
        return {
            "heads": f"{self.heads}/{self.heads_kv}",
            "d": self.head_dim,
            "ranks": self.ranks,
            "rows": self.rows,
            "batch": self.batch,
        }

    def planned(self) -> list[tuple[Call, ...]]:
        """The calls of each step: with the rank's own keys, then with those of each rank before."""
        total = self.ranks * self.rows
        shards = Shards(total, "zigzag", self.ranks)
        rank = self.ranks // 2
        sources = [(rank - step) % self.ranks for step in range(self.ranks)]
        documents = Documents((0, total), (0, total))
        rows = shards.outer_ranges(rank)
        return [calls(Mask(right=0), documents, rows, shards.outer_ranges(x)) for x in sources]


def cases(quick: bool = False) -> list[RingCase]:
    """Short and long steps, narrow and wide heads."""
    some = [
        RingCase(32, 8, 128, 8, 2048),
        RingCase(32, 8, 128, 8, 8192),
        RingCase(32, 8, 128, 2, 8192),
        RingCase(32, 8, 64, 8, 2048),
        RingCase(16, 16, 128, 8, 1024, batch=2),
        RingCase(16, 4, 256, 8, 2048),
    ]
    return some[::3] if quick else some


class SumOfParts(RunningSum):
    """dq of calls that each give their part in a tensor of its own."""

    has_parts = True

    def add_keys(self, *_: object) -> None:
        """None: the call gives its dq to add()."""


# sums: kernels add to the same sums of dq from call to call, where they can. parts: each call has
# sums of its own, and their results are added.
FORMS = ("sums", "parts")


def backward(form: str, case: RingCase, race: Race) -> Callable[[], Tensor]:
    """The backward of one rank, which returns its dq. All keys of a rank are the same tensor."""
    torch.manual_seed(0)  # the same numbers in both forms
    device, dtype = race.device, race.dtype

    def of_heads(heads: int) -> Tensor:
        return torch.randn(case.batch, case.rows, heads, case.head_dim, device=device, dtype=dtype)

    q, dout = of_heads(case.heads), of_heads(case.heads)
    k, v = of_heads(case.heads_kv), of_heads(case.heads_kv)
    options = Options(case.head_dim**-0.5, 0.0, None, False, False, None)
    steps = case.planned()
    all_calls = [call for step in steps for call in step]
    merge = RunningMerge(torch.empty_like(q), None)
    for call in all_calls:
        run_forward(call, q, k, v, options, merge)
    out, lse = merge.result()
    queries = Queries(q, out, dout, lse, None)
    stored = torch.empty_like(q)

    def run() -> Tensor:
        dq = SumOfQueries(queries, all_calls) if form == "sums" else SumOfParts(q)
        for step in steps:
            of_keys = RunningSum(k), RunningSum(v)
            for call in step:
                run_backward(call, queries, k, v, options, (dq, *of_keys))
            for gradient in of_keys:
                gradient.value()
        dq.store(stored)
        return stored

    return run if device.type == "cpu" else race_caches.graph_of([run])


def run(race: Race, cases: list[RingCase], names: tuple[str, ...]) -> list[dict]:
    """Microseconds of all steps; ratio: those of parts ÷ those of sums."""
    records = []
    for case in cases:
        times = race.seconds(
            names, f"ring {case.shape()}", lambda name, case=case: backward(name, case, race)
        )
        micros = {n: None if t is None else t * 1e6 for n, t in times.items()}
        sums, parts = micros.get("sums"), micros.get("parts")
        ratio = {"parts/sums": parts / sums} if sums and parts else None
        records.append(results.record("ring", case.shape(), "us", micros, ratio))
        progress(records[-1])
    return records
