"""Type checkers know what the functions return: assert_type in a user's script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import flash_attn

SCRIPT = Path(__file__).parent / "typed_user.py"
PACKAGES = Path(flash_attn.__file__).parent.parent


def check(*command: object) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_mypy(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {PACKAGES}\nfollow_imports = silent\nstrict = True\n")
    cache = tmp_path / "cache"
    check(sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", cache, SCRIPT)


def test_pyright(tmp_path: Path) -> None:
    """basedpyright, a pyright whose package brings all that it runs."""
    config = tmp_path / "pyrightconfig.json"
    config.write_text(
        json.dumps(
            dict(include=[str(SCRIPT)], extraPaths=[str(PACKAGES)], typeCheckingMode="strict")
        )
    )
    checker = Path(sys.executable).parent / "basedpyright"
    check(checker, "--project", config, "--pythonpath", sys.executable)
