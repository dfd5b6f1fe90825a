"""The race of masks: calls with an object of flash_attn.masks beside the work that it leaves."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import flex, results
from benchmarks.contest import Race, progress
from benchmarks.shapes import HIDDEN, TOKENS

BLOCK = 128  # queries, and keys, of a block
BLOCKS = ("tiles", "fresh", "full", "flex")
DOCUMENTS = ("varlen", "packed", "prepared", "ids", "fresh", "flex")
PREFIX = ("prefix", "fresh", "bool", "tensor", "causal", "flex")
UNLIKE = ("full", "causal")  # what others are compared with, and another result


@dataclass(frozen=True)
class MaskCase:
    """Blocks of a density, each of them seen or not by chance, or causal documents of one sequence,
    or prefix-LM.

    tiles: the mask. full: no mask. varlen: the documents as sequences. packed, prepared, ids: masks
    of their bounds, of their ids when it is known that each lies in one piece, and of ids alone.
    prefix: the mask. bool: the same, made of a bool tensor. tensor: that tensor itself. causal: no
    prefix. A mask keeps its tiles from its first call on; fresh: it is made anew in each call."""

    seqlen: int
    head_dim: int
    density: float = 0.0
    documents: int = 0
    prefix: int = 0

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim

    @property
    def batch(self) -> int:
        return 1 if self.documents else max(1, TOKENS // self.seqlen)

    @property
    def kept(self) -> str:
        """The contestant that a duel runs: a mask that keeps its tiles."""
        return "prefix" if self.prefix else "ids" if self.documents else "tiles"

    @property
    def names(self) -> tuple[str, ...]:
        if self.prefix:
            return PREFIX
        return DOCUMENTS if self.documents else BLOCKS

    def lengths(self) -> list[int]:
        """Of the documents, by cuts at random."""
        cuts = sorted(
            random.Random(self.documents).sample(range(1, self.seqlen), self.documents - 1)
        )
        return [b - a for a, b in zip([0, *cuts], [*cuts, self.seqlen], strict=True)]

    def shape(self) -> dict:
        what = {"documents": self.documents} if self.documents else {"density": self.density}
        what = {"prefix": self.prefix} if self.prefix else what
        return {"d": self.head_dim, "seqlen": self.seqlen, "batch": self.batch} | what


def cases(quick: bool = False) -> list[MaskCase]:
    blocks = [MaskCase(s, d, density=0.1) for d in (64, 128, 256) for s in (8192, 16384, 32768)]
    documents = [MaskCase(TOKENS, d, documents=n) for d in (64, 128, 256) for n in (4, 12, 64)]
    prefixes = [MaskCase(s, d, prefix=s // 4) for d in (64, 128, 256) for s in (8192, 16384)]
    listed = blocks + documents + prefixes
    return listed[::4] if quick else listed


class Inputs:
    def __init__(self, case: MaskCase, race: Race):
        generator = torch.Generator(race.device).manual_seed(0)
        place = dict(device=race.device, generator=generator)
        shape = (case.batch, case.seqlen, case.heads, case.head_dim)
        self.leaves = [
            torch.randn(shape, dtype=race.dtype, **place, requires_grad=True) for _ in "qkv"
        ]
        self.dout = torch.randn(shape, dtype=race.dtype, **place)
        count = -(-case.seqlen // BLOCK)
        self.seen = torch.rand(case.heads, count, count, **place) < case.density
        lengths = torch.tensor(case.lengths() if case.documents else [case.seqlen])
        self.longest = int(lengths.max())
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.cu_seqlens = ends.to(race.device, torch.int32)
        ids = torch.arange(lengths.numel()).repeat_interleave(lengths)
        self.ids = ids.to(race.device)[None]


def attention(name: str, case: MaskCase, inputs: Inputs) -> Callable:
    """The contestant as a function of q, k, v."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func, masks

    if name == "flex":
        return of_flex(case, inputs)
    if name == "varlen":
        cu, longest = inputs.cu_seqlens, inputs.longest
        bounds = (cu, cu, longest, longest)

        # squeeze(), as the backward of an index would fill a tensor and copy into it.
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            sequence = [x.squeeze(0) for x in qkv]
            return flash_attn_varlen_func(*sequence, *bounds, causal=True).unsqueeze(0)

        return attend
    if name == "causal":
        return lambda q, k, v: flash_attn_func(q, k, v, causal=True)

    def in_bools() -> torch.Tensor:
        device = inputs.dout.device
        return masks.prefix_lm(case.prefix).to_bool(case.seqlen, case.seqlen, device=device)

    make = {
        "full": lambda: None,
        "tiles": lambda: masks.block_sparse(inputs.seen, BLOCK),
        "packed": lambda: masks.causal() & masks.packed_documents(inputs.cu_seqlens[None]),
        "ids": lambda: masks.causal() & masks.documents(inputs.ids),
        "prepared": lambda: (masks.causal() & masks.documents(inputs.ids)).prepared(
            case.seqlen, case.seqlen
        ),
        "prefix": lambda: masks.prefix_lm(case.prefix),
        "bool": lambda: masks.from_bool(in_bools()),
        "tensor": in_bools,
    }
    if name == "fresh":
        again = make["prefix" if case.prefix else "ids" if case.documents else "tiles"]
        return lambda q, k, v: flash_attn_func(q, k, v, attn_bias=again())
    mask = make[name]()
    return lambda q, k, v: flash_attn_func(q, k, v, attn_bias=mask)


def of_flex(case: MaskCase, inputs: Inputs) -> Callable:
    seen, ids = inputs.seen, inputs.ids[0]

    def of_blocks(b, h, i, j):
        return seen[h, i // BLOCK, j // BLOCK]

    def of_documents(b, h, i, j):
        return (j <= i) & (ids[i] == ids[j])

    def of_prefix(b, h, i, j):
        return (j <= i) | (j < case.prefix)

    sees = of_prefix if case.prefix else of_documents if case.documents else of_blocks
    heads = case.heads if sees is of_blocks else None
    return flex.attention(case.seqlen, case.head_dim, inputs.dout.device, sees=sees, heads=heads)


def forward(name: str, case: MaskCase, inputs: Inputs) -> Callable:
    attend = attention(name, case, inputs)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return attend(*inputs.leaves)

    return call


def backward(name: str, case: MaskCase, inputs: Inputs) -> Callable:
    out = attention(name, case, inputs)(*inputs.leaves)
    return lambda: torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)


def run(race: Race, quick: bool, names: tuple[str, ...]) -> list[dict]:
    """Microseconds of each direction; ratio: the time ÷ that of varlen, or of the causal call, or
    of the full call times the density."""
    records = []
    for case in race.chosen(cases(quick)):
        inputs = Inputs(case, race)
        density = inputs.seen.float().mean().item()

        for direction, make in (("fwd", forward), ("bwd", backward)):
            build = functools.partial(make, case=case, inputs=inputs)
            label = f"masks.{direction} {case.shape()}"
            own = [name for name in case.names if name in names]
            if direction == "bwd" and "fresh" in own:
                own.remove("fresh")  # whose backward has the forward's tiles
            times = race.seconds([name for name in own if name not in UNLIKE], label, build)
            unlike = [name for name in own if name in UNLIKE]
            times |= race.seconds(unlike, label, build, compare=False)
            micros = {n: None if t is None else t * 1e6 for n, t in times.items()}
            base, factor = (
                ("full", density)
                if case.density
                else ("varlen" if case.documents else "causal", 1.0)
            )
            share = micros.get(base)
            ratio = share and {
                f"{n}/{base}": t / (share * factor) for n, t in micros.items() if t and n != base
            }
            shape = case.shape() | ({"density": round(density, 4)} if case.density else {})
            records.append(results.record(f"masks.{direction}", shape, "us", micros, ratio or None))
            progress(records[-1])
        del inputs, build
    return records
