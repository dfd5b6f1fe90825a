"""Markers, the --device option, a seed of its own for each test, the benchmarks as a package."""

from __future__ import annotations

import faulthandler
import os
import re
import zlib
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Pool

HANG_SECONDS = 300
KEPT_GPU_BYTES = 2 << 30
GPU_RANKS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpu_ranks])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("all", "cpu", "cuda"),
        default="all",
        help="run the tests of one device only (default: all; cuda skips where there is no GPU)",
    )
    parser.addoption(
        "--part",
        type=_part,
        metavar="I/N",
        help="run every Nth test from the Ith on (from 0): N processes share a suite",
    )


def _part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise ArgumentTypeError(f"expected I/N with 0 <= I < N, got {text!r}")
    return int(first), int(step)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means. A process takes a core; beside a GPU two, and at most 4 GiB of it."""
    cores = min(len(os.sched_getaffinity(0)), 16)
    if not torch.cuda.is_available():
        return cores
    memory = min(
        torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())
    )
    return max(1, min(cores // 2, memory >> 32))


def pytest_configure(config: pytest.Config) -> None:
    # Processes that share the cores would wait for each other's threads.
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(workers)))
    for line in (
        "gpu: needs a CUDA device",
        "gpu_ranks: processes on several CUDA devices wait for each other; beside others, which "
        "take turns with them, they hardly get on",
        "simulated: runs a kernel of the simulated GPU, whose library is loaded",
        "real_gpu: takes a simulated GPU too long, or asks how tensors of a GPU are treated; a "
        "simulated one has those of the CPU",
        "plans: asserts what is chosen on an H200, which a simulated GPU of as many "
        "multiprocessors tells",
        "sanitize: one tiny case a kernel instantiation, for compute-sanitizer",
        "slow: seconds rather than milliseconds",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """It comes last, so that parts are dealt from what pytest's own -m and -k leave, and are of one
    size."""
    if "FLASH_ATTN_SIMULATED" in os.environ:
        keep_only(config, items, [i for i in items if _is_simulated(i)])
    device = config.getoption("--device")
    if device != "all":
        gpu = device == "cuda"
        keep_only(config, items, [i for i in items if bool(i.get_closest_marker("gpu")) == gpu])
    if part := config.getoption("--part"):
        first, step = part
        part = items[first::step]
        # Each begins elsewhere: where a driver compiles kernels at their first call, the processes
        # would all wait for the same one.
        begin = len(part) * first // step
        keep_only(config, items, part[begin:] + part[:begin])
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def _is_simulated(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("simulated")) and not item.get_closest_marker("real_gpu")


def keep_only(config: pytest.Config, items: list[pytest.Item], wanted: list[pytest.Item]) -> None:
    kept = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = wanted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Under FLASH_ATTN_SMEM_LIMIT a GPU lacks what one with so little shared memory lacks, and so
    does a simulated one of 8.0, which has no streams and graphs of CUDA's either."""
    try:
        return (yield)
    except RuntimeError as error:
        simulated = os.environ.get("FLASH_ATTN_SIMULATED")
        if simulated and re.search("CUDA driver version|Found no NVIDIA driver", str(error)):
            pytest.skip("needs CUDA's runtime")
        lacks = re.search(r"needs a GPU with \d+ KB of shared memory", str(error))
        if lacks and ("FLASH_ATTN_SMEM_LIMIT" in os.environ or simulated == "80"):
            pytest.skip(lacks[0])
        raise


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The same numbers for the same test on every run, other numbers for every other test."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be imported, from the root of the repository."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent))


@pytest.fixture
def short_race(benchmarks: None):
    """A race on the CPU whose phases are short."""
    from benchmarks import contest, timing

    timer = timing.Timer(torch.device("cpu"), timing.Recipe(0.0, 0.001, 0.001))
    return contest.Race(timer, torch.float32)


@pytest.fixture(scope="session", params=["cpu", GPU_RANKS])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Processes that form a torch.distributed world: 4, or as many as there are GPUs."""
    size = 4 if request.param == "cpu" else min(4, torch.cuda.device_count())
    if size < 2:
        pytest.skip("needs at least 2 GPUs")
    pool = Pool(size, request.param, seconds=60 if request.param == "cpu" else 40)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def returned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a large test leaves in torch's allocator goes back: other processes share the GPU."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.memory_reserved() > KEPT_GPU_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel that hangs would hang the run: the process ends with a traceback that names the
    test."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
