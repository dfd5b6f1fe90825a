"""Dropout's mask as a sample of independent numbers: how often each line of it keeps, and whether
places, heads, sequences, seeds and calls know of each other.

Every statistic is a deviation in units of its own standard deviation; 5 of them come by chance once
in two million.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from test_dropout import correlation

from flash_attn.reference import keep_probability, philox_keep_mask

PROBABILITIES = (0.1, 0.5, 0.8)
SIZE = 768
STATE = (0x1234_5678_9ABC_DEF0, 5)
MOST = 5.0


def masks(p: float, state: tuple[int, int] = STATE, batch: int = 2, heads: int = 2) -> torch.Tensor:
    """(batch · heads, SIZE, SIZE)"""
    return philox_keep_mask(state, p, batch, heads, SIZE, SIZE).flatten(0, 1)


def chi_square(kept: torch.Tensor, count: int, p: float) -> float:
    """Of numbers of kept places, each of `count`: too even is as bad as too uneven."""
    keep = keep_probability(p)
    statistic = ((kept.double() - count * keep) ** 2).sum().item() / (count * keep * (1 - keep))
    # Of the square of a binomial number: 2 + (1 - 6 keep (1 - keep)) / (count keep (1 - keep)).
    variance = 2 + (1 - 6 * keep * (1 - keep)) / (count * keep * (1 - keep))
    return (statistic - kept.numel()) / math.sqrt(kept.numel() * variance)


def diagonals(mask: torch.Tensor) -> torch.Tensor:
    """Row i turned by i: of a square, its wrapped diagonals become columns."""
    place = (torch.arange(SIZE) + torch.arange(SIZE)[:, None]) % SIZE
    return mask.gather(-1, place.expand(mask.shape))


LINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda m: m,
    "columns": lambda m: m.mT,
    "diagonals": lambda m: diagonals(m).mT,
    "antidiagonals": lambda m: diagonals(m.flip(-1)).mT,
    "tiles of 16 by 32": lambda m: m.unflatten(1, (-1, 16)).unflatten(3, (-1, 32)).transpose(2, 3),
    "places of a tile": lambda m: (
        m.unflatten(1, (-1, 16)).unflatten(3, (-1, 32)).permute(2, 4, 0, 1, 3)
    ),
    "a quarter of a row": lambda m: m.unflatten(2, (4, -1)),
}


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("name", LINES)
def test_lines_keep_as_often_as_chance(name: str, p: float) -> None:
    lines = LINES[name](masks(p))
    lines = lines.flatten(2) if name.startswith("places") else lines
    if name.startswith("tiles"):
        lines = lines.flatten(3)
    assert abs(chi_square(lines.sum(-1), lines.size(-1), p)) <= MOST


@pytest.mark.parametrize("p", PROBABILITIES)
def test_pairs_of_masks(p: float) -> None:
    """Other heads, sequences, seeds that differ in one bit, and the calls that follow."""
    seed, offset = STATE
    states = [(seed, offset + call) for call in (1, 2, 4)] + [
        (seed ^ bit, offset) for bit in (1, 1 << 31, 1 << 32, -(1 << 63))
    ]
    different = list(masks(p)) + [masks(p, state, 1, 1)[0] for state in states]
    found = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(different), 2):
        found[i, j] = correlation(a.double(), b.double(), p)
        found[i, j, "transposed"] = correlation(a.double(), b.mT.double(), p)
        found[i, j, "shifted"] = correlation(a[:, :-8].double(), b[:, 8:].double(), p)
    assert {pair: sigmas for pair, sigmas in found.items() if abs(sigmas) > MOST} == {}


@pytest.mark.parametrize("p", PROBABILITIES)
def test_triples(p: float) -> None:
    """Of the corners of a rectangle, two say nothing of a third: rows and columns have words of
    their own, which a weak mixture would let through. Nor does the upper right of the lower left.
    """
    keep = keep_probability(p)
    x = (masks(p).double() - keep) / math.sqrt(keep * (1 - keep))
    found = {}
    for down, right in itertools.product((1, 8, 16), (1, 8, 32, 72)):
        a, b, c = x[:, :-down, :-right], x[:, :-down, right:], x[:, down:, :-right]
        found[down, right, 3] = (a * b * c).sum().item() / math.sqrt(a.numel())
        found[down, right, 2] = (b * c).sum().item() / math.sqrt(a.numel())
    assert {place: sigmas for place, sigmas in found.items() if abs(sigmas) > MOST} == {}


def test_the_battery_sees_what_it_should() -> None:
    """Each row the one above, shifted; and a mask that keeps equally often in each row."""
    p, keep = 0.5, 0.5
    generator = torch.Generator().manual_seed(0)
    row = torch.rand(SIZE, generator=generator) < keep
    shifted = torch.stack([row.roll(i) for i in range(SIZE)])[None]
    assert abs(correlation(shifted[:, :-1, :-1].double(), shifted[:, 1:, 1:].double(), p)) > 100
    even = torch.rand(1, SIZE, SIZE, generator=generator).argsort(-1) < SIZE // 2
    assert chi_square(even.sum(-1), SIZE, p) < -MOST
