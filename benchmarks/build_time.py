"""How long a clean build takes, and which files take it.

    python -m benchmarks.build_time [--jobs N] [--out FILE.json]      builds in a temporary folder
    python -m benchmarks.build_time --log build/.ninja_log            reads a build that was made

Times of single files are those of a parallel build: they add up to more than the whole.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import results


def clean_build(folder: Path, jobs: int | None) -> float:
    """Configures and builds into an empty folder; seconds."""
    tools = os.environ | {
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    }
    configure = ["cmake", "-G", "Ninja", "-S", str(results.ROOT), "-B", str(folder)]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    build = ["cmake", "--build", str(folder), *(["-j", str(jobs)] if jobs else [])]
    start = time.perf_counter()
    subprocess.run(configure, env=tools, check=True)
    subprocess.run(build, env=tools, check=True)
    return time.perf_counter() - start


def file_times(log: Path) -> dict[str, float]:
    """Seconds of each output of a ninja log (start and end in ms, mtime, output, hash)."""
    times: dict[str, float] = {}
    for line in log.read_text().splitlines():
        if line.startswith("#"):
            continue
        start, end, _, output, _ = line.split("\t")
        times[_source(output)] = (
            int(end) - int(start)
        ) / 1e3  # a later line is a newer build of it
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _source(output: str) -> str:
    """CMakeFiles/flash_attn.dir/csrc/aten/fwd.cpp.o -> csrc/aten/fwd.cpp; a file that CMake puts
    together of several keeps its target in front, as several targets may have one of that name."""
    target, _, name = output.removesuffix(".o").removeprefix("CMakeFiles/").rpartition(".dir/")
    return f"{target}/{name}" if name.startswith("Unity/") else name


def build_records(log: Path, seconds: float | None) -> list[dict]:
    times = file_times(log)
    if seconds is None:
        ends = [int(line.split("\t")[1]) for line in log.read_text().splitlines()[1:]]
        seconds = max(ends) / 1e3
    records = [results.record("build", {"what": "all"}, "s", {"seconds": seconds})]
    records += [
        results.record("build.file", {"file": f}, "s", {"seconds": t}) for f, t in times.items()
    ]
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, help="default: as many as ninja likes")
    parser.add_argument("--log", type=Path, help="read this .ninja_log instead of building")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    if args.log:
        if not args.log.is_file():
            parser.error(f"--log: {args.log} does not exist")
        measured = build_records(args.log, None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            seconds = clean_build(Path(folder), args.jobs)
            measured = build_records(Path(folder, ".ninja_log"), seconds)
    method = f"{args.jobs or os.cpu_count()} jobs on {os.cpu_count()} cores"
    records = [results.run_record(torch.device("cpu"), method), *measured]
    results.write(args.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
