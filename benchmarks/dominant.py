"""Simulates the rule for dominant keys of Hopper's forward: how often does it fire, what is lost?

    python -m benchmarks.dominant [--dims 64,128] [--blocks 3,16] [--peak 1] [--draws 8] [--bf16]

The forward exponentiates a block of keys by the row maxima of the blocks before. A P above 1 may be
that of a key which outweighs its row, and its rounding would be the error of that row. So where a
thread has a P above a share of what it has summed of the row, and above of_exact times the largest
P of the row that is exact, its warp moves the maxima of its 16 rows to where the largest P of each
needs no rounding. Where a P is above 2¹⁵ in fp16 or 2²⁰ in bf16, the warp computes the block again
with true maxima (OnlineSoftmax::step_ahead).

The share is min(max(whole · blocks, first) / done, most) with `done` of the tile's `blocks` summed
(share_of_sum() in csrc/sm90/fwd_traits.cuh). Evened: from the first block on each of the four lanes
that share a row has a fourth of its sum. With an of_exact of 0 a P counts from 1 on, whichever P is
exact. For each rule, over all blocks but the first:

    rows           the part in which a lane's P passes its limit
    warps          the part with such a row, which scans S and rescales O
    again          the part that computes the block again
    norm, largest  of the error of O in 16 bits over those with true maxima in each block

All are means of draws, in which rows see all keys of a head, q is peak · N(0, 1), and k and v are
N(0, 1). Tiles of two thread blocks an SM have a rule of their own, which is none of these.
"""

import argparse
from typing import NamedTuple

import numpy as np

WARP_ROWS, LANES = 16, 4
SLACK = {"fp16": 2.0**15, "bf16": 2.0**20}
BLOCK_N = {64: 96, 96: 80, 128: 128, 192: 96, 256: 64}  # kFwdTile in csrc/sm90/config.h


class Rule(NamedTuple):
    whole: float
    first: float
    most: float
    evened: bool = True
    of_exact: float = 0.0


TAKEN = "the same, beside twice an exact P (taken)"
RULES = {
    "none but the last limit": Rule(np.inf, 0, np.inf),
    "1/8 of the whole, at most 1/2, not evened": Rule(1 / 8, 0, 1 / 2, evened=False),
    "1/4 of the whole, at most 1": Rule(1 / 4, 0, 1),
    "1/8 of the whole, at most 1": Rule(1 / 8, 0, 1),
    "1/4 of the whole, at least 3 firsts": Rule(1 / 4, 3, 3),
    "1/8 of the whole, at least 1.5 firsts": Rule(1 / 8, 1.5, 1.5),
    "the same, beside an exact P": Rule(1 / 8, 1.5, 1.5, of_exact=1.0),
    TAKEN: Rule(1 / 8, 1.5, 1.5, of_exact=2.0),
    "the same, beside four times an exact P": Rule(1 / 8, 1.5, 1.5, of_exact=4.0),
}


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """To the nearest number of 16 bits, in fp32."""
    if dtype == "fp16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def of_lanes(p: np.ndarray) -> np.ndarray:
    """(rows, keys) as (rows, lanes, keys of a lane), which has two of each eight."""
    return p.reshape(len(p), -1, LANES, 2).swapaxes(1, 2).reshape(len(p), LANES, -1)


def by_warp(of_rows: np.ndarray) -> np.ndarray:
    return of_rows.reshape(-1, WARP_ROWS).any(1).repeat(WARP_ROWS)


def attend(scores, v, block_n: int, rule: Rule | None, dtype: str) -> tuple[np.ndarray, ...]:
    """O, of scores in units of log 2, and the parts. No rule: true maxima in each block."""
    rows, blocks = len(scores), scores.shape[1] // block_n
    exact = np.ones(rows, np.float32)  # the largest P that is
    maximum, sums = np.full(rows, -np.inf, np.float32), np.zeros((rows, LANES), np.float32)
    out, counts = np.zeros((rows, v.shape[1]), np.float32), np.zeros(3)
    for done in range(blocks):
        keys = slice(done * block_n, (done + 1) * block_n)
        s, before = scores[:, keys], maximum
        fired = again = np.ones(rows, bool)
        if rule and done:
            p = of_lanes(rounded(np.exp2(s - maximum[:, None]), dtype)).max(2)
            share = min(max(rule.whole * blocks, rule.first) / done, rule.most)
            least = np.maximum(rule.of_exact * exact, 1)[:, None]
            limit = np.minimum(np.maximum(share * sums, least), SLACK[dtype])
            exceeds = (p > limit).any(1)
            fired, again = by_warp(exceeds), by_warp((p > SLACK[dtype]).any(1))
            counts += np.array([exceeds.mean(), fired.mean(), again.mean()]) / (blocks - 1)
        maximum = np.where(again, np.maximum(maximum, s.max(1)), maximum)
        p = np.exp2(s - maximum[:, None])
        top = p.max(1)
        exact = np.where(again, 1, np.where(fired, np.maximum(exact, top), exact))
        # The maximum moves behind the rounding of P, which stays as it is.
        factor = np.where(fired & (top > 1), rounded(top, dtype) / top, np.float32(1))
        maximum = maximum - np.log2(factor)
        correction = np.exp2(before - maximum)[:, None]
        sums = sums * correction + of_lanes(p).sum(2) * factor[:, None]
        if done == 0 and rule and rule.evened:
            sums = sums.mean(1, keepdims=True).repeat(LANES, 1)
        out = out * correction + rounded(p, dtype) @ v[keys]
    return out / sums.sum(1, keepdims=True), counts


def compare(d: int, blocks: int, peak: float, draws: int, dtype: str, rows: int = 1024) -> dict:
    """By rule: parts of rows, of warps and of warps again, ratios of the norm and the largest."""
    figures = {name: np.zeros(5) for name in ("true maxima", *RULES)}
    for draw in range(draws):
        normal = np.random.default_rng(draw).standard_normal
        q = rounded(peak * normal((rows, d)), dtype)
        k, v = (rounded(normal((blocks * BLOCK_N[d], d)), dtype) for _ in range(2))
        scores = q @ k.T * np.float32(np.log2(np.e) / np.sqrt(d))
        exact = np.exp2(scores.astype(np.float64) - scores.max(1, keepdims=True))
        exact = exact @ v / exact.sum(1, keepdims=True)
        for name, found in figures.items():
            out, parts = attend(scores, v, BLOCK_N[d], RULES.get(name), dtype)
            error = np.abs(rounded(out, dtype) - exact)
            found += np.array([*parts, np.linalg.norm(error), error.max()]) / draws
    of_true = [1, 1, 1, *figures.pop("true maxima")[3:]]
    return {name: found / of_true for name, found in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(dims="64,128,256", blocks="3,6,16", peak=1.0, draws=8).items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    parser.add_argument("--bf16", dest="dtype", action="store_const", const="bf16", default="fp16")
    args = parser.parse_args()
    for d in map(int, args.dims.split(",")):
        for blocks in map(int, args.blocks.split(",")):
            shape = f"d={d}, {blocks} blocks of {BLOCK_N[d]} keys"
            print(f"{shape:48}   rows  warps  again   norm largest")
            for name, figures in compare(d, blocks, args.peak, args.draws, args.dtype).items():
                print(f"  {name:46}", *(f"{x:6.3f}" for x in figures))


if __name__ == "__main__":
    main()
