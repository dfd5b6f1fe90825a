"""The race of multi-head latent attention: one new token against a cache of one row a token, whose
first columns are its value."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import results
from benchmarks.cache_calls import scattered
from benchmarks.contest import Race, progress
from benchmarks.race_caches import graph_of, microseconds
from flash_attn.cli import peers
from flash_attn.cli.common import forced_backend

# ours, paged16, paged64: what the library chooses, dense and in pages; cuda, aten: backends by
# name; naive: plain PyTorch, two products and a softmax.
NAMES = ("ours", "paged16", "paged64", "cuda", "aten", "naive")
COLUMNS, VALUES = 576, 512


@dataclass(frozen=True)
class LatentCase:
    heads: int
    batch: int
    length: int

    def shape(self) -> dict:
        sizes = {"heads": f"{self.heads}/1", "batch": self.batch, "length": self.length}
        return sizes | {"d": COLUMNS, "d_v": VALUES}

    def cache_bytes(self) -> int:
        return 2 * self.batch * self.length * COLUMNS


def cases(quick: bool = False) -> list[LatentCase]:
    """All heads of DeepSeek-V3, and those of one GPU of two, four and eight."""
    shapes = ((1, 8192), (1, 32768), (16, 2048), (16, 16384), (128, 2048), (128, 8192))
    listed = [LatentCase(heads, *shape) for heads in (16, 32, 64, 128) for shape in shapes]
    return listed[:1] if quick else listed


def decode(
    name: str, case: LatentCase, q: torch.Tensor, caches: list[torch.Tensor]
) -> list[Callable[[], torch.Tensor]]:
    """A call for each cache (batch, length, 1, COLUMNS)."""
    from flash_attn import flash_decode_func

    if name == "naive":  # query heads that share their keys are so many queries
        rows = q.transpose(1, 2)
        attend = functools.partial(peers.naive_attention, rows)
        return [lambda x=x: attend(x, x[..., :VALUES]).transpose(1, 2) for x in caches]
    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device=q.device)
    options = {"cache_seqlens": lengths}
    if name.startswith("paged"):
        caches, options["block_table"] = scattered(caches, int(name.removeprefix("paged")))

    def call(cache: torch.Tensor) -> torch.Tensor:
        with forced_backend(name if name in ("cuda", "aten") else None):
            return flash_decode_func(q, cache, cache[..., :VALUES], **options)

    return [functools.partial(call, cache) for cache in caches]


def run(race: Race, listed: list[LatentCase], names: tuple[str, ...]) -> list[dict]:
    """Time, and at how many TB/s the rows are read if each is read once."""
    records = []
    l2 = torch.cuda.get_device_properties(race.device).L2_cache_size
    for case in listed:
        count = max(2, -(-3 * l2 // case.cache_bytes()))  # so that they come from memory
        rounds = max(1, 48 // count)
        generator = torch.Generator(race.device).manual_seed(0)
        make = dict(dtype=race.dtype, device=race.device, generator=generator)
        q = torch.randn(case.batch, 1, case.heads, COLUMNS, **make)
        rows = [torch.randn(case.batch, case.length, 1, COLUMNS, **make) for _ in range(count)]

        def build(name: str, case=case, q=q, rows=rows, rounds=rounds) -> Callable:
            return graph_of(decode(name, case, q, rows) * rounds)

        times = race.seconds(names, f"latent {case.shape()}", build)
        micros = microseconds(times, count * rounds)
        ratio = results.ratios(micros, names[0], names[1:], "less")
        records.append(results.record("decode.latent", case.shape(), "us", micros, ratio))
        rates = {n: None if t is None else case.cache_bytes() / t / 1e6 for n, t in micros.items()}
        records.append(results.record("decode.latent.rate", case.shape(), "TB/s", rates))
        progress(records[-2])
        del q, rows, build
    return records
