"""Every argument of flash_attn.context_parallel's functions, given each kind of wrong value, in a
world of one rank: one line that names it, before this rank waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from wrong_values import (
    ANYTHING,
    FLOATS,
    INTEGERS,
    NUMBERS,
    TRUTH,
    check_wrong_values,
    each_argument,
    is_optional,
    normal,
    numbers,
)

from flash_attn import context_parallel


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def options() -> dict:
    return dict(alibi_slopes=torch.rand(4), learnable_sink=normal(4))


def dense() -> dict:
    q, k, v = normal(2, 4, 4, 8), normal(2, 4, 2, 8), normal(2, 4, 2, 8)
    return dict(q=q, k=k, v=v) | options()


def varlen() -> dict:
    q, k, v = normal(7, 4, 8), normal(7, 2, 8), normal(7, 2, 8)
    lengths = dict(cu_seqlens_q=numbers(0, 3, 7), cu_seqlens_k=numbers(0, 3, 7))
    return dict(q=q, k=k, v=v) | lengths | options()


def decode() -> dict:
    caches = dict(k_cache=normal(3, 9, 2, 8), v_cache=normal(3, 9, 2, 8))
    indices = dict(cache_seqlens=numbers(4, 9), cache_batch_idx=numbers(2, 0))
    places = dict(seqlens=numbers(4, 9), first_key=numbers(0, 0))
    return dict(q=normal(2, 1, 4, 8)) | caches | indices | places | options()


def decode_paged() -> dict:
    pages = dict(k_cache=normal(5, 2, 2, 8), v_cache=normal(5, 2, 2, 8))
    table = dict(block_table=numbers(*range(15)).view(3, 5), cache_seqlens=numbers(4, 6))
    return decode() | pages | table | dict(seqlens=numbers(4, 6))


def decode_8_bits() -> dict:
    caches = {name: torch.ones(3, 9, 2, 8).to(torch.int8) for name in ("k_cache", "v_cache")}
    return decode() | caches | dict(k_descale=normal(2), v_descale=normal(2))


def tokens() -> dict:
    return dict(x=normal(2, 8, 4))


def length() -> dict:
    return dict(length=8)


def partial_results() -> dict:
    return dict(outs=[normal(2, 4, 4, 8)] * 2, lses=[normal(2, 4, 4)] * 2)


def shape() -> dict:
    return dict(seqlen_q=64, heads_q=4, heads_kv=2)


CALLS: dict[Callable, list[Callable[[], dict]]] = {
    context_parallel.flash_attn_func: [dense],
    context_parallel.flash_attn_varlen_func: [varlen],
    context_parallel.flash_decode_func: [decode, decode_paged, decode_8_bits],
    context_parallel.split: [tokens],
    context_parallel.join: [tokens],
    context_parallel.position_ids: [length],
    context_parallel.merge_attention: [partial_results],
    context_parallel.choose_scheme: [shape],
}
# Of torch's or transformers' calls, which name their own arguments.
OF_OTHERS = {context_parallel.serve_torch, context_parallel.transformers_attention}

# What is right for an argument, of the wrong values; None besides where the signature says so.
TAKEN: dict[str, set[str]] = {
    **dict.fromkeys(["deterministic", "batch_invariant"], {"None", *NUMBERS}),
    **dict.fromkeys(
        ["return_attn_probs", "return_softmax_lse", "alibi", "causal", "rounds_parts"], TRUTH
    ),
    **dict.fromkeys(["softcap", "softmax_scale"], NUMBERS),
    **dict.fromkeys(["max_seqlen_q", "max_seqlen_k"], ANYTHING),  # not read
    **dict.fromkeys(["num_splits", "length"], {"integer"}),
    **dict.fromkeys(["cu_seqlens_q", "cu_seqlens_k"], {"int8", "int64"}),
    **dict.fromkeys(["seqlens", "first_key"], INTEGERS - {"bool"}),
    "learnable_sink": FLOATS,
    "x": FLOATS | INTEGERS | {"rank + 1", "rank - 1"},
}
TAKEN_BY: dict[Callable, dict[str, set[str]]] = {
    context_parallel.choose_scheme: dict.fromkeys(
        ["seqlen_q", "heads_q", "heads_kv", "head_dim"], NUMBERS
    ),
    # with caches of 8 bits
    context_parallel.flash_decode_func: {"q": {"float16", "bfloat16", "float64"}},
    context_parallel.split: {"x": TAKEN["x"] | {"complex64", "meta"}},
}
# What not every group sends.
UNSENT = frozenset({"complex64", "float8_e4m3fn", "meta"})
# What a wrong length is held against.
BESIDE = {"seqlen_q": "q", "seqlen_k": "k", "cu_seqlens_q": "q", "cu_seqlens_k": "k", "length": "x"}


@each_argument(CALLS)
def test_wrong_value(function: Callable, make: Callable[[], dict], argument: str) -> None:
    right = TAKEN_BY.get(function, {}).get(argument, TAKEN.get(argument, set()))
    if is_optional(function, argument):
        right = right | {"None"}
    also, undecided = BESIDE.get(argument), frozenset[str]()
    if function is context_parallel.join and argument == "x":
        undecided = UNSENT
    check_wrong_values(function, make, argument, right, also, undecided)


def test_every_public_function_is_here() -> None:
    public = {getattr(context_parallel, name) for name in context_parallel.__all__}
    assert public - OF_OTHERS == set(CALLS)
