"""The dropout mask from the definition, in NumPy, independent of the library: Philox (Salmon et
al., SC 2011), element by element.

Of each head: K, X, Y, Z = the words of Philox4x32-10, key = (seed_lo, seed_hi), counter =
(head_lo, head_hi, offset_lo, offset_hi), head = batch * heads_q + head.
Of a query: R = the first word of Philox2x32-7, key = K, counter = (i / 16 * 8 + i % 8, X); of a
key: C, counter = (j / 32 * 8 + j % 8, Y). Of an element: p = M * (R ^ C), q = M * (high(p) ^ C),
the word high(q) ^ low(p) ^ Z, or for odd (i / 8) low(q); of its byte (j / 8) % 4 the low seven
bits, then the highest bit of byte (j / 8) % 4 ^ 1, are its number. It is kept iff number >= T, or
where T > 2^7 iff number < 2^8 - T, with T = dropout_p * 2^8 rounded.
"""

from __future__ import annotations

import numpy as np
import torch

MASK_32 = 0xFFFFFFFF
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
MULTIPLIER = np.uint64(0xD256D193)
WEYL = 0x9E3779B9, 0xBB67AE85


def words_of(number: object) -> tuple[np.ndarray, np.ndarray]:
    """The low and high 32 bits of a 64-bit number."""
    number = np.asarray(number, dtype=np.uint64)
    return number & np.uint64(MASK_32), number >> np.uint64(32)


def philox4x32(counter: tuple, key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Four 32-bit words for each counter, after 10 rounds; the counter's words broadcast."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        low_0, high_0 = words_of(MULTIPLIERS[0] * c0)
        low_1, high_1 = words_of(MULTIPLIERS[1] * c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ np.uint64(k0), low_1, high_0 ^ c3 ^ np.uint64(k1), low_0
        k0, k1 = (k0 + WEYL[0]) & MASK_32, (k1 + WEYL[1]) & MASK_32
    return c0, c1, c2, c3


def philox2x32(counter: tuple, key: object) -> tuple[np.ndarray, np.ndarray]:
    """Two 32-bit words for each counter, after 7 rounds; the counter's words and the key
    broadcast."""
    c0, c1 = (np.asarray(word, dtype=np.uint64) for word in counter)
    key = np.asarray(key, dtype=np.uint64)
    for _ in range(7):
        low, high = words_of(MULTIPLIER * c0)
        c0, c1 = high ^ c1 ^ key, low
        key = (key + np.uint64(WEYL[0])) & np.uint64(MASK_32)
    return c0, c1


def threshold(dropout_p: float) -> int:
    return int(dropout_p * 2**8 + 0.5)


def keep_probability(dropout_p: float) -> float:
    return (2**8 - threshold(dropout_p)) / 2**8


def draw(
    rng_state: tuple[int, int], batch: int | range, heads: int, seqlen_q: int, seqlen_k: int
) -> np.ndarray:
    """The number of each element: (batch, heads, seqlen_q, seqlen_k), or without batch for one
    sequence's index."""
    seed, offset = (int(word) & 0xFFFFFFFFFFFFFFFF for word in rng_state)
    batches = np.arange(batch, batch + 1) if isinstance(batch, int) else np.asarray(batch)
    number = (batches[:, None] * heads + np.arange(heads))[:, :, None, None]
    key, x, y, z = philox4x32((*words_of(number), *words_of(offset)), words_of(seed))
    i = np.arange(seqlen_q, dtype=np.uint64)[:, None]
    j = np.arange(seqlen_k, dtype=np.uint64)
    one, eight = np.uint64(1), np.uint64(8)
    of_query = philox2x32((i // np.uint64(16) * eight + i % eight, x), key)[0]
    of_key = philox2x32((j // np.uint64(32) * eight + j % eight, y), key)[0]
    low_p, high_p = words_of(MULTIPLIER * (of_query ^ of_key))
    low_q, high_q = words_of(MULTIPLIER * (high_p ^ of_key))
    word = np.where(i // eight % np.uint64(2) == 0, high_q ^ low_p ^ z, low_q)
    byte = j // eight % np.uint64(4)
    upper = (word >> byte * eight) & np.uint64(127)
    numbers = upper << one | (word >> (byte ^ one) * eight + np.uint64(7)) & one
    return numbers[0] if isinstance(batch, int) else numbers


def keep_mask(
    rng_state: tuple[int, int],
    dropout_p: float,
    batch: int | range,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> torch.Tensor:
    """True where dropout keeps; shaped as draw."""
    numbers, t = draw(rng_state, batch, heads, seqlen_q, seqlen_k), threshold(dropout_p)
    return torch.from_numpy(numbers >= t if t <= 2**7 else numbers < 2**8 - t)
