"""The shapes of the races whose keys come from a cache, or lie in pages."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeCase:
    """New tokens of each sequence, with theirs in it, against a full cache of head_dim 128."""

    heads: int
    heads_kv: int
    batch: int
    length: int
    head_dim: int = 128
    tokens: int = 1

    def flops(self) -> float:
        """Causal, aligned bottom-right."""
        pairs = self.tokens * self.length - self.tokens * (self.tokens - 1) / 2
        return 4.0 * self.batch * self.heads * pairs * self.head_dim

    def cache_bytes(self, itemsize: int = 2) -> int:
        return 2 * self.batch * self.length * self.heads_kv * self.head_dim * itemsize

    def shape(self) -> dict:
        return {
            "heads": f"{self.heads}/{self.heads_kv}",
            "batch": self.batch,
            "length": self.length,
            "d": self.head_dim,
        } | ({"tokens": self.tokens} if self.tokens > 1 else {})


def decode(quick: bool = False) -> list[DecodeCase]:
    cases = [
        DecodeCase(32, 8, 1, 8192),
        DecodeCase(32, 8, 1, 32768),
        DecodeCase(32, 8, 1, 131072),
        DecodeCase(32, 8, 16, 2048),
        DecodeCase(32, 8, 16, 32768),
        DecodeCase(32, 8, 128, 2048),
        DecodeCase(32, 32, 1, 8192),
        DecodeCase(32, 32, 16, 8192),
        DecodeCase(64, 8, 1, 32768),
        DecodeCase(64, 8, 32, 8192),
        DecodeCase(16, 1, 1, 32768),
        DecodeCase(16, 1, 64, 8192),
    ]
    return cases[::4] if quick else cases


def short_decode(quick: bool = False) -> list[DecodeCase]:
    """Where chats live: up to 4k keys, batches of 1 to 64, and other head dims."""
    cases = [
        DecodeCase(32, 8, batch, length)
        for length in (256, 512, 1024, 4096)
        for batch in (1, 4, 16, 64)
    ] + [
        DecodeCase(4096 // head_dim, 1024 // head_dim, batch, length, head_dim)
        for head_dim in (64, 256)
        for batch, length in ((1, 1024), (1, 4096), (16, 1024), (64, 1024))
    ]
    return cases[::8] if quick else cases


def few_queries(quick: bool = False) -> list[DecodeCase]:
    """Steps of generation, and chunks of a prompt, without a cache's function."""
    cases = [
        DecodeCase(heads, heads_kv, batch, length, head_dim, tokens)
        for heads, heads_kv, head_dim in ((32, 8, 128), (16, 16, 64), (16, 4, 256))
        for batch, length, tokens in (
            (1, 2048, 1),
            (1, 8192, 1),
            (1, 32768, 1),
            (16, 2048, 1),
            (64, 2048, 1),
            (1, 8192, 8),
            (16, 2048, 8),
            (1, 8192, 64),
            (1, 16384, 256),
            (4, 8192, 64),
        )
    ]
    return cases[::10] if quick else cases


@dataclass(frozen=True)
class MixedCase:
    """Sequences with a few new tokens, each with the same keys, and chunks of others' prompts, with
    as many keys."""

    heads: int
    heads_kv: int
    sequences: int
    keys: int
    chunks: int
    chunk: int  # queries of each
    head_dim: int = 128
    tokens: int = 1
    page_size: int = 0  # 0: keys lie side by side

    def queries(self) -> list[int]:
        """Of each sequence."""
        return [self.tokens] * self.sequences + [self.chunk] * self.chunks

    def shape(self) -> dict:
        return {
            "heads": f"{self.heads}/{self.heads_kv}",
            "d": self.head_dim,
            "sequences": f"{self.sequences}x{self.tokens}",
            "chunks": f"{self.chunks}x{self.chunk}",
            "keys": self.keys,
            "pages": self.page_size,
        }


def mixed(quick: bool = False) -> list[MixedCase]:
    """What continuous batching makes of requests, and drafts of speculative decoding."""
    drafts = [
        MixedCase(heads, heads_kv, sequences, keys, 0, 0, head_dim, tokens, page_size)
        for page_size in (16, 0)
        for heads, heads_kv, head_dim in ((64, 8, 128), (8, 1, 128), (16, 4, 256))
        for sequences, keys in ((16, 8192), (64, 2048), (8, 1024))
        for tokens in (8, 48)
    ]
    cases = [
        MixedCase(heads, heads_kv, sequences, keys, chunks, chunk, head_dim, tokens, page_size)
        for page_size in (16, 0)
        for heads, heads_kv, head_dim in ((32, 8, 128), (64, 8, 128), (16, 16, 64), (8, 1, 128))
        for sequences, tokens, keys, chunks, chunk in (
            (63, 1, 4096, 1, 512),
            (15, 1, 8192, 1, 2048),
            (127, 1, 1024, 1, 512),
            (7, 1, 32768, 1, 1024),
            (60, 1, 2048, 4, 256),
            (31, 4, 4096, 1, 512),
            (3, 1, 8192, 1, 512),
        )
    ] + drafts
    return cases[::9] if quick else cases


def wide_decode(quick: bool = False) -> list[DecodeCase]:
    """Head dims above 256."""
    cases = [
        DecodeCase(heads, heads_kv, batch, length, head_dim)
        for head_dim in (512, 320)
        for heads, heads_kv in ((16, 4), (8, 8))
        for batch, length in ((1, 8192), (1, 32768), (16, 2048), (16, 16384))
    ]
    return cases[:1] if quick else cases


def cache(quick: bool = False) -> list[DecodeCase]:
    """For the forms of a cache."""
    cases = [
        DecodeCase(32, 8, 1, 8192),
        DecodeCase(32, 8, 1, 131072),
        DecodeCase(32, 8, 16, 32768),
        DecodeCase(32, 8, 128, 2048),
    ]
    return cases[:1] if quick else cases


def decode_terms(quick: bool = False) -> list[DecodeCase]:
    """One new token, and a tree of eight."""
    cases = [
        DecodeCase(4096 // head_dim, 1024 // head_dim, batch, length, head_dim, tokens)
        for head_dim in (64, 128, 256)
        for batch, length in ((1, 8192), (16, 2048), (16, 32768))
        for tokens in (1, 8)
    ]
    return cases[:1] if quick else cases


def chunk(quick: bool = False) -> list[DecodeCase]:
    """Prefill in chunks, into a cache, and drafts of speculative decoding."""
    cases = [
        DecodeCase(32, 8, 1, length, tokens=tokens)
        for length in (8192, 32768)
        for tokens in (64, 256, 1024)
    ] + [DecodeCase(32, 8, 8, 8192, tokens=64)]
    cases += [
        DecodeCase(64, 8, batch, length, tokens=tokens)
        for batch, length in ((1, 32768), (16, 8192))
        for tokens in (8, 16)
    ]
    return cases[::3] if quick else cases


@dataclass(frozen=True)
class PagedCase:
    """A causal varlen call on pages, all sequences alike; page_size 0: keys lie in one row."""

    batch: int
    tokens: int
    length: int
    page_size: int
    capacity: int  # keys that a row of the table has room for
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128

    def shape(self) -> dict:
        return {
            "batch": self.batch,
            "tokens": self.tokens,
            "length": self.length,
            "d": self.head_dim,
            "page": self.page_size,
            "room": self.capacity,
        }


def varlen_pages(quick: bool = False) -> list[PagedCase]:
    """Whole prompts, and chunks of long ones, in tables with and without room to spare."""
    cases = [
        PagedCase(batch, tokens, length, page_size, capacity, head_dim=head_dim)
        for batch, tokens, length, capacity in (
            (8, 2048, 2048, 2048),
            (8, 8192, 8192, 8192),
            (4, 512, 16384, 65536),
            (16, 64, 4096, 32768),
        )
        for page_size in (0, 16, 64, 256)
        for head_dim in (64, 128, 256)
    ]
    return cases[:2] if quick else cases


def ragged(quick: bool = False) -> dict[str, tuple[int, ...]]:
    """64 lengths, log-uniform from 100 to 64k, and as many tokens in equal ones."""
    generator = random.Random(0)
    longest = 4096 if quick else 65536
    lengths = tuple(
        round(math.exp(generator.uniform(math.log(100), math.log(longest)))) for _ in range(64)
    )
    return {"ragged": lengths, "uniform": (sum(lengths) // 64,) * 64}


def splits(quick: bool = False) -> list[DecodeCase]:
    """Batch by kv heads by length, four query heads to a kv head, caches of up to 4 GiB."""
    cases = [
        DecodeCase(4 * heads_kv, heads_kv, batch, length)
        for heads_kv in (1, 8, 32)
        for batch in (1, 8, 64)
        for length in (1024, 8192, 65536)
    ]
    return cases[:1] if quick else [c for c in cases if c.cache_bytes() <= 1 << 32]
