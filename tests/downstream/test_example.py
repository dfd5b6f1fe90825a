"""examples/finetune_transformers.py runs as it is, and the model learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "finetune_transformers.py"


@pytest.mark.skipif(not EXAMPLE.exists(), reason="no source tree beside the tests")
def test_finetune() -> None:
    command = [sys.executable, str(EXAMPLE)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    assert losses[0] > 3.5 and losses[-1] < 1, "of 48 numbers one at random is 3.9"
    answers = [line for line in lines if line.startswith("prompt ")]
    assert len(answers) == 3
    for line in answers:
        prompt, follows = (eval(part) for part in line[len("prompt ") :].split(" goes on "))
        assert follows[0] == prompt[-1] % 48 + 1
