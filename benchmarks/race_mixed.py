"""The race of the batches that serving engines make: sequences of one new token beside chunks of
prompts, and of a few drafts each."""

import functools
import importlib
from collections.abc import Callable

import torch

import flash_attn
from benchmarks import backends
from benchmarks.cache_calls import scattered
from benchmarks.cache_shapes import MixedCase
from benchmarks.contest import Race
from benchmarks.race_few import by_forward, timed

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
    return by_forward(call.ours, call.q.device)


def run(race: Race, cases: list[MixedCase], names: tuple[str, ...], calls: int = 5) -> list[dict]:
    records = []
    for case in cases:
        call = Call(case, race.dtype, race.device)
        records.append(
            timed(race, "mixed", case, names, lambda name, call=call: attention(name, call), calls)
        )
    return records
