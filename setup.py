"""Builds the C++ and CUDA part with CMake, the one build, into the Python package."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


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
        build = ROOT / "build"
        configure = [
            *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build)),
            f"-DCMAKE_INSTALL_PREFIX={package}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DFLASH_ATTN_STRICT={os.environ.get('FLASH_ATTN_STRICT', '0')}",
            f"-DFLASH_ATTN_TESTS={'ON' if self.inplace else 'OFF'}",
        ]
        if archs := os.environ.get("FLASH_ATTN_CUDA_ARCHS"):
            configure.append(f"-DFLASH_ATTN_CUDA_ARCHS={archs}")
        for command in (configure, ["cmake", "--build", str(build), "--target", "install"]):
            if subprocess.call(command) != 0:
                sys.exit(f"flash_attn: the build failed: {' '.join(command)}")

    def get_outputs(self) -> list[str]:
        return []


setup(ext_modules=[Extension("flash_attn._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
