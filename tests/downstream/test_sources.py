"""What other people's sources import from the flash-attn packages is here, with the arguments that
they pass. The sources are unpacked, not installed: most of them need a GPU, or each other."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = [
    "axolotl==0.19.0",
    "liger-kernel==0.8.5",
    "sglang==0.5.10.post1",
    "unsloth==2026.10.9",
    "verl==0.9.1",
    "xfuser==0.7.0",
    "yunchang==0.6.4",
]
OURS = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_2_cuda")
# A name of old releases, which the program asks for where the newer one is missing.
ABSENT = {("unsloth", "flash_attn.flash_attn_interface", "flash_attn_cuda")}
# Calls functions as releases before 2.7 and FlashAttention-3's betas had them.
OTHER_KEYWORDS = {"yunchang"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:")
    subprocess.run([*pip, "-d", str(folder), *SOURCES], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / wheel.name.split("-")[0])
    return folder


def is_ours(module: str) -> bool:
    """Not FlashAttention-4, flash_attn.cute, which lives beside this package."""
    first, *rest = module.split(".")
    return first in OURS and rest[:1] != ["cute"]


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None, str]]:
    """(module, name or None, what it is called there)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and is_ours(node.module or ""):
            yield from (
                (node.module, x.name, x.asname or x.name)
                for x in node.names
                if is_ours(f"{node.module}.{x.name}")
            )
        elif isinstance(node, ast.Import):
            yield from ((x.name, None, x.asname or x.name) for x in node.names if is_ours(x.name))


def found(module: str, name: str | None) -> object:
    here = importlib.import_module(module)
    if name is None or hasattr(here, name):
        return getattr(here, name) if name else here
    return importlib.import_module(f"{module}.{name}")


def wrong_keywords(tree: ast.AST, functions: dict[str, object]) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        function = functions.get(node.func.id)
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters
            passed = [keyword.arg for keyword in node.keywords if keyword.arg]
            if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
                yield from (f"{node.func.id}({x}=)" for x in passed if x not in parameters)


def problems_of(package: str, tree: ast.AST) -> list[str]:
    problems, functions = [], {}
    for module, name, alias in imports(tree):
        if (package, module, name) in ABSENT:
            continue
        try:
            # One name may come from either of two packages, by what is installed.
            functions[alias] = None if alias in functions else found(module, name)
        except ImportError as error:
            problems.append(f"{module}.{name}: {error}")
    return problems if package in OTHER_KEYWORDS else [*problems, *wrong_keywords(tree, functions)]


def test_imports_and_keywords(sources: Path) -> None:
    problems, seen = [], dict.fromkeys((s.split("==")[0].replace("-", "_") for s in SOURCES), 0)
    for path in sources.rglob("*.py"):
        package = path.relative_to(sources).parts[0]
        try:
            tree = ast.parse(path.read_text(errors="ignore"))
        except SyntaxError:  # a template
            continue
        seen[package] += sum(1 for _ in imports(tree))
        problems += [f"{path.relative_to(sources)}: {x}" for x in problems_of(package, tree)]
    assert not problems, "\n".join(problems)
    assert sum(count > 0 for count in seen.values()) >= 6, seen
