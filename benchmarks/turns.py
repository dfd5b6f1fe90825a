"""Simulates the deterministic backward: what does an order of tiles cost, and what do turns?

    python -m benchmarks.turns [--seqlens 512,2048,8192] [--handoff 1.2]

Multiprocessors take tiles of 128 keys from a counter. A tile walks over its blocks of queries, an
iteration each. In the deterministic mode a block of queries admits the tiles of its head one after
the other, in the order in which they were taken. From then on to when the next one may add pass
`handoff` iterations. Nothing else costs time, neither memory nor power, so a ratio says what order
and turns do, and with --handoff 0 what the order does alone. It is the time of the plain mode over
that of

    in sections               full: sections of heads, whose tiles all begin with the same queries
    shortest first            causal: the same, but in each section the last keys come first, so
                              that tiles which start together come to a block of queries one behind
                              the other; in the end there are only long tiles, and multiprocessors
                              without work
    longest first at last     the same, but in a last section of 128 MB the first keys come first

In the plain mode tiles come head after head where the mask is full or the sums of dQ are a pool,
and else in sections, from the longest to the shortest. 16384 tokens with a hidden size of 2048, on
132 multiprocessors.
"""

import argparse
import heapq
from collections.abc import Iterator

TOKENS, HIDDEN, SMS, KEYS = 16384, 2048, 132, 128
SECTION, LAST_SECTION = 32 << 20, 128 << 20  # bytes of Q, dO and dQ's sums
TILE_ENDS = 3  # iterations that the beginning and the end of a tile take

Tile = tuple[int, int]  # head, block of keys


def in_sections(first: int, end: int, size: int, blocks: range) -> Iterator[Tile]:
    """The tiles of heads, of which `size` come together."""
    for section in range(first, end, size):
        for block in blocks:
            for head in range(section, min(section + size, end)):
                yield head, block


def simulate(tiles: Iterator[Tile], queries: int, handoff: float | None, begin_at: int) -> float:
    """Iterations until all tiles are done. queries: blocks of a head. begin_at: with a causal mask
    tile j begins at its block j * begin_at. handoff None: no turns."""
    free, passed, end = [0.0] * SMS, {}, 0.0
    for head, block in tiles:
        now = heapq.heappop(free) + TILE_ENDS
        turns = passed.setdefault(head, [0.0] * queries)
        for i in range(block * begin_at, queries):
            now += 1
            if handoff is not None:
                now = max(now, turns[i])
                turns[i] = now + handoff
        end = max(end, now)
        heapq.heappush(free, now)
    return end


def compare(head_dim: int, seqlen: int, causal: bool, handoff: float) -> dict[str, float]:
    heads = TOKENS // seqlen * (HIDDEN // head_dim)
    block_m = 128 if head_dim <= 64 else 64
    queries, blocks = seqlen // block_m, seqlen // KEYS
    of_head = seqlen * head_dim * 8
    section, last = (min(max(size // of_head, 1), heads) for size in (SECTION, LAST_SECTION))
    begin_at = KEYS // block_m if causal else 0
    up, down = range(blocks), range(blocks - 1, -1, -1)

    def time(*parts: Iterator[Tile], turns: bool = True) -> float:
        tiles = (tile for part in parts for tile in part)
        return simulate(tiles, queries, handoff if turns else None, begin_at)

    if not causal:
        plain = time(in_sections(0, heads, 1, up), turns=False)
        return {"in sections": plain / time(in_sections(0, heads, section, up))}
    if seqlen <= (2048 if head_dim <= 64 else 4096):  # a pool
        plain = time(in_sections(0, heads, 1, up), turns=False)
    else:
        # The last section has two rounds of tiles, as far as 128 MB allow.
        rounds = max(section, min(2 * SMS // blocks, last))
        plain = time(
            in_sections(0, heads - rounds, max(section, SMS // blocks), up),
            in_sections(heads - rounds, heads, rounds, up),
            turns=False,
        )
    last_up = in_sections(heads - last, heads, last, up)
    return {
        "shortest first": plain / time(in_sections(0, heads, section, down)),
        "longest first at last": plain / time(in_sections(0, heads - last, section, down), last_up),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--handoff", type=float, default=1.2, help="iterations; default 1.2")
    args = parser.parse_args()
    for head_dim in (64, 128):
        for causal in (False, True):
            for seqlen in map(int, args.seqlens.split(",")):
                ratios = compare(head_dim, seqlen, causal, args.handoff)
                figures = ", ".join(f"{order} {ratio:.3f}" for order, ratio in ratios.items())
                mask = "causal" if causal else "full"
                print(f"d={head_dim} seqlen={seqlen} {mask}: {figures}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
