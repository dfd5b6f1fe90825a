"""The race of packed calls: forward and backward of q, k and v that lie in one tensor."""

from collections.abc import Callable

import torch

import flash_attn
from benchmarks import backends, results
from benchmarks.contest import Race, progress
from benchmarks.shapes import Case
from flash_attn.cli.measure import peak_memory

# separate: three tensors. qkv, kv: the packed functions. unbound: one tensor, of which the plain
# function gets q, k and v, so that autograd copies their gradients into one.
FORMS = ("separate", "qkv", "kv", "unbound")


def attention(form: str, case: Case, inputs: backends.Inputs) -> tuple[Callable, list]:
    """The call without arguments, and its leaves, which hold the same numbers in every form."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    options = {"causal": case.causal}
    bounds, both = (), ()
    if case.docs:
        bounds = (inputs.cu_seqlens, max(case.docs))
        both = (bounds[0], bounds[0], bounds[1], bounds[1])
    prefix = "flash_attn_varlen" if case.docs else "flash_attn"
    if form == "separate":
        call = getattr(flash_attn, f"{prefix}_func")
        return lambda: call(q, k, v, *both, **options), [q, k, v]
    if form == "kv":
        kv = torch.stack([k, v], dim=-3).detach().requires_grad_()
        call = getattr(flash_attn, f"{prefix}_kvpacked_func")
        return lambda: call(q, kv, *both, **options), [q, kv]
    if case.kv_heads != case.heads:
        raise backends.Unsupported("no GQA")
    qkv = torch.stack([q, k, v], dim=-3).detach().requires_grad_()
    if form == "qkv":
        call = getattr(flash_attn, f"{prefix}_qkvpacked_func")
        return lambda: call(qkv, *bounds, **options), [qkv]
    call = getattr(flash_attn, f"{prefix}_func")
    return lambda: call(*qkv.unbind(-3), *both, **options), [qkv]


def both_passes(form: str, case: Case, inputs: backends.Inputs) -> Callable:
    """A forward and its backward; output and gradients of q, k and v, apart."""
    attend, leaves = attention(form, case, inputs)

    def call() -> tuple[torch.Tensor, ...]:
        out = attend()
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
        apart = (x.unbind(-3) if x.dim() > inputs.q.dim() else (x,) for x in gradients)
        return out, *(y for x in apart for y in x)

    return call


def run(race: Race, cases: list[Case], names: tuple[str, ...]) -> list[dict]:
    """Microseconds of both passes, and MiB above the inputs; ratio: ÷ those of separate tensors."""
    records = []
    for case in cases:
        inputs = backends.make_inputs(case, race.dtype, race.device)
        calls: dict[str, Callable] = {}

        def build(form: str, case=case, inputs=inputs, calls=calls) -> Callable:
            calls[form] = both_passes(form, case, inputs)
            return calls[form]

        times = race.seconds(names, f"packed {case.shape()}", build)
        micros = {n: None if t is None else t * 1e6 for n, t in times.items()}
        peaks = {n: peak_memory(fn, race.device) for n, fn in calls.items()}
        mib = {n: None if peaks.get(n) is None else peaks[n] / 2**20 for n in names}
        for kind, unit, values in (("packed", "us", micros), ("packed.memory", "MiB", mib)):
            base = values.get("separate")
            ratio = base and {f"{n}/separate": x / base for n, x in values.items() if x}
            records.append(results.record(kind, case.shape(), unit, values, ratio or None))
            progress(records[-1])
    return records
