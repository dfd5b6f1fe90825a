"""A copy of the built package in which one file is another: Python, or an object of the library."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STEP_SECONDS = 400  # of one pytest; a mutant that takes longer hangs, and is caught


def find_ninja() -> str | None:
    return shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


class Workplace:
    """A copy of the package, and what compiles and links one object of the library into it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        for part in ("flash_attn", "tests", "fa3"):
            shutil.copytree(ROOT / part, scratch / part, ignore=shutil.ignore_patterns("__pyc*"))
        for file in ("flash_attn_2_cuda.py", "pyproject.toml"):
            shutil.copy(ROOT / file, scratch)
        self.library = scratch / "flash_attn" / "lib" / "libflash_attn.so"
        self.original = scratch / "libflash_attn.original"
        shutil.copy(self.library, self.original)
        self.build = ROOT / "build"

    def restore(self, file: str) -> None:
        if file.endswith(".cpp"):
            shutil.copy(self.original, self.library)
        else:
            shutil.copy(ROOT / file, self.scratch / file)

    def install(self, file: str, text: str) -> bool:
        """Puts `text` in the place of a file of the checkout. False: it does not compile."""
        if file.endswith(".cpp"):
            return self._compile(file, text)
        (self.scratch / file).write_text(text)
        return True

    def _compile(self, file: str, text: str) -> bool:
        commands = json.loads((self.build / "compile_commands.json").read_text())
        [entry] = [c for c in commands if c["file"] == str(ROOT / file)]
        mutated = self.scratch / "mutated.cpp"
        mutated.write_text(text)
        words = shlex.split(entry["command"])
        was, now = words[words.index("-o") + 1], str(self.scratch / "mutated.o")
        words[words.index("-o") + 1] = now
        words[words.index(str(ROOT / file))] = str(mutated)
        words += ["-iquote", str((ROOT / file).parent), "-w"]
        if subprocess.run(words, cwd=self.build, capture_output=True, check=False).returncode:
            return False
        listing = [find_ninja(), "-t", "commands", "libflash_attn.so"]
        links = subprocess.run(listing, cwd=self.build, capture_output=True, text=True, check=True)
        link = links.stdout.splitlines()[-1].replace(f" {was} ", f" {now} ")
        link = link.replace("-o libflash_attn.so", f"-o {self.library}")
        subprocess.run(link, cwd=self.build, shell=True, capture_output=True, check=True)
        return True

    def failure(self, arguments: str) -> str | None:
        """How these tests of pytest end with this package; None where they pass."""
        words = [f"tests/{w}" if w.endswith(".py") else w for w in arguments.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.scratch), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                command,
                cwd=self.scratch,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=STEP_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"longer than {STEP_SECONDS} s"
        return None if done.returncode == 0 else done.stdout[-2000:]
