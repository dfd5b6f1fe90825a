"""What a library costs before it has computed anything: import, first calls, bytes on disk.

    python -m benchmarks.first_call [--device cuda] [--rounds 3] [--out FILE.json]

Each figure comes from fresh processes, torch imported and the device woken before the clock starts,
and is the median of the rounds: the import of the library, the first forward, the first backward,
and a call after both. Ours beside torch's SDPA, FlexAttention under torch.compile (with an empty
cache of its own each round) and, where it can be imported, FlashAttention-4. Of a contestant that
cannot run on the device only the steps before are timed: an import needs no GPU. Bytes on disk are
those of what is installed for it beside torch.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import results

STEP_SECONDS = 120  # of one process

# How a contestant is imported, and its call of q, k, v: (batch, seqlen, heads, d).
CONTESTANTS = {
    "ours": ("import flash_attn", "flash_attn.flash_attn_func(q, k, v, causal=True)"),
    # The kernels that GPUs other than Hopper run, on any.
    "sm80": (
        "import flash_attn; flash_attn.use_backend('sm80').__enter__()",
        "flash_attn.flash_attn_func(q, k, v, causal=True)",
    ),
    "sdpa": (
        "import torch.nn.functional as F",
        "F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)",
    ),
    "flex": (
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention;"
        " attend = torch.compile(flex_attention);"
        " mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024, DEVICE)",
        "attend(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)",
    ),
    "fa4": (
        "from flash_attn.cute.interface import flash_attn_func",
        "first(flash_attn_func(q, k, v, causal=True))",
    ),
}
PROCESS = """
import json, sys, time, torch
DEVICE = sys.argv[1]
make = dict(device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
q, k, v = (torch.randn(1, 1024, 8, 128, **make) for _ in range(3))
(q.detach().flatten(1) @ q.detach().flatten(1).T).sum().item()
synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
first = lambda x: x[0] if isinstance(x, tuple) else x
seconds = {}
def timed(name, run):
    synchronize()
    start = time.perf_counter()
    result = run()
    synchronize()
    seconds[name] = time.perf_counter() - start
    print("seconds", json.dumps(seconds), flush=True)
    return result
timed("import", lambda: exec(IMPORT, globals()))
out = timed("first forward", lambda: eval(CALL))
timed("first backward", lambda: out.sum().backward())
timed("later call", lambda: eval(CALL))
"""


def run(name: str, device: str) -> dict[str, float]:
    """Seconds of each step in a fresh process, up to the one that fails."""
    how, call = CONTESTANTS[name]
    code = f"IMPORT = {how!r}\nCALL = {call!r}\n{PROCESS}"
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        if name == "fa4":
            # Beside our package flash_attn.cute would import ours first.
            places = env.get("PYTHONPATH", "").split(os.pathsep)
            others = (p for p in places if p and Path(p).resolve() != results.ROOT)
            env["PYTHONPATH"] = os.pathsep.join(others)
        done = subprocess.run(
            [sys.executable, "-c", code, device],
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
            cwd=cache if name == "fa4" else None,
            env=env,
        )
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    steps = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    return json.loads(steps[-1].removeprefix("seconds ")) if steps else {}


def size_of(folder: Path) -> int:
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return sum(f.stat().st_size for f in files)


def mebibytes(name: str) -> float | None:
    """What is installed for a contestant beside torch."""
    modules = {
        "ours": ["flash_attn"],
        "sm80": ["flash_attn"],
        "sdpa": [],
        "flex": [],
        "fa4": [
            *("flash_attn.cute", "quack", "nvidia_cutlass_dsl", "tvm_ffi"),
            *("torch_c_dlpack_ext", "google.protobuf"),
        ],
    }[name]
    places: list[str] = []
    for number, module in enumerate(modules):
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        if spec is not None:
            places += spec.submodule_search_locations or ()
        elif number == 0:
            return None  # not installed; what it needs may come with torch, or not at all
    return sum(size_of(Path(place)) for place in places) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    default = ",".join(name for name in CONTESTANTS if name != "sm80")
    parser.add_argument("--contestants", default=default, help=f"some of {','.join(CONTESTANTS)}")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    records = [
        results.run_record(
            torch.device(args.device),
            f"fresh processes, median of {args.rounds}; q, k, v of (1, 1024, 8, 128)",
        )
    ]
    steps: dict[str, dict[str, float]] = {}
    for name in args.contestants.split(","):
        taken = [run(name, args.device) for _ in range(args.rounds)]
        for step in taken[0]:
            if all(step in seconds for seconds in taken):
                median = statistics.median(seconds[step] for seconds in taken)
                steps.setdefault(step, {})[name] = 1e3 * median
    records += [results.record("first", {"step": s}, "ms", v) for s, v in steps.items()]
    on_disk = {name: mebibytes(name) for name in args.contestants.split(",")}
    records.append(results.record("disk", {}, "MiB", on_disk))
    results.write(args.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
