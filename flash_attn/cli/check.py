"""Every backend of this machine against naive attention in float64."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .common import CliError, add_device_arguments, check_backend_name, pick_device, table

HELP = "every backend of this machine against float64: forward, gradients and decode"

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# ||x - truth|| / ||truth|| on N(0, 1) inputs. 16-bit types: in units of half an ulp, what rounding
# P, dS and the result once each leaves; the others: the length of the sums and the exponential.
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LIMIT_16_BIT = {"out": 0.75, "dq": 0.9, "dk": 0.9, "dv": 0.8}
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-5 * 2.0**-29}


@dataclass(frozen=True)
class Case:
    name: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    heads_kv: int = 4  # of 4 query heads
    decode: bool = False
    docs: tuple[int, ...] = ()  # varlen: their lengths
    options: dict = field(default_factory=dict)


CASES = (
    Case("full d 64", 200, 333, 64),
    Case("causal d 128", 333, 333, 128, options={"causal": True}),
    Case("causal, more keys, GQA", 70, 260, 64, heads_kv=2, options={"causal": True}),
    Case("causal, more queries", 260, 70, 64, options={"causal": True}),
    Case("window 33, MQA, d 256", 190, 190, 256, heads_kv=1, options={"window_size": (33, 5)}),
    Case("d 40", 150, 150, 40),
    Case("varlen causal", 0, 0, 64, docs=(1, 0, 130, 77), options={"causal": True}),
    Case("deterministic", 150, 300, 128, options={"causal": True, "deterministic": True}),
    Case("softcap 5", 150, 150, 64, options={"softcap": 5.0}),
    Case("decode 1 token", 1, 700, 128, heads_kv=1, decode=True),
    Case("decode 5 tokens", 5, 700, 64, heads_kv=2, decode=True),
    Case("decode 200 tokens", 200, 700, 128, heads_kv=2, decode=True),
)


@dataclass
class Call:
    """The tensors of a case, and its options for flash_attn and for the reference alike."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    options: dict


def make_call(case: Case, dtype: torch.dtype, device: torch.device) -> Call:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    options = dict(case.options)
    if case.docs:
        cu_seqlens = torch.tensor((0, *case.docs), device=device).cumsum(0).to(torch.int32)
        for side in ("q", "k"):
            options |= {f"cu_seqlens_{side}": cu_seqlens, f"max_seqlen_{side}": max(case.docs)}
        lead_q = lead_k = (sum(case.docs),)
    else:
        lead_q, lead_k = (2, case.seqlen_q), (2, case.seqlen_k)
    return Call(
        q=normal(*lead_q, 4, case.head_dim),
        k=normal(*lead_k, case.heads_kv, case.head_dim),
        v=normal(*lead_k, case.heads_kv, case.head_dim),
        dout=normal(*lead_q, 4, case.head_dim),
        options=options,
    )


def backends_for(case: Case, call: Call, op: str = "fwd") -> list[str]:
    """The one that serves the call (or its backward), and the others that could."""
    import flash_attn

    op = "decode" if case.decode else op
    support = flash_attn.can_use(call.q, call.k, call.v, op=op, **call.options)
    return [support.backend, *(name for name, why in support.reasons.items() if not why)]


def run_attention(call: Call, backward: bool) -> dict[str, torch.Tensor]:
    import flash_attn

    varlen = "cu_seqlens_q" in call.options
    attend = flash_attn.flash_attn_varlen_func if varlen else flash_attn.flash_attn_func
    leaves = [x.detach().requires_grad_(backward) for x in (call.q, call.k, call.v)]
    out = attend(*leaves, **call.options)
    if not backward:
        return {"out": out}
    grads = torch.autograd.grad(out, leaves, call.dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def run_decode(call: Call) -> dict[str, torch.Tensor]:
    """The second sequence's cache is part full, and what it does not use is NaN."""
    import flash_attn

    lengths, k, v = part_full(call)
    return {"out": flash_attn.flash_decode_func(call.q, k, v, lengths)}


def part_full(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    capacity = call.k.shape[1]
    used = capacity // 3
    k, v = call.k.clone(), call.v.clone()
    k[1, used:], v[1, used:] = math.nan, math.nan
    lengths = torch.tensor([capacity, used], dtype=torch.int32, device=k.device)
    return lengths, k, v


def truth(case: Case, call: Call) -> dict[str, torch.Tensor]:
    from flash_attn.reference import attention_ref, attention_ref_grads

    if case.decode:
        lengths, k, v = part_full(call)
        out, _, _ = attention_ref(call.q, k, v, causal=True, seqused_k=lengths)
        return {"out": out}
    # The reference is deterministic already.
    options = {name: x for name, x in call.options.items() if name != "deterministic"}
    out, _, _ = attention_ref(call.q, call.k, call.v, **options)
    grads = attention_ref_grads(call.dout, call.q, call.k, call.v, **options)
    return {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def limit(tensor: str, dtype: torch.dtype) -> float:
    return LIMIT[dtype] if dtype in LIMIT else LIMIT_16_BIT[tensor] * HALF_ULP[dtype]


def rows(device: torch.device, only: str | None) -> Iterator[tuple[list[str | None], bool]]:
    """(table row, passed) of each backend, dtype and case."""
    import flash_attn

    for dtype in DTYPES:
        for case in CASES:
            call = make_call(case, dtype, device)
            names = [n for n in backends_for(case, call) if only in (None, n)]
            exact = truth(case, call) if names else {}
            for name in names:
                backward = not case.decode and name in backends_for(case, call, "bwd")
                with flash_attn.use_backend(name):
                    results = run_decode(call) if case.decode else run_attention(call, backward)
                errors = {t: relative_error(x, exact[t]) for t, x in results.items()}
                # NaN is no pass
                passed = all(error <= limit(t, dtype) for t, error in errors.items())
                figures = [f"{errors[t]:.1e}" if t in errors else None for t in LIMIT_16_BIT]
                label = str(dtype).removeprefix("torch.")
                row = [name, str(device), label, case.name, *figures, "ok" if passed else "FAILED"]
                yield row, passed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    check_backend_name(args.backend)
    devices = [device]
    if args.device is None and device.type == "cuda":
        devices.insert(0, torch.device("cpu"))
    lines, failed = [], 0
    for where in devices:
        for row, passed in rows(where, args.backend):
            lines.append(row)
            failed += not passed
    if not lines:
        raise CliError(f"--backend: none of the calls is served by {args.backend!r} on {device}")
    print("relative error against float64, ||x - exact|| / ||exact||")
    print(table(["backend", "device", "dtype", "case", *LIMIT_16_BIT, "verdict"], lines))
    print(f"{len(lines) - failed} of {len(lines)} within the limits")
    return 1 if failed else 0
