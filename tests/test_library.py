"""The shared libraries as files: what they bring into a process that has torch in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import flash_attn

PACKAGE = Path(flash_attn.__file__).parent
LIBRARIES = sorted([*PACKAGE.glob("_C*.so"), PACKAGE / "lib" / "libflash_attn.so"])
# Strong definitions: weak ones are templates that this library instantiates.
RUNTIME = re.compile(
    r"^\S+ [TDBR] ((?:std|__gnu_cxx|__cxxabiv1)::.*|__cxa_.*|operator new.*)$", re.M
)


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])
def test_no_cxx_runtime_of_its_own(library: Path) -> None:
    """Two in one process crash where the streams of one meet the locales of the other: in every
    error message that prints a number."""
    command = ["nm", "--dynamic", "--demangle", "--defined-only", library]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "flash_attn" in listed or "PyInit__C" in listed
    assert RUNTIME.findall(listed) == []
