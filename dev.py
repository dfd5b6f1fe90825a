#!/usr/bin/env python3
"""Sets everything up on a fresh machine, then runs one job.

    python3 dev.py demo | test | lint | build | wheel | docs
    python3 dev.py test --downstream     other people's programs, installed into .venv
    python3 dev.py test --simulator      the CUDA kernels without a GPU, on a simulated one
    python3 dev.py wheel --aarch64       a wheel for 64-bit Arm, by cross-compiling

Needs only Python and g++. What is missing comes by pip into .venv: torch, CMake, Ninja, and nvcc
where the machine has none (no GPU is needed to compile); for lint and docs their tools alone. Run
again, it reuses what is there: pip is skipped while the requirements stand, and the build is
incremental.
FLASH_ATTN_CUDA=0 builds for the CPU only; FLASH_ATTN_CUDA_ARCHS=90-real for one GPU.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
BUILD_TOOLS = ["setuptools>=64", "wheel", "cmake>=3.28", "ninja"]
TEST_TOOLS = ["pytest", "pytest-xdist", "hypothesis", "einops", "numpy", "expecttest"]
CLI_TOOLS = ["tqdm", "matplotlib"]
# As many processes as tests/conftest.py says. Each takes tests from another that has many left.
PYTEST = (PYTHON, "-m", "pytest", "-n", "auto", "--dist", "worksteal")
LINT_TOOLS = ["ruff", "clang-format"]
DOC_TOOLS = ["mkdocs", "mkdocstrings[python]", "ruff"]


def say(text: str) -> None:
    print(f"\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"== {text}", flush=True)


def run(*command: object, variables: dict[str, str] | None = None, **options: object) -> None:
    """Runs a command in the checkout; its failure is this program's, without a traceback."""
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **(variables or {})}
    result = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, **options)
    if result.returncode:
        sys.exit(result.returncode)


def ask(code: str) -> str:
    """What the environment's Python prints, or nothing if it fails."""
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def pip_install(what: str, *requirements: str) -> None:
    """Installs requirements unless this very list was installed before (stamp files in .venv)."""
    key = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:16]
    constraints = Path(os.environ.get("PIP_CONSTRAINT", os.devnull)).read_bytes()
    stamp = VENV / f"flash-attn-{key}-{hashlib.sha256(constraints).hexdigest()[:8]}.stamp"
    if stamp.exists():
        return
    say(f"Installing {what}")
    run(
        PYTHON,
        "-m",
        "pip",
        "install",
        "--progress-bar",
        "on",
        "--disable-pip-version-check",
        *requirements,
    )
    stamp.touch()


def make_environment() -> None:
    """.venv, empty if it is new."""
    if PYTHON.exists():
        return
    say("Creating .venv")
    try:
        run(sys.executable, "-m", "venv", VENV, stderr=subprocess.DEVNULL)
    except SystemExit:
        sys.exit(
            "flash_attn: this Python has no module venv: install it "
            "(Debian, Ubuntu: apt-get install python3-venv)"
        )


def install_build() -> None:
    """Torch, the build's tools and, where it makes sense, nvcc."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        sys.exit(
            "flash_attn: a C++20 compiler is needed: install g++ "
            "(Debian, Ubuntu: apt-get install g++)"
        )
    pip_install("torch (the largest part: about 5 GB with CUDA's libraries)", "torch>=2.11")
    pip_install("build and test tools", *BUILD_TOOLS, *TEST_TOOLS, *CLI_TOOLS)
    wants_cuda = os.environ.get("FLASH_ATTN_CUDA") != "0"
    cuda = ask("import torch; print(torch.version.cuda or '')") if wants_cuda else ""
    has_nvcc = (
        shutil.which("nvcc")
        or Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc").exists()
    )
    if cuda and not has_nvcc:
        pip_install(f"nvcc {cuda}", f"cuda-toolkit[nvcc,cccl,cudart]=={cuda}.*")


def build() -> None:
    """An editable install: the first one takes minutes, later ones only what changed."""
    start = time.time()
    say("Building flash_attn (minutes the first time)")
    # What pip writes down at install: a change of it asks for a new installation.
    sources = ("pyproject.toml", "setup.py", "flash_attn/__init__.py", "fa3/pyproject.toml")
    described = hashlib.sha256(b"".join((ROOT / f).read_bytes() for f in sources)).hexdigest()
    stamp = VENV / "flash-attn-editable.stamp"
    if not stamp.exists() or stamp.read_text() != described:
        pip = (PYTHON, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps")
        run(*pip, "-e", ".", "-e", "fa3")
        stamp.write_text(described)
    else:
        run(PYTHON, "setup.py", "-q", "build_ext", "--inplace")
    say(f"Built in {time.time() - start:.0f} s")


def prepare_aarch64() -> None:
    """What compiling for 64-bit Arm needs beside this machine's nvcc; and that pip names it so."""
    if shutil.which("aarch64-linux-gnu-g++") is None:
        sys.exit(
            "flash_attn: a C++20 compiler for aarch64 is needed: install aarch64-linux-gnu-g++ "
            "(Debian, Ubuntu: apt-get install g++-aarch64-linux-gnu)"
        )
    packages = ["torch"]
    if os.environ.get("FLASH_ATTN_CUDA") != "0":
        packages.append("nvidia-cuda-runtime")
    # Of .venv's versions, so that the wheel is for the same torch.
    versions = ask(
        "import sys; from importlib.metadata import version; print('%d.%d' % sys.version_info[:2],"
        f" *(version(x).partition('+')[0] for x in {packages}))"
    )
    if not versions:
        sys.exit("flash_attn: .venv has no torch with CUDA: FLASH_ATTN_CUDA=0 builds without")
    python, *versions = versions.split()
    site = VENV / "aarch64"
    pip_install(
        "torch for aarch64",
        *("--target", str(site), "--no-deps", "--only-binary", ":all:", "--python-version", python),
        *(f"--platform=manylinux_2_{libc}_aarch64" for libc in (17, 27, 28)),
        *("--platform=manylinux2014_aarch64",),
        *(f"{x}=={version}" for x, version in zip(packages, versions, strict=True)),
    )
    nvcc = ask("import nvidia; print(nvidia.__path__[0])")
    for own in Path(nvcc).glob("cu*/bin/nvcc") if nvcc else ():
        os.environ.setdefault("CUDA_HOME", str(own.parent.parent))
    os.environ["FLASH_ATTN_AARCH64_TORCH"] = str(site / "torch")
    os.environ["_PYTHON_HOST_PLATFORM"] = "linux-aarch64"  # sysconfig's name for the target


def wheel(extra: list[str]) -> None:
    """Wheels of both distributions in dist/, for this Python, .venv's torch, and this machine or,
    with --aarch64, 64-bit Arm."""
    if "--aarch64" in extra:
        extra.remove("--aarch64")
        prepare_aarch64()
    pip = (PYTHON, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", "dist")
    run(*pip, *extra, ".", "./fa3")


def demo(extra: list[str]) -> None:
    run(PYTHON, "-m", "flash_attn", "demo", *extra)


def downstream(extra: list[str]) -> None:
    """Other people's programs, of the versions that tests/downstream names."""
    folder = ROOT / "tests" / "downstream"
    lines = (folder / "requirements.txt").read_text().splitlines()
    pip_install("other people's programs", *(x for x in lines if not x.startswith("#")))
    run(*PYTEST, folder, *extra)


def simulator(extra: list[str]) -> None:
    """The tests of the kernels on a simulated GPU (csrc/simulator) of either architecture."""
    if ask("from flash_attn import _build_info; print(_build_info.CUDA)") != "True":
        sys.exit("flash_attn: the simulator needs nvcc's headers: build with CUDA")
    targets = ("flash_attn_simulator_tests", "flash_attn_simulated_80", "flash_attn_simulated_90")
    say("Building the kernels for a simulated GPU")
    run("cmake", "--build", ROOT / "build", "--target", *targets)
    for architecture in ("80", "90"):
        say(f"Tests on a simulated GPU of architecture {architecture}")
        library = str(ROOT / "build" / "simulator" / architecture)
        variables = {
            "FLASH_ATTN_SIMULATED": architecture,
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [library, os.environ.get("LD_LIBRARY_PATH")])
            ),
        }
        run(*PYTEST, *extra, variables=variables)


def test(extra: list[str]) -> None:
    """Python tests, then the C++ program against the installed CMake package."""
    for option, tests in (("--downstream", downstream), ("--simulator", simulator)):
        if option in extra:
            return tests([x for x in extra if x != option])
    say("Building the unit tests of the kernels' tile layers and of the choice of a backend")
    run("cmake", "--build", ROOT / "build", "--target", "flash_attn_tests")
    gpus = ask("import torch; print(torch.cuda.device_count())")
    if extra or gpus in ("", "0", "1"):
        run(*PYTEST, *extra)
    else:
        run(*PYTEST, "-m", "not gpu_ranks")
        say("Tests of ranks on several GPUs, with nothing beside them")
        run(PYTHON, "-m", "pytest", "-m", "gpu_ranks")
    say("C++: building and testing examples/cpp against the installed package")
    example = ROOT / "build" / "example"
    run(
        *("cmake", "-G", "Ninja", "-S", ROOT / "examples" / "cpp", "-B", example),
        *(f"-DCMAKE_PREFIX_PATH={ROOT / 'flash_attn'}", f"-DPython_EXECUTABLE={PYTHON}"),
    )
    run("cmake", "--build", example)
    run("ctest", "--test-dir", example, "--output-on-failure")


def lint(extra: list[str]) -> None:
    """Formatting of C++, CUDA and Python."""
    pip_install("formatters", *LINT_TOOLS)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sources = [f for f in listed.stdout.split() if f.endswith((".h", ".cpp", ".cu", ".cuh"))]
    fix = "--fix" in extra
    run(VENV / "bin" / "clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources)
    run(VENV / "bin" / "ruff", "format", *([] if fix else ["--check"]), ".")
    run(VENV / "bin" / "ruff", "check", *(["--fix"] if fix else []), ".")


def docs(extra: list[str]) -> None:
    """The pages of docs/ and the reference from the docstrings as a site in build/site; a link to
    nothing fails it. The pages lie there as Markdown too, where llms.txt names them."""
    pip_install("what the documentation needs", *DOC_TOOLS)
    run(VENV / "bin" / "mkdocs", "build", "--quiet", *extra)
    pages, site = ROOT / "docs", ROOT / "build" / "site"
    for page in pages.rglob("*.md"):
        shutil.copy(page, site / page.relative_to(pages))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("job", choices=["demo", "test", "lint", "build", "wheel", "docs"])
    arguments, extra = parser.parse_known_args()
    make_environment()
    if arguments.job not in ("lint", "docs"):
        install_build()
    if arguments.job not in ("lint", "docs", "wheel"):
        build()
    jobs = {"demo": demo, "test": test, "lint": lint, "docs": docs, "wheel": wheel}
    jobs.get(arguments.job, lambda extra: None)(extra)


if __name__ == "__main__":
    main()
