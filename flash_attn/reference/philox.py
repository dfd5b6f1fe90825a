"""Dropout's keep-mask: a pure function of (seed, offset, batch, head, query, key).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a
counter of four 32-bit words and a key of two into four random words, with no state in between. Here
the counter is the place in the attention matrix, so any backend finds the same bits for any element
in any order:

    key     = (seed's low word, seed's high word)
    counter = (key index // 4, query index, batch * heads_q + head, offset's low word xor its high
    word) the element is kept iff word [key index % 4] >= round(dropout_p · 2³²)
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # the golden ratio and √3 - 1, in 32 bits


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of the product. int64 wraps modulo 2⁶⁴, which keeps all 64 bits."""
    product = word * multiplier
    return (product >> 32) & MASK, product & MASK


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


def philox_keep_mask(
    rng_state: Tensor | tuple[int, int],
    dropout_p: float,
    batch: int | range,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k) on the CPU: True where dropout keeps.

    Arguments:
        rng_state: (seed, offset): the int64 (2) tensor that the forward used.
        dropout_p: probability in [0, 1) of False.
        batch: how many, from 0 on, or a range of them.
    """
    seed, offset = (int(word) for word in rng_state)
    quad = torch.arange((seqlen_k + 3) // 4)
    query = torch.arange(seqlen_q)[:, None]
    index = torch.tensor(range(batch) if isinstance(batch, int) else batch, dtype=torch.int64)
    row = (index[:, None] * heads + torch.arange(heads))[..., None, None]
    last = torch.tensor((offset ^ (offset >> 32)) & MASK)
    words = philox4x32((quad, query, row, last), (seed & MASK, (seed >> 32) & MASK))
    words = torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2)[..., :seqlen_k]
    return words >= round(dropout_p * 2**32)
