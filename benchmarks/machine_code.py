"""Is the machine code of two builds the same?

    python -m benchmarks.machine_code BEFORE AFTER [--files TEXT]     two folders with object files

For a change that is to leave the kernels as they are: moved files, renamed types, another layout of
a parameter struct. Kernels are paired by their code, whatever they are called and wherever they
stand. Two are equal if every instruction is, with its registers, its immediates and the words that
steer its issue, and if they take the same registers, stack and shared memory. Masked are offsets in
the constant bank, where the parameters lie, mangled names, and the sum of a parameter's address.
Ends with 1 if a kernel of either build has no equal in the other.

nvcc names things inside a file after the file's path, and in a few large kernels the order of
instructions follows. Where those differ, compile the file of before at another path as well: what
the path alone changes is no change of the source.

Needs cuobjdump and nvdisasm: of the CUDA Toolkit, or those that pip brings with triton.
"""

import argparse
import collections
import difflib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# A parameter: c[0x0][0x210], c[0x0][R4+0x210].
_CONSTANT = re.compile(r"(c\[0x[0-9a-f]+\]\[(?:U?R\d+\+)?)0x[0-9a-f]+\]")
# The address of a parameter as a sum of 64 bits, whose lower half carries into a predicate.
_PARAMETER_ADDRESS = re.compile(r"(U?IADD3 U?R\d+, U?P\d, U?R\d+, )0x[2-9a-f][0-9a-f]{2},")
_NAME = re.compile(r"\b_Z\w+|\$_\w+|\.(?:text|nv)\.\w+")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* (0x[0-9a-f]{16}) \*/")
_SECOND_WORD = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
_RESOURCES = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")


@dataclass(frozen=True)
class Kernel:
    """One function of an object file, for one architecture."""

    file: str
    name: str
    code: tuple[str, ...]  # masked, behind a line of architecture and resources


def masked(instruction: str) -> str:
    """An instruction without what another layout of the parameters changes."""
    instruction = _CONSTANT.sub(r"\1*]", instruction)
    instruction = _PARAMETER_ADDRESS.sub(r"\1*,", instruction)
    return _NAME.sub("name", instruction)


def read_code(listing: str) -> dict[tuple[str, str], list[str]]:
    """(architecture, function) -> masked instructions, of what `cuobjdump -sass` prints."""
    functions: dict[tuple[str, str], list[str]] = {}
    arch, lines = "", []
    for line in listing.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif line.lstrip().startswith("Function : "):
            lines = functions.setdefault((arch, line.split(" : ")[1].strip()), [])
        elif found := _INSTRUCTION.search(line):
            lines.append(masked(found[2]))
        elif lines and (found := _SECOND_WORD.match(line)):
            lines[-1] += f"  {found[1]}"
    return functions


def read_resources(listing: str) -> dict[tuple[str, str], str]:
    """(architecture, function) -> registers and memory, of what `cuobjdump -res-usage` prints."""
    resources: dict[tuple[str, str], str] = {}
    arch = name = ""
    for line in listing.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif line.lstrip().startswith("Function "):
            name = line.split()[1].rstrip(":")
        elif found := _RESOURCES.findall(line):
            resources[arch, name] = " ".join(f"{key} {value}" for key, value in found)
    return resources


def find_cuobjdump() -> str:
    candidates = [shutil.which("cuobjdump"), "/usr/local/cuda/bin/cuobjdump"]
    try:
        import triton

        candidates.append(str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"))
    except ImportError:
        pass
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    sys.exit("machine_code: no cuobjdump: it comes with the CUDA Toolkit, or with pip's triton")


def read_kernels(folder: Path, files: str, cuobjdump: str) -> list[Kernel]:
    def dump(path: Path, what: str) -> str:
        result = subprocess.run([cuobjdump, what, path], capture_output=True, text=True)
        return result.stdout

    def of_file(path: Path) -> list[Kernel]:
        code, resources = read_code(dump(path, "-sass")), read_resources(dump(path, "-res-usage"))
        return [
            Kernel(path.name, name, (f"{arch}: {resources[arch, name]}", *lines))
            for (arch, name), lines in code.items()
        ]

    paths = sorted(path for path in folder.rglob("*.cu.o") if files in str(path))
    if not paths:
        sys.exit(f"machine_code: no object files of CUDA sources below {folder}")
    with ThreadPoolExecutor(2) as pool:
        return [kernel for kernels in pool.map(of_file, paths) for kernel in kernels]


def unmatched(before: list[Kernel], after: list[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of each build that have no equal in the other."""

    def without(kernels: list[Kernel], others: list[Kernel]) -> list[Kernel]:
        left = collections.Counter(kernel.code for kernel in others)
        found = []
        for kernel in kernels:
            if left[kernel.code] > 0:
                left[kernel.code] -= 1
            else:
                found.append(kernel)
        return found

    return without(before, after), without(after, before)


def describe(kernel: Kernel, others: list[Kernel]) -> str:
    """A kernel without an equal, and where it leaves the one of the other build nearest to it."""
    title = (
        f"{kernel.file}: {kernel.name}\n    {kernel.code[0]}, {len(kernel.code) - 1} instructions"
    )
    arch = kernel.code[0].split(":")[0]
    candidates = {other.name: other for other in others if other.code[0].startswith(arch + ":")}
    nearest = difflib.get_close_matches(kernel.name, candidates, n=1, cutoff=0)
    if not nearest:
        return title
    other = candidates[nearest[0]].code
    pairs = zip(kernel.code[1:], other[1:], strict=False)
    first = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    text = f"{title}\n    the other build: {other[0]}, {len(other) - 1} instructions"
    if first is None:
        return text
    return f"{text}\n    {first}: {kernel.code[first + 1]}\n    {first}: {other[first + 1]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--files", default="", help="only object files with this in their path")
    arguments = parser.parse_args()
    cuobjdump = find_cuobjdump()
    before = read_kernels(arguments.before, arguments.files, cuobjdump)
    after = read_kernels(arguments.after, arguments.files, cuobjdump)
    only_before, only_after = unmatched(before, after)
    for build, kernels, others in (
        ("before", only_before, only_after),
        ("after", only_after, only_before),
    ):
        for kernel in kernels:
            print(f"only {build}: {describe(kernel, others)}")
    print(f"{len(before)} kernels before, {len(after)} after, ", end="")
    print(f"{len(before) - len(only_before)} equal, {len(only_after)} without an equal")
    return 1 if only_before or only_after else 0


if __name__ == "__main__":
    sys.exit(main())
