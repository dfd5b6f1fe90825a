"""What is built, what this machine has, and which backend serves which call."""

import argparse
import platform
import textwrap

import torch

from . import support
from .common import add_device_arguments, pick_device

HELP = "what is built, what this machine has, which backend serves which call and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_arguments(parser, backend=False)


# (name of a feature, dtype, head dim), the reasons for whose backends are told.
TYPICAL = {
    "fwd": [
        *(("causal, windows, GQA, LSE", dtype, d) for dtype, d in (("bf16", 128), ("fp16", 64))),
        *(("causal, windows, GQA, LSE", dtype, d) for dtype, d in (("fp32", 64), ("bf16", 512))),
        *(
            (name, "bf16", 128)
            for name in ("varlen, seqused, leftpad", "dropout", "softcap", "ALiBi", "sinks")
        ),
        *((name, "bf16", 128) for name in ("bias of q's dtype", "mask of tiles")),
    ],
    "decode": [
        (name, "bf16", 128)
        for name in ("one new token", "pages", "cache of fp8", "cache of int8", "1024 new tokens")
    ],
}


def served_by(device: torch.device) -> str:
    """The backend of each typical call; a reason that holds for all calls of an op is said once."""
    import flash_attn

    features = {(feature.op, feature.name): feature for feature in support.FEATURES}
    titles = {"fwd": "flash_attn_func, flash_attn_varlen_func", "decode": "flash_decode_func"}
    parts = []
    for op, calls in TYPICAL.items():
        found = {}
        for name, dtype, d in calls:
            feature, of = features[op, name], support.DTYPES[dtype]
            *tensors, options = support.call_of(feature, of, d, device)
            found[f"{name}; {dtype}, d {d}"] = flash_attn.can_use(*tensors, op=op, **options)
        parts.append(f"{titles[op]}\n{_served(found)}")
    return "\n".join(parts)


def column(device: torch.device) -> str:
    """What serves every feature, dtype and head dim: a column of docs/support.md."""
    lines = []
    for op, title in support.OPS.items():
        for names, dtypes, (found,) in support.table(op, (support.ask_here(device),)):
            lines.append(f"{title}, {dtypes}: {support.in_words(found)}")
            lines.append(textwrap.indent(textwrap.fill(names, 96), "    "))
    return "\n".join(lines)


def _served(calls: dict) -> str:
    supports = list(calls.values())
    always = {
        name: [why for why in supports[0].reasons[name] if _holds_for_all(supports, name, why)]
        for name in supports[0].reasons
    }
    lines = [f"  never {name}: {'; '.join(why)}" for name, why in always.items() if why]
    width = max(map(len, calls))
    for call, found in calls.items():
        own = {
            name: [why for why in reasons if why not in always.get(name, ())]
            for name, reasons in found.reasons.items()
        }
        notes = "; ".join(f"{name}: {', '.join(why)}" for name, why in own.items() if why)
        line = f"  {call.ljust(width)}  {found.backend.ljust(5)} {notes and '(not ' + notes + ')'}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _holds_for_all(supports: list, name: str, why: str) -> bool:
    return all(why in support.reasons.get(name, ()) for support in supports)


def run(args: argparse.Namespace) -> int:
    import flash_attn
    from flash_attn import _build_info as build

    device = pick_device(args.device)
    archs = ", ".join(build.CUDA_ARCHS) if build.CUDA else "no: a CPU build"
    rows = [
        ("flash_attn", f"{flash_attn.__version__}, built against torch {build.TORCH_VERSION}"),
        ("CUDA kernels", archs),
        (
            "Python, torch",
            f"{platform.python_version()}, {torch.__version__} (CUDA {torch.version.cuda})",
        ),
        ("CPU", f"{platform.machine()}, {torch.get_num_threads()} threads"),
    ]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(gpus):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        rows.append((f"GPU {index}", f"{properties.name}, {capability}, {memory}"))
    if not gpus:
        rows.append(("GPU", "none that torch can use"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows))
    print(
        f"\nwhich backend serves what on {device}, up to which head dim; aten above that; "
        "*: a mask's hidden tiles are skipped"
    )
    print(column(device))
    print("\nwhy not the others, for typical calls (flash_attn.can_use):")
    print(served_by(device))
    return 0
