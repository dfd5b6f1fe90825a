"""The races of calls that read a cache: several caches take turns in one CUDA graph, so that K and
V come from memory."""

import functools
import statistics
from collections.abc import Callable

import torch

from benchmarks import cache_calls, cache_shapes, prefix, results
from benchmarks.contest import AGREE_8_BITS, Race, progress


def caches_and_rounds(
    race: Race, case: cache_shapes.DecodeCase, itemsize: int = 2
) -> tuple[torch.Tensor, list, int]:
    """q, caches of more than twice the L2 at this many bytes a number, to take turns in one CUDA
    graph so that K and V come from memory, and how often: a short graph would time its launch."""
    l2 = torch.cuda.get_device_properties(race.device).L2_cache_size
    count = max(2, -(-5 * l2 // (2 * case.cache_bytes(itemsize))))
    q, caches = cache_calls.make_caches(case, count, race.device, race.dtype)
    return q, caches, max(1, 48 // count)


def microseconds(times: dict[str, float | None], calls: int) -> dict[str, float | None]:
    return {n: None if t is None else t / calls * 1e6 for n, t in times.items()}


def decode_race(
    race: Race, kind: str, cases: list[cache_shapes.DecodeCase], names: tuple[str, ...]
) -> list[dict]:
    """TB/s and time of the cases (kind decode), or of short ones (kind short)."""
    suffix = "" if kind == "decode" else f".{kind}"
    records = []
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case)

        def build(name: str, case=case, q=q, caches=caches, rounds=rounds) -> Callable:
            calls = [cache_calls.decode(name, case, q, cache) for cache in caches] * rounds
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
    race: Race, kind: str, cases: list[cache_shapes.DecodeCase], names: tuple[str, ...]
) -> list[dict]:
    """The same numbers in caches of these forms."""
    records = []
    agree = {n: AGREE_8_BITS for n in names if kind == "short_pages" and n.endswith("e4m3")}
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case, itemsize=1)

        def build(name: str, case=case, q=q, caches=caches, rounds=rounds) -> Callable:
            return graph_of(cache_calls.decode_form(name, case, q, caches) * rounds)

        times = race.seconds(names, f"{kind} {case.shape()}", build, agree=agree)
        micros = microseconds(times, len(caches) * rounds)
        ratio = results.ratios(micros, names[0], names[1:], "less")
        records.append(results.record(f"decode.{kind}", case.shape(), "us", micros, ratio))
        progress(records[-1])
        del q, caches, build
    return records


def terms_race(
    race: Race, cases: list[cache_shapes.DecodeCase], names: tuple[str, ...]
) -> list[dict]:
    """What a score term costs."""
    records = []
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case)

        def build(name: str, case=case, q=q, caches=caches, rounds=rounds) -> Callable:
            return graph_of([cache_calls.decode_term(name, case, q, x) for x in caches] * rounds)

        times = race.seconds(names, f"decode_terms {case.shape()}", build, compare=False)
        micros = microseconds(times, len(caches) * rounds)
        ratio = results.ratios(micros, names[0], names[1:], "less")
        records.append(results.record("decode.terms", case.shape(), "us", micros, ratio))
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
    for name, lengths in cache_shapes.ragged(quick).items():
        call = cache_calls.decode_pages(lengths, race.device, race.dtype)

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


def chunk_race(
    race: Race, cases: list[cache_shapes.DecodeCase], names: tuple[str, ...]
) -> list[dict]:
    records = []
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case)

        def build(name: str, case=case, q=q, caches=caches, rounds=rounds) -> Callable:
            return graph_of(cache_calls.chunk(name, case, q, caches) * rounds)

        times = race.seconds(names, f"chunk {case.shape()}", build)
        micros = microseconds(times, len(caches) * rounds)
        rates = {n: None if t is None else case.flops() / t / 1e6 for n, t in micros.items()}
        ratio = results.ratios(rates, names[0], names[1:], "more")
        records.append(results.record("decode.chunk", case.shape(), "TFLOP/s", rates, ratio))
        records.append(results.record("decode.chunk.time", case.shape(), "us", micros))
        progress(records[-1])
        del q, caches, build
    return records


def splits_race(
    race: Race, cases: list[cache_shapes.DecodeCase], names: tuple[str, ...]
) -> list[dict]:
    """num_splits=1 against what is chosen, and the part of a call after its last key was read."""
    records = []
    for case in cases:
        q, caches, rounds = caches_and_rounds(race, case)

        def calls(name: str, case=case, q=q, caches=caches) -> list[Callable]:
            num_splits = {"automatic": 0, "unsplit": 1}[name]
            return [cache_calls.decode("cuda", case, q, cache, num_splits) for cache in caches]

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
