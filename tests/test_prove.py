"""The script benchmarks/prove, as far as it can be wrong without a GPU, and how tests are dealt out
to processes."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


def test_prove_reports_a_failed_stage(tmp_path):
    """Without a GPU no GPU test passes: the stage fails, the summary says so, the exit code too."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("benchmarks/prove", "--out", str(tmp_path), "--stages", "sanitize")
    assert done.returncode == 1
    assert "| sanitize | FAILED |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "results.json").is_file() and len(list(tmp_path.iterdir())) <= 8


def test_prove_names_an_unknown_stage(tmp_path):
    done = run("benchmarks/prove", "--out", str(tmp_path), "--stages", "nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr


@pytest.mark.parametrize(
    "mib, cores, processes",
    [
        ([81559], 32, 22),  # of one H100
        ([81559], 16, 16),
        ([24564, 81559], 32, 12),
        ([2048], 16, 1),
        ([], 16, 1),
    ],
)
def test_prove_fills_memory_and_cores(mib, cores, processes, tmp_path, monkeypatch):
    """With fewer processes than the deadlines are for, these are later."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    prove["count_processes"].__globals__["mib_of_gpus"] = lambda: mib
    assert prove["count_processes"]() == processes
    stage = prove["Stage"]("tests", tmp_path)
    monkeypatch.setattr(prove["Stage"], "side_by_side", lambda *_, **__: None)
    prove["pytest"](stage, tmp_path, [], {"whole": []})
    assert stage.seconds == prove["SECONDS"]["tests"] * max(1, 16 / processes)


def test_prove_asks_for_the_gpus_that_cuda_sees(monkeypatch):
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    there = range(torch.cuda.device_count())
    sizes = tuple(torch.cuda.get_device_properties(i).total_memory >> 20 for i in there)
    assert prove["mib_of_gpus"]() == sizes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    prove["mib_of_gpus"].cache_clear()
    assert prove["mib_of_gpus"]() == ()


def test_prove_selects_tests():
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    assert prove["selecting"](["-m", "sanitize"]) == ["-m", "sanitize", "-k", ""]
    prove["SELECTED"][:] = ["d192 or d256"]
    assert prove["selecting"](["-m", "sanitize"]) == ["-m", "sanitize", "-k", "(d192 or d256)"]
    assert prove["selecting"](["-k", "not sm90"]) == ["-k", "(not sm90) and (d192 or d256)"]


def test_prove_soaks_for_as_long_as_it_is_told(tmp_path, monkeypatch):
    """Random calls last that long, and the stage as much longer."""
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    ran = []
    monkeypatch.setattr(
        prove["Stage"], "step", lambda self, command, env: ran.append((self.seconds, command))
    )
    words = ["prove", "--out", str(tmp_path), "--stages", "soak", "--soak", "1234"]
    monkeypatch.setattr(sys, "argv", words)
    assert prove["main"]() == 0
    ((seconds, command),) = ran
    assert command[command.index("--seconds") + 1] == "1234"
    assert seconds == prove["SECONDS"]["soak"] + 1234


def test_prove_builds_both_sides_of_a_duel(tmp_path, monkeypatch):
    """The revision's files lie in a folder of their own, and both are built before they race."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a clone of git")
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    ran, really_run = [], prove["Stage"].side_by_side

    def note(self, commands, *rest):
        if commands[0][0] in ("git", "tar"):
            return really_run(self, commands, *rest)
        if commands[0][0] == "env":
            assert all((Path(tree) / "setup.py").is_file() for _, _, tree, *_ in commands)
        ran.append(commands)
        return True

    monkeypatch.setattr(prove["Stage"], "side_by_side", note)
    words = ["prove", "--out", str(tmp_path), "--stages", "duel", "--kinds", "peaked", "--before"]
    monkeypatch.setattr(sys, "argv", [*words, "HEAD"])
    assert prove["main"]() == 0
    ((_, _, before, *build), (_, _, after, *same)), (race,) = ran
    assert before != after == str(ROOT) and build == same == prove["SETUP"]
    place = race.index("benchmarks.duel") + 1
    assert race[place : place + 4] == [before, after, "--kinds", "peaked"]

    monkeypatch.setattr(sys, "argv", [*words, "no-such-revision"])
    assert prove["main"]() == 1 and len(ran) == 2


@pytest.mark.parametrize("words", [["--stages", "duel"], ["--before", "HEAD"]])
def test_prove_wants_both_words_of_a_duel(words, tmp_path):
    done = run("benchmarks/prove", "--out", str(tmp_path), *words)
    assert done.returncode == 2 and "--before" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("code, is_failure", [(0, False), (5, False), (1, True)])
def test_a_part_without_tests_is_no_failure(code, is_failure, tmp_path, monkeypatch):
    """pytest ends with 5 where fewer tests are selected than there are processes."""
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    prove["pytest"].__globals__["count_processes"] = lambda: 1
    stage = prove["Stage"]("tests", tmp_path)
    before = [sys.executable, "-c", f"raise SystemExit({code})"]
    prove["pytest"](stage, tmp_path, [], {"whole": before})
    assert any("exit code" in words for words in stage.failures) == is_failure


@pytest.mark.slow
def test_parts_share_what_is_selected():
    """pytest's -k comes first: a part of few tests would end long before another."""
    words = ["-m", "pytest", "tests/test_layering.py", "-o", "addopts=", "--collect-only", "-q"]
    words += ["-k", "prose and (api/masks or kernels/masks or are-tiles)"]
    parts = [run(*words, f"--part={i}/3") for i in range(3)]
    named = [[x for x in part.stdout.splitlines() if "::" in x] for part in parts]
    assert [len(part) for part in named] == [1, 1, 1] and len({part[0] for part in named}) == 3


@pytest.mark.parametrize(
    "gpus, selected, apart", [(1, [], False), (2, [], True), (2, ["x"], False)]
)
def test_ranks_come_last_and_alone(gpus, selected, apart):
    """Where there are several GPUs, and nothing is selected."""
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    runs = []

    def pytest_of_prove(stage, scratch, arguments, runs_of_stage, env=None, processes=0):
        runs.append((arguments, processes))

    names = prove["tests"].__globals__
    names["visible_gpus"], names["pytest"] = lambda: ["0"] * gpus, pytest_of_prove
    names["SELECTED"][:] = selected
    prove["tests"](None, None)
    whole = [([], 0)]
    assert runs == ([(["-m", "not gpu_ranks"], 0), (["-m", "gpu_ranks"], 1)] if apart else whole)


@pytest.mark.parametrize(
    "gpus, words, apart", [("1", [], False), ("2", [], True), ("2", ["-x"], False)]
)
def test_ranks_come_last_in_the_test_command(gpus, words, apart):
    """Of dev.py, where it has no arguments for pytest."""
    dev = runpy.run_path(str(ROOT / "dev.py"))
    commands = []
    names = dev["test"].__globals__
    names["ask"], names["run"] = lambda code: gpus, lambda *words: commands.append(words)
    dev["test"](words)
    runs = [command[3:] for command in commands if "pytest" in command]
    beside = ("-n", "auto", "--dist", "worksteal")
    alone = [(*beside, "-m", "not gpu_ranks"), ("-m", "gpu_ranks")]
    assert runs == (alone if apart else [(*beside, *words)])


def test_prove_has_a_deadline_for_each_stage(tmp_path):
    """That of the stages with several sizes of shared memory is theirs together."""
    prove = runpy.run_path(str(ROOT / "benchmarks" / "prove"))
    assert set(prove["SECONDS"]) == set(prove["STAGES"])
    for name in prove["STAGES"]:
        assert prove["Stage"](name, tmp_path).left() <= prove["SECONDS"][name]
    stage = prove["Stage"]("ptx-tests", tmp_path)
    prove["of_the_copy"](stage)
    assert stage.left() > 2 * prove["SECONDS"]["ptx-tests"]
    stage = prove["Stage"]("tests", tmp_path)
    stage.seconds = 1
    assert not stage.step([sys.executable, "-c", "import time; time.sleep(60)"])
    assert ["stopped at 1 s of the stage" in words for words in stage.failures] == [True]
