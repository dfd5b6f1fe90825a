"""A pool of processes that form a torch.distributed world, and run functions of the tests in it.

The processes are started once, as importing torch takes longer than most tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_SECONDS = 200  # for all processes to import torch, which may take long beside others


@contextlib.contextmanager
def one_at_a_time(device: str) -> Iterator[None]:
    """On GPUs, no process of this user does it beside another. NCCL's kernels wait for those of
    other GPUs. Where many processes take turns on the GPUs, those of one group seldom run at the
    same time, so that several groups hardly get on."""
    if device == "cpu":
        yield
        return
    path = Path(tempfile.gettempdir()) / f"flash_attn-ranks-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back as the file is closed
        yield


def _serve(rank: int, size: int, device: str, time_out: float, store: str, pipe) -> None:
    torch.set_num_threads(1)
    pipe.send(None)  # all form the world at once, as it waits for nobody longer than time_out
    pipe.recv()
    if device == "cuda":
        torch.cuda.set_device(rank)
        # NCCL's watchdog ends the process: without a minute's wait for notes of others, and without
        # a core dump.
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "100"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=time_out),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # torch's own end of gloo's threads may abort, and wait for a rank that is gone


class Pool:
    """seconds: for one function on all ranks; the group's own time-out is half of it, or
    time_out."""

    def __init__(
        self, size: int, device: str, seconds: float = 60, time_out: float | None = None
    ) -> None:
        self.size, self.device, self.seconds = size, device, seconds
        self.time_out = seconds / 2 if time_out is None else time_out
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, self.device, self.time_out, store, there),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        for rank, pipe in enumerate(self._pipes):
            try:
                if pipe.poll(max(deadline - time.monotonic(), 0)):
                    pipe.recv()
                    continue
            except (EOFError, ConnectionResetError):  # it has ended
                pass
            self.close()
            pytest.fail(f"rank {rank} has not started in {START_SECONDS} s")
        for pipe in self._pipes:
            pipe.send(None)

    def need(self, ranks: int) -> None:
        """Skips the test where the world is smaller."""
        needed = 4 if ranks in (4, TWO_DIMENSIONS) else 2
        if self.size < needed:
            pytest.skip(f"needs {needed} GPUs")

    def outcomes(self, function: Callable, *arguments: object) -> list[tuple[bool, object]]:
        """Of function(*arguments) on every rank: (True, its result) or (False, its traceback)."""
        if not all(
            process.is_alive() for process in self._processes
        ):  # a test before has ended one
            self.close()
            self._start()
        with one_at_a_time(self.device):
            return self._answers(function, *arguments)

    def _answers(self, function: Callable, *arguments: object) -> list[tuple[bool, object]]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self.seconds):
                self.close()
                pytest.fail(f"rank {rank} has not answered in {self.seconds} s")
            try:
                results.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                results.append((False, "the process has ended"))
        return results

    def run(self, function: Callable, *arguments: object) -> list:
        """function(*arguments) on every rank; their results. A rank's error fails the test."""
        results = self.outcomes(function, *arguments)
        errors = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(results) if not ok]
        assert not errors, "\n".join(errors)
        return [value for _, value in results]

    def close(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            with contextlib.suppress(BrokenPipeError):  # a process that ends just now
                if process.is_alive():
                    pipe.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


# Groups of two dimensions, outer times inner: 2 x 2, 2 x 1, 1 x 2.
TWO_DIMENSIONS, OUTER_OF_TWO, INNER_OF_TWO = 22, 21, 12
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(*members: int) -> dist.ProcessGroup | None:
    """The group of these ranks, made once; every rank has to call it. None for the others."""
    if members not in _groups:
        _groups[members] = dist.new_group(list(members))
    return _groups[members] if dist.get_rank() in members else None


def _device_of(rank: int, device: str) -> str:
    return f"cuda:{rank}" if device == "cuda" else device


def place(ranks: int, device: str):
    """This rank's device and its group, None if it takes no part: of 4 ranks; of 2, which are not
    neighbours in a world of 4; of 2 times 2, of which the inner ones are not; of 2 times 1, and
    of 1 times 2."""
    rank = dist.get_rank()
    device = _device_of(rank, device)
    if ranks == TWO_DIMENSIONS:
        outer, inner = (group_of(0, 1), group_of(2, 3)), (group_of(0, 2), group_of(1, 3))
        return device, (outer[rank // 2], inner[rank % 2])
    if ranks == 4:
        return device, group_of(0, 1, 2, 3)
    members = (1, 3) if dist.get_world_size() == 4 else (0, 1)
    both = group_of(*members)
    if ranks == 2:
        return device, both
    alone = [group_of(member) for member in members]
    if both is None:
        return device, None
    mine = alone[members.index(rank)]
    return device, (both, mine) if ranks == OUTER_OF_TWO else (mine, both)


def everyone(device: str):
    """This rank's device and the group of all ranks."""
    members = range(dist.get_world_size())
    return _device_of(dist.get_rank(), device), group_of(*members)
