"""Runs a seeded sample of upstream's own test files, from where you have them, on this library.

    python tests/upstream_tests.py PATH/test_flash_attn.py --count 6000 --seed 1

Nothing of upstream lies in this repository. Every failure is listed with its reason. Exit code: 0
without failures, 1 with some, 2 where nothing was collected.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest


class Sample:
    """Keeps `count` of the collected cases, the same ones each time, and notes how they end."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self.outcomes: Counter[str] = Counter()
        self.failures: dict[str, str] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept = random.Random(self.seed).sample(range(len(items)), min(self.count, len(items)))
        chosen = set(kept)
        config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i not in chosen])
        items[:] = [items[i] for i in sorted(chosen)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else report.longreprtext
            self.failures[report.nodeid] = reason.strip().partition("\n")[0][:200]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="upstream's test files")
    parser.add_argument("--count", type=int, default=6000, help="cases to run (default: 6000)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    given = parser.parse_args(arguments)
    for file in given.files:
        if not file.is_file():
            parser.error(f"expected a test file of upstream's, got {str(file)!r}")
    sample = Sample(given.count, given.seed)
    files = [str(file.resolve()) for file in given.files]
    options = ["-c", os.devnull, "--rootdir", os.path.dirname(files[0]), "--no-header", "-q"]
    options += ["-p", "no:cacheprovider", "--tb", "short", "--no-summary", "-W", "ignore"]
    code = pytest.main([*options, *files], plugins=[sample])
    for name, reason in sorted(sample.failures.items()):
        print(f"{name}\n    {reason}")
    passed, failed, skipped = (sample.outcomes[x] for x in ("passed", "failed", "skipped"))
    print(f"seed {given.seed}: {passed} passed, {failed} failed, {skipped} skipped")
    return int(code) if code in (0, 1) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
