"""Why flash attention is fast: bytes through device memory, operations and time beside naive.

    python -m benchmarks.io [--backend sm80] [--out FILE.json]

The bytes are the hardware's own counters (ncu, dram__bytes_read.sum and dram__bytes_write.sum over
all kernels of one forward call; one child process makes all calls); the time is taken without ncu,
settled.
"""

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys

import torch

from benchmarks import backends, results
from benchmarks.shapes import Case
from benchmarks.timing import Timer

LENGTHS = (512, 1024, 2048, 4096, 8192)
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
SEPARATOR = "spin_kernel"  # of torch.cuda._sleep
CHILD_SECONDS = 120


def make_case(seqlen: int) -> Case:
    """16k tokens in all, width 1024, causal."""
    return Case(16384 // seqlen, seqlen, 16, 64, causal=True)


def find_ncu() -> str | None:
    found = shutil.which("ncu")
    beside_nvcc = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "ncu")
    return found or (beside_nvcc if os.access(beside_nvcc, os.X_OK) else None)


def child(names: list[str], lengths: list[int]) -> None:
    """For each length and name a forward call that is profiled, after one that is not.

    A spinning kernel ends each call's kernels, so that the parent can tell the calls apart.
    """
    device = torch.device("cuda")
    for seqlen in lengths:
        case = make_case(seqlen)
        inputs = backends.make_inputs(case, torch.float16, device)
        for name in names:
            call = backends.forward(name, case, inputs)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def dram_bytes(ncu: str, names: tuple[str, ...], lengths: tuple[int, ...]) -> list[float]:
    """Bytes that all kernels of a call read and wrote, in the order of child's calls; caches stay
    warm between the kernels."""
    command = [ncu, "--profile-from-start", "off", "--print-units", "base"]
    command += ["--clock-control", "none", "--cache-control", "none"]
    command += ["--metrics", ",".join(METRICS), "--csv", "--target-processes", "application-only"]
    command += [sys.executable, "-m", "benchmarks.io", "--child", ",".join(names)]
    command += ["--lengths", ",".join(map(str, lengths))]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=results.ROOT, timeout=CHILD_SECONDS
    )
    calls = parse(done.stdout)
    if done.returncode or len(calls) != len(names) * len(lengths):
        raise RuntimeError((done.stdout + done.stderr).strip()[-300:])
    return calls


def parse(output: str) -> list[float]:
    """Bytes of each call: sums of the metrics in ncu's CSV, which follows its log lines, between
    the spinning kernels."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    calls, total, ended = [], 0.0, None
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row["Metric Name"] not in METRICS:
            continue
        if SEPARATOR not in row["Kernel Name"]:
            total += float(row["Metric Value"].replace(",", ""))
        elif row["ID"] != ended:  # one row a metric, all with the launch's ID
            calls.append(total)
            total, ended = 0.0, row["ID"]
    return calls


def measured_bytes(names: tuple[str, ...], lengths: tuple[int, ...]) -> dict | None:
    """Bytes by (length, name) if ncu is there and may read the counters; else one line that says
    why not, and None."""
    ncu = find_ncu()
    try:
        if ncu:
            keys = [(seqlen, name) for seqlen in lengths for name in names]
            return dict(zip(keys, dram_bytes(ncu, names, lengths), strict=True))
        why = "ncu (Nsight Compute) not found"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        why = "ncu failed: " + " ".join(str(error).split())
    print(f"io: no bytes, only time and operations: {why}", file=sys.stderr)
    return None


def measure(names: tuple[str, str], timer: Timer) -> list[dict]:
    records = []
    ours, naive = names
    moved_bytes = measured_bytes(names, LENGTHS)
    for seqlen in LENGTHS:
        case = make_case(seqlen)
        inputs = backends.make_inputs(case, torch.float16, timer.device)
        shape = case.shape()
        times = {n: timer(backends.forward(n, case, inputs)) * 1e3 for n in names}
        faster = results.ratios(times, ours, [naive], "less")
        records.append(results.record("io.time", shape, "ms", times, faster))
        # naive multiplies the masked half as well
        flops = {ours: case.flops(False) / 1e9, naive: 2 * case.flops(False) / 1e9}
        records.append(results.record("io.operations", shape, "GFLOP", flops))
        if moved_bytes:
            moved = {n: moved_bytes[seqlen, n] / 1e6 for n in names}
            fewer = {f"{naive}/{ours}": moved[naive] / moved[ours]}
            least = (
                4 * inputs.q.numel() * inputs.q.element_size() / 1e6
            )  # q, k, v read, out written
            records.append(results.record("io.dram", shape, "MB", {**moved, "least": least}, fewer))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="sm80", help="ours")
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--lengths", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    if args.child:
        child(args.child.split(","), [int(s) for s in args.lengths.split(",")])
        return 0
    timer = Timer(torch.device("cuda"))
    records = [
        results.run_record(timer.device, timer.recipe.describe(timer.device) + "; bytes by ncu")
    ]
    records += measure((args.backend, "naive"), timer)
    results.write(args.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
