"""Builds of this library in turns: is the one after a change faster?

    python -m benchmarks.duel BEFORE AFTER... [--kinds fwd,bwd,shapes,bwd_shapes,bwd_narrow,
    bwd_few_tiles,bwd_short,features,bwd_features,decode,short,decode_terms,varlen_pages,masks,
    bwd_masks,mixed,peaked,cpu]
    [--only PATTERN] [--backend sm80] [--rounds 2] [--quick]
    [--phases PRODUCT,SETTLE,TIMED] [--out FILE.json]

BEFORE and each AFTER are checkouts with a built package. Each has a process of its own, which takes
its flash_attn from there and everything else from here, so that all run the same shapes and phases.
BEFORE takes part twice, as "again": how far it is from itself says what a difference is worth. One
AFTER is called "after", several are called by their folders. They take turns, shape by shape; a
figure is the least time of all rounds. Their outputs are compared by their norms.
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import flash_attn
from benchmarks import (
    backends,
    cache_calls,
    cache_shapes,
    race_caches,
    race_masks,
    race_mixed,
    results,
    shapes,
)
from benchmarks.contest import AGREE, Race, matches, progress
from benchmarks.timing import QUICK, Recipe, Timer, recipe_of


@dataclass(frozen=True)
class TermCase:
    """Decode with one of cache_calls.DECODE_TERMS."""

    call: cache_shapes.DecodeCase
    term: str

    def shape(self) -> dict:
        return self.call.shape() | {"term": self.term}


def decode_terms(quick: bool) -> list[TermCase]:
    return [
        TermCase(x, term)
        for x in cache_shapes.decode_terms(quick)
        for term in cache_calls.DECODE_TERMS
    ]


KINDS = {
    "fwd": shapes.dense,
    "bwd": shapes.dense,
    "shapes": shapes.other_shapes,
    "bwd_shapes": shapes.other_shapes,
    "bwd_narrow": shapes.narrow_heads,
    "bwd_few_tiles": shapes.few_tiles,
    "bwd_short": shapes.short_sequences,
    "features": shapes.features,
    "bwd_features": shapes.features,
    "decode": cache_shapes.decode,
    "short": cache_shapes.short_decode,
    "decode_terms": decode_terms,
    "varlen_pages": cache_shapes.varlen_pages,
    "masks": race_masks.cases,
    "bwd_masks": race_masks.cases,
    "mixed": cache_shapes.mixed,
    "peaked": shapes.peaked,
    "cpu": shapes.cpu,
}
# The package first from the build that takes part, then the benchmarks from this checkout.
WORKER = (
    "import sys; there, here, *rest = sys.argv[1:]; sys.path[0] = there; import flash_attn; "
    "sys.path[0] = here; from benchmarks.duel import serve; serve(*rest)"
)


def make_call(kind: str, case, race: Race) -> tuple[Callable, int]:
    """What is timed, and how many calls of the library it makes."""
    torch.manual_seed(0)  # the same numbers for each build
    if kind == "varlen_pages":
        return cache_calls.varlen_pages(case, race.device, race.dtype), 1
    if kind in ("masks", "bwd_masks"):
        make = race_masks.forward if kind == "masks" else race_masks.backward
        return make(case.kept, case, race_masks.Inputs(case, race)), 1
    if kind == "mixed":
        calls = [race_mixed.Call(case, race.dtype, race.device).ours] * 5
        return race_caches.graph_of(calls), len(calls)
    if kind == "decode_terms":
        q, caches, rounds = race_caches.caches_and_rounds(race, case.call)
        calls = [cache_calls.decode_term(case.term, case.call, q, x) for x in caches] * rounds
        return race_caches.graph_of(calls), len(calls)
    if kind in ("decode", "short"):
        q, caches, rounds = race_caches.caches_and_rounds(race, case)
        calls = [cache_calls.decode("cuda", case, q, cache) for cache in caches] * rounds
        return race_caches.graph_of(calls), len(calls)
    inputs = backends.make_inputs(case, race.dtype, race.device)
    make = backends.backward if kind.startswith("bwd") else backends.forward
    return make("ours", case, inputs), 1


def serve(device: str, quick: str, phases: str, backend: str) -> None:
    """A contestant: reads {kind, number} a line, writes {seconds, norms} or {reason}."""
    recipe = QUICK if quick == "quick" else recipe_of(phases)
    with flash_attn.use_backend(backend) if backend else contextlib.nullcontext():
        answer_questions(device, quick, recipe)


def answer_questions(device: str, quick: str, recipe: Recipe) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    race = Race(Timer(torch.device(device), recipe), dtype)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        case = KINDS[asked["kind"]](quick == "quick")[asked["number"]]
        try:
            call, calls = make_call(asked["kind"], case, race)
            result = call()
            tensors = result if isinstance(result, tuple | list) else (result,)
            norms = [x.double().norm().item() for x in tensors]
            answer = {"seconds": race.timer(call) / calls, "norms": norms}
        except (RuntimeError, NotImplementedError, ValueError) as error:
            answer = {"reason": str(error).strip().splitlines()[0]}
        call = result = tensors = None
        print(json.dumps(answer), file=answers, flush=True)


class Contestant:
    """The process of one build."""

    def __init__(self, checkout: Path, args: argparse.Namespace, device: str) -> None:
        command = (sys.executable, "-c", WORKER, str(checkout), str(results.ROOT))
        self.process = subprocess.Popen(
            [*command, device, "quick" if args.quick else "whole", args.phases, args.backend],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, kind: str, number: int) -> dict:
        question = json.dumps({"kind": kind, "number": number})
        with contextlib.suppress(BrokenPipeError):
            print(question, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"flash_attn: a contestant ended with {self.process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def duel(
    contestants: dict[str, Contestant], kind: str, number: int, case, rounds: int, limit: float
) -> tuple[dict | None, str]:
    """The record of one shape, or why there is none."""
    times = dict.fromkeys(contestants, math.inf)
    norms: dict[str, list[float]] = {}
    for turn in range(rounds):
        names = list(contestants) if turn % 2 == 0 else list(contestants)[::-1]
        for name in names:
            answer = contestants[name].ask(kind, number)
            if "reason" in answer:
                return None, f"{kind} {case.shape()} {name}: {answer['reason']}"
            times[name] = min(times[name], answer["seconds"])
            norms[name] = answer["norms"]
    for name, values in norms.items():
        for index, (x, y) in enumerate(zip(values, norms["before"], strict=True)):
            if not abs(x - y) <= limit * abs(y):
                return None, f"{kind} {case.shape()}: output {index} of {name}: norm {x}, not {y}"
    micros = {name: t * 1e6 for name, t in times.items()}
    ratio = {f"before/{name}": times["before"] / times[name] for name in times if name != "before"}
    return results.record(f"duel.{kind}", case.shape(), "us", micros, ratio), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="+")
    parser.add_argument("--kinds", default="fwd,bwd,decode", help=f"of {','.join(KINDS)}")
    parser.add_argument("--only", default="", help="shapes in whose description this is found")
    parser.add_argument("--backend", default="", help="of ours; else the one it chooses")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few shapes, short phases")
    parser.add_argument("--phases", default="", help="their seconds (default: of timing.py)")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: expected some of {','.join(KINDS)}, got {','.join(unknown)}")
    device = "cpu" if kinds == ["cpu"] else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("these kinds need a CUDA GPU; without one: --kinds cpu")

    names = [checkout.resolve().name for checkout in args.after]
    if len(names) > 1 and len({"before", "again", *names}) < len(names) + 2:
        parser.error(f"AFTER: expected folders of different names, got {', '.join(names)}")
    checkouts = {"before": args.before, "again": args.before}
    called = ["after"] if len(names) == 1 else names
    checkouts |= dict(zip(called, args.after, strict=True))
    contestants = {
        name: Contestant(checkout.resolve(), args, device) for name, checkout in checkouts.items()
    }
    recipe = QUICK if args.quick else recipe_of(args.phases)
    method = f"{recipe.describe(torch.device(device))}, in turns, the least of {args.rounds} rounds"
    records = [results.run_record(torch.device(device), method)]
    reasons = []
    limit = AGREE[torch.float32 if device == "cpu" else torch.bfloat16]
    for kind in kinds:
        for number, case in enumerate(KINDS[kind](args.quick)):
            if not matches(args.only, case.shape()):
                continue
            found, reason = duel(contestants, kind, number, case, args.rounds, limit)
            if found is None:
                reasons.append(reason)
                continue
            records.append(found)
            progress(found)
        records += results.geometric_means(
            [r for r in records if r["kind"] == f"duel.{kind}"], by=()
        )
        results.write(args.out, records)
    for contestant in contestants.values():
        contestant.end()
    print(results.show(records))
    print(*reasons, sep="\n")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
