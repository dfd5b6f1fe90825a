"""Decode of sequences that share leading pages: cases and contestants of the race's kind prefix.

"shared" reads the shared pages once, "plain" reads them for each sequence (the L2 cache helps it),
"cascade" and "cascade_fa2" are FlashInfer's MultiLevelCascadeAttentionWrapper of two levels, on the
backend that it chooses (FA3 on Hopper) and on its FA2.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

import flash_attn
from benchmarks.backends import Unsupported
from benchmarks.cache_calls import Cache

PAGE, HEAD_DIM = 16, 128


@dataclass(frozen=True)
class PrefixCase:
    """One new token of each sequence: `shared` keys in common with its group, `own` of its own."""

    heads: int
    heads_kv: int
    batch: int
    groups: int
    shared: int
    own: int

    def shape(self) -> dict:
        return {"heads": f"{self.heads}/{self.heads_kv}", "batch": self.batch} | {
            "groups": self.groups,
            "shared": self.shared,
            "own": self.own,
        }

    def cache_bytes(self) -> int:
        """Of every key once."""
        keys = self.groups * self.shared + self.batch * self.own
        return 4 * keys * self.heads_kv * HEAD_DIM


def cases(quick: bool = False) -> list[PrefixCase]:
    listed = [
        PrefixCase(32, 8, 64, 1, 8192, 256),
        PrefixCase(32, 8, 64, 1, 32768, 256),
        PrefixCase(32, 8, 16, 1, 8192, 256),
        PrefixCase(32, 8, 16, 1, 32768, 1024),
        PrefixCase(32, 8, 4, 1, 32768, 256),
        PrefixCase(32, 8, 64, 8, 8192, 256),
        PrefixCase(32, 8, 256, 1, 2048, 256),
        PrefixCase(32, 32, 64, 1, 8192, 256),
        PrefixCase(64, 8, 32, 1, 16384, 512),
    ]
    return listed[::4] if quick else listed


@dataclass
class Inputs:
    q: torch.Tensor  # (batch, 1, heads, d), group after group
    caches: list[Cache]  # of pages, with the same numbers in the table
    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def make(cls, case: PrefixCase, device: torch.device, dtype: torch.dtype) -> "Inputs":
        """Caches of more than the L2 together, to take turns."""
        shared, own = case.shared // PAGE, -(-case.own // PAGE)
        pages = case.groups * shared + case.batch * own
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
        group = torch.arange(case.batch) * case.groups // case.batch
        common = order[: case.groups * shared].view(case.groups, shared)[group]
        table = torch.cat([common, order[case.groups * shared :].view(case.batch, own)], 1)
        on_gpu = device.type == "cuda"
        l2 = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
        normal = functools.partial(torch.randn, device=device, dtype=dtype)
        shape = (pages, PAGE, case.heads_kv, HEAD_DIM)
        count = max(2, -(-5 * l2 // (2 * case.cache_bytes())))
        return cls(
            normal(case.batch, 1, case.heads, HEAD_DIM),
            [Cache(normal(shape), normal(shape)) for _ in range(count)],
            table.to(device),
            torch.full((case.batch,), case.shared + case.own, dtype=torch.int32, device=device),
        )


def calls(name: str, case: PrefixCase, inputs: Inputs) -> list[Callable[[], torch.Tensor]]:
    """A call for each cache. What is shared was found, and FlashInfer's plan made, before."""
    if name.startswith("cascade"):
        run = _cascade(case, inputs, "fa2" if name == "cascade_fa2" else None)
    else:
        options = {"block_table": inputs.table}
        if name == "shared":
            options["shared_prefix"] = flash_attn.find_shared_prefix(
                inputs.table, inputs.lengths, PAGE
            )

        def run(cache: Cache) -> torch.Tensor:
            return flash_attn.flash_decode_func(
                inputs.q, cache.k, cache.v, inputs.lengths, **options
            )

    return [functools.partial(run, cache) for cache in inputs.caches]


def _cascade(case: PrefixCase, inputs: Inputs, backend: str | None) -> Callable:
    try:
        from flashinfer import MultiLevelCascadeAttentionWrapper
    except ImportError as error:
        raise Unsupported("flashinfer is not installed") from error
    device, columns = inputs.q.device, case.shared // PAGE
    count = functools.partial(torch.arange, dtype=torch.int32, device=device)
    first = (count(case.groups + 1) * case.batch + case.groups - 1) // case.groups
    own = inputs.table[:, columns:].contiguous()
    wrapper = MultiLevelCascadeAttentionWrapper(
        2, torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD"
    )
    if backend is not None:
        for level in wrapper._batch_prefill_wrappers:
            level._backend = backend
    wrapper.plan(
        [first, count(case.batch + 1)],
        [count(case.groups + 1) * columns, count(case.batch + 1) * own.size(1)],
        [inputs.table[first[:-1].long(), :columns].flatten(), own.flatten()],
        [
            torch.full((case.groups,), PAGE, dtype=torch.int32, device=device),
            torch.full((case.batch,), (case.own - 1) % PAGE + 1, dtype=torch.int32, device=device),
        ],
        *(case.heads, case.heads_kv, HEAD_DIM, PAGE),
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.q.dtype,
    )

    def run(cache: Cache) -> torch.Tensor:
        return wrapper.run(inputs.q.squeeze(1), (cache.k, cache.v)).unsqueeze(1)

    return run
