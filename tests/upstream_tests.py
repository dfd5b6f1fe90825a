"""Runs a seeded sample of upstream's own test files, from where you have them, on this library.

    python tests/upstream_tests.py PATH/tests/test_flash_attn.py --processes 14
    python tests/upstream_tests.py PATH/hopper/test_flash_attn.py     # wants flash-attn-3, of fa3/

Nothing of upstream lies in this repository. Every failure is listed with its reason, and, apart
from them, every option that this library refuses by name; then how many of each test there are for
each reason. Exit code: 0 without failures, 1 with some, 2 where nothing was collected.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

LEAST = 16  # cases of each test, or all it has
REFUSED = "NotImplementedError"  # how the library says that it lacks an option
# For want of memory beside other processes: such a case runs once more, alone.
STARVED = re.compile("OutOfMemoryError|CUDA error: out of memory|_ALLOC_FAILED")
WRITING = 1.0  # seconds between two writings of what is known


class Cases:
    """All cases of a parametrised test, numbered as pytest does, without making one of them: the
    files have hundreds of thousands."""

    def __init__(self, test: object) -> None:
        marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
        self.names: list[str] = []
        self.axes: list[list[tuple[tuple, str]]] = []  # values with their id, the outermost first
        for mark in marks:
            given, values = mark.args
            names = [x.strip() for x in given.split(",")] if isinstance(given, str) else [*given]
            rows = [tuple(x) if len(names) > 1 else (x,) for x in values]
            self.names += names
            self.axes.append([(row, self._id(names, row, i)) for i, row in enumerate(rows)])

    @staticmethod
    def _id(names: list[str], row: tuple, index: int) -> str:
        """pytest's: what prints itself, else the argument's name and its place."""
        prints = (str, int, float, bool, type(None))
        return "-".join(
            str(x) if isinstance(x, prints) else f"{name}{index}"
            for name, x in zip(names, row, strict=True)
        )

    def __len__(self) -> int:
        return math.prod(map(len, self.axes))

    def __getitem__(self, number: int) -> tuple[tuple, str]:
        """The arguments, in the order of `names`, and the id."""
        chosen = []
        for axis in reversed(self.axes):
            number, place = divmod(number, len(axis))
            chosen.insert(0, axis[place])
        return sum((row for row, _ in chosen), ()), "-".join(name for _, name in chosen)

    def arguments(self, number: int) -> dict[str, str]:
        """The arguments as one writes them, by name."""
        return dict(zip(self.names, map(str, self[number][0]), strict=True))


class Sample:
    """Keeps `count` of a file's cases, the same ones each time, and notes how they end."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.end = time.monotonic() + given.seconds
        self.written = -math.inf
        self.outcomes: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.wanted = json.loads(given.cases.read_text()) if given.cases else None
        self._drawn: dict[str, dict[str, list[int]]] = {}

    def _draw(self, module: object) -> dict[str, list[int]]:
        """The numbers of the cases to run, by the name of their test: LEAST of each test, as some
        have a thousandth of the others' cases, and the rest from all."""
        rng = random.Random(self.given.seed)
        tests = {
            name: self._kept(Cases(test))
            for name, test in vars(module).items()
            if name.startswith("test") and callable(test) and re.search(self.given.tests, name)
        }
        everything = [(name, i) for name, numbers in tests.items() for i in numbers]
        drawn = dict.fromkeys(
            (name, i)
            for name, numbers in tests.items()
            for i in rng.sample(numbers, min(len(numbers), LEAST))
        )
        drawn |= dict.fromkeys(rng.sample(everything, min(len(everything), self.given.count)))
        chosen = [*drawn][: self.given.count]
        if self.wanted is not None:
            chosen = [case for case in chosen if self._is_wanted(module, *case)]
        rng.shuffle(chosen)  # the parts take as long as each other
        first, step = self.given.part
        kept = chosen[first::step]
        return {name: sorted(i for n, i in kept if n == name) for name in tests}

    def _kept(self, cases: Cases) -> Sequence[int]:
        """The numbers of the cases to draw from."""
        if not self.given.without:
            return range(len(cases))
        left_out = set(self.given.without)
        return [i for i in range(len(cases)) if left_out.isdisjoint(cases.arguments(i).items())]

    def _is_wanted(self, module: object, name: str, number: int) -> bool:
        case = Cases(getattr(module, name))[number][1]
        file = os.path.basename(module.__file__)
        return (f"{file}::{name}[{case}]" if case else f"{file}::{name}") in self.wanted

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        module = metafunc.module
        drawn = self._drawn.setdefault(module.__file__, {}) or self._draw(module)
        self._drawn[module.__file__] = drawn
        numbers = drawn.get(metafunc.function.__name__, [])
        cases, definition = Cases(metafunc.function), metafunc.definition
        definition.own_markers = [x for x in definition.own_markers if x.name != "parametrize"]
        if cases.names:
            chosen = [cases[i] for i in numbers]
            ids = [name for _, name in chosen]
            metafunc.parametrize(cases.names, [row for row, _ in chosen], ids=ids)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Tests without parameters are one case; without any of the chosen ones, pytest makes one
        that skips itself."""
        kept = [item for item in items if self._is_drawn(item)]
        config.hook.pytest_deselected(items=[x for x in items if x not in kept])
        items[:] = kept

    def _is_drawn(self, item: pytest.Item) -> bool:
        return bool(self._drawn[item.module.__file__].get(item.function.__name__))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["not collected"] += 1
            self.reasons[report.nodeid] = report.longreprtext.strip()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.monotonic() < self.end:
            return None
        self.outcomes["not reached"] += 1
        return True  # as if it had been run

    def pytest_runtest_teardown(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # for the other processes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = report.outcome
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else report.longreprtext).strip()
            outcome = "refused" if message.startswith(REFUSED) else outcome
            outcome = "starved" if STARVED.search(message.splitlines()[0]) else outcome
            line = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", None)
            place = f"line {line[0].reprfileloc.lineno}: " if line and line[0].reprfileloc else ""
            self.reasons[report.nodeid] = f"{outcome}: {place}{message.splitlines()[0][:200]}"
        self.outcomes[outcome] += 1
        if time.monotonic() > self.written + WRITING:
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        """What is known so far: a crash or a time limit leaves it behind, whole."""
        if self.given.out:
            found = dict(outcomes=self.outcomes, reasons=self.reasons)
            half = self.given.out.with_name(f"{self.given.out.name}.half")
            half.write_text(json.dumps(found, indent=1))
            half.replace(self.given.out)
            self.written = time.monotonic()


def by_reason(reasons: dict[str, str]) -> Counter[tuple[str, str]]:
    """How many cases of each test ended for each reason, whatever fractions it names."""
    return Counter(
        (
            case.partition("[")[0].rpartition("::")[2],
            re.sub(r"\d+\.\d+(e[-+]?\d+)?|\d+e[-+]?\d+", "#", reason),
        )
        for case, reason in reasons.items()
    )


def run(given: argparse.Namespace) -> tuple[int, Sample]:
    """This process's part of the sample."""
    sample = Sample(given)
    files = [str(file.resolve()) for file in given.files]
    options = ["-c", os.devnull, "--rootdir", os.path.dirname(files[0]), "--no-header", "-q"]
    options += ["-p", "no:cacheprovider", "--tb", "short", "--no-summary", "-W", "ignore"]
    return int(pytest.main([*options, *files], plugins=[sample])), sample


def start(given: argparse.Namespace, arguments: list[str], folder: Path, parts: int, gpus: int):
    """Runs this script `parts` times; returns their exit codes and what they found."""
    running = []
    for i in range(parts):
        out, log = folder / f"{i}.json", (folder / f"{i}.log").open("w+")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(i % gpus)}
        part = ("--processes", "1", "--part", f"{i}/{parts}", "--out", str(out))
        command = [sys.executable, __file__, *arguments, *part]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        running.append((process, out, log))
    codes, found = [], []
    for process, out, log in running:
        codes.append(process.wait())
        found.append(json.loads(out.read_text()) if out.exists() else {})
        if codes[-1] not in (0, 1, 2):
            log.seek(0)
            print(log.read()[-4000:])
        log.close()
    return codes, found


def run_processes(given: argparse.Namespace, arguments: list[str]) -> tuple[int, Sample]:
    """The sample in parts, a process each, which share the GPUs."""
    whole, gpus = Sample(given), max(torch.cuda.device_count(), 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes, found = start(given, arguments, folder, given.processes, gpus)
        starved = [
            case
            for part in found
            for case, reason in part.get("reasons", {}).items()
            if reason.startswith("starved")
        ]
        if starved:
            cases = folder / "cases.json"
            cases.write_text(json.dumps(starved))
            rest = ("--cases", str(cases), "--seconds", str(whole.end - time.monotonic()))
            more, again = start(given, [*arguments, *rest], folder, 1, gpus)
            codes, found = codes + more, found + again
        for part in found:
            whole.outcomes.update(part.get("outcomes", {}))
            whole.reasons.update(part.get("reasons", {}))
        for case in starved:  # counted once more in the second run
            whole.outcomes["starved"] -= 1
            if found[-1].get("reasons", {}).get(case) is None:
                whole.reasons.pop(case)
    whole.outcomes["processes lost"] += sum(code not in (0, 1, 2) for code in codes)
    nothing = all(code == 2 for code in codes)
    return 2 if nothing else int(any(code not in (0, 2) for code in codes)), whole


def part(text: str) -> tuple[int, int]:
    first, step = map(int, text.split("/"))
    return first, step


def argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="upstream's test files")
    parser.add_argument("--count", type=int, default=6000, help="cases of each (default: 6000)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    parser.add_argument(
        "--tests", default="", metavar="REGEX", help="only tests whose names match this"
    )
    parser.add_argument(
        "--without",
        type=argument,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="draw no case with this argument, as one writes it; may be given more than once",
    )
    parser.add_argument("--processes", type=int, default=1, help="that share the sample and GPUs")
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N", help="one of them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after them")
    parser.add_argument("--cases", type=Path, metavar="FILE.json", help="only these of the sample")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="how each case ended")
    given = parser.parse_args(arguments)
    for file in given.files:
        if not file.is_file():
            parser.error(f"expected a test file of upstream's, got {str(file)!r}")
    code, sample = run_processes(given, arguments) if given.processes > 1 else run(given)
    for name, reason in sorted(sample.reasons.items()):
        print(f"{name}\n    {reason}")
    for (test, reason), count in by_reason(sample.reasons).most_common():
        print(f"{count} of {test}: {reason}")
    counts = {x: sample.outcomes[x] for x in ("passed", "failed", "skipped")} | +sample.outcomes
    sample.write()
    print(f"seed {given.seed}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    if code not in (0, 1):
        return 2
    return int(any(counts.get(x) for x in ("failed", "starved", "processes lost")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
