"""The race of generation: a prompt and then one new token of a small model, against caches.

ours appends to a cache and attends to it in one call of flash_attn_with_kvcache. sdpa writes into
its cache itself, and torch's scaled_dot_product_attention gets the part of it that a query sees.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import flash_attn
from benchmarks import backends, results
from benchmarks.contest import Race, progress
from benchmarks.race_caches import graph_of
from benchmarks.shapes import Case
from benchmarks.small_models import MODELS, Transformer


@dataclass(frozen=True)
class GenerationCase:
    """A prompt of so many tokens, and one token after it."""

    model: str
    batch: int
    prompt: int

    def shape(self) -> dict:
        return {"model": self.model, "batch": self.batch, "prompt": self.prompt}


def cases(quick: bool = False) -> list[GenerationCase]:
    sizes = ((1, 4096), (8, 4096), (1, 32768))
    listed = [GenerationCase(name, *size) for name in ("gemma4", "llama128") for size in sizes]
    return listed[:1] if quick else listed


def ours(layer: Case, cache: torch.Tensor, seen: int) -> backends.Attend:
    lengths = torch.full((layer.batch,), seen, dtype=torch.int32, device=cache.device)
    window = (-1 if layer.window is None else layer.window, 0)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, *cache, k, v, cache_seqlens=lengths, causal=True, window_size=window
        )

    return attend


def sdpa(layer: Case, cache: torch.Tensor, seen: int) -> backends.Attend:
    """For a prompt, of which nothing was seen, or for one token."""
    first = 0 if seen == 0 or layer.window is None else max(0, seen - layer.window)
    attend = backends.windowed_sdpa(layer, cache.device) if seen == 0 else backends.free_sdpa(False)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        end = seen + q.size(1)
        for of_cache, new in zip(cache, (k, v), strict=True):
            of_cache[:, seen:end] = new
        return attend(q, *(x[:, first:end] for x in cache))

    return call


class Generation:
    """The two calls of a case for each contestant, from the same weights and tokens."""

    def __init__(self, case: GenerationCase, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.parts = case, MODELS[case.model]
        torch.manual_seed(0)
        size = (case.batch, case.prompt + 1)
        self.model = Transformer(self.parts, size[1]).to(device, dtype)
        self.tokens = torch.randint(self.model.embed.num_embeddings, size, device=device)

    def call(self, caches: list[torch.Tensor], name: str, first: int, end: int) -> Callable:
        """The logits of the last of these tokens, where the caches have those before `first`."""
        make = {"ours": ours, "sdpa": sdpa}[name]
        layers = self.parts.cases(self.case.batch, end - first)
        attends = [make(layer, x, first) for layer, x in zip(layers, caches, strict=True)]

        @torch.no_grad()
        def logits() -> torch.Tensor:
            return self.model(self.tokens[:, first:end], attends, first)[:, -1]

        return logits

    def caches(self) -> list[torch.Tensor]:
        """Keys and values of each layer."""
        weight = self.model.embed.weight
        return [
            weight.new_zeros(2, x.batch, x.seqlen, x.kv_heads, x.head_dim)
            for x in self.parts.cases(*self.tokens.shape)
        ]

    def prompt(self, name: str) -> Callable:
        return self.call(self.caches(), name, 0, self.case.prompt)

    def step(self, name: str) -> Callable:
        caches, seen = self.caches(), self.case.prompt
        self.call(caches, name, 0, seen)()
        step = self.call(caches, name, seen, seen + 1)
        return graph_of([step]) if self.tokens.is_cuda else step


def run(race: Race, quick: bool, names: tuple[str, ...]) -> list[dict]:
    """Milliseconds of the prompt, and of the token after it as a CUDA graph: a host that launches
    the kernels of so small a model one by one takes longer than they do."""
    records = []
    for case in race.chosen(cases(quick)):
        generation = Generation(case, race.device, race.dtype)
        for kind in ("prompt", "step"):
            times = race.seconds(
                names, f"generate.{kind} {case.shape()}", getattr(generation, kind)
            )
            values = {n: None if t is None else t * 1e3 for n, t in times.items()}
            ratio = results.ratios(values, names[0], names[1:], "less")
            records.append(results.record(f"generate.{kind}", case.shape(), "ms", values, ratio))
            progress(records[-1])
        del generation
    return records
