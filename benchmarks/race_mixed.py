"""The race of the batches that serving engines make: sequences of one new token beside chunks."""

import functools
import importlib
from collections.abc import Callable

import torch

import flash_attn
from benchmarks import backends, results
from benchmarks.cache_calls import scattered
from benchmarks.contest import Race, progress
from benchmarks.race_caches import graph_of
from benchmarks.shapes import MixedCase

# ours: flash_attn_varlen_func; forward: the forward's kernels alone, named.
OURS = ("ours", "forward")


class Call:
    """The arguments of a case: q (total_q, heads, d), k and v side by side or in pages."""

    def __init__(self, case: MixedCase, dtype: torch.dtype, device: torch.device):
        make = {"dtype": dtype, "device": device}
        queries = torch.tensor([0, *case.queries()], dtype=torch.int32, device=device)
        batch = len(case.queries())
        self.starts_q = queries.cumsum(0, dtype=torch.int32)
        self.starts_k = torch.arange(batch + 1, dtype=torch.int32, device=device) * case.keys
        self.longest = max(case.queries()), case.keys
        self.q = torch.randn(sum(case.queries()), case.heads, case.head_dim, **make)
        k, v = torch.randn(2, batch, case.keys, case.heads_kv, case.head_dim, **make)
        self.table = None
        if case.page_size:
            (self.k, self.v), self.table = scattered((k, v), case.page_size)
        else:
            self.k, self.v = k.flatten(0, 1), v.flatten(0, 1)

    def ours(self) -> torch.Tensor:
        tensors = self.q, self.k, self.v, self.starts_q, self.starts_k
        return flash_attn.flash_attn_varlen_func(
            *tensors, *self.longest, causal=True, block_table=self.table
        )


def fa4(call: Call) -> Callable[[], torch.Tensor]:
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise backends.Unsupported(f"no flash_attn.cute.interface: {error}") from None
    options = {"cu_seqlens_q": call.starts_q, "max_seqlen_q": call.longest[0], "causal": True}
    if call.table is None:
        options |= {"cu_seqlens_k": call.starts_k, "max_seqlen_k": call.longest[1]}
    else:
        options |= {"page_table": call.table, "seqused_k": call.starts_k.diff()}
    attend = functools.partial(interface.flash_attn_varlen_func, **options)
    return lambda: attend(call.q, call.k, call.v)[0]


def attention(name: str, call: Call) -> Callable[[], torch.Tensor]:
    if name == "fa4":
        return fa4(call)
    if name == "ours":
        return call.ours
    backend = "sm90" if torch.cuda.get_device_capability(call.q.device) == (9, 0) else "sm80"

    def forward() -> torch.Tensor:
        with flash_attn.use_backend(backend):
            return call.ours()

    return forward


def run(race: Race, cases: list[MixedCase], names: tuple[str, ...], calls: int = 5) -> list[dict]:
    """Microseconds of a call, of a graph of some; ratio: ÷ ours."""
    records = []
    for case in cases:
        call = Call(case, race.dtype, race.device)
        times = race.seconds(
            names,
            f"mixed {case.shape()}",
            lambda name, call=call: graph_of([attention(name, call)] * calls),
        )
        micros = {n: None if t is None else t * 1e6 / calls for n, t in times.items()}
        base = micros.get("ours")
        ratio = base and {f"{n}/ours": x / base for n, x in micros.items() if x}
        records.append(results.record("mixed", case.shape(), "us", micros, ratio or None))
        progress(records[-1])
    return records
