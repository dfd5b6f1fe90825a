"""What should one sequence over many GPUs cost? Predicted from stated assumptions, not measured.

    python -m benchmarks.scaling [--out FILE.json]

Causal attention, forward and backward, of one layer with 32 query and 8 key heads of d = 128 in
bf16, zigzag. The work of each step is counted from the plan that flash_attn.context_parallel runs;
the rest is the assumptions below. A step of the ring lasts as long as the longest of its
computation, its transfer and its launches, and so does a group of heads of the other schemes, whose
first exchange and last one hide behind nothing. What is left out: other traffic on the links, ranks
of unequal speed, power limits.
"""

import argparse
import dataclasses
import math

from benchmarks import results
from flash_attn.context_parallel.heads import heads_of_a_group
from flash_attn.context_parallel.plan import Documents, Mask, Rectangle, calls
from flash_attn.context_parallel.schemes import LAUNCH_SECONDS, LINK_BYTES, step_seconds
from flash_attn.context_parallel.shards import Shards, size_of

HEADS_Q, HEADS_KV, D = 32, 8, 128
BF16, FP32 = 2, 4
CAUSAL = Mask(right=0)
RANKS_OF_HOST = 8
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """An H200 with NVLink in a host of eight, and one 400 Gb/s adapter for each GPU."""

    # The kernels at long sequences, of all score pairs seen, and the length at which they reach
    # half of that: fitted to one GPU's 49.5 and 778 ms at 32k and 128k (2026-11-23).
    forward_flops: float = 655e12
    backward_flops: float = 627e12
    forward_half_length: float = 300.0
    backward_half_length: float = 500.0
    # Elementwise passes (merging, adding gradients, packing), of 4.8 TB/s.
    memory: float = 3.8e12
    # What arrives at a GPU, of 450 GB/s and of 50 GB/s; and what a transfer costs beside its bytes.
    in_host: float = LINK_BYTES[True]
    between_hosts: float = LINK_BYTES[False]
    in_host_latency: float = 20e-6
    between_hosts_latency: float = 40e-6
    # Of the GPU's time, to NCCL's own kernels while they run beside a computation.
    transfer_share: float = 0.04
    # The host's work for a step of the ring, in Python, and for a call of another scheme.
    launch: float = LAUNCH_SECONDS


ASSUMED = Assumptions()
# Nothing travels: the ring's kernels on buffers that are local already.
LOCAL = dataclasses.replace(ASSUMED, in_host=math.inf, in_host_latency=0.0, transfer_share=0.0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of the forward and of the backward, and bytes of a GPU at the peak of both."""

    forward: float
    backward: float
    memory: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def seen_pairs(r: Rectangle) -> int:
    """Pairs of row and key in the band of a rectangle without a left limit."""
    if r.right < 0:
        return r.rows * r.keys
    short = max(0, min(r.rows, r.keys - 1 - r.right))  # rows that do not see the last key
    return short * (r.right + 1) + short * (short - 1) // 2 + (r.rows - short) * r.keys


def transfer_time(size: float, between_hosts: bool, a: Assumptions = ASSUMED) -> float:
    if size == 0:
        return 0.0
    if between_hosts:
        return a.between_hosts_latency + size / a.between_hosts
    return a.in_host_latency + size / a.in_host


def kernel_time(
    rectangles: list[Rectangle], heads: float, backward: bool, a: Assumptions = ASSUMED
) -> float:
    peak, half, products = (
        (a.backward_flops, a.backward_half_length, 5)
        if backward
        else (a.forward_flops, a.forward_half_length, 2)
    )
    seconds = 0.0
    for r in rectangles:
        shorter = min(r.rows, r.keys)
        seconds += products * 2 * D * heads * seen_pairs(r) / (peak * shorter / (shorter + half))
    return seconds


def overlapped(computing: float, moving: float, a: Assumptions) -> float:
    """How long a step of the ring or a group of heads takes with the transfers beside it."""
    return step_seconds(computing + a.transfer_share * min(moving, computing), moving, a.launch)


def split_workspace(length: float, heads_kv: float) -> float:
    """Bytes that a causal backward takes where its blocks of keys are few: each in two parts, whose
    dk and dv are added up in fp32 (csrc/sm90/bwd.cu)."""
    blocks = heads_kv * length / 128
    return 2 * 2 * blocks * 128 * D * FP32 if blocks < 2 * MULTIPROCESSORS else 0.0


def planned(q: tuple, k: tuple, length: int) -> list[Rectangle]:
    whole = Documents((0, length), (0, length))
    return [r for call in calls(CAUSAL, whole, q, k) for r in call]


def bytes_of(rows: float, heads: float, itemsize: int) -> float:
    return rows * heads * D * itemsize


def one_gpu(length: int, heads_q: float = HEADS_Q, heads_kv: float = HEADS_KV) -> Cost:
    whole = ((0, length),)
    times = [kernel_time(planned(whole, whole, length), heads_q, bwd) for bwd in (False, True)]
    # q, out, dout, dq; k, v, dk, dv; the backward's own fp32 sum of dq.
    memory = 4 * bytes_of(length, heads_q, BF16) + 4 * bytes_of(length, heads_kv, BF16)
    return Cost(*times, memory + bytes_of(length, heads_q, FP32))


def ring(
    length: int, ranks: int, between_hosts: bool, inner: int = 1, a: Assumptions = ASSUMED
) -> Cost:
    """Over `ranks`, each of which may be an inner group of GPUs that share the heads."""
    heads_q, heads_kv = HEADS_Q / inner, max(1.0, HEADS_KV / inner)
    shards = Shards(length, "zigzag", ranks)
    held = [shards.ranges(rank) for rank in range(ranks)]
    rows = size_of(held[0])
    keys, wide_keys = 2 * bytes_of(rows, heads_kv, BF16), 2 * bytes_of(rows, heads_kv, FP32)
    queries, wide_queries = bytes_of(rows, heads_q, BF16), bytes_of(rows, heads_q, FP32)
    groups = head_groups(rows, heads_q, heads_kv)

    def of_queries(step: int, backward: bool) -> float:
        """Bytes that merging out, or adding dq, moves: the first part is the sum as it came; the
        last one is added straight into the result, the others into an fp32 sum."""
        if step == 0:
            return 0 if ranks > 1 else 2 * queries
        first = queries if step == 1 else wide_queries  # reading the sum
        if step == ranks - 1:
            return first + 2 * queries + (0 if backward else 2 * wide_queries)
        widening = queries + wide_queries if step == 1 else 0
        return widening + (2 if backward else 4) * wide_queries + queries

    def of_keys(step: int) -> float:
        """Adding what came back, and the end of dk and dv."""
        return 3 * wide_keys * (step > 0) + (wide_keys + keys) * (step == ranks - 1)

    seconds = []
    for backward in (False, True):
        gradients = wide_keys if backward and ranks > 1 else 0
        total = transfer_time(gradients / groups, between_hosts, a)  # the last ones, beside nothing
        for step in range(ranks):
            work = max(
                kernel_time(planned(held[rank], held[rank - step], length), heads_q, backward)
                for rank in {0, ranks // 2, ranks - 1}
            )
            passes = of_queries(step, backward) + (of_keys(step) if backward else 0)
            computing = (work + passes / a.memory) / groups
            # The second step's gradients are the first to travel, beside the third step. Those of a
            # group's last step travel beside the first one of the next group.
            for count, returning in ((1, step > 1), (groups - 1, step != 1)):
                moved = keys * (step + 1 < ranks) + gradients * returning
                moving = transfer_time(moved / groups, between_hosts, a)
                total += count * overlapped(computing, moving, a)
        seconds.append(total)
    # q, out, dout, dq and k, v, dk, dv; and of one group of heads: the call's dq and its fp32 sum;
    # own keys and those that come; dk and dv of the call; and of the group before our own dk and
    # dv, and others on their way out and in. Beyond two ranks dq has an fp32 sum here, too.
    group = queries + (1 + (ranks > 2)) * wide_queries + 2 * keys + 4 * wide_keys
    group += groups * split_workspace(rows, heads_kv / groups)
    return Cost(*seconds, 4 * queries + 2 * keys + group / groups)


def head_groups(rows: float, heads_q: float, heads_kv: float) -> int:
    """The groups of heads that a rank goes through."""
    return math.ceil(heads_kv / heads_of_a_group(int(rows), int(heads_q / heads_kv), int(heads_kv)))


def in_groups(
    computing: float, comes: float, leaves: float, groups: int, between_hosts: bool, a: Assumptions
) -> float:
    """Seconds of groups of heads whose bytes come while the group before is computed, and leave
    while the next one is."""
    first, last = (transfer_time(x / groups, between_hosts, a) for x in (comes, leaves))
    seconds = first + last  # beside nothing
    for group in range(groups):
        moving = first * (group + 1 < groups) + last * (group > 0)
        seconds += overlapped(computing / groups, moving, a)
    return seconds


def all_gather(length: int, ranks: int, between_hosts: bool, a: Assumptions = ASSUMED) -> Cost:
    shards = Shards(length, "zigzag", ranks)
    held = shards.ranges(0)
    rows, whole = size_of(held), ((0, length),)
    rectangles = planned(held, whole, length)
    keys, wide_keys = 2 * bytes_of(length, HEADS_KV, BF16), 2 * bytes_of(length, HEADS_KV, FP32)
    queries, wide_queries = bytes_of(rows, HEADS_Q, BF16), bytes_of(rows, HEADS_Q, FP32)
    groups, away = head_groups(rows, HEADS_Q, HEADS_KV), (ranks - 1) / ranks
    # A rank's own keys are copied to be sent, all of them to where they belong; the results are
    # copied to their heads. The calls' dk and dv are added up, copied to be sent, and added again.
    passes = 2 * keys * (1 + 1 / ranks) + 2 * queries
    computing = kernel_time(rectangles, HEADS_Q, False) + passes / a.memory
    forward = in_groups(computing, keys * away, 0, groups, between_hosts, a)
    passes += (3 * len(rectangles) + 2 * away + 3) * wide_keys + (wide_keys + keys) / ranks
    computing = kernel_time(rectangles, HEADS_Q, True) + passes / a.memory
    backward = in_groups(computing, keys * away, wide_keys * away, groups, between_hosts, a)
    # As in the ring; of a group all keys as they came and where they belong, those of the next one,
    # their gradients, and what leaves and comes of the group before.
    group = queries + wide_queries + 4 * keys + 3 * wide_keys
    return Cost(forward, backward, 4 * queries + 2 * keys / ranks + group / groups)


def ulysses(length: int, ranks: int, between_hosts: bool, a: Assumptions = ASSUMED) -> Cost | None:
    """None where there are more ranks than query heads. Key heads are repeated where they have to
    be."""
    if ranks > HEADS_Q:
        return None
    share_q, share_kv = HEADS_Q / ranks, max(1.0, HEADS_KV / ranks)
    one = one_gpu(length, share_q, share_kv)
    groups = head_groups(length, share_q, share_kv)
    queries = bytes_of(length, share_q, BF16)
    keys = 2 * bytes_of(length, share_kv, BF16)
    away = (ranks - 1) / ranks
    seconds = []
    # What comes and what leaves: q, k, v and out; the same and dout, and dq, dk, dv.
    for computing, comes, leaves in (
        (one.forward, queries + keys, queries),
        (one.backward, 3 * queries + keys, queries + keys),
    ):
        # What travels is copied once to be sent, and everything once to where it belongs.
        computing += 2 * (1 + away) * (comes + leaves) / a.memory
        traffic = (comes * away, leaves * away)
        seconds.append(in_groups(computing, *traffic, groups, between_hosts, a))
    # By rows q, out, dout, k, v; by heads those of a group, what is sent and received of the next
    # one, the call's dq in fp32 and its results; of the groups before this rank's rows of results,
    # and what is sent of the last of them. In the end those of all groups and where they belong.
    given, results_ = 3 * queries + keys, queries + keys
    peak = given + (2 + away / groups) * results_
    workspace = split_workspace(length, share_kv / groups)
    for before in range(groups):
        following = 2 * away * (before + 1 < groups)
        leaving = before + away * (before > 0)
        here = (1 + following) * given + 2 * queries + results_ + leaving * results_
        peak = max(peak, given + here / groups + workspace)
    return Cost(*seconds, peak)


def ring_of_hosts(length: int, ranks: int, a: Assumptions = ASSUMED) -> Cost | None:
    """A ring between hosts, all-to-all over heads inside of them. None inside one host."""
    hosts = ranks // RANKS_OF_HOST
    if hosts < 2:
        return None
    inner = RANKS_OF_HOST
    cost = ring(length, hosts, True, inner, a)
    rows = length / hosts
    exchanged = bytes_of(rows, (2 * HEADS_Q + 2 * HEADS_KV) / inner, BF16)
    moving = transfer_time(exchanged * (inner - 1) / inner, False, a)
    moving += 4 * exchanged / a.memory + 2 * a.launch
    memory = cost.memory + bytes_of(rows / inner, 3 * HEADS_Q + 2 * HEADS_KV, BF16)
    return Cost(cost.forward + moving, cost.backward + moving, memory)


def schemes(length: int, ranks: int) -> dict[str, Cost]:
    between_hosts = ranks > RANKS_OF_HOST
    costs = {
        "ring": ring(length, ranks, between_hosts),
        "all-gather": all_gather(length, ranks, between_hosts),
        "ulysses": ulysses(length, ranks, between_hosts),
        "ring x ulysses": ring_of_hosts(length, ranks),
    }
    return {name: cost for name, cost in costs.items() if cost is not None}


def two_gpus() -> list[dict]:
    records = []
    for length in (1 << 15, 1 << 17, 1 << 19):
        alone, shape = one_gpu(length), {"tokens": length, "ranks": 2}
        costs = schemes(length, 2)
        speedups = {name: alone.both / cost.both for name, cost in costs.items()}
        records.append(results.record("scaling.two", shape, "x one GPU", speedups))
        memory = {name: cost.memory / alone.memory for name, cost in costs.items()}
        records.append(results.record("scaling.two.memory", shape, "of one GPU's", memory))
        local = {
            "ring": ring(length, 2, False, a=LOCAL),
            "ulysses": ulysses(length, 2, False, LOCAL),
        }
        longer = {name: costs[name].both / cost.both for name, cost in local.items()}
        records.append(results.record("scaling.two.local", shape, "x local buffers", longer))
    return records


def many_gpus() -> list[dict]:
    records = []
    for length in (1 << 17, 1 << 20, 10 << 20):
        alone = one_gpu(length)
        for ranks in (8, 16, 32, 64, 128, 256, 512, 1024):
            costs = schemes(length, ranks)
            best = min(costs, key=lambda name: costs[name].both)
            shape = {"tokens": length, "ranks": ranks}
            times = {name: 1e3 * cost.both for name, cost in costs.items()}
            records.append(results.record("scaling.many", shape | {"first": best}, "ms", times))
            efficiency = {n: alone.both / ranks / cost.both for n, cost in costs.items()}
            records.append(results.record("scaling.many.efficiency", shape, "", efficiency))
            memory = {name: cost.memory / 2**30 for name, cost in costs.items()}
            records.append(results.record("scaling.many.memory", shape, "GiB", memory))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FILE.json")
    arguments = parser.parse_args()
    assumptions = dataclasses.asdict(ASSUMED)
    records = [
        results.record(
            "run", {}, "", {"method": "simulation", "commit": results.commit()} | assumptions
        ),
        *two_gpus(),
        *many_gpus(),
    ]
    print(results.show(records))
    results.write(arguments.out, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
