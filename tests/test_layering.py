"""The folders are the architecture: who may include whom, where asm stands, how long a file may
be."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
PYTHON = sorted([*(ROOT / "flash_attn").rglob("*.py"), *(ROOT / "tests").glob("*.py")])

pytestmark = pytest.mark.skipif(not SOURCES, reason="no source tree beside the tests")

# What each folder may include; itself always. core/ is plain C++ and lies under everything.
ALLOWED = {
    "core": set(),
    "cuda/ptx": set(),
    "cuda/tile": {"core", "cuda/ptx"},
    "cuda/attn": {"core", "cuda/tile", "cuda/ptx"},
    "cuda": {"core", "cuda/attn", "cuda/tile", "cuda/ptx"},
    "cuda/cache": {"core", "cuda", "cuda/tile", "cuda/ptx"},
    "cuda/decode": {"core", "cuda", "cuda/cache", "cuda/attn", "cuda/tile", "cuda/ptx"},
    "cuda/decode/inst": {"cuda/decode"},
    "sm80": {"core", "cuda", "cuda/attn", "cuda/decode", "cuda/tile", "cuda/ptx"},
    "sm80/inst": {"core", "sm80", "cuda", "cuda/attn", "cuda/tile", "cuda/ptx"},
    "sm90/ptx": {"cuda/ptx"},
    "sm90/tile": {"core", "cuda/tile", "cuda/ptx", "sm90/ptx"},
    "sm90": {
        "core",
        "cuda",
        "cuda/attn",
        "cuda/cache",
        "cuda/decode",
        "cuda/tile",
        "cuda/ptx",
        "sm90/tile",
        "sm90/ptx",
    },
    "sm90/inst": {"core", "sm90", "cuda", "cuda/attn", "cuda/tile", "cuda/ptx"},
    "tests": {
        "core",
        "bindings",
        "cuda",
        "cuda/attn",
        "cuda/tile",
        "cuda/ptx",
        "sm90",
        "sm90/tile",
        "sm90/ptx",
    },
    "aten": {"core", "cuda"},
    "bindings": {"core", "aten", "cuda", "cuda/cache", "cuda/decode", "sm80", "sm90"},
    "simulator": {"aten", "cuda"},
}
# Files that stand in for others of the same path where a kernel meets a simulated GPU.
OVERLAY = CSRC / "simulator" / "overlay"
TORCH_FOLDERS = {"bindings", "aten", "simulator"}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|pybind11)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
MAX_LINES = 450


@cache
def text(path: Path) -> str:
    return path.read_text()


@cache
def code(path: Path) -> str:
    """Without comments and string literals."""
    without = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", text(path), flags=re.DOTALL)
    return without


def place(path: Path) -> Path:
    """Where a file stands when it is compiled."""
    return CSRC / path.relative_to(OVERLAY) if path.is_relative_to(OVERLAY) else path


def folder(path: Path) -> str:
    return place(path).parent.relative_to(CSRC).as_posix()


def resolve(path: Path, name: str) -> Path | None:
    """The file of ours that an include names: beside the file, or from csrc/."""
    for candidate in (place(path).parent / name, CSRC / name):
        if candidate.is_file():
            return candidate.resolve()
    return None


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_includes_point_downward(path: Path) -> None:
    here = folder(path)
    assert here in ALLOWED, f"{here} is not on the map of the house: add its arrows here"
    for quote, name in INCLUDE.findall(text(path)):
        if TORCH_HEADER.match(name):
            assert here in TORCH_FOLDERS, f"{name}: only {TORCH_FOLDERS} know torch"
            continue
        target = resolve(path, name)
        if target is None:
            assert quote == "<", f"{name} is not a file of ours and stands in quotes"
            continue
        there = folder(target)
        if path.is_relative_to(OVERLAY) and there == "simulator":
            continue
        if here in TORCH_FOLDERS:
            assert target.suffix == ".h", f"{name}: of the kernels, {here} sees launches only"
        assert there == here or there in ALLOWED[here], f"{here} may not include {there} ({name})"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix in (".h", ".cuh")], ids=ids)
def test_headers_are_included_once(path: Path) -> None:
    assert "#pragma once" in text(path)


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_asm_stands_in_ptx(path: Path) -> None:
    if path.parent.name != "ptx":
        assert not re.search(r"\basm\b", code(path)), "asm belongs in a ptx/ folder"


FORBIDDEN = {
    "an attention op of torch's": r"scaled_dot_product|_flash_attention|_efficient_attention"
    r"|_cudnn_attention|_fused_sdp|_native_multi_head",
    "a device synchronisation": r"cuda(Device|Stream|Event)Synchronize|\bsynchronize\s*\(",
    "an exit": r"\b(exit|abort|_exit|quick_exit)\s*\(",
    "a print": r"\b(printf|fprintf|puts)\s*\(|std::c(out|err)\b",
    "a user check that dies": r"\bassert\s*\(",
    "CUTLASS": r"cutlass|cute::",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nowhere_in_csrc(what: str) -> None:
    found = [ids(path) for path in SOURCES if re.search(FORBIDDEN[what], code(path))]
    assert not found, f"{what} in {found}"


def test_no_kernel_includes_torch_through_the_build() -> None:
    """The kernels' target has no torch include path."""
    cmake = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "cmake/Simulator.cmake").read_text()
    for call in re.findall(
        r"target_(?:include_directories|link_libraries)\((flash_attn_kernels[^)]*)\)", cmake
    ):
        assert "torch" not in call.lower()


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_file_length(path: Path) -> None:
    assert text(path).count("\n") <= MAX_LINES


@pytest.mark.parametrize("path", [*SOURCES, *PYTHON], ids=ids)
def test_no_leftovers(path: Path) -> None:
    """No notes to oneself and no commented-out code (// ends with a semicolon or an opening
    brace)."""
    if path.name == Path(__file__).name:
        return
    body = text(path)
    assert not re.search(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b", body)
    if path.suffix != ".py":
        dead = [line for line in body.splitlines() if re.match(r"\s*//\s*\S.*[;{]\s*$", line)]
        dead = [
            line
            for line in dead
            if re.search(r"[=()]", line) and not re.search(r"[a-z]+ [a-z]+ [a-z]+", line)
        ]
        assert not dead, dead


def test_every_source_is_built() -> None:
    lists = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "cmake/Simulator.cmake").read_text()
    lists = lists.replace("${staged}/", "csrc/")
    forgotten = [
        ids(path)
        for path in SOURCES
        if path.suffix in (".cpp", ".cu") and place(path).relative_to(ROOT).as_posix() not in lists
    ]
    assert not forgotten, forgotten


def included(path: Path, seen: set[Path]) -> set[Path]:
    """The file and all of ours that it includes."""
    if path not in seen:
        seen.add(path)
        for name in re.findall(r'^#include "([^"]+)"', text(path), re.MULTILINE):
            included((path.parent / name).resolve(), seen)
    return seen


def test_what_has_one_ptx_asks_for_no_architecture() -> None:
    """It would have the oldest one's code on each (flash_attn_from_one_ptx)."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    files = re.search(r"set\(one_ptx_kernels\n([^)]*)\)", cmake)[1].split()
    assert files
    read = set.union(*(included(ROOT / file, set()) for file in files))
    asking = [ids(path) for path in sorted(read) if "__CUDA_ARCH__" in code(path)]
    assert not asking, asking


def test_python_reaches_the_library_through_one_module() -> None:
    """Only _library loads _C, and no Python of ours calls torch's own attention but the races and
    the demo."""
    for path in (ROOT / "flash_attn").rglob("*.py"):
        body = text(path)
        if path.name != "_library.py":
            assert not re.search(
                r"^\s*(from flash_attn import _C|import flash_attn\._C)", body, re.MULTILINE
            ), path
        assert "import flash_attn_2_cuda" not in body, f"{path}: the shim stands on the package"
        if "cli" not in path.parts:
            assert "functional.scaled_dot_product_attention(" not in body, path


PAGES = sorted(
    path
    for pattern in ("*.md", "benchmarks/*.md", "csrc/*.md", "docs/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_prose(path: Path) -> None:
    """At most 100 characters; a row of a table and what is quoted between fences may be longer."""
    fenced, long = False, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and len(line) > 100 and not line.lstrip().startswith(("|", "$$", "```")):
            long.append(f"{number}: {line}")
    assert not long, "\n".join(long)
