"""The races: ours by backend against torch's backends, FlexAttention, FlashAttention-4, FlashInfer.

    python -m benchmarks.race [--kinds fwd,shapes,bwd,bwd_shapes,deterministic,decode,cache,
    pages,prefix,short,short_pages,chunk,splits,naive,peaked,masks,decode_terms,features,terms,
    fp32,wide,wide_decode,latent,packed,few,mixed,ring,generate,aten,cpu]
    [--backends sm80,fa2,cudnn] [--only PATTERN] [--phases PRODUCT,SETTLE,TIMED]
    [--out FILE.json]

Forward and backward in TFLOP/s of the work that the mask leaves (4·b·h·s²·d forward, 2.5 times that
backward), decode in TB/s of K and V read. Each contestant's output is compared with the others'
before it is timed. shapes and bwd_shapes: GQA, other head dims, a window, documents; deterministic:
the backward in that mode beside our own without it. The kinds cache and splits race our decode with
itself: over the forms that a cache can have, and cut into pieces against not. pages: pages of 16
against dense, and against FlashInfer where it is installed. prefix: sequences that share leading
pages, against FlashInfer's cascade there. short, short_pages: decode against up to 4k keys, the
second on pages and in 8 bits, against FlashInfer's XQA kernel there. chunk: many new tokens against
a cache, dense and in pages, on the prefill kernels and on decode's. peaked: the forward where few
keys of a row outweigh the others, which costs a kernel that follows the row's maximum. masks:
blocks and documents of flash_attn.masks, both directions, against FlexAttention; the ratios are
their times ÷ the full call's times the density, or ÷ varlen's. decode_terms: what softcap, ALiBi, a
bias or a tree of new tokens costs decode. terms: score terms, dropout and sinks, both directions;
the cost of a term is its time ÷ the plain call's. fp32: both directions with torch's switch for
TF32 off and on, against torch's memory-efficient backend. wide, wide_decode: head dims above 256,
where FlexAttention has two sets of tiles. latent: decode of multi-head latent attention, against
plain PyTorch. packed: both passes of q, k and v in one tensor. few: forwards of few queries, dense
and varlen. mixed: sequences of one new token beside chunks of prompts, in one varlen call, and of a
few drafts each. ring: the calls of one rank's backward. generate: a prompt and one new token of
whole small models, beside SDPA's default. aten: calls that no kernel serves, against naive
attention.
"""

import argparse
import dataclasses
import importlib.util
import signal
import sys
from collections.abc import Callable

import torch

from benchmarks import (
    backends,
    cache_calls,
    cache_shapes,
    prefix,
    race_aten,
    race_few,
    race_generate,
    race_latent,
    race_masks,
    race_mixed,
    race_packed,
    race_ring,
    results,
    shapes,
)
from benchmarks import race_caches as caches
from benchmarks.contest import AGREE_TF32, SHOWN, Race, progress
from benchmarks.timing import QUICK, Timer, recipe_of
from flash_attn.cli.measure import peak_memory

KINDS = (
    *("fwd", "shapes", "bwd", "bwd_shapes", "deterministic", "decode", "cache", "pages"),
    *("prefix", "short", "short_pages", "chunk", "splits", "naive", "peaked", "masks"),
    *("decode_terms", "features", "terms", "fp32", "wide", "wide_decode", "latent", "packed"),
    *("few", "mixed", "ring", "generate", "aten", "cpu"),
)
PEERS = {
    "fwd": ("fa2", "cudnn", "fa4"),
    "shapes": ("fa2", "cudnn", "fa4"),
    "bwd": ("fa2", "cudnn", "fa4"),
    "bwd_shapes": ("fa2", "cudnn", "fa4"),
    "deterministic": ("fa4",),
    "decode": ("fa2", "cudnn"),
    "cache": (),
    "pages": ("flashinfer", "xqa"),
    "prefix": ("cascade", "cascade_fa2"),
    "short": ("fa2", "cudnn"),
    "decode_terms": (),
    "short_pages": cache_calls.FLASHINFER,
    "chunk": ("fa2", "cudnn"),
    "splits": (),
    "naive": ("naive",),
    "peaked": ("fa2", "cudnn", "fa4"),
    "masks": (),  # FlexAttention is among its contestants
    "features": ("fa2", "cudnn", "efficient", "fa4", "flex"),
    "terms": ("fa2", "cudnn", "efficient", "fa4", "flex"),
    "fp32": ("efficient",),
    "wide": ("sdpa", "flex", "flex_narrow"),
    "wide_decode": ("sdpa",),
    "latent": (),  # naive is among its contestants
    "packed": (),
    "few": (),  # peers are among its contestants
    "mixed": ("fa4",),
    "ring": (),
    "generate": ("sdpa",),
    "aten": ("naive",),
    "cpu": ("flash",),
}


def contestants(kind: str, device: torch.device) -> tuple[str, ...]:
    """Ours, the fastest on this device first, then the peers that are installed."""
    ours = {
        "decode": ("cuda",),
        "cache": cache_calls.CACHE_FORMS,
        "pages": ("paged16", "plain"),
        "prefix": ("shared", "plain"),
        "short": ("cuda",),
        "short_pages": ("paged16", "plain", "paged64_e4m3", "e4m3"),
        "splits": ("automatic", "unsplit"),
        "decode_terms": cache_calls.DECODE_TERMS,
        "masks": tuple(
            dict.fromkeys((*race_masks.BLOCKS, *race_masks.DOCUMENTS, *race_masks.PREFIX))
        ),
        "wide_decode": ("plain", "paged16"),
        "latent": race_latent.NAMES,
        "packed": race_packed.FORMS,
        "few": race_few.NAMES,
        "mixed": race_mixed.OURS,
        "ring": race_ring.FORMS,
        "generate": ("ours",),
        "aten": ("ours",),
        "cpu": ("aten",),
    }.get(kind, ("sm80",))
    on_hopper = kind in (
        *("fwd", "bwd", "shapes", "bwd_shapes", "deterministic", "naive", "peaked", "features"),
        *("chunk", "terms"),
    )
    if on_hopper and torch.cuda.get_device_capability(device) == (9, 0):
        ours = ("sm90", *ours)
    if kind == "chunk":
        ours = (ours[0], "cuda", f"{ours[0]}.paged16", "cuda.paged16")
    flashinfer = (*cache_calls.FLASHINFER, *PEERS["prefix"])
    modules = {"fa4": "flash_attn.cute"} | dict.fromkeys(flashinfer, "flashinfer")
    return *ours, *(
        name
        for name in PEERS[kind]
        if name not in modules or importlib.util.find_spec(modules[name]) is not None
    )


def dense_race(
    race: Race,
    kind: str,
    cases: list[shapes.Case],
    names: tuple[str, ...],
    suffix: str = "",
    agree: float | None = None,
    **more: object,
) -> list[dict]:
    """TFLOP/s of the forward (kind fwd) or the backward (kind bwd). agree: how far outputs may be
    apart, where AGREE does not say. more: what the records' shapes say besides."""
    backward = kind == "bwd"
    make = backends.backward if backward else backends.forward
    records = []
    for case in cases:
        inputs = backends.make_inputs(case, race.dtype, race.device)
        shape = case.shape() | more
        label = f"{kind}{suffix} {shape}"
        times = race.seconds(
            names,
            label,
            lambda name, case=case, inputs=inputs: make(name, case, inputs),
            compare=not case.dropout,
            agree=agree and dict.fromkeys(names, agree),
        )
        flops = case.flops(backward)
        values = {n: None if t is None else flops / t / 1e12 for n, t in times.items()}
        # sm90 does not serve every feature: then the next of ours is compared.
        ours = [n for n in names if n not in backends.PEERS]
        first = next((n for n in ours if values[n] is not None), names[0])
        others = [n for n in names if n != first and (values[n] is not None or n not in ours)]
        ratio = results.ratios(values, first, others, "more")
        records.append(results.record(kind + suffix, shape, "TFLOP/s", values, ratio))
        progress(records[-1])
    return records


def both_directions(race: Race, *args, **more) -> list[dict]:
    return [r for kind in ("fwd", "bwd") for r in dense_race(race, kind, *args, **more)]


def terms_race(race: Race, cases: list[shapes.Case], names: tuple[str, ...]) -> list[dict]:
    """TFLOP/s, and for each contestant the time of a call ÷ that of its plain one."""
    records = both_directions(race, cases, names, ".terms")
    sizes = tuple(shapes.Case(1, 1, 1, 1).shape())
    plain: dict[tuple, dict] = {}
    for r in list(records):
        call = (r["kind"], *(r["shape"][size] for size in sizes))
        if tuple(r["shape"]) == sizes:
            plain[call] = r["values"]
        elif call in plain:
            costs = {n: plain[call][n] / x for n, x in r["values"].items() if x and plain[call][n]}
            records.append(results.record(f"{r['kind']}.cost", r["shape"], "of plain", costs))
    return records


def float32_race(race: Race, cases: list[shapes.Case], names: tuple[str, ...]) -> list[dict]:
    """TFLOP/s with torch's switch for TF32 on, and off."""
    records, switch = [], torch.backends.cuda.matmul
    before = switch.allow_tf32
    try:
        for allowed in (True, False):
            switch.allow_tf32 = allowed
            agree = AGREE_TF32 if allowed else None
            records += both_directions(race, cases, names, ".fp32", agree, tf32=allowed)
    finally:
        switch.allow_tf32 = before
    return records


def deterministic_race(race: Race, cases: list[shapes.Case], names: tuple[str, ...]) -> list[dict]:
    """TFLOP/s of the deterministic backward, and of ours in its normal mode (NAME.normal)."""
    records = []
    for case in cases:
        normal = dataclasses.replace(case, deterministic=False)
        inputs = backends.make_inputs(case, race.dtype, race.device)

        def build(name: str, case=case, normal=normal, inputs=inputs) -> Callable:
            backend, _, mode = name.partition(".")
            return backends.backward(backend, normal if mode else case, inputs)

        contest = (names[0], f"{names[0]}.normal", *names[1:])
        times = race.seconds(contest, f"deterministic {case.shape()}", build)
        flops = case.flops(backward=True)
        values = {n: None if t is None else flops / t / 1e12 for n, t in times.items()}
        ratio = results.ratios(values, contest[0], contest[1:], "more")
        records.append(results.record("bwd.deterministic", case.shape(), "TFLOP/s", values, ratio))
        progress(records[-1])
    return records


def cpu_race(race: Race, cases: list[shapes.Case], names: tuple[str, ...]) -> list[dict]:
    """Time and peak memory of one call, forward and backward."""
    records = []
    for case in cases:
        inputs = backends.make_inputs(case, race.dtype, race.device)
        for kind, make in (("fwd", backends.forward), ("bwd", backends.backward)):
            label = f"cpu.{kind} {case.shape()}"
            times = race.seconds(
                names,
                label,
                lambda name, make=make, case=case, inputs=inputs: make(name, case, inputs),
            )
            flops = case.flops(kind == "bwd")
            values = {n: None if t is None else flops / t / 1e9 for n, t in times.items()}
            ratio = results.ratios(values, names[0], names[1:], "more")
            records.append(results.record(f"cpu.{kind}", case.shape(), "GFLOP/s", values, ratio))
            peaks = {n: _peak_mib(make, n, case, inputs) for n, t in times.items() if t is not None}
            ratio = results.ratios(peaks, names[0], names[1:], "more")
            records.append(results.record(f"cpu.{kind}.memory", case.shape(), "MiB", peaks, ratio))
            progress(records[-2])
    return records


def _peak_mib(
    make: Callable, name: str, case: shapes.Case, inputs: backends.Inputs
) -> float | None:
    fn = make(name, case, inputs)
    peak = peak_memory(fn, inputs.q.device)
    return None if peak is None else peak / 2**20


def run_kind(kind: str, race: Race, names: tuple[str, ...], quick: bool) -> list[dict]:
    def of(make: Callable[[bool], list]) -> list:
        return race.chosen(make(quick))

    if kind in ("decode", "short"):
        cases = of(cache_shapes.decode if kind == "decode" else cache_shapes.short_decode)
        records = caches.decode_race(race, kind, cases, names)
        return records + results.geometric_means(records, by=())
    if kind == "cache":
        records = caches.forms_race(race, kind, of(cache_shapes.cache), names)
        return records + caches.ragged_race(race, quick)
    if kind in ("pages", "short_pages"):
        cases = of(cache_shapes.decode if kind == "pages" else cache_shapes.short_decode)
        records = caches.forms_race(race, kind, cases, names)
        return records + results.geometric_means(records, by=())
    if kind == "wide_decode":
        return caches.forms_race(race, "wide", of(cache_shapes.wide_decode), names)
    if kind == "latent":
        return race_latent.run(race, of(race_latent.cases), names)
    if kind == "prefix":
        return caches.prefix_race(race, of(prefix.cases), names)
    if kind == "chunk":
        return caches.chunk_race(race, of(cache_shapes.chunk), names)
    if kind == "decode_terms":
        return caches.terms_race(race, of(cache_shapes.decode_terms), names)
    if kind == "splits":
        return caches.splits_race(race, of(cache_shapes.splits), names)
    if kind == "masks":
        return race_masks.run(race, quick, names)
    if kind == "aten":
        return race_aten.run(race, quick, names)
    if kind == "packed":
        return race_packed.run(race, of(shapes.packed), names)
    if kind == "few":
        return race_few.run(race, of(cache_shapes.few_queries), names)
    if kind == "mixed":
        return race_mixed.run(race, of(cache_shapes.mixed), names)
    if kind == "ring":
        return race_ring.run(race, of(race_ring.cases), names)
    if kind == "generate":
        return race_generate.run(race, quick, names)
    if kind == "terms":
        return terms_race(race, of(shapes.score_terms), names)
    if kind == "fp32":
        return float32_race(race, of(shapes.float32), names)
    if kind == "wide":
        return both_directions(race, of(shapes.wide), names, ".wide")
    if kind == "naive":
        return dense_race(race, "fwd", of(shapes.gpt2_medium), names, suffix=".naive")
    if kind == "peaked":
        return dense_race(race, "fwd", of(shapes.peaked), names, suffix=".peaked")
    if kind in ("shapes", "bwd_shapes"):
        direction = "fwd" if kind == "shapes" else "bwd"
        return dense_race(race, direction, of(shapes.other_shapes), names, suffix=".feature")
    if kind == "deterministic":
        return deterministic_race(race, of(shapes.deterministic), names)
    if kind == "features":
        return both_directions(race, of(shapes.features), names, ".feature")
    if kind == "cpu":
        return cpu_race(race, of(shapes.cpu), names)
    records = dense_race(race, kind, of(shapes.dense), names)
    return records + results.geometric_means(records, by=("d", "causal"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="fwd,bwd,decode,naive", help=f"of {','.join(KINDS)}")
    parser.add_argument(
        "--backends", help="contestants, ours first (default: chosen for each kind)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="default: bfloat16; naive float16; fp32 and cpu float32; aten has its own",
    )
    parser.add_argument("--only", default="", help="shapes in whose description this is found")
    parser.add_argument("--phases", default="", help="their seconds (default: of timing.py)")
    parser.add_argument(
        "--quick", action="store_true", help="few shapes, short phases: does it run?"
    )
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(
            f"--kinds: expected some of {','.join(KINDS)}, got {','.join(sorted(unknown))}"
        )
    if set(kinds) != {"cpu"} and not torch.cuda.is_available():
        parser.error("these kinds need a CUDA GPU; without one: --kinds cpu")

    usual = {"naive": "float16", "cpu": "float32", "fp32": "float32"}
    recipe = QUICK if args.quick else recipe_of(args.phases)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    records, reasons, wrong = [], {}, []
    for kind in kinds:
        device = torch.device("cpu" if kind == "cpu" else "cuda")
        dtype = getattr(torch, args.dtype or usual.get(kind, "bfloat16"))
        names = tuple(args.backends.split(",")) if args.backends else contestants(kind, device)
        race = Race(Timer(device, recipe), dtype, args.only)
        if not records:
            records.append(results.run_record(device, recipe.describe(device)))
        SHOWN.clear()
        try:
            records += run_kind(kind, race, names, args.quick)
        except KeyboardInterrupt:  # or SIGTERM, of a time limit: what was shown until then
            results.write(args.out, records + SHOWN)
            raise
        reasons |= race.reasons
        wrong += race.wrong
        results.write(args.out, records)
    print(results.show(records))
    for name, reason in reasons.items():
        print(f"cannot: {name}: {reason}")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
