"""Every argument of the modules that have upstream's names, flash_attn_interface of
FlashAttention-3 and flash_attn_2_cuda, given each kind of wrong value: one line that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from wrong_values import (
    ANYTHING,
    FLOATS,
    NUMBERS,
    TRUTH,
    check_wrong_values,
    each_argument,
    is_optional,
    normal,
    numbers,
)

import flash_attn_2_cuda

fa3 = pytest.importorskip("flash_attn_3.flash_attn_interface")
MODULES = (fa3, flash_attn_2_cuda)
FP8 = torch.float8_e4m3fn
ROTATION = ("rotary_cos", "rotary_sin")


def dense() -> dict:
    return dict(q=normal(2, 4, 4, 8), k=normal(2, 5, 2, 8), v=normal(2, 5, 2, 8))


def in_fp8(call: dict) -> dict:
    """The call with its inputs in fp8, its rotation in bf16 and all descales."""
    names = ("q", "k", "v", "k_cache", "v_cache")
    dtypes = dict.fromkeys(names, FP8) | dict.fromkeys(ROTATION, torch.bfloat16)
    given = {name: x.to(dtypes[name]) if name in dtypes else x for name, x in call.items()}
    return given | {f"{name}_descale": normal(2, 2).abs() for name in "qkv"}


def dense_fp8() -> dict:
    return in_fp8(dense())


def packed_5d() -> dict:
    return dict(qkv=normal(2, 4, 3, 4, 8))


def packed_4d() -> dict:
    return dict(qkv=normal(2, 4, 8, 8), num_heads_q=4)


def lengths() -> dict:
    starts = dict(cu_seqlens_q=numbers(0, 3, 7), cu_seqlens_k=numbers(0, 3, 7))
    return starts | dict(max_seqlen_q=4, max_seqlen_k=4)


def rows() -> dict:
    return dict(q=normal(7, 4, 8), k=normal(7, 2, 8), v=normal(7, 2, 8))


def varlen() -> dict:
    return rows() | lengths() | dict(seqused_q=numbers(2, 4), seqused_k=numbers(3, 3))


def varlen_fp8() -> dict:
    return in_fp8(varlen())


def step() -> dict:
    caches = dict(k_cache=normal(3, 9, 2, 8), v_cache=normal(3, 9, 2, 8))
    indices = dict(cache_seqlens=numbers(4, 5), cache_batch_idx=numbers(2, 0))
    return dict(q=normal(2, 1, 4, 8), cache_leftpad=numbers(0, 1)) | caches | indices


def append() -> dict:
    rotation = dict(rotary_cos=normal(9, 4), rotary_sin=normal(9, 4))
    return step() | dict(k=normal(2, 3, 2, 8), v=normal(2, 3, 2, 8)) | rotation


def append_fp8() -> dict:
    return in_fp8(append())


def paged() -> dict:
    pages = dict(k_cache=normal(5, 2, 2, 8), v_cache=normal(5, 2, 2, 8))
    table = dict(page_table=numbers(*range(15)).view(3, 5) % 5, cache_seqlens=numbers(4, 6))
    return step() | pages | table


def varlen_step() -> dict:
    """Queries of different lengths against a cache."""
    given = step() | dict(q=normal(7, 4, 8), cu_seqlens_q=numbers(0, 3, 7), max_seqlen_q=4)
    return given | dict(attention_chunk=3)


def varlen_append() -> dict:
    new = dict(k=normal(3, 2, 8), v=normal(3, 2, 8), cu_seqlens_k_new=numbers(0, 1, 3))
    rotation = dict(rotary_cos=normal(9, 4), rotary_sin=normal(9, 4))
    return varlen_step() | new | rotation | dict(rotary_seqlens=numbers(4, 5))


def pieces() -> dict:
    out = dict(out=normal(2, 4, 8))
    return dict(out_partial=normal(3, 2, 4, 8), lse_partial=normal(3, 2, 4)) | out


def plan() -> dict:
    sizes = dict.fromkeys(["batch_size", "max_seqlen_q", "max_seqlen_k"], 4)
    heads = dict(num_heads_q=4, num_heads_kv=2, headdim=8)
    return sizes | heads | dict(cache_seqlens=numbers(4, 5))


def options() -> dict:
    mask = dict(causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0)
    return dict(alibi_slopes=normal(4), softmax_scale=0.3) | mask


def forward() -> dict:
    q, result = normal(2, 4, 4, 8), dict(out_=normal(2, 4, 4, 8))
    return dense() | dict(q=q, dropout_p=0.0, return_softmax=False) | result | options()


def varlen_forward() -> dict:
    unused = dict(seqused_k=None, block_table=None, zero_tensors=False)
    pads = dict(leftpad_k=numbers(0, 1), dropout_p=0.0, return_softmax=False)
    return rows() | lengths() | pads | unused | dict(out_=normal(7, 4, 8)) | options()


def backward_of(call: dict, lse_shape: tuple[int, ...]) -> dict:
    unknown = {"out_", "return_softmax", "seqused_k", "leftpad_k", "block_table"}
    call = {name: x for name, x in call.items() if name not in unknown}
    results = {f"d{name}_": torch.empty_like(call[name]) for name in "qkv"}
    saved = dict(dout=normal(*call["q"].shape), out=normal(*call["q"].shape))
    return call | results | saved | dict(softmax_lse=normal(*lse_shape), deterministic=False)


def backward() -> dict:
    return backward_of(forward(), (2, 4, 4))


def varlen_backward() -> dict:
    return backward_of(varlen_forward(), (4, 7))


def forward_on_cache() -> dict:
    more = dict(block_table=None, out_=normal(2, 1, 4, 8), rotary_interleaved=True, num_splits=0)
    return append() | options() | more


OF_CACHES = [append, append_fp8, paged, varlen_step, varlen_append]
CALLS: dict[Callable, list[Callable[[], dict]]] = {
    fa3.flash_attn_func: [dense, dense_fp8],
    fa3.flash_attn_qkvpacked_func: [packed_5d, packed_4d],
    fa3.flash_attn_varlen_func: [varlen, varlen_fp8],
    fa3.flash_attn_with_kvcache: OF_CACHES,
    fa3.flash_attn_combine: [pieces],
    fa3.get_scheduler_metadata: [plan],
    flash_attn_2_cuda.fwd: [forward],
    flash_attn_2_cuda.varlen_fwd: [varlen_forward],
    flash_attn_2_cuda.bwd: [backward],
    flash_attn_2_cuda.varlen_bwd: [varlen_backward],
    flash_attn_2_cuda.fwd_kvcache: [forward_on_cache],
}
# What is right for an argument, of the wrong values; None besides where the signature says so.
TUNING = ["num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "zero_tensors"]
TAKEN: dict[str, set[str]] = {
    **dict.fromkeys(["causal", "deterministic", "rotary_interleaved"], {"None", *NUMBERS}),
    **dict.fromkeys(["return_attn_probs", "return_softmax_lse"], TRUTH),
    "return_softmax": {"None", *NUMBERS},
    **dict.fromkeys(["softcap", "softmax_scale"], NUMBERS),
    **dict.fromkeys(["max_seqlen_q", "max_seqlen_k"], {"integer"}),
    **dict.fromkeys(["window_size_left", "window_size_right"], {"integer", "None"}),
    **dict.fromkeys(TUNING, ANYTHING),  # they change no result
    "rng_state": ANYTHING,  # without dropout nothing looks at it
    "attention_chunk": {"None", *NUMBERS},
    "qkv": FLOATS | {"meta"},
}
TAKEN_BY: dict[Callable, dict[str, set[str]]] = {
    fa3.flash_attn_with_kvcache: {"cache_seqlens": {"integer"}},
    flash_attn_2_cuda.fwd_kvcache: {"cache_seqlens": {"integer", "None"}},
    fa3.flash_attn_combine: dict.fromkeys(["out_partial", "lse_partial", "out"], FLOATS),
    fa3.get_scheduler_metadata: dict.fromkeys(
        inspect.signature(fa3.get_scheduler_metadata).parameters, ANYTHING
    )
    | {"cache_seqlens": ANYTHING - {"string", "list", "None", *NUMBERS}},
}
# Of flash_attn_2_cuda, whose signatures have neither types nor defaults.
OPTIONAL = ["out_", "dq_", "dk_", "dv_", "alibi_slopes", "softmax_scale", "seqused_k", "leftpad_k"]
OPTIONAL += ["block_table", "cache_leftpad", "cache_batch_idx"]
# What is right in a call, of another set of values: it does not look at the argument, or turns
# queries and keys by the layer's function.
TAKEN_IN: dict[Callable[[], dict], dict[str, set[str]]] = {
    packed_5d: {"num_heads_q": ANYTHING},
    **dict.fromkeys([append, append_fp8], {"max_seqlen_q": ANYTHING}),
    paged: dict.fromkeys(
        ["max_seqlen_q", "cu_seqlens_k_new", "rotary_seqlens", "rotary_interleaved"], ANYTHING
    ),
    varlen_step: dict.fromkeys(["cu_seqlens_k_new", "rotary_seqlens"], {"None", "int32"})
    | {"rotary_interleaved": ANYTHING},
    varlen_append: dict.fromkeys(ROTATION, FLOATS) | {"rotary_interleaved": TRUTH},
}


@each_argument(CALLS)
def test_wrong_value(function: Callable, make: Callable[[], dict], argument: str) -> None:
    taken = TAKEN | TAKEN_BY.get(function, {}) | TAKEN_IN.get(make, {})
    right = taken.get(argument, set())
    if is_optional(function, argument) or argument in OPTIONAL:
        right = right | {"None"}
    # Upstream's extension has an underscore behind what it may write to.
    check_wrong_values(function, make, argument, right, argument.removesuffix("_"))


def test_every_public_function_is_here() -> None:
    public = {
        getattr(module, name) for module in MODULES for name in module.__all__ if name[0] != "_"
    }
    assert public == set(CALLS)
