"""Parts of a call that draw their part of its dropout mask.

Kernels draw the mask in blocks of 16 queries and 32 keys, so a part has to begin where such blocks
do. What is put before its first row and key brings it there: rows of zeros, whose results nobody
reads, and keys that a bias hides.

A band that is said from the top-left corner moves with that corner. Where one of its limits would
fall below 0, it is said from the bottom-right corner instead, which rows or keys behind the last
bring to its place.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn.context_parallel.plan import Rectangle

QUERIES, KEYS = 16, 32  # of a block


@dataclass(frozen=True)
class Dropout:
    """The mask of a call of all sequences, tokens and `heads` heads."""

    probability: float
    rng_state: Tensor
    heads: int
    first_head: int  # of those that are here

    def of_heads(self, heads: slice) -> "Dropout":
        return replace(self, first_head=self.first_head + heads.start)

    def arguments(self, sequence: int = 0, query: int = 0, key: int = 0) -> dict:
        """The op's, of a part that begins there."""
        return dict(
            dropout_p=self.probability,
            rng_state=self.rng_state,
            dropout_place=[sequence, self.first_head, self.heads, query, key],
        )


@dataclass(frozen=True)
class Padding:
    """Rows and keys before the first and behind the last one, and the band between all of them."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    left: int
    right: int
    top_left: bool

    def arguments(self, bias: Tensor | None, keys: int, device: torch.device) -> dict:
        """The op's. bias: of the `keys` keys of the call, which broadcasts its rows."""
        arguments = dict(
            window_size=(self.left, self.right),
            causal_alignment="top-left" if self.top_left else "bottom-right",
        )
        if self.keys == (0, 0):
            return arguments
        if bias is None:
            bias = F.pad(torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device), self.keys)
        else:
            bias = F.pad(bias, self.keys, value=float("-inf"))
        return arguments | dict(attn_bias=bias)

    def pad_rows(self, x: Tensor) -> Tensor:
        """x: (batch, rows, heads, d)"""
        return _padded(x, self.rows)

    def pad_keys(self, x: Tensor) -> Tensor:
        return _padded(x, self.keys)

    def pad_lse(self, lse: Tensor) -> Tensor:
        """lse: (batch, heads, rows). The new rows see nothing, and have no gradient."""
        return F.pad(lse, self.rows, value=float("-inf")) if any(self.rows) else lse

    def pad_dlse(self, dlse: Tensor) -> Tensor:
        return F.pad(dlse, self.rows) if any(self.rows) else dlse

    def own_rows(self, count: int) -> slice:
        """Where the `count` rows of the call lie."""
        return slice(self.rows[0], self.rows[0] + count)

    def own_keys(self, count: int) -> slice:
        return slice(self.keys[0], self.keys[0] + count)


def _padded(x: Tensor, padding: tuple[int, int]) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, *padding)) if any(padding) else x


def padding_of(r: Rectangle) -> Padding:
    """What makes a rectangle begin at a block of the mask."""
    rows, keys = r.query % QUERIES, r.key % KEYS
    if not r.top_left:
        return Padding((rows, 0), (keys, 0), r.left, r.right, False)
    # The diagonal meets the first of the new keys so much further to the right.
    shift = keys - rows
    left = r.left if r.left < 0 else r.left - shift
    right = r.right if r.right < 0 else r.right + shift
    if left >= min(r.left, 0) and right >= min(r.right, 0):
        return Padding((rows, 0), (keys, 0), left, right, True)
    missing = r.rows - r.keys  # keys behind the last, or less rows
    return Padding((rows, max(0, -missing)), (keys, max(0, missing)), r.left, r.right, False)
