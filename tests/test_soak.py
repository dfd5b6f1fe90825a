"""The soak for seconds; benchmarks/prove runs it for minutes."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest
import soak
import torch

SECONDS = 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_calls_from_many_threads(device: str) -> None:
    missing = {kind.__name__ for kind in soak.KINDS[device]}
    for seed in range(1, 6):  # beside other processes there is time for few calls
        report = soak.soak(device, SECONDS, threads=4, streams=2, seed=seed)
        assert report.complaints() == []
        assert len(report.host_bytes) == soak.EPOCHS
        missing -= set(report.calls)
        if not missing:
            return
    pytest.fail(f"no call of {missing}")


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = soak.run

    def wrong(*arguments: object) -> dict:
        results = right(*arguments)
        return results | {"out": results["out"] + 1}

    monkeypatch.setattr(soak, "run", wrong)
    monkeypatch.setitem(soak.KINDS, "cpu", [soak.attention])
    [failure, *_] = soak.soak("cpu", SECONDS, threads=1).complaints()
    assert failure.startswith("attention, number ") and "out" in failure


def keep_a_tensor(draw: random.Random, device: str, kept: list) -> int:
    kept.append(torch.ones(1 << 20, device=device))
    return 1


def multiply_on_another_stream(draw: random.Random, device: str, kept: list) -> int:
    """Each of torch's 32 streams has a workspace of cuBLAS from its first product on."""
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(64, 64, device=device)
        x @ x
    return 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, grows", [(keep_a_tensor, True), (multiply_on_another_stream, False)]
)
def test_what_is_kept_is_a_complaint(kind, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """About one call an epoch, to the end."""
    kept: list[torch.Tensor] = []

    def call(draw: random.Random, device: str, seed: int) -> int:
        time.sleep(0.1)
        return kind(draw, device, kept)

    monkeypatch.setitem(soak.KINDS, "cuda", [call])
    device, _ = soak.soak("cuda", 1, threads=1, streams=1).growth()
    assert (device > soak.DEVICE_GROWTH) == grows, device
    if grows:
        assert device % kept[0].nbytes == 0


def test_a_record_after_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What is left of a soak that is stopped."""
    seen = []

    def call(draw: random.Random, device: str, seed: int) -> int:
        seen.append(json.loads(out.read_text())[0] if out.exists() else None)
        time.sleep(0.02)
        return 1

    out = tmp_path / "soak.json"
    monkeypatch.setitem(soak.KINDS, "cpu", [call])
    words = ["soak", "--device", "cpu", "--seconds", "2", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert soak.main() == 0
    assert seen[0] is None and seen[-1]["values"]["call"] < len(seen)
    record = json.loads(out.read_text())[0]
    assert record["values"]["call"] == len(seen) and record["values"]["failures"] == 0
    assert len(record["host_bytes"]) == soak.EPOCHS and record["failed"] == []
    assert len(capsys.readouterr().out.splitlines()) == soak.EPOCHS + 1


def test_growth_is_a_complaint() -> None:
    flat = soak.Report(device_bytes=[9, 5, 5], host_bytes=[9, 5, 5])
    assert flat.complaints() == []
    device = soak.Report(device_bytes=[0, 0, 3 << 20], host_bytes=[0, 0, 0])
    host = soak.Report(device_bytes=[0, 0, 0], host_bytes=[0, 0, 1 << 30])
    assert device.complaints() == [f"device memory grew by {3 << 20} bytes"]
    assert host.complaints() == [f"host memory grew by {1 << 30} bytes"]
