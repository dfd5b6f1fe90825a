"""Markers, the --device option, a seed of its own for each test."""

from __future__ import annotations

import faulthandler
import zlib
from collections.abc import Iterator

import pytest
import torch

HANG_SECONDS = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("all", "cpu", "cuda"),
        default="all",
        help="run the tests of one device only (default: all; cuda skips where there is no GPU)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "gpu: needs a CUDA device",
        "sanitize: one tiny case a kernel instantiation, for compute-sanitizer",
        "slow: seconds rather than milliseconds",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    if device != "all":
        wanted = [
            item for item in items if bool(item.get_closest_marker("gpu")) == (device == "cuda")
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The same numbers for the same test on every run, other numbers for every other test."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    torch.manual_seed(seed)


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
