"""Varlen calls whose sequences differ, and what they are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from cases import ATEN_CPU, DECODE_CUDA

import flash_attn

KEYS = 700
# Decode is chosen where no backend is named.
DEVICES = (ATEN_CPU, DECODE_CUDA)
SLOPES = torch.tensor([0.1, 0.02, 0.3, 0.0])


@dataclass
class Ragged:
    """Varlen sequences between rows that belong to none, all of which are NaN."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    d: int = 64
    d_v: int = 64
    dtype: torch.dtype = torch.float16
    heads: tuple[int, int] = (4, 2)
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    leftpad: tuple[int, ...] | None = None
    page_size: int = 0
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        def rows(lengths, heads, d):
            x = torch.full((sum(lengths) + 5, heads, d), math.nan, dtype=self.dtype)
            x[2 : 2 + sum(lengths)].normal_()
            return x

        self.q = rows(self.lengths_q, self.heads[0], self.d)
        self.k = rows(self.lengths_k, self.heads[1], self.d)
        self.v = rows(self.lengths_k, self.heads[1], self.d_v)

    def starts(self, lengths) -> list[int]:
        return torch.tensor([2, *lengths]).cumsum(0).tolist()

    def pages(self, x: torch.Tensor) -> torch.Tensor:
        """Each sequence's keys in pages of its own; what they have no keys for is NaN."""
        most = -(-max(self.lengths_k) // self.page_size)
        pool = torch.full((len(self.lengths_k) * most, self.page_size, *x.shape[1:]), math.nan)
        pool = pool.to(x.dtype)
        starts = self.starts(self.lengths_k)
        for b, length in enumerate(self.lengths_k):
            own = pool[b * most : (b + 1) * most].flatten(0, 1)
            own[:length] = x[starts[b] : starts[b + 1]]
        return pool

    def arguments(self, device: str):
        def ints(x):
            return None if x is None else torch.tensor(x, dtype=torch.int32, device=device)

        options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in self.options.items()}
        k, v = self.k, self.v
        if self.page_size:
            k, v = self.pages(k), self.pages(v)
            table = torch.arange(len(k), dtype=torch.int32, device=device)
            options["block_table"] = table.view(len(self.lengths_k), -1)
        return [x.to(device) for x in (self.q, k, v)], options | dict(
            cu_seqlens_q=ints(self.starts(self.lengths_q)),
            cu_seqlens_k=ints(self.starts(self.lengths_k)),
            max_seqlen_q=max(self.lengths_q),
            max_seqlen_k=max(self.lengths_k),
            seqused_q=ints(self.used_q),
            seqused_k=ints(self.used_k),
            leftpad_k=ints(self.leftpad),
        )

    def call(self, device: str):
        tensors, options = self.arguments(device)
        out, lse, _ = flash_attn.flash_attn_varlen_func(*tensors, **options, return_attn_probs=True)
        return out.cpu().double(), lse.cpu().double()

    def served_by(self, device: str) -> str:
        tensors, options = self.arguments(device)
        return flash_attn.can_use(*tensors, **options).backend

    def plan(self, device: str) -> str:
        tensors, options = self.arguments(device)
        return flash_attn.can_use(*tensors, **options).plan

    def expected(self):
        """By the CPU in float64, sequence by sequence; rows that do not count are 0, lse -inf."""
        out = torch.zeros(len(self.q), self.heads[0], self.d_v, dtype=torch.float64)
        lse = torch.full((self.heads[0], len(self.q)), -math.inf, dtype=torch.float64)
        for b in range(len(self.lengths_q)):
            queries = self.lengths_q[b] if self.used_q is None else self.used_q[b]
            keys = self.lengths_k[b] if self.used_k is None else self.used_k[b]
            skipped = 0 if self.leftpad is None else self.leftpad[b]
            first_q, first_k = self.starts(self.lengths_q)[b], self.starts(self.lengths_k)[b]
            if queries == 0:
                continue
            options = dict(self.options)
            if (slopes := options.get("alibi_slopes")) is not None and slopes.dim() > 1:
                options["alibi_slopes"] = slopes[b]
            q = self.q[first_q : first_q + queries].double()[None]
            k, v = (x[first_k + skipped : first_k + keys].double()[None] for x in (self.k, self.v))
            o, s, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
            out[first_q : first_q + queries], lse[:, first_q : first_q + queries] = o[0], s[0]
        return out, lse


def assert_close(actual, expected, dtype: torch.dtype) -> None:
    error = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}[dtype]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=error, atol=error)


def tensors(device: str, batch: int, queries: int, heads: tuple[int, int] = (4, 2)):
    make = {"device": device, "dtype": torch.float16}
    q = torch.randn(batch, queries, heads[0], 64, **make)
    k, v = torch.randn(2, batch, KEYS, heads[1], 64, **make)
    return q, k, v


def check_replay(
    device: str,
    heads: tuple[int, int],
    captured: tuple[int, ...],
    replayed: tuple[int, ...],
    plan: str = "",
) -> None:
    """A graph reads the lengths of its replay, not of its capture. plan: a part of the call's."""
    q, k, v = (x.flatten(0, 1) for x in tensors(device, len(captured), max(captured), heads))
    q = q[: sum(captured)]
    starts_q, starts_k = (
        torch.tensor([0, *x], device=device).cumsum(0, dtype=torch.int32)
        for x in (captured, [KEYS] * len(captured))
    )
    options = {
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        "max_seqlen_q": max(captured),
        "max_seqlen_k": KEYS,
    }
    assert plan in flash_attn.can_use(q, k, v, **options).plan

    def attend() -> torch.Tensor:
        return flash_attn.flash_attn_varlen_func(q, k, v, **options)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    starts_q[1:].copy_(torch.tensor(replayed).cumsum(0))
    starts_k[1:3].copy_(torch.tensor([80, 900]))
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, attend())
    used = sum(replayed)
    assert out[:used].any(-1).all() and not out[used:].any()
