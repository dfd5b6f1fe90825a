"""Builds the C++ and CUDA part with CMake, the one build, into the Python package."""

import importlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str, folder: str) -> str:
    """The program of the package `name` of this Python, else beside this Python, else on PATH.

    An environment that is not activated has its programs beside its Python and not on PATH.
    """
    places = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    with suppress(ImportError, AttributeError):
        places.insert(0, getattr(importlib.import_module(name), folder))
    program = shutil.which(name, path=os.pathsep.join(map(str, places)))
    if program is None:
        sys.exit(f"flash_attn: {name} is not installed. Install it first: pip install {name}")
    return program


class CMakeBuild(build_ext):
    """Builds incrementally in build/, installs beside the package's Python files."""

    def run(self) -> None:
        try:
            import torch  # noqa: F401
        except ImportError:
            sys.exit(
                "flash_attn: torch is not installed in this Python. Install it first "
                "(pip install torch), then build against it: pip install --no-build-isolation ."
            )
        package = (
            ROOT / "flash_attn" if self.inplace else Path(self.build_lib, "flash_attn").resolve()
        )
        # dev.py wheel --aarch64 sets it: the package torch of that machine.
        other_torch = os.environ.get("FLASH_ATTN_AARCH64_TORCH")
        build = ROOT / "build" / "aarch64" if other_torch else ROOT / "build"
        cmake, ninja = tool("cmake", "CMAKE_BIN_DIR"), tool("ninja", "BIN_DIR")
        configure = [
            *(cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(build)),
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DCMAKE_INSTALL_PREFIX={package}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DFLASH_ATTN_STRICT={os.environ.get('FLASH_ATTN_STRICT', '0')}",
        ]
        if other_torch:
            configure.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64.cmake'}")
            configure.append(f"-DFLASH_ATTN_TORCH_DIR={other_torch}")
        if archs := os.environ.get("FLASH_ATTN_CUDA_ARCHS"):
            configure.append(f"-DFLASH_ATTN_CUDA_ARCHS={archs}")
        for command in (configure, [cmake, "--build", str(build), "--target", "install"]):
            if subprocess.call(command) != 0:
                sys.exit(f"flash_attn: the build failed: {' '.join(command)}")

    def get_outputs(self) -> list[str]:
        return []


def torch_requirement() -> str:
    """The one torch that a library built here loads with; without one, what a build needs."""
    try:
        return f"torch=={version('torch').partition('+')[0]}"
    except PackageNotFoundError:
        return "torch>=2.11"


setup(
    ext_modules=[Extension("flash_attn._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # einops: programs import rearrange from bert_padding.
    install_requires=[torch_requirement(), "einops"],
)
