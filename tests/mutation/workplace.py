"""A copy of the built package in which files are others: Python, or objects of the library."""

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


# Which of a tensor's numbers the host reads, and the same where it reads none, as on a GPU.
HOST_READS = "csrc/aten/host_reads.cpp"


def padded_host_reads() -> dict[str, str]:
    text = (ROOT / HOST_READS).read_text()
    other = text.replace("const at::Tensor& x", "const at::Tensor&").replace(
        "x.is_cpu() && gpu_of(x) == nullptr", "false"
    )
    assert other.count("false") == 1
    return {HOST_READS: other}


class Workplace:
    """A copy of the package, and what compiles and links objects of the library into it."""

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

    def install(self, texts: dict[str, str]) -> bool:
        """Puts these texts in the place of files of the checkout. False: one does not compile."""
        objects = {}
        for number, (file, text) in enumerate(texts.items()):
            if not file.endswith(".cpp"):
                (self.scratch / file).write_text(text)
                continue
            compiled = self._compile(file, text, self.scratch / f"mutated{number}.o")
            if compiled is None:
                return False
            objects |= compiled
        if objects:
            self._link(objects)
        return True

    def _compile(self, file: str, text: str, to: Path) -> dict[str, str] | None:
        """The object of the build, and what stands for it; None: it does not compile."""
        commands = json.loads((self.build / "compile_commands.json").read_text())
        [entry] = [c for c in commands if c["file"] == str(ROOT / file)]
        mutated = to.with_suffix(".cpp")
        mutated.write_text(text)
        words = shlex.split(entry["command"])
        was = words[words.index("-o") + 1]
        words[words.index("-o") + 1] = str(to)
        words[words.index(str(ROOT / file))] = str(mutated)
        words += ["-iquote", str((ROOT / file).parent), "-w"]
        done = subprocess.run(words, cwd=self.build, capture_output=True, check=False)
        return None if done.returncode else {was: str(to)}

    def _link(self, objects: dict[str, str]) -> None:
        listing = [find_ninja(), "-t", "commands", "libflash_attn.so"]
        links = subprocess.run(listing, cwd=self.build, capture_output=True, text=True, check=True)
        link = links.stdout.splitlines()[-1]
        for was, now in objects.items():
            link = link.replace(f" {was} ", f" {now} ")
        link = link.replace("-o libflash_attn.so", f"-o {self.library}")
        subprocess.run(link, cwd=self.build, shell=True, capture_output=True, check=True)

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
