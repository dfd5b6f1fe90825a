"""Simulates the deterministic backward: what does an order of tiles cost, and what do turns?

    python -m benchmarks.turns [--seqlens 512,2048,8192] [--group 4] [--handoff 1.2]

Multiprocessors take tiles of 128 keys one after the other. A tile walks over its blocks of queries,
an iteration each, for each query head of its group, and its two ends take three more. In the
deterministic mode a block of queries admits the tiles of its head one after the other, in the order
in which they were taken. From then on to when the next one may add pass `handoff` iterations; 1.2
are some 3 µs, a guess. Nothing else costs time, neither memory nor power, so a ratio says what
order and turns do, and with --handoff 0 what the order does alone. It is the time of the plain mode
over that of

    in sections               full: sections of heads, whose tiles all begin with the same queries
    last blocks first         causal: the same, but in each section the last keys come first, so
                              that tiles which start together come to a block of queries one behind
                              the other; in the end there are only long tiles, and multiprocessors
                              without work
    first blocks first        causal: the first keys come first, in sections of 32 heads; a tile
                              waits at its diagonal for those before it
    plain, head after head    plain causal calls with a pool, if they had no last section

In the plain mode tiles come head after head where the mask is full or the sums of dQ are a pool,
and else in sections, from the longest to the shortest. With a causal mask there is a last section
of two rounds, with a pool too, as far as 128 MB and half of the places go. Where sums in order are
a pool, as in short calls at d = 128, the deterministic mode is left out. 16384 tokens with a hidden
size of 2048, on 132 multiprocessors; --group query heads share a kv head.
"""

import argparse
import heapq
from collections.abc import Iterator

from benchmarks.shapes import HIDDEN, TOKENS

SMS, KEYS = 132, 128
SECTION, LAST_SECTION = 32 << 20, 128 << 20  # bytes of Q, dO and dQ's sums
# kBwdGroupsInOrder and kBwdHeadsFirstFirst in csrc/sm90/bwd_config.h.
GROUPS_IN_ORDER, HEADS_FIRST_FIRST = 8, 32
TILE_ENDS = 3
# pooled_queries and pool_rounds there; kBwdMostPooledOfGroup; and the keys that a query sees at
# most in the mean where sums in order are a pool, kBwdMostSeenInOrder.
POOLED_QUERIES = {64: 2048, 128: 4096}
POOL_ROUNDS = {64: 3.0, 128: 2.5}
POOLED_OF_GROUP = 1024
SEEN_IN_ORDER = {64: 0, 128: 576}

Tile = tuple[int, int]  # head, block of keys


def in_sections(first: int, end: int, size: int, blocks: range) -> Iterator[Tile]:
    """The tiles of heads, of which `size` come together, but fewer in a first section."""
    rest = (end - first) % size
    for begin in ([first] if rest else []) + list(range(first + rest, end, size)):
        heads = range(begin, first + rest if begin < first + rest else begin + size)
        for block in blocks:
            for head in heads:
                yield head, block


def simulate(
    tiles: Iterator[Tile], queries: int, group: int, handoff: float | None, begin_at: int
) -> float:
    """Iterations until all tiles are done. queries: blocks of a head. begin_at: with a causal mask
    tile j begins at its block j * begin_at. handoff None: no turns."""
    free, end = [0.0] * SMS, 0.0
    passed: dict[int, list[float]] = {}
    for head, block in tiles:
        now = heapq.heappop(free) + TILE_ENDS
        turns = passed.setdefault(head, [0.0] * (queries * group))
        for of_head in range(0, queries * group, queries):
            for i in range(of_head + block * begin_at, of_head + queries):
                now += 1
                if handoff is not None:
                    now = max(now, turns[i])
                    turns[i] = now + handoff
        end = max(end, now)
        heapq.heappush(free, now)
    return end


def compare(
    head_dim: int, seqlen: int, causal: bool, group: int, handoff: float
) -> dict[str, float]:
    heads = TOKENS // seqlen * (HIDDEN // head_dim) // group  # of keys
    block_m = 128 if head_dim <= 64 else 64
    queries, blocks = seqlen // block_m, seqlen // KEYS
    of_head = seqlen * head_dim * 8 * group
    section, few = (min(max(size // of_head, 1), heads) for size in (SECTION, LAST_SECTION))
    begin_at = KEYS // block_m if causal else 0
    up, down = range(blocks), range(blocks - 1, -1, -1)

    def time(*parts: Iterator[Tile], turns: bool) -> float:
        tiles = (tile for part in parts for tile in part)
        return simulate(tiles, queries, group, handoff if turns else None, begin_at)

    def plain_time(inner: int, last: int) -> float:
        """Of sections of `inner` heads and a last one of `last`, the longest tiles first."""
        first = in_sections(0, heads - last, inner, up)
        return time(first, in_sections(heads - last, heads, last, up), turns=False)

    most_pooled = POOLED_QUERIES[head_dim]
    has_pool = seqlen <= (most_pooled if group == 1 else min(most_pooled, POOLED_OF_GROUP))
    head_after_head = time(in_sections(0, heads, 1, up), turns=False)
    two_rounds = min(2 * SMS // blocks, few, heads)
    if not causal:
        plain = head_after_head
    elif has_pool:
        places = min(int(POOL_ROUNDS[head_dim] * SMS / blocks) + 2, heads)
        plain = plain_time(1, max(min(two_rounds, places // 2), 1))
    else:
        inner = min(max(section, SMS // blocks), heads)
        plain = plain_time(inner, max(inner, two_rounds))
    ratios = {}
    if seqlen / (2 if causal else 1) > SEEN_IN_ORDER[head_dim]:
        if not causal:
            together = section if group == 1 else min(max(section, GROUPS_IN_ORDER), heads)
            ratios["in sections"] = plain / time(in_sections(0, heads, together, up), turns=True)
        else:
            together = min(HEADS_FIRST_FIRST, heads)
            last_first = in_sections(0, heads, section, down)
            first_first = in_sections(0, heads, together, up)
            ratios["last blocks first"] = plain / time(last_first, turns=True)
            ratios["first blocks first"] = plain / time(first_first, turns=True)
    if causal and has_pool:
        ratios["plain, head after head"] = plain / head_after_head
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--group", type=int, default=1, help="query heads of a kv head; default 1")
    parser.add_argument("--handoff", type=float, default=1.2, help="iterations; default 1.2")
    args = parser.parse_args()
    seqlens = [int(word) for word in args.seqlens.split(",")]
    if wrong := [n for n in seqlens if n <= 0 or n % KEYS or TOKENS % n]:
        parser.error(f"--seqlens: expected multiples of {KEYS} that divide {TOKENS}, got {wrong}")
    if args.group not in (1, 2, 4, 8, 16):
        parser.error(f"--group: expected 1, 2, 4, 8 or 16, got {args.group}")
    for head_dim in POOLED_QUERIES:
        for causal in (False, True):
            for seqlen in seqlens:
                ratios = compare(head_dim, seqlen, causal, args.group, args.handoff)
                if not ratios:
                    continue
                figures = ", ".join(f"{order} {ratio:.3f}" for order, ratio in ratios.items())
                mask = "causal" if causal else "full"
                print(f"d={head_dim} seqlen={seqlen} {mask}: {figures}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
