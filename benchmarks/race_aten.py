"""The race of the last resort: calls that no kernel serves on Hopper, beside plain PyTorch.

fp64, fp32 above d = 256, head dims above 512, S_dmask of dropout, and caches of such dtypes. Ours
is what the library chooses; a record says which backend that was.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks import backends, cache_calls, results
from benchmarks.cache_shapes import DecodeCase
from benchmarks.contest import AGREE, AGREE_8_BITS, Race, progress
from benchmarks.shapes import Case
from flash_attn.cli import peers

NAMES = ("ours", "naive")
AGREE_LONG = AGREE | {torch.float64: 1e-10}


@dataclass(frozen=True)
class AtenCase:
    """probs: the call returns S_dmask. form: one of cache_calls.CACHE_FORMS, of a call that
    decodes."""

    call: Case | DecodeCase
    dtype: str
    probs: bool = False
    form: str = ""

    def shape(self) -> dict:
        more = {"probs": self.probs, "form": self.form}
        return {"dtype": self.dtype} | self.call.shape() | {n: x for n, x in more.items() if x}


def cases(quick: bool = False) -> list[AtenCase]:
    small = dict(batch=8, seqlen=1024, heads=16, head_dim=64, causal=True)
    listed = [
        *(
            AtenCase(Case(b, s, 16, 64, True), "float64")
            for b, s in ((1, 64), (64, 128), (8, 1024))
        ),
        AtenCase(Case(2, 4096, 16, 64, True), "float64"),
        AtenCase(Case(8, 1024, 16, 128), "float64"),
        AtenCase(Case(**small, heads_kv=4), "float64"),
        AtenCase(Case(**small, softcap=30.0), "float64"),
        AtenCase(Case(**small, dropout=0.1), "float64"),
        *(AtenCase(Case(b, s, 4, 512, True), "float32") for b, s in ((16, 512), (2, 4096))),
        AtenCase(Case(4, 2048, 6, 320), "float32"),
        *(AtenCase(Case(b, s, 4, 640, True), "bfloat16") for b, s in ((8, 1024), (2, 4096))),
        *(
            AtenCase(Case(b, s, 16, 64, True, dropout=0.1), "bfloat16", probs=True)
            for b, s in ((16, 512), (4, 2048))
        ),
        AtenCase(DecodeCase(16, 4, 4, 4096, 64), "float64", form="plain"),
        AtenCase(DecodeCase(16, 4, 4, 4096, 64), "float64", form="paged16"),
        AtenCase(DecodeCase(16, 4, 4, 4096, 64, tokens=8), "float64", form="plain"),
        AtenCase(DecodeCase(32, 8, 4, 4096), "float32", form="e4m3"),
        AtenCase(DecodeCase(32, 8, 4, 4096), "float32", form="int8"),
        AtenCase(DecodeCase(8, 2, 4, 4096, 640), "bfloat16", form="plain"),
    ]
    return listed[::7] if quick else listed


def naive(case: Case, probs: bool) -> Callable:
    """softmax(Q Kᵀ / √d) V of all scores at once; with probs also what dropout left of P."""
    backends.refuse(case, "window", "alibi", "bias", "sink", "docs")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = (q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.causal:
            hidden = peers.causal_hidden(case.seqlen, case.seqlen, q.device)
            scores = scores.masked_fill_(hidden, float("-inf"))
        kept = F.dropout(scores.softmax(-1), case.dropout)
        out = (kept @ v).transpose(1, 2)
        return (out, kept) if probs else out

    return attend


def attention(name: str, case: AtenCase, inputs: backends.Inputs) -> Callable:
    """The contestant, or a backend of ours, as a function of q, k, v. The output comes first."""
    if name == "naive":
        return naive(case.call, case.probs)
    if not case.probs:
        return backends.attention(name, case.call, inputs)
    import flash_attn

    def attend(*qkv: torch.Tensor):
        with backends.forced_backend(None if name == "ours" else name):
            return flash_attn.flash_attn_func(
                *qkv, case.call.dropout, causal=case.call.causal, return_attn_probs=True
            )

    return attend


def decode(name: str, case: AtenCase, q: torch.Tensor, cache: cache_calls.Cache) -> Callable:
    """Ours on a cache of the case's form; naive on the dense numbers that the cache holds."""
    if name != "naive":
        backend = None if name == "ours" else name
        return cache_calls.decode_form(case.form, case.call, q, [cache], backend)[0]
    eight_bits = case.form in ("e4m3", "int8")
    stored = cache_calls.quantised([cache], case.form)[0] if eight_bits else cache
    descale = cache_calls.DESCALE if eight_bits else None
    group = case.call.heads // case.call.heads_kv
    tokens, length = case.call.tokens, case.call.length
    hidden = peers.causal_hidden(tokens, length, q.device) if tokens > 1 else None

    def call() -> torch.Tensor:
        k, v = (x.to(q.dtype) for x in (stored.k, stored.v))
        if descale:
            k, v = k * descale, v * descale
        return peers.naive_attention(
            q, *(x.repeat_interleave(group, 2) for x in (k, v)), hidden=hidden
        )

    return call


def served(build: Callable) -> str:
    """The backend of ours that the call of build(name) runs on, the fastest first."""
    for backend in ("sm90", "sm80", "cuda"):
        try:
            build(backend)()
            return backend
        except RuntimeError:
            continue
    return "aten"


def directions(case: AtenCase, race: Race) -> dict[str, Callable]:
    """Of each direction how a contestant's call is built."""
    dtype = getattr(torch, case.dtype)
    if isinstance(case.call, DecodeCase):
        q, (cache,) = cache_calls.make_caches(case.call, 1, race.device, dtype)
        return {"decode": lambda name: decode(name, case, q, cache)}
    inputs = backends.make_inputs(case.call, dtype, race.device)
    leaves = inputs.leaves()

    def forward(name: str) -> Callable:
        attend = attention(name, case, inputs)

        def call():
            with torch.no_grad():
                return attend(inputs.q, inputs.k, inputs.v)

        return call

    def backward(name: str) -> Callable:
        out = attention(name, case, inputs)(inputs.q, inputs.k, inputs.v)
        out = out[0] if case.probs else out
        return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

    return {"fwd": forward, "bwd": backward}


def run(race: Race, quick: bool, names: tuple[str, ...]) -> list[dict]:
    """Microseconds of each direction; ratio: how many times as fast ours is."""
    records = []
    for case in race.chosen(cases(quick)):
        limit = AGREE_8_BITS if "8" in case.form or "e4m3" in case.form else None
        limit = limit or AGREE_LONG[getattr(torch, case.dtype)]
        random = isinstance(case.call, Case) and case.call.dropout > 0
        for direction, build in directions(case, race).items():
            label = f"aten.{direction} {case.shape()}"
            agree = dict.fromkeys(names, limit)
            times = race.seconds(names, label, build, compare=not random, agree=agree)
            micros = {n: None if t is None else t * 1e6 for n, t in times.items()}
            ratio = results.ratios(micros, names[0], names[1:], "less")
            shape = case.shape() | {"served": served(build)}
            records.append(results.record(f"aten.{direction}", shape, "us", micros, ratio))
            progress(records[-1])
    return records
