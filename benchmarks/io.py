"""Why flash attention is fast: bytes through device memory, operations and time beside naive.

    python -m benchmarks.io [--backend sm80] [--out FILE.json]

The bytes are the hardware's own counters (ncu, dram__bytes_read.sum and dram__bytes_write.sum over
all kernels of one forward call, in a child process); the time is taken without ncu, settled.
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
CHILD_SECONDS = 60


def make_case(seqlen: int) -> Case:
    """16k tokens in all, width 1024, causal."""
    return Case(16384 // seqlen, seqlen, 16, 64, causal=True)


def find_ncu() -> str | None:
    found = shutil.which("ncu")
    beside_nvcc = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "ncu")
    return found or (beside_nvcc if os.access(beside_nvcc, os.X_OK) else None)


def child(name: str, seqlen: int) -> None:
    """One profiled forward call, after one that is not."""
    device = torch.device("cuda")
    case = make_case(seqlen)
    call = backends.forward(name, case, backends.make_inputs(case, torch.float16, device))
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def dram_bytes(ncu: str, name: str, seqlen: int) -> float:
    """Bytes that all kernels of one call read and wrote; caches stay warm between them."""
    command = [ncu, "--profile-from-start", "off", "--print-units", "base"]
    command += ["--clock-control", "none", "--cache-control", "none"]
    command += ["--metrics", ",".join(METRICS), "--csv", "--target-processes", "application-only"]
    command += [sys.executable, "-m", "benchmarks.io", "--child", name, "--seqlen", str(seqlen)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=results.ROOT, timeout=CHILD_SECONDS
    )
    total = parse(done.stdout)
    if done.returncode or total is None:
        raise RuntimeError((done.stdout + done.stderr).strip()[-300:])
    return total


def parse(output: str) -> float | None:
    """Bytes: the sum of the metrics in ncu's CSV, after its log lines; None if there is none."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return None
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    values = [
        float(row["Metric Value"].replace(",", "")) for row in rows if row["Metric Name"] in METRICS
    ]
    return sum(values) if values else None


def usable_ncu(name: str) -> str | None:
    """ncu if it is there and may read the counters; else one line that says why not, and None."""
    ncu = find_ncu()
    try:
        if ncu:
            dram_bytes(ncu, name, LENGTHS[0])
            return ncu
        why = "ncu (Nsight Compute) not found"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        why = "ncu failed: " + " ".join(str(error).split())
    print(f"io: no bytes, only time and operations: {why}", file=sys.stderr)
    return None


def measure(names: tuple[str, str], ncu: str | None, timer: Timer) -> list[dict]:
    records = []
    ours, naive = names
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
        if ncu:
            moved = {n: dram_bytes(ncu, n, seqlen) / 1e6 for n in names}
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
    parser.add_argument("--seqlen", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    if args.child:
        child(args.child, args.seqlen)
        return 0
    ncu = find_ncu()
    if ncu is None:
        print(
            "io: ncu (Nsight Compute) not found: no bytes, only time and operations",
            file=sys.stderr,
        )
    timer = Timer(torch.device("cuda"))
    records = [
        results.run_record(timer.device, timer.recipe.describe(timer.device) + "; bytes by ncu")
    ]
    records += measure((args.backend, "naive"), ncu, timer)
    results.write(args.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
