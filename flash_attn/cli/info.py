"""What is built, what this machine has, and which backend serves which call."""

import argparse
import platform

import torch

from .common import add_device_arguments, pick_device

HELP = "what is built, what this machine has, which backend serves which call and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_arguments(parser, backend=False)


def typical_calls(device: torch.device) -> list[tuple[str, tuple[torch.Tensor, ...], dict]]:
    """(name, (q, k, v), options of can_use): nothing is computed with them."""
    half = torch.bfloat16

    def dense(dtype=half, d: int = 128, kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
        q = torch.empty(1, 64, 4, d, dtype=dtype, device=device)
        k = torch.empty(1, 64, kv_heads, d, dtype=dtype, device=device)
        return q, k, k

    def cached(tokens: int = 1, dtype=half) -> tuple[torch.Tensor, ...]:
        return torch.empty(1, tokens, 4, 128, dtype=half, device=device), *dense(dtype)[1:]

    cu_seqlens = torch.tensor([0, 64], dtype=torch.int32, device=device)
    varlen = {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": 64,
        "max_seqlen_k": 64,
    }
    slopes = torch.ones(4, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    paged = {"block_table": one.view(1, 1) - 1, "cache_seqlens": one}
    return [
        ("causal, bf16, d 128", dense(), {"causal": True}),
        ("GQA, fp16, d 64", dense(torch.float16, 64, 1), {}),
        ("fp32, d 64", dense(torch.float32, 64), {}),
        ("varlen, bf16", tuple(x[0] for x in dense()), {"causal": True, **varlen}),
        ("window 1024, bf16", dense(), {"causal": True, "window_size": (1024, 0)}),
        ("d 512, bf16", dense(d=512), {}),
        ("dropout, bf16", dense(), {"dropout_p": 0.1}),
        ("softcap, bf16", dense(), {"softcap": 50.0}),
        ("ALiBi, bf16", dense(), {"alibi_slopes": slopes}),
        (
            "bias, bf16",
            dense(),
            {"attn_bias": torch.empty(1, 1, 64, 64, dtype=half, device=device)},
        ),
        ("sink, bf16", dense(), {"learnable_sink": slopes}),
        ("decode, bf16", cached(), {"op": "decode"}),
        ("decode, paged, bf16", cached(), {"op": "decode", **paged}),
        ("decode, fp8 cache", cached(dtype=torch.float8_e4m3fn), {"op": "decode"}),
        ("decode, 4096 tokens, bf16", cached(4096), {"op": "decode"}),
    ]


def served_by(device: torch.device) -> str:
    """The backend of each typical call; a reason that holds for all calls of an op is said once."""
    import flash_attn

    found: dict[str, dict[str, flash_attn.Support]] = {"fwd": {}, "decode": {}}
    for name, (q, k, v), options in typical_calls(device):
        support = flash_attn.can_use(q, k, v, **options)
        found[options.get("op", "fwd")][name] = support
    titles = {"fwd": "flash_attn_func, flash_attn_varlen_func", "decode": "flash_decode_func"}
    return "\n".join(f"{titles[op]}\n{_served(calls)}" for op, calls in found.items())


def _served(calls: dict) -> str:
    supports = list(calls.values())
    always = {
        name: [why for why in supports[0].reasons[name] if _holds_for_all(supports, name, why)]
        for name in supports[0].reasons
    }
    lines = [f"  never {name}: {'; '.join(why)}" for name, why in always.items() if why]
    width = max(map(len, calls))
    for call, support in calls.items():
        own = {
            name: [why for why in reasons if why not in always.get(name, ())]
            for name, reasons in support.reasons.items()
        }
        notes = "; ".join(f"{name}: {', '.join(why)}" for name, why in own.items() if why)
        line = (
            f"  {call.ljust(width)}  {support.backend.ljust(5)} {notes and '(not ' + notes + ')'}"
        )
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
        f"\nwhich backend serves a call on {device}, and why not the others (flash_attn.can_use):"
    )
    print(served_by(device))
    return 0
