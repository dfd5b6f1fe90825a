"""Time and memory of attention over sequence length: ours, naive, and torch's own backends."""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from . import peers
from .common import (
    CliError,
    add_device_arguments,
    check_backend,
    optional_import,
    pick_device,
    positive_int,
    table,
    usual_dtype,
)
from .measure import peak_memory, time_call

HELP = "time and memory of ours, naive attention and torch's backends over sequence length"

SEQLENS = {"cpu": [256, 512, 1024, 2048, 4096], "cuda": [512, 1024, 2048, 4096, 8192, 16384]}
_SIZES = {"cpu": (8, 64), "cuda": (16, 128)}  # heads, head_dim
KINDS = {"forward": "ms", "backward": "ms", "memory": "MiB"}  # memory: the peak of both passes
OURS = "flash_attn"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE.png", help="draw the tables")
    parser.add_argument(
        "--seqlens",
        type=_lengths,
        metavar="N,N,...",
        help="sequence lengths (default: 256 to 4096 on a CPU, 512 to 16384 on a GPU)",
    )
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    add_device_arguments(parser)


def _lengths(text: str) -> list[int]:
    return sorted({positive_int(part) for part in text.split(",")})


def contestants(args: argparse.Namespace, device: torch.device) -> dict[str, peers.Attention]:
    causal = not args.full
    torch_backends = (
        ("flash", "math") if device.type == "cpu" else ("fa2", "cudnn", "efficient", "math")
    )
    return {
        OURS: peers.ours(args.backend, causal),
        "naive": peers.naive(causal),
        **{f"torch {name}": peers.sdpa(name, causal) for name in torch_backends},
    }


def inputs(seqlen: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v, dout: on a GPU 16k tokens of width 2048, on a CPU one sequence of width 512."""
    heads, head_dim = _SIZES[device.type]
    batch = max(1, 16384 // seqlen) if device.type == "cuda" else 1
    shape, dtype = (batch, seqlen, heads, head_dim), usual_dtype(device)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(4)
    )
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def measure(attend: peers.Attention, seqlen: int, device: torch.device) -> dict[str, float | None]:
    """Milliseconds forward and backward, MiB that both need at their peak."""
    q, k, v, dout = inputs(seqlen, device)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    def memory() -> float | None:
        both()
        peak = peak_memory(both, device)
        return None if peak is None else peak / 2**20

    result = {"forward": time_call(forward, device) * 1e3, "memory": memory()}
    out = attend(q, k, v)
    result["backward"] = 1e3 * time_call(
        lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), device
    )
    return result


def attempt(fn: Callable[[], dict], reasons: dict[str, str], name: str) -> dict:
    """An empty dict where this contestant cannot run; the first reason is kept for the reader."""
    try:
        return fn()
    except torch.OutOfMemoryError:
        reasons.setdefault(name, "out of memory")
    except (RuntimeError, NotImplementedError) as error:
        reasons.setdefault(name, str(error).splitlines()[0])
    finally:
        gc.collect()
    return {}


def collect(args: argparse.Namespace, device: torch.device) -> tuple[list[dict], dict[str, str]]:
    """Records {kind, shape, unit, values, ratio}, and why a contestant is missing."""
    entries = contestants(args, device)
    records, reasons = [], {}
    for seqlen in args.seqlens or SEQLENS[device.type]:
        measured = {
            name: attempt(lambda a=attend, n=seqlen: measure(a, n, device), reasons, name)
            for name, attend in entries.items()
        }
        if not measured[OURS]:
            raise CliError(f"seqlen {seqlen}: {reasons[OURS]}")
        for kind, unit in KINDS.items():
            values = {name: result.get(kind) for name, result in measured.items()}
            mine, other = values[OURS], values["naive"]
            shape = {"seqlen": seqlen, "causal": not args.full}
            ratio = {f"naive/{OURS}": other / mine} if mine and other else None
            records.append(dict(kind=kind, shape=shape, unit=unit, values=values, ratio=ratio))
    return records, reasons


def show(records: list[dict]) -> str:
    blocks = []
    for kind, unit in KINDS.items():
        chosen = [r for r in records if r["kind"] == kind]
        names = list(chosen[0]["values"])
        rows = [
            [r["shape"]["seqlen"]]
            + [None if r["values"][n] is None else f"{r['values'][n]:.4g}" for n in names]
            + ["-" if not r["ratio"] else f"{r['ratio'][f'naive/{OURS}']:.2f}"]
            for r in chosen
        ]
        blocks.append(table([f"{kind}, {unit}", *names, f"naive/{OURS}"], rows))
    return "\n\n".join(blocks)


def check_plot(path: str) -> None:
    """Fails before the race on a plot that could not be written after it."""
    plt = optional_import("matplotlib.pyplot", "--plot")
    formats = plt.Figure().canvas.get_supported_filetypes()
    file = Path(path).absolute()
    if not file.parent.is_dir() or file.suffix.removeprefix(".") not in formats:
        raise CliError(f"--plot: expected a .png file in an existing folder, got {path!r}")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    check_backend(args.backend, device, _SIZES[device.type][1])
    if args.plot:
        check_plot(args.plot)
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    q = inputs(1, device)[0]
    mask = "full" if args.full else "causal"
    print(
        f"{where}, {q.dtype}, {q.shape[2]} heads of {q.shape[3]}, {mask}, torch {torch.__version__}"
    )
    records, reasons = collect(args, device)
    print(show(records))
    for name, reason in reasons.items():
        print(f"{name}: {reason}")
    if args.plot:
        from .plot import plot_records

        plot_records(records, args.plot, title=where)
        print(f"plot: {args.plot}")
    return 0
