"""A serving loop: prompts of different lengths are prefilled into a paged cache, then sequences
join and leave a batch that decodes token by token. Every token is checked against recomputation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from caches import EIGHT_BITS, assert_stored, quantize
from cases import DECODE_TARGETS, Target, each_target, use
from numerics import assert_close, assert_lse_close

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.reference import attention_ref, condition_tensors

HEADS_Q, HEADS_KV, D, PAGE, PAGES, MAX_PAGES = 4, 2, 64, 16, 40, 8
STEPS = 24


@dataclass
class Sequence:
    """What a server knows of a request: its pages, and here also what it has seen."""

    pages: list[int]
    remaining: int
    k: list[torch.Tensor] = field(default_factory=list)  # rotated, (tokens, heads_kv, d) each
    v: list[torch.Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(x.size(0) for x in self.k)


class Server:
    def __init__(self, target: Target, cache: str, seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = EIGHT_BITS.get(cache, torch.bfloat16)
        self.pools = [
            torch.zeros(PAGES, PAGE, HEADS_KV, D, device=target.device).to(self.dtype)
            for _ in range(2)
        ]
        self.free = list(range(PAGES))
        self.random.shuffle(self.free)
        self.running: list[Sequence] = []
        angles = torch.randn(MAX_PAGES * PAGE, D // 2, generator=self.generator)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.descale = torch.full((HEADS_KV,), 0.03) if cache else None

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16()

    def admit(self) -> None:
        """A new request: its prompt is one call of its own."""
        prompt = self.random.choice([1, 5, PAGE, 30, 2 * PAGE + 1, 50])
        sequence = Sequence([], self.random.randint(2, 12))
        self.run([sequence], prompt)
        self.running.append(sequence)

    def retire(self) -> None:
        for sequence in [s for s in self.running if s.remaining == 0]:
            self.running.remove(sequence)
            self.free += sequence.pages

    def run(self, batch: list[Sequence], new: int) -> None:
        """`new` more tokens of every sequence of the batch through the cache; checks what comes."""
        lengths = [len(s) for s in batch]
        for sequence, length in zip(batch, lengths, strict=True):
            while len(sequence.pages) * PAGE < length + new:
                sequence.pages.append(self.free.pop())
        # What lies behind a sequence's pages is never looked at.
        table = torch.full((len(batch), MAX_PAGES), 2**31 - 1, dtype=torch.int32)
        for row, sequence in zip(table, batch, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        q = self.normal(len(batch), new, HEADS_Q, D)
        k, v = self.normal(2, len(batch), new, HEADS_KV, D)
        before = torch.tensor(lengths, dtype=torch.int32)
        given = dict(q=q, k=k, v=v, rotary_cos=self.cos, rotary_sin=self.sin, cache_seqlens=before)
        given |= dict(block_table=table)
        if self.descale is not None:
            given |= dict(k_descale=self.descale, v_descale=self.descale)
        with use(self.target):
            out, lse = flash_attn.flash_attn_with_kvcache(
                k_cache=self.pools[0],
                v_cache=self.pools[1],
                causal=True,
                rotary_interleaved=False,
                return_softmax_lse=True,
                **{name: x.to(self.target.device) for name, x in given.items()},
            )
        self.remember(batch, k, v, before, table)
        self.check(batch, self.rotate(q, before).bfloat16(), out, lse)

    def rotate(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        tables = self.cos.float(), self.sin.float()
        return apply_rotary_emb(x.float(), *tables, seqlen_offsets=before.long())

    def remember(self, batch, k, v, before, table) -> None:
        """The caches hold the new tokens at their places."""
        exact = self.target.backend == "aten"
        position = before[:, None].long() + torch.arange(k.size(1))
        page, slot = table.long().gather(1, position // PAGE), position % PAGE
        for name, pool, new in zip(
            "kv", self.pools, (self.rotate(k, before), v.float()), strict=True
        ):
            stored = pool.cpu().view(torch.uint8)[page, slot].view(self.dtype)
            expected = quantize(new, self.dtype, self.descale)
            assert_stored(f"{name}_cache", stored, expected, exact or name == "v")
            values = stored.double()
            if self.descale is not None:
                values = values * self.descale[:, None]
            for sequence, value in zip(batch, values, strict=True):
                getattr(sequence, name).append(value)

    def check(self, batch, q, out, lse) -> None:
        lengths = torch.tensor([len(s) for s in batch])
        padded = [
            torch.nn.utils.rnn.pad_sequence([torch.cat(x) for x in seen], batch_first=True)
            for seen in ([s.k for s in batch], [s.v for s in batch])
        ]
        options = dict(q=q, k=padded[0], v=padded[1], causal=True, seqused_k=lengths)
        expected, expected_lse, _ = attention_ref(**options)
        conditions = condition_tensors(torch.zeros_like(expected), **options)
        largest = conditions.largest_score
        assert_close("out", out, expected, conditions.out, q.dtype, largest_score=largest)
        assert_lse_close(lse, expected_lse, largest)


@each_target(*DECODE_TARGETS)
@pytest.mark.parametrize("cache", ["", "fp8", "int8"], ids=["bf16", "fp8", "int8"])
def test_serving(cache: str, target: Target, seed: int) -> None:
    server = Server(target, cache, seed)
    paged = dict(block_table=torch.zeros(1, 1, dtype=torch.int32, device=target.device))
    q = torch.zeros(1, 1, HEADS_Q, D, dtype=torch.bfloat16, device=target.device)
    support = flash_attn.can_use(q, *server.pools, op="decode", **paged)
    if support.reasons.get(target.backend):
        pytest.skip("; ".join(support.reasons[target.backend]))
    for step in range(STEPS):
        while len(server.running) < 4 and (step % 3 == 0 or not server.running):
            server.admit()
        server.random.shuffle(server.running)
        server.run(server.running, 2 if step % 7 == 6 else 1)  # now and then a speculated token
        for sequence in server.running:
            sequence.remaining -= 1
        server.retire()
    assert len(server.free) + sum(len(s.pages) for s in server.running) == PAGES
