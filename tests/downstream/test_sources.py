"""What other people's sources import from the flash-attn packages is here, with the arguments that
they pass; and their own checks of versions let it in. The sources are unpacked, not installed: most
of them need a GPU, or each other."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Optional

import pytest
import torch
from packaging import version
from packaging.version import Version

import flash_attn
import flash_attn.flash_attn_interface as ours
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

SOURCES = [
    "axolotl==0.19.0",
    "liger-kernel==0.8.5",
    "megatron-core==0.19.2",
    "sglang==0.5.10.post1",
    "transformer-engine==2.20.2",
    "unsloth==2026.10.9",
    "verl==0.9.1",
    "xformers==0.0.35",
    "xfuser==0.7.0",
    "yunchang==0.6.4",
]
WITHOUT_WHEEL = ["deepspeed==0.19.8", "vllm==0.33.0"]  # or with one of hundreds of megabytes
OURS = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_2_cuda")
# A name of old releases, which the program asks for where the newer one is missing.
ABSENT = {("unsloth", "flash_attn.flash_attn_interface", "flash_attn_cuda")}
# Call functions as releases before 2.7, and FlashAttention-3's betas, had them, too.
OTHER_KEYWORDS = {"deepspeed", "yunchang"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder))
    # Some ask for a newer Python than may be here; nothing of them is run but a few lines.
    subprocess.run(
        [*pip, "--only-binary", ":all:", "--python-version", "3.12", *SOURCES], check=True
    )
    # Their setup.py ask for nvcc and for a version unless they are told.
    told = dict(TORCH_CUDA_ARCH_LIST="9.0", VLLM_TARGET_DEVICE="empty")
    told |= {
        f"{s.split('==')[0].upper()}_VERSION_OVERRIDE": s.split("==")[1] for s in WITHOUT_WHEEL
    }
    archives = (*pip, "--no-build-isolation", "--no-binary", ":all:", *WITHOUT_WHEEL)
    subprocess.run(archives, check=True, env={**os.environ, **told})
    for archive_file in folder.glob("*.tar.gz"):
        with tarfile.open(archive_file) as archive:
            archive.extractall(folder / archive_file.name.split("-")[0], filter="data")
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = node.args[0] if node.args else None
            if isinstance(named, ast.Constant) and is_ours(str(named.value)):
                yield named.value, None, named.value


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
    names = [s.split("==")[0].replace("-", "_") for s in (*SOURCES, *WITHOUT_WHEEL)]
    problems, seen = [], dict.fromkeys(names, 0)
    for path in sources.rglob("*.py"):
        package = path.relative_to(sources).parts[0]
        try:
            tree = ast.parse(path.read_text(errors="ignore"))
        except SyntaxError:  # a template
            continue
        seen[package] += sum(1 for _ in imports(tree))
        problems += [f"{path.relative_to(sources)}: {x}" for x in problems_of(package, tree)]
    assert not problems, "\n".join(problems)
    assert sum(count > 0 for count in seen.values()) >= 10, seen


def run_statements(
    sources: Path, file: str, wanted: Callable[[ast.stmt, str], bool], names: dict
) -> None:
    """Those of a file's own statements that are `wanted`, by their syntax and text, in order."""
    (path,) = sources.glob(file)
    text = path.read_text()
    statements = [x for x in ast.parse(text).body if wanted(x, ast.get_source_segment(text, x))]
    assert statements, f"{file} is another one now"
    exec(compile(ast.Module(statements, []), str(path), "exec"), names)


def asks_for(*modules: str) -> Callable[[ast.stmt, str], bool]:
    return lambda statement, text: (
        isinstance(statement, ast.Try) and any(m in text for m in modules)
    )


def test_transformer_engine_lets_us_in(sources: Path) -> None:
    attention = "transformer_engine/transformer_engine/pytorch/attention/dot_product_attention"
    names = dict(PkgVersion=Version, get_pkg_version=metadata.version, torch=torch, inspect=inspect)
    names |= dict(PackageNotFoundError=metadata.PackageNotFoundError, Callable=Callable)
    names |= dict(get_device_compute_capability=torch.cuda.get_device_capability)
    run_statements(
        sources, f"{attention}/utils.py", lambda _, text: "class FlashAttentionUtils" in text, names
    )
    found = names["fa_utils"] = names["FlashAttentionUtils"]
    gates = asks_for('("flash-attn")', '("flash-attn-3")')
    run_statements(sources, f"{attention}/backends.py", gates, names)
    assert found.is_installed and found.v2_7_0_plus
    assert found.v3_is_installed and found.fa3_supports_softcap
    assert names["_flash_attn_varlen_bwd"] is ours._flash_attn_varlen_backward


def test_megatron_lets_us_in(sources: Path) -> None:
    core = "megatron_core/megatron/core"
    names = dict(PkgVersion=Version, version=metadata.version, HAVE_PACKAGING=True)
    run_statements(sources, f"{core}/utils.py", lambda _, text: "_fa_version" in text, names)
    assert names["is_fa_min_version"]("2.7.3")
    run_statements(
        sources,
        f"{core}/transformer/attention.py",
        asks_for("import flash_attn_varlen", "_3."),
        names,
    )
    assert names["HAVE_FA3"]
    assert names["flash_attn_varlen_func"] is ours.flash_attn_varlen_func


def test_deepspeed_lets_us_in(sources: Path) -> None:
    names = dict(version=version)
    layer = "deepspeed/deepspeed-*/deepspeed/sequence/fpdt_layer.py"
    run_statements(sources, layer, asks_for("import flash_attn"), names)
    assert names["flash_attn_version"] >= Version("2.7.0")
    assert names["_flash_attn_backward"] is ours._flash_attn_backward


def test_xformers_lets_us_in(sources: Path) -> None:
    """Both of its operators find what they call."""
    fmha = "xformers/xformers/ops/fmha"
    names = dict(importlib=importlib, os=os, parse_version=version.parse, torch=torch)
    gate = 'find_spec("flash_attn")'
    run_statements(sources, f"{fmha}/flash.py", lambda _, text: gate in text, names)
    assert names["FLASH_VERSION"] == flash_attn.__version__
    assert names["_flash_attn_cuda"] is ours.flash_attn_gpu

    names = dict(importlib=importlib, torch=torch, parse_schema=torch._C.parse_schema)
    names |= dict(Optional=Optional, logger=logging.getLogger(__name__), FLASH_VERSION="")
    gates = ("def _flash_attention3_incompatible_reason", 'find_spec("flash_attn_3")')
    run_statements(
        sources, f"{fmha}/flash3.py", lambda _, text: any(gate in text for gate in gates), names
    )
    assert names["_C_flashattention3"] is torch.ops.flash_attn_3


def test_verl_takes_our_cross_entropy(sources: Path) -> None:
    """It asks for the result of releases from 2.4.3 on."""
    names = dict(torch=torch, cross_entropy_loss=cross_entropy_loss)
    name = "logprobs_from_logits_flash_attn"
    run_statements(
        sources,
        "verl/verl/utils/torch_functional.py",
        lambda _, text: text.startswith(f"def {name}("),
        names,
    )
    logits, labels = torch.randn(5, 11), torch.tensor([0, 3, 10, 7, 7])
    expected = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(names[name](logits, labels), expected)
