"""The races: ours by backend against torch's backends, FlexAttention, FlashAttention-4, FlashInfer.

    python -m benchmarks.race [--kinds fwd,shapes,bwd,bwd_shapes,deterministic,decode,cache,
    pages,prefix,short,short_pages,chunk,splits,naive,features,cpu] [--backends sm80,fa2,cudnn]
    [--out FILE.json]

Forward and backward in TFLOP/s of the work that the mask leaves (4·b·h·s²·d forward, 2.5 times that
backward), decode in TB/s of K and V read. Each contestant's output is compared with the others'
before it is timed. shapes and bwd_shapes: GQA, other head dims, a window, documents; deterministic:
the backward in that mode beside our own without it. The kinds cache and splits race our decode with
itself: over the forms that a cache can have, and cut into pieces against not. pages: pages of 16
against dense, and against FlashInfer where it is installed. prefix: sequences that share leading
pages, against FlashInfer's cascade there. short, short_pages: decode against up to 4k keys, the
second on pages and in 8 bits, against FlashInfer's XQA kernel there. chunk: many new tokens against
a cache, dense and in pages, on the prefill kernels and on decode's.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterable

import torch

from benchmarks import backends, prefix, results, shapes
from benchmarks.timing import QUICK, Recipe, Timer
from flash_attn.cli.measure import peak_memory

KINDS = (
    *("fwd", "shapes", "bwd", "bwd_shapes", "deterministic", "decode", "cache", "pages"),
    *("prefix", "short", "short_pages", "chunk", "splits", "naive", "features", "cpu"),
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
    "short_pages": backends.FLASHINFER,
    "chunk": ("fa2", "cudnn"),
    "splits": (),
    "naive": ("naive",),
    "features": ("fa2", "cudnn", "efficient", "fa4", "flex"),
    "cpu": ("flash",),
}


def contestants(kind: str, device: torch.device) -> tuple[str, ...]:
    """Ours, the fastest on this device first, then the peers that are installed."""
    ours = {
        "decode": ("cuda",),
        "cache": backends.CACHE_FORMS,
        "pages": ("paged16", "plain"),
        "prefix": ("shared", "plain"),
        "short": ("cuda",),
        "short_pages": ("paged16", "plain", "paged64_e4m3", "e4m3"),
        "splits": ("automatic", "unsplit"),
        "cpu": ("aten",),
    }.get(kind, ("sm80",))
    on_hopper = kind in (
        *("fwd", "bwd", "shapes", "bwd_shapes", "deterministic", "naive", "features", "chunk"),
    )
    if on_hopper and torch.cuda.get_device_capability(device) == (9, 0):
        ours = ("sm90", *ours)
    if kind == "chunk":
        ours = (ours[0], "cuda", f"{ours[0]}.paged16", "cuda.paged16")
    flashinfer = (*backends.FLASHINFER, *PEERS["prefix"])
    modules = {"fa4": "flash_attn.cute"} | dict.fromkeys(flashinfer, "flashinfer")
    return *ours, *(
        name
        for name in PEERS[kind]
        if name not in modules or importlib.util.find_spec(modules[name]) is not None
    )


# Contestants' outputs differ by the rounding of P, dS and the result to 16 bits; more is a wrong
# result.
AGREE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
AGREE_8_BITS = 0.1  # K and V in e4m3, of few keys: 5e-2, and with queries in e4m3 as well, more


class Race:
    """Times the contestants of one case after another, and keeps what could not run."""

    def __init__(self, timer: Timer, dtype: torch.dtype):
        self.timer, self.dtype, self.device = timer, dtype, timer.device
        self.reasons: dict[str, str] = {}
        self.wrong: list[str] = []

    def seconds(
        self,
        names: Iterable[str],
        label: str,
        build: Callable,
        compare: bool = True,
        agree: dict[str, float] | None = None,
    ) -> dict[str, float | None]:
        """Seconds a call of build(name)() for each name; None where a contestant cannot. agree: how
        far the output of a name may be from the first one's, where AGREE does not say."""
        times, reference = {}, None
        for name in names:
            times[name] = None
            try:
                fn = build(name)
                result = fn()
                if compare:
                    limit = (agree or {}).get(name, AGREE[self.dtype])
                    reference = self._compare(name, label, result, reference, limit)
                times[name] = self.timer(fn)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                self.reasons.setdefault(f"{label} {name}", str(error).strip().splitlines()[0])
            fn = result = None
            gc.collect()
        return times

    def _compare(self, name: str, label: str, result, reference, limit: float):
        tensors = result if isinstance(result, tuple | list) else (result,)
        if reference is None:
            return name, [x.detach().clone() for x in tensors]
        first, expected = reference
        for index, (x, y) in enumerate(zip(tensors, expected, strict=True)):
            error = ((x.double() - y.double()).norm() / y.double().norm()).item()
            if not error <= limit:
                self.wrong.append(
                    f"{label}: output {index} of {name} differs from {first} by {error:.2e}"
                )
        return reference


def dense_race(
    race: Race, kind: str, cases: list[shapes.Case], names: tuple[str, ...], suffix: str = ""
) -> list[dict]:
    """TFLOP/s of the forward (kind fwd) or the backward (kind bwd)."""
    backward = kind == "bwd"
    make = backends.backward if backward else backends.forward
    records = []
    for case in cases:
        inputs = backends.make_inputs(case, race.dtype, race.device)
        label = f"{kind}{suffix} {case.shape()}"
        times = race.seconds(
            names,
            label,
            lambda name, case=case, inputs=inputs: make(name, case, inputs),
            compare=not case.dropout,
        )
        flops = case.flops(backward)
        values = {n: None if t is None else flops / t / 1e12 for n, t in times.items()}
        # sm90 does not serve every feature: then the next of ours is compared.
        ours = [n for n in names if n not in backends.PEERS]
        first = next((n for n in ours if values[n] is not None), names[0])
        others = [n for n in names if n != first and (values[n] is not None or n not in ours)]
        ratio = results.ratios(values, first, others, "more")
        records.append(results.record(kind + suffix, case.shape(), "TFLOP/s", values, ratio))
        progress(records[-1])
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


def caches_and_rounds(
    race: Race, case: shapes.DecodeCase, itemsize: int = 2
) -> tuple[torch.Tensor, list, int]:
    """q, caches of more than twice the L2 at this many bytes a number, to take turns in one CUDA
    graph so that K and V come from memory, and how often: a short graph would time its launch."""
    l2 = torch.cuda.get_device_properties(race.device).L2_cache_size
    count = max(2, -(-5 * l2 // (2 * case.cache_bytes(itemsize))))
    q, caches = backends.make_caches(case, count, race.device, race.dtype)
    return q, caches, max(1, 48 // count)


def microseconds(times: dict[str, float | None], calls: int) -> dict[str, float | None]:
    return {n: None if t is None else t / calls * 1e6 for n, t in times.items()}


def decode_race(
    race: Race, kind: str, cases: list[shapes.DecodeCase], names: tuple[str, ...]
) -> list[dict]:
    """TB/s and time of the cases (kind decode), or of short ones (kind short)."""
    suffix = "" if kind == "decode" else f".{kind}"
    records = []
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case)

        def build(name: str, case=case, q=q, caches=caches, rounds=rounds) -> Callable:
            calls = [backends.decode(name, case, q, cache) for cache in caches] * rounds
            return graph_of(calls)

        times = race.seconds(names, f"{kind} {case.shape()}", build)
        micros = microseconds(times, len(caches) * rounds)
        rates = {n: None if t is None else case.cache_bytes() / t / 1e6 for n, t in micros.items()}
        ratio = results.ratios(rates, names[0], names[1:], "more")
        records.append(results.record("decode" + suffix, case.shape(), "TB/s", rates, ratio))
        records.append(results.record(f"decode{suffix}.time", case.shape(), "us", micros))
        progress(records[-2])
        del q, caches, build
    return records


def forms_race(
    race: Race, kind: str, cases: list[shapes.DecodeCase], names: tuple[str, ...]
) -> list[dict]:
    """The same numbers in caches of these forms."""
    records = []
    agree = {n: AGREE_8_BITS for n in names if kind == "short_pages" and n.endswith("e4m3")}
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case, itemsize=1)

        def build(name: str, case=case, q=q, caches=caches, rounds=rounds) -> Callable:
            return graph_of(backends.decode_form(name, case, q, caches) * rounds)

        times = race.seconds(names, f"{kind} {case.shape()}", build, agree=agree)
        micros = microseconds(times, len(caches) * rounds)
        ratio = results.ratios(micros, names[0], names[1:], "less")
        records.append(results.record(f"decode.{kind}", case.shape(), "us", micros, ratio))
        progress(records[-1])
        del q, caches, build
    return records


def prefix_race(race: Race, cases: list[prefix.PrefixCase], names: tuple[str, ...]) -> list[dict]:
    """Time of a step of sequences that share pages."""
    records = []
    for case in cases:
        inputs = prefix.Inputs.make(case, race.device, race.dtype)
        rounds = max(1, 16 // len(inputs.caches))

        def build(name: str, case=case, inputs=inputs, rounds=rounds) -> Callable:
            return graph_of(prefix.calls(name, case, inputs) * rounds)

        times = race.seconds(names, f"prefix {case.shape()}", build)
        micros = microseconds(times, len(inputs.caches) * rounds)
        ratio = results.ratios(micros, names[0], names[1:], "less")
        records.append(results.record("decode.prefix", case.shape(), "us", micros, ratio))
        progress(records[-1])
        del inputs, build
    return records + results.geometric_means(records, by=())


def ragged_race(race: Race, quick: bool) -> list[dict]:
    """Lengths that differ within the batch."""
    records = []
    modes = {"balanced": {}, "batch_invariant": {"batch_invariant": True}}
    for name, lengths in shapes.ragged(quick).items():
        call = backends.decode_pages(lengths, race.device, race.dtype)

        def build_mode(mode: str, call=call) -> Callable:
            return graph_of([functools.partial(call, **modes[mode])] * 4)

        times = race.seconds(modes, f"ragged {name}", build_mode)
        tokens_bytes = sum(lengths) * 2 * 8 * 128 * 2
        rates = {n: None if t is None else tokens_bytes * 4 / t / 1e12 for n, t in times.items()}
        shape = {"lengths": name, "batch": len(lengths), "tokens": sum(lengths)}
        ratio = results.ratios(rates, "batch_invariant", ["balanced"], "more")
        records.append(results.record("decode.ragged", shape, "TB/s", rates, ratio))
        progress(records[-1])
        del call, build_mode
    return records


def chunk_race(race: Race, cases: list[shapes.DecodeCase], names: tuple[str, ...]) -> list[dict]:
    records = []
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case)

        def build(name: str, case=case, q=q, caches=caches, rounds=rounds) -> Callable:
            return graph_of(backends.chunk(name, case, q, caches) * rounds)

        times = race.seconds(names, f"chunk {case.shape()}", build)
        micros = microseconds(times, len(caches) * rounds)
        rates = {n: None if t is None else case.flops() / t / 1e6 for n, t in micros.items()}
        ratio = results.ratios(rates, names[0], names[1:], "more")
        records.append(results.record("decode.chunk", case.shape(), "TFLOP/s", rates, ratio))
        records.append(results.record("decode.chunk.time", case.shape(), "us", micros))
        progress(records[-1])
        del q, caches, build
    return records


def splits_race(race: Race, cases: list[shapes.DecodeCase], names: tuple[str, ...]) -> list[dict]:
    """num_splits=1 against what is chosen, and the part of a call after its last key was read."""
    records = []
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case)

        def calls(name: str, case=case, q=q, caches=caches) -> list[Callable]:
            num_splits = {"automatic": 0, "unsplit": 1}[name]
            return [backends.decode("cuda", case, q, cache, num_splits) for cache in caches]

        times = race.seconds(
            names,
            f"splits {case.shape()}",
            lambda name, calls=calls, rounds=rounds: graph_of(calls(name) * rounds),
        )
        micros = microseconds(times, len(caches) * rounds)
        ratio = results.ratios(micros, names[0], names[1:], "less")
        records.append(results.record("decode.splits", case.shape(), "us", micros, ratio))
        progress(records[-1])
        share = combine_share(calls(names[0]))
        records.append(results.record("decode.combine", case.shape(), "share", {names[0]: share}))
        del q, caches, calls
    return records


def combine_share(calls: list[Callable]) -> float:
    """Of the time from the first kernel's start to the last one's end, what comes after the kernel
    that reads K and V; 0 where it is the only one. From the profiler's time stamps."""
    rounds = max(1, 16 // len(calls))
    for call in calls:
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls * rounds:
            call()
            torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, "combine" in event.name)
        for event in profile.events()
        if "flash_attn" in event.name and "kernel" in event.name
    )
    shares, start, read = [], 0.0, 0.0
    for begin, end, combines in spans:
        if combines:
            shares[-1] = (end - read) / (end - start)
        else:
            start, read = begin, end
            shares.append(0.0)
    return statistics.median(shares)


def graph_of(calls: list[Callable[[], torch.Tensor]]) -> Callable[[], torch.Tensor]:
    """A closure that replays all calls as one CUDA graph and returns the first call's output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]

    def replay() -> torch.Tensor:
        graph.replay()
        return outputs[0]

    # The graph reads what the calls own (their cache_seqlens): once freed, other data would stand
    # there, be taken for lengths, and the replays would read next to nothing.
    replay.calls = calls
    return replay


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


def progress(record: dict) -> None:
    """One line a case on stderr, so that a long race shows where it is."""
    values = "  ".join(f"{n} {v:.4g}" if v else f"{n} -" for n, v in record["values"].items())
    print(
        f"{record['kind']} {record['shape']}: {values} {record['unit']}",
        file=sys.stderr,
        flush=True,
    )


def run_kind(kind: str, race: Race, names: tuple[str, ...], quick: bool) -> list[dict]:
    if kind in ("decode", "short"):
        cases = shapes.decode(quick) if kind == "decode" else shapes.short_decode(quick)
        records = decode_race(race, kind, cases, names)
        return records + results.geometric_means(records, by=())
    if kind == "cache":
        return forms_race(race, kind, shapes.cache(quick), names) + ragged_race(race, quick)
    if kind in ("pages", "short_pages"):
        cases = shapes.decode(quick) if kind == "pages" else shapes.short_decode(quick)
        records = forms_race(race, kind, cases, names)
        return records + results.geometric_means(records, by=())
    if kind == "prefix":
        return prefix_race(race, prefix.cases(quick), names)
    if kind == "chunk":
        return chunk_race(race, shapes.chunk(quick), names)
    if kind == "splits":
        return splits_race(race, shapes.splits(quick), names)
    if kind == "naive":
        return dense_race(race, "fwd", shapes.gpt2_medium(quick), names, suffix=".naive")
    if kind == "shapes":
        return dense_race(race, "fwd", shapes.other_shapes(quick), names, suffix=".feature")
    if kind == "bwd_shapes":
        return dense_race(race, "bwd", shapes.other_shapes(quick), names, suffix=".feature")
    if kind == "deterministic":
        return deterministic_race(race, shapes.deterministic(quick), names)
    if kind == "features":
        cases = shapes.features(quick)
        return [r for k in ("fwd", "bwd") for r in dense_race(race, k, cases, names, ".feature")]
    if kind == "cpu":
        return cpu_race(race, shapes.cpu(quick), names)
    records = dense_race(race, kind, shapes.dense(quick), names)
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
        help="default: bfloat16; naive float16; cpu float32",
    )
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

    recipe = QUICK if args.quick else Recipe()
    records, reasons, wrong = [], {}, []
    for kind in kinds:
        device = torch.device("cpu" if kind == "cpu" else "cuda")
        dtype = getattr(
            torch, args.dtype or {"naive": "float16", "cpu": "float32"}.get(kind, "bfloat16")
        )
        names = tuple(args.backends.split(",")) if args.backends else contestants(kind, device)
        race = Race(Timer(device, recipe), dtype)
        if not records:
            records.append(results.run_record(device, recipe.describe(device)))
        records += run_kind(kind, race, names, args.quick)
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
