"""The race of forwards of few queries beside many keys, as in generation."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn
from benchmarks import backends, results
from benchmarks.cache_calls import scattered
from benchmarks.cache_shapes import DecodeCase
from benchmarks.contest import Race, progress
from benchmarks.race_caches import graph_of, microseconds

# ours: flash_attn_func, whatever serves it; forward: the forward's kernels, named. varlen, paged16:
# flash_attn_varlen_func, of keys side by side and in pages. fa2, cudnn: torch's SDPA.
NAMES = ("ours", "forward", "varlen", "paged16", "fa2", "cudnn")
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def varlen(name: str, case: DecodeCase, q, k, v) -> Callable[[], torch.Tensor]:
    """The same sequences side by side, or their keys in scattered pages of 16."""
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)
    options = dict(
        cu_seqlens_q=starts * case.tokens,
        cu_seqlens_k=starts * case.length,
        max_seqlen_q=case.tokens,
        max_seqlen_k=case.length,
        causal=True,
    )
    if name == "paged16":
        (k, v), options["block_table"] = scattered((k, v), 16)
    else:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    call = functools.partial(flash_attn.flash_attn_varlen_func, q.flatten(0, 1), k, v, **options)
    return lambda: call().view(q.shape)


def attention(name: str, case: DecodeCase, q, k, v) -> Callable[[], torch.Tensor]:
    """(batch, tokens, heads, d); causal from the bottom right."""
    if name in ("varlen", "paged16"):
        return varlen(name, case, q, k, v)
    if name in PEERS:
        if case.tokens > 1:  # SDPA counts from the top left, and a mask is another call
            raise backends.Unsupported("no causal mask from the bottom right")
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]

        def peer() -> torch.Tensor:
            with sdpa_kernel(PEERS[name]):
                out = F.scaled_dot_product_attention(
                    *heads_first, enable_gqa=case.heads != case.heads_kv
                )
            return out.transpose(1, 2)

        return peer
    call = functools.partial(flash_attn.flash_attn_func, q, k, v, causal=True)
    if name == "ours":
        return call
    return by_forward(call, q.device)


def by_forward(call: Callable, device: torch.device) -> Callable:
    """The call on the forward's kernels, named."""
    backend = "sm90" if torch.cuda.get_device_capability(device) == (9, 0) else "sm80"

    def forward() -> torch.Tensor:
        with flash_attn.use_backend(backend):
            return call()

    return forward


def timed(
    race: Race, kind: str, case, names: tuple[str, ...], attend: Callable, calls: int
) -> dict:
    """The record of a case: microseconds of attend(name)(), of a graph of some calls; how many
    times as fast the first name is as each other."""
    times = race.seconds(
        names, f"{kind} {case.shape()}", lambda name: graph_of([attend(name)] * calls)
    )
    micros = microseconds(times, calls)
    ratio = results.ratios(micros, names[0], names[1:], "less")
    record = results.record(kind, case.shape(), "us", micros, ratio)
    progress(record)
    return record


def run(race: Race, cases: list[DecodeCase], names: tuple[str, ...], calls: int = 10) -> list[dict]:
    """Caches come from the L2 cache where they fit."""
    records = []
    for case in cases:
        sizes = (
            (case.tokens, case.heads),
            (case.length, case.heads_kv),
            (case.length, case.heads_kv),
        )
        x = [
            torch.randn(case.batch, *size, case.head_dim, dtype=race.dtype, device=race.device)
            for size in sizes
        ]
        records.append(
            timed(
                race,
                "few",
                case,
                names,
                lambda name, case=case, x=x: attention(name, case, *x),
                calls,
            )
        )
    return records
