"""Dropout's keep-mask: a pure function of (seed, offset, batch, head, query, key).

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter and a
key into random words, with no state in between. Here the counter is a place in the attention
matrix, so any backend finds the same bits for any element in any order.

Once for each head, with number = batch * heads_q + head:

    K, X, Y, Z = Philox4x32-10(counter = (number's low and high word, offset's low and high word),
                               key = (seed's low word, seed's high word))

Queries and keys draw a word each, which rows and columns share, and two more multiplications mix
them into the two words of eight elements. One thread holds four of these in the register layout of
the tensor cores, with queries as rows and with keys as rows. With query i = 16 a + 8 r + u and key
j = 32 b + 8 s + v (u, v < 8; r < 2; s < 4), h and l the high and the low word of a product, and M
the multiplier of Philox2x32:

    R = Philox2x32-7(counter = (8 a + u, X), key = K), the first word
    C = Philox2x32-7(counter = (8 b + v, Y), key = K), the first word
    p = M (R xor C);  q = M (h(p) xor C);  w = h(q) xor l(p) xor Z, l(q)
    number(i, j) = 8 bits: the low seven of byte s of w[r], then the highest of byte s xor 1
    T = dropout_p · 2⁸, rounded half up
    kept iff number >= T              where T <= 2⁷
         iff number < 2⁸ - T          else

An element is thus kept with the probability 1 - T / 2⁸, and weights are scaled by its inverse.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn.reference.arguments import (
    check_places,
    check_probability,
    check_rng_state,
    check_words,
    checked,
)

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
MULTIPLIER_2 = 0xD256D193
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # the golden ratio and √3 - 1, in 32 bits
NUMBERS = 1 << 8  # that a place may draw


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of the product. int64 wraps modulo 2⁶⁴, which keeps all 64 bits."""
    product = word * multiplier
    return (product >> 32) & MASK, product & MASK


@checked(check_words)
def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words (as int64) for each counter; the counter's words broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


@checked(check_words)
def philox2x32(
    counter: tuple[Tensor, Tensor], key: Tensor | int, rounds: int = 7
) -> tuple[Tensor, Tensor]:
    """Two random 32-bit words (as int64) for each counter; the counter's words and the key
    broadcast."""
    c0, c1 = counter
    for _ in range(rounds):
        high, low = _multiply(c0, MULTIPLIER_2)
        c0, c1 = high ^ c1 ^ key, low
        key = (key + KEY_STEPS[0]) & MASK
    return c0, c1


@checked(check_probability)
def dropout_threshold(dropout_p: float) -> int:
    """T: of the 2⁸ numbers that a place may draw, how many drop it."""
    return math.floor(dropout_p * NUMBERS + 0.5)


@checked(check_probability)
def keep_probability(dropout_p: float) -> float:
    """The probability with which an element is kept: 1 - dropout_p, rounded to a multiple of
    2⁻⁸."""
    return 1 - dropout_threshold(dropout_p) / NUMBERS


@checked(check_rng_state, check_probability, check_places)
def philox_keep_mask(
    rng_state: Tensor | Sequence[int],
    dropout_p: float,
    batch: int | range,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k) on the CPU: True where dropout keeps.

    Arguments:
        rng_state: (seed, offset): the int64 (2) tensor that the forward used.
        dropout_p: probability in [0, 1] of False, rounded to a multiple of 2⁻⁸.
        batch: how many, from 0 on, or a range of them.
    """
    seed, offset = (int(word) for word in rng_state)
    index = torch.tensor(range(batch) if isinstance(batch, int) else batch, dtype=torch.int64)
    head = (index[:, None] * heads + torch.arange(heads))[..., None, None]
    K, X, Y, Z = philox4x32(
        (head & MASK, head >> 32, torch.tensor(offset & MASK), torch.tensor(offset >> 32 & MASK)),
        (seed & MASK, seed >> 32 & MASK),
    )
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    r, s = i // 8 % 2, j // 8 % 4
    R, _ = philox2x32((8 * (i // 16) + i % 8, X), K)
    C, _ = philox2x32((8 * (j // 32) + j % 8, Y), K)
    high_p, low_p = _multiply(R ^ C, MULTIPLIER_2)
    high_q, low_q = _multiply(high_p ^ C, MULTIPLIER_2)
    w = torch.where(r == 0, high_q ^ low_p ^ Z, low_q)
    number = 2 * ((w >> 8 * s) & 127) + ((w >> 8 * (s ^ 1) + 7) & 1)

    T = dropout_threshold(dropout_p)
    return number >= T if T <= NUMBERS // 2 else number < NUMBERS - T
