"""The dropout mask from the definition: Philox4x32-10 (Salmon et al., SC 2011) in NumPy,
independent of the library.

key = (seed_lo, seed_hi), counter = (key index // 4, query index, batch * heads_q + head, offset_lo
^ offset_hi); word key index % 4 of the output decides: kept iff word >= round(dropout_p * 2^32).
"""

from __future__ import annotations

import numpy as np
import torch

MASK_32 = np.uint64(0xFFFFFFFF)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox4x32(counter: tuple, key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Four 32-bit words for each counter; the counter's words broadcast against one another."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product_1 & MASK_32,
            (product_0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product_0 & MASK_32,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_mask(
    rng_state: tuple[int, int],
    dropout_p: float,
    batch: int | range,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> torch.Tensor:
    """True where dropout keeps: (batch, heads, seqlen_q, seqlen_k), or without batch for one
    sequence's index."""
    seed, offset = (word & 0xFFFFFFFFFFFFFFFF for word in rng_state)
    batches = np.arange(batch, batch + 1) if isinstance(batch, int) else np.asarray(batch)
    rows = (batches[:, None] * heads + np.arange(heads))[:, :, None, None]
    queries = np.arange(seqlen_q)[None, None, :, None]
    quads = np.arange((seqlen_k + 3) // 4)[None, None, None, :]
    words = philox4x32(
        (quads, queries, rows, (offset ^ (offset >> 32)) & 0xFFFFFFFF),
        (seed & 0xFFFFFFFF, seed >> 32),
    )
    words = np.stack(np.broadcast_arrays(*words), axis=-1)
    words = words.reshape(*words.shape[:3], 4 * words.shape[3])[..., :seqlen_k]
    kept = torch.from_numpy(words >= np.uint64(round(dropout_p * 2**32)))
    return kept[0] if isinstance(batch, int) else kept
