"""The shared libraries as files, what they bring into a process that has torch in it, and how they
are built and found."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

import flash_attn
from flash_attn import _build_info

PACKAGE = Path(flash_attn.__file__).parent
LIBRARIES = sorted([*PACKAGE.glob("_C*.so"), PACKAGE / "lib" / "libflash_attn.so"])
# Strong definitions: weak ones are templates that this library instantiates.
RUNTIME = re.compile(
    r"^\S+ [TDBR] ((?:std|__gnu_cxx|__cxxabiv1)::.*|__cxa_.*|operator new.*)$", re.M
)


def exported(library: Path) -> str:
    command = ["nm", "--dynamic", "--demangle", "--defined-only", library]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])
def test_no_cxx_runtime_of_its_own(library: Path) -> None:
    """Two in one process crash where the streams of one meet the locales of the other: in every
    error message that prints a number."""
    listed = exported(library)
    assert "flash_attn" in listed or "PyInit__C" in listed
    assert RUNTIME.findall(listed) == []


def has_static_runtime() -> bool:
    """Some systems package it apart from g++, which then answers with the bare name."""
    command = ["g++", "-print-file-name=libstdc++.a"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Path(said.strip()).is_absolute()


@pytest.mark.skipif(None in map(shutil.which, ("nm", "g++")), reason="no nm or no g++")
@pytest.mark.parametrize("flags, has_one", [([], False), (["-static-libstdc++"], True)])
def test_a_cxx_runtime_is_seen(flags: list[str], has_one: bool, tmp_path: Path) -> None:
    """Of a library that brings one along, in the same list."""
    if has_one and not has_static_runtime():
        pytest.skip("no libstdc++.a")
    source, library = tmp_path / "number.cpp", tmp_path / "libnumber.so"
    source.write_text(
        "#include <sstream>\n"
        'extern "C" int number() { return (std::ostringstream() << 7).str().size(); }\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", *flags, source, "-o", library], check=True)
    listed = exported(library)
    assert "number" in listed
    assert bool(RUNTIME.findall(listed)) == has_one


SOURCES = PACKAGE.parent / "csrc"
BETWEEN_PRODUCTS = re.compile(
    r" [tTwW] void (flash_attn::cuda::(?:\(anonymous namespace\)::)?(?:softmax_step|gradient_step"
    r"|probabilities|finish_rows|keep_finite|restore|retake|row_delta)_kernel<.*?>)\("
)
OF_CACHES = re.compile(r"flash_attn::(cuda::(decode|kvcache|prefix)|sm90::latent)_kernel<")
PLAIN_FORMS = {
    "kPlain",
    "kPieces",
    "kPooled",
    "kPooledLong",
    "kStretched",
    "kOrdered",
    "kPooledInOrder",
    "kSplit",
    "kWithoutDq",
    "kMaxLogits",
    "kMasked",
}


def form_of(kernel: str) -> str | None:
    """The enumerator that a symbol of sm90 tells by its number."""
    at = re.search(r"::(Fwd|Bwd|BwdPair)Form\)(\d+)", kernel)
    if at is None:
        return None
    sources = (path.read_text() for path in (SOURCES / "sm90").glob("*.cuh"))
    found = (re.search(rf"enum class {at[1]}Form {{([^}}]*)}}", source) for source in sources)
    return next(filter(None, found))[1].split(",")[int(at[2])].strip()


def has_terms(kernel: str) -> bool:
    form = form_of(kernel)
    if form is not None:
        return form not in PLAIN_FORMS
    return "TermScores<" in kernel or "::bwd_bias_kernel<" in kernel


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@pytest.mark.skipif(not SOURCES.exists(), reason="no source tree beside the tests")
@pytest.mark.skipif(not _build_info.CUDA, reason="no kernels built")
def test_as_many_kernels_as_csrc_says() -> None:
    """Each is time of the build and size of the library: one more should not come unseen."""
    command = ["nm", "--demangle", LIBRARIES[-1]]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    room = r"flash_attn::(?:cuda|sm\d+)::(?!launch_|allow_smem)"
    kernel = rf" [tTwW] void ({room}\w+_kernel<.*?)(?: \[clone \S+\])?$"
    kernels = set(re.findall(kernel, listed, re.M))
    wide = re.compile(r"DType\)[27]\b")  # fp32, TF32
    counts = {
        "score terms": sum(has_terms(name) and not wide.search(name) for name in kernels),
        "score terms in fp32": sum(has_terms(name) and bool(wide.search(name)) for name in kernels),
        "max_logits": sum(form_of(name) == "kMaxLogits" for name in kernels),
        "keys from a cache": sum(bool(OF_CACHES.match(name)) for name in kernels),
        "a pass between products": len(set(BETWEEN_PRODUCTS.findall(listed))),
        "masks of tiles": sum(
            form_of(name) == "kMasked" or "MaskedScores" in name for name in kernels
        ),
    }
    said = (SOURCES / "README.md").read_text()
    for what, count in counts.items():
        assert f"{count} kernels with {what}" in said.replace("\n", " "), (what, count)


def test_an_unbuilt_checkout_does_not_borrow_a_library(tmp_path: Path) -> None:
    """Its Python must not meet the compiled part of an installed copy."""
    built = ("*.so", "_build_info.py", "lib", "include", "share", "__pycache__")
    ignored = shutil.ignore_patterns(*built)
    shutil.copytree(PACKAGE, tmp_path / "flash_attn", ignore=ignored)
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    result = subprocess.run(
        [sys.executable, "-c", "import flash_attn"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    error = result.stderr.strip().splitlines()[-1]
    assert f"the C++ library is not built in {tmp_path / 'flash_attn'}" in error
    assert "another copy's" in error and "pip install" in error


def test_the_build_takes_its_tools_from_its_python(tmp_path: Path, monkeypatch) -> None:
    """From the package of this Python, else beside this Python, else from PATH; its torch, and no
    other, is what the result requires."""
    setup = PACKAGE.parent / "setup.py"
    if not setup.exists():
        pytest.skip("no source tree beside the tests")
    functions: dict = {"__file__": str(setup)}
    exec(setup.read_text().partition("\nsetup(")[0], functions)
    tool = functions["tool"]
    assert functions["torch_requirement"]() == f"torch=={torch.__version__.partition('+')[0]}"
    programs = []
    for name in ("package", "beside", "path"):
        programs.append(tmp_path / name / "a-tool")
        programs[-1].parent.mkdir()
        programs[-1].write_text("")
        programs[-1].chmod(0o755)
    monkeypatch.setitem(sys.modules, "a-tool", SimpleNamespace(BIN=programs[0].parent))
    monkeypatch.setattr(sys, "executable", str(programs[1].parent / "python"))
    monkeypatch.setenv("PATH", str(programs[2].parent))
    for program in programs:
        assert tool("a-tool", "BIN") == str(program)
        program.unlink()
    with pytest.raises(SystemExit, match="a-tool is not installed. .* pip install a-tool"):
        tool("a-tool", "BIN")


@pytest.mark.skipif(not SOURCES.exists(), reason="no source tree beside the tests")
@pytest.mark.parametrize("cuda", ["13.0", ""])
def test_another_machines_torch_is_read_and_not_run(cuda: str, tmp_path: Path) -> None:
    """For a build that cannot run its Python: version.py of the unpacked package is enough."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("no cmake")
    package = tmp_path / "torch"
    package.mkdir()
    said = f"cuda: Optional[str] = {cuda!r}" if cuda else "cuda: Optional[str] = None"
    (package / "version.py").write_text(f"__version__ = '2.11.0+cu130'\ndebug = False\n{said}\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.28)\nproject(x LANGUAGES NONE)\n"
        f"include({SOURCES.parent}/cmake/TorchByPath.cmake)\n"
        'message(NOTICE "${TORCH_DIR} ${TORCH_VERSION} <${TORCH_CUDA_VERSION}>")\n'
    )
    options = (f"-DFLASH_ATTN_TORCH_DIR={package}", "-DPython_EXECUTABLE=/none")
    command = [cmake, "-S", str(tmp_path), "-B", str(tmp_path / "build"), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert f"{package} 2.11.0+cu130 <{cuda}>" in result.stderr, result.stdout + result.stderr


def test_a_wheel_for_arm_names_the_compiler_that_it_needs(monkeypatch) -> None:
    dev = PACKAGE.parent / "dev.py"
    if not dev.exists():
        pytest.skip("no source tree beside the tests")
    functions = runpy.run_path(str(dev))
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(SystemExit, match="apt-get install g[+][+]-aarch64-linux-gnu"):
        functions["prepare_aarch64"]()


def test_the_package_asks_for_the_torch_that_it_was_built_with() -> None:
    try:
        needed = [Requirement(line) for line in requires("flash-attn") or ()]
    except PackageNotFoundError:
        pytest.skip("the package was built in place and not installed")
    (found,) = (x for x in needed if x.name == "torch")
    assert str(found.specifier) == f"=={torch.__version__.partition('+')[0]}"


def test_reference_comes_with_the_package() -> None:
    code = "import flash_attn; print(flash_attn.reference.attention_ref.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "attention_ref\n", result.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/use.md"])
def test_first_example_of_a_page(page: str) -> None:
    """It runs as it stands, on a machine with or without a GPU."""
    path = PACKAGE.parent / page
    if not path.exists():
        pytest.skip("no source tree beside the tests")
    example = re.search(r"```python\n(.*?)```", path.read_text(), re.DOTALL).group(1)
    names: dict = {}
    exec(example, names)
    assert names["out"].shape == (2, 1024, 16, 64) and names["q"].grad.isfinite().all()
    assert names["token"].shape == (2, 1, 16, 64)
    assert names["k_cache"][0, 699].any() and not names["k_cache"][0, 698].any()
