"""The programs in examples/ run as they are, are short, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAMS = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("cpp/*.cpp")])

pytestmark = pytest.mark.skipif(not PROGRAMS, reason="no source tree beside the tests")


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def run(name: str, device: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if line.startswith("step ")]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


@each_device
@pytest.mark.slow
def test_train_gpt(device: str) -> None:
    first, *_, last = losses(run("train_gpt.py", device, "--steps", "25"))
    assert first > 5 and last < 3.5, "a byte at random is 5.5"


@each_device
@pytest.mark.slow
def test_diffusion_transformer(device: str) -> None:
    """It learns, and draws four pictures of discs beside each other."""
    lines = run("diffusion_transformer.py", device, "60")
    first, *_, last = losses(lines)
    assert last < first / 2
    pictures = lines[-12:]
    assert all(len(row.split()) == 4 and set(row) <= set("# .") for row in pictures)
    assert 20 < "".join(pictures).count("#") < 400


@each_device
def test_serve(device: str) -> None:
    """Every answer is that of the prompt alone, but for rounding to 16 bits on a GPU, and the
    shared pages were prefilled once."""
    lines = run("serve.py", device)
    assert lines[0] == "260 tokens of prompts, 132 of them prefilled"
    answers = [line for line in lines if line.startswith("[")]
    assert len(set(answers)) == 5
    if device == "cpu":
        assert all(line.endswith("] as alone") for line in answers)
