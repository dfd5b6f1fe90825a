"""Every argument of every public function, given each kind of wrong value: one line that names it.

A value that is taken has to be one that TAKEN lists, so that nothing wrong passes in silence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from wrong_values import (
    ANYTHING,
    FLOATS,
    INTEGERS,
    MANY,
    NUMBERS,
    TRUTH,
    check_wrong_values,
    is_optional,
    normal,
    numbers,
)

import flash_attn
from flash_attn import _upstream, bert_padding, masks
from flash_attn.layers import rotary

INT32 = torch.int32
WINDOWLESS = dict(causal=False, window_size_left=-1, window_size_right=-1)


def options(heads: int = 4) -> dict:
    return dict(alibi_slopes=normal(heads), learnable_sink=normal(heads))


def dense() -> dict:
    q, k, v = normal(2, 4, 4, 8), normal(2, 5, 2, 8), normal(2, 5, 2, 8)
    return dict(q=q, k=k, v=v, attn_bias=normal(2, 4, 4, 5)) | options()


def varlen() -> dict:
    lengths = dict(cu_seqlens_q=numbers(0, 3, 7), cu_seqlens_k=numbers(0, 3, 7))
    used = dict(seqused_q=numbers(2, 4), seqused_k=numbers(3, 3), leftpad_k=numbers(0, 1))
    tensors = dict(q=normal(7, 4, 8), k=normal(7, 2, 8), v=normal(7, 2, 8))
    rest = dict(max_seqlen_q=4, max_seqlen_k=4, attn_bias=normal(2, 4, 1, 1))
    return tensors | lengths | used | rest | options()


def varlen_paged() -> dict:
    pages = dict(k=normal(3, 2, 2, 8), v=normal(3, 2, 2, 8))
    return varlen() | pages | dict(block_table=numbers(0, 1, 2, 0).view(2, 2))


def qkvpacked() -> dict:
    return dict(qkv=normal(2, 4, 3, 4, 8), attn_bias=normal(2, 4, 4, 4)) | options()


def kvpacked() -> dict:
    return dict(q=normal(2, 4, 4, 8), kv=normal(2, 5, 2, 2, 8)) | options()


def varlen_qkvpacked() -> dict:
    return dict(qkv=normal(7, 3, 4, 8), cu_seqlens=numbers(0, 3, 7), max_seqlen=4) | options()


def varlen_kvpacked() -> dict:
    lengths = dict(cu_seqlens_q=numbers(0, 3, 7), cu_seqlens_k=numbers(0, 3, 7))
    longest = dict(max_seqlen_q=4, max_seqlen_k=4)
    return dict(q=normal(7, 4, 8), kv=normal(7, 2, 2, 8)) | lengths | longest | options()


def decode() -> dict:
    caches = dict(k_cache=normal(3, 9, 2, 8), v_cache=normal(3, 9, 2, 8))
    indices = dict(cache_seqlens=numbers(4, 9), cache_batch_idx=numbers(2, 0))
    rest = dict(cache_leftpad=numbers(0, 1), attn_bias=normal(2, 4, 1, 9))
    return dict(q=normal(2, 1, 4, 8)) | caches | indices | rest | options()


def decode_8_bits() -> dict:
    caches = {name: torch.ones(3, 9, 2, 8).to(torch.int8) for name in ("k_cache", "v_cache")}
    return decode() | caches | dict(k_descale=normal(2), v_descale=normal(2))


def decode_paged() -> dict:
    pages = dict(k_cache=normal(5, 2, 2, 8), v_cache=normal(5, 2, 2, 8))
    table = dict(block_table=numbers(*range(15)).view(3, 5), cache_seqlens=numbers(4, 6))
    tree = dict(attn_bias=None, tree_mask=torch.ones(2, 1, 1, dtype=torch.bool))
    return decode() | pages | table | tree


def append() -> dict:
    rotation = dict(rotary_cos=normal(9, 4), rotary_sin=normal(9, 4))
    new = dict(k=normal(2, 3, 2, 8), v=normal(2, 3, 2, 8), cache_seqlens=numbers(4, 5))
    return decode() | new | rotation


def sdpa() -> dict:
    q, k, v = normal(2, 4, 4, 8), normal(2, 4, 5, 8), normal(2, 4, 5, 8)
    return dict(query=q, key=k, value=v, attn_mask=normal(2, 4, 4, 5))


def sdpa_grouped() -> dict:
    return sdpa() | dict(key=normal(2, 2, 5, 8), value=normal(2, 2, 5, 8), enable_gqa=True)


def can_use_decode() -> dict:
    given = decode_paged()
    return dict(op="decode", k=given.pop("k_cache"), v=given.pop("v_cache")) | given


def pages_in_common() -> dict:
    table = numbers(0, 1, 2, 0, 1, 3).view(2, 3)
    return dict(block_table=table, cache_seqlens=numbers(6, 6), page_size=2)


def dense_can_use() -> dict:
    return dense()


def varlen_can_use() -> dict:
    return varlen()


def padded() -> dict:
    mask = torch.ones(2, MANY, dtype=INT32)
    return dict(hidden_states=normal(2, MANY, 4), attention_mask=mask, unused_mask=mask - 1)


def concatenated() -> dict:
    lengths = torch.zeros(2, MANY, dtype=INT32)
    lengths[:, 0] = 3
    return dict(hidden_states=normal(2, MANY, 4), attention_mask_in_length=lengths)


def unpadded() -> dict:
    return dict(hidden_states=normal(3, 4), indices=numbers(0, 2, 5), batch=2, seqlen=4)


def rows_of() -> dict:
    return dict(input=normal(9, 4), indices=numbers(0, 2))


def rows_into() -> dict:
    return dict(values=normal(2, 4), indices=numbers(0, 2), first_axis_dim=9)


def tables() -> dict:
    return dict(cos=normal(MANY, 4), sin=normal(MANY, 4))


def rotated() -> dict:
    return dict(x=normal(2, 4, 4, 8), seqlen_offsets=numbers(0, 3)) | tables()


def rotated_varlen() -> dict:
    return dict(x=normal(7, 4, 8), cu_seqlens=numbers(0, 3, 7)) | tables()


def packed_5d() -> dict:
    return dict(qkv=normal(2, 4, 3, 4, 8), seqlen_offsets=numbers(0, 3)) | tables()


def packed_4d() -> dict:
    own = dict(cos_k=normal(MANY, 4), sin_k=normal(MANY, 4))
    return dict(qkv=normal(2, 4, 8, 8), num_heads_q=4) | own | tables()


def packed_kv() -> dict:
    return dict(kv=normal(2, 4, 2, 4, 8)) | tables()


def upstream() -> dict:
    call = dict(q=normal(2, 4, 4, 8), k=normal(2, 5, 2, 8), v=normal(2, 5, 2, 8))
    numbers = dict(dropout_p=0.0, softmax_scale=0.3, softcap=0.0, return_softmax=False)
    return call | numbers | WINDOWLESS | dict(alibi_slopes=normal(4))


def upstream_varlen() -> dict:
    lengths = dict(cu_seqlens_q=numbers(0, 3, 7), cu_seqlens_k=numbers(0, 3, 7))
    longest = dict(max_seqlen_q=4, max_seqlen_k=4, leftpad_k=numbers(0, 1))
    tensors = dict(q=normal(7, 4, 8), k=normal(7, 2, 8), v=normal(7, 2, 8))
    return upstream() | tensors | lengths | longest


def saved(call: dict, lse_shape: tuple[int, ...]) -> dict:
    """What the backward takes besides, and the tensors that it writes into."""
    del call["return_softmax"]
    call.pop("leftpad_k", None)
    q = call["q"]
    results = dict(dout=normal(*q.shape), out=normal(*q.shape), softmax_lse=normal(*lse_shape))
    gradients = {f"d{name}": torch.empty_like(call[name]) for name in "qkv"}
    return call | results | gradients | dict(deterministic=False)


def upstream_backward() -> dict:
    return saved(upstream(), (2, 4, 4))


def upstream_varlen_backward() -> dict:
    return saved(upstream_varlen(), (4, 7))


def name() -> dict:
    return dict(name="aten")


def attended(make: Callable[..., masks.Mask]) -> Callable[..., torch.Tensor]:
    """What makes a mask, and a call with it."""

    @functools.wraps(make)
    def call(**arguments: object) -> torch.Tensor:
        q = normal(2, 4, 2, 8)
        return flash_attn.flash_attn_func(q, q, q, attn_bias=make(**arguments))

    return call


def sides() -> dict:
    return dict(left=1, right=1)


def ids() -> dict:
    return dict(ids=numbers(0, 0, 1, 1), ids_k=numbers(0, 0, 1, 1))


def bounds() -> dict:
    return dict(cu_seqlens=numbers(0, 2, 4))


def prefixes() -> dict:
    return dict(lengths=numbers(2, 3))


def blocks() -> dict:
    return dict(block_mask=torch.ones(2, 2, dtype=torch.bool), block_size=2)


def whole_mask() -> dict:
    return dict(seen=torch.ones(4, 4, dtype=torch.bool))


packed_documents = attended(masks.packed_documents)
MASKS = {
    attended(masks.window): [sides],
    attended(masks.documents): [ids],
    packed_documents: [bounds],
    attended(masks.prefix): [prefixes],
    attended(masks.prefix_lm): [prefixes],
    attended(masks.block_sparse): [blocks],
    attended(masks.from_bool): [whole_mask],
}
CALLS: dict[Callable, list[Callable[[], dict]]] = {
    flash_attn.flash_attn_func: [dense],
    flash_attn.flash_attn_varlen_func: [varlen, varlen_paged],
    flash_attn.flash_attn_qkvpacked_func: [qkvpacked],
    flash_attn.flash_attn_kvpacked_func: [kvpacked],
    flash_attn.flash_attn_varlen_qkvpacked_func: [varlen_qkvpacked],
    flash_attn.flash_attn_varlen_kvpacked_func: [varlen_kvpacked],
    flash_attn.flash_decode_func: [decode, decode_8_bits, decode_paged],
    flash_attn.flash_attn_with_kvcache: [append, decode_paged],
    flash_attn.scaled_dot_product_attention: [sdpa, sdpa_grouped],
    flash_attn.can_use: [dense_can_use, varlen_can_use, can_use_decode],
    flash_attn.use_backend: [name],
    _upstream._flash_attn_forward: [upstream],
    _upstream._flash_attn_varlen_forward: [upstream_varlen],
    _upstream._flash_attn_backward: [upstream_backward],
    _upstream._flash_attn_varlen_backward: [upstream_varlen_backward],
    bert_padding.index_first_axis: [rows_of],
    bert_padding.index_first_axis_residual: [rows_of],
    bert_padding.index_put_first_axis: [rows_into],
    bert_padding.unpad_input: [padded],
    bert_padding.unpad_input_for_concatenated_sequences: [concatenated],
    bert_padding.pad_input: [unpadded],
    flash_attn.find_shared_prefix: [pages_in_common],
    rotary.apply_rotary_emb: [rotated, rotated_varlen],
    rotary.apply_rotary_emb_qkv_: [packed_5d, packed_4d],
    rotary.apply_rotary_emb_kv_: [packed_kv],
} | MASKS
# What is right for an argument, of the values below; None besides where the signature says so.
TAKEN: dict[str, set[str]] = {
    **dict.fromkeys(["causal", "is_causal", "deterministic", "return_softmax"], {"None", *NUMBERS}),
    **dict.fromkeys(
        ["batch_invariant", "return_max_logits", "rotary_interleaved"], {"None", *NUMBERS}
    ),
    **dict.fromkeys(["return_attn_probs", "return_softmax_lse", "enable_gqa"], TRUTH),
    **dict.fromkeys(["interleaved", "inplace"], TRUTH),
    **dict.fromkeys(["softcap", "softmax_scale", "scale"], NUMBERS),
    **dict.fromkeys(["num_splits", "max_seqlen", "max_seqlen_q", "max_seqlen_k"], {"integer"}),
    **dict.fromkeys(["window_size_left", "window_size_right"], {"integer", "None"}),
    "page_size": {"integer"},
    # of masks
    **dict.fromkeys(["left", "right"], {"integer"}),
    **dict.fromkeys(["ids", "ids_k"], {"int64", "rank + 1"}),
    "lengths": {"integer", "int64"},
    "block_mask": {"rank + 1"},
    "block_size": NUMBERS,
    "seen": {"rank + 1", "rank - 1", "0-dim"},
    "least_pages": NUMBERS,
    "zero_tensors": ANYTHING,  # nothing here needs it
    "rng_state": ANYTHING,  # without dropout nothing looks at it
    **dict.fromkeys(["batch", "seqlen", "first_axis_dim"], {"integer"}),
    "seqlen_offsets": {"integer", *INTEGERS},
    **dict.fromkeys(["attn_bias", "attn_mask"], {*FLOATS, "bool", "rank - 1", "0-dim"}),
    "tree_mask": {"bool", "rank - 1"},
    "learnable_sink": FLOATS,
    "indices": {"int64"},
    **dict.fromkeys(["attention_mask", "attention_mask_in_length", "unused_mask"], INTEGERS),
    **dict.fromkeys(["query", "key", "value"], {"rank + 1", "rank - 1"}),  # they broadcast
}
ROWS = FLOATS | INTEGERS | {"complex64", "rank - 1"}  # moved, whatever they are
TABLES = {"cos": FLOATS, "sin": FLOATS}
TAKEN_BY: dict[Callable, dict[str, set[str]]] = {
    packed_documents: {"cu_seqlens": {"rank + 1"}},
    flash_attn.flash_attn_qkvpacked_func: {"qkv": FLOATS - {"float8_e4m3fn"}},
    flash_attn.flash_attn_varlen_qkvpacked_func: {"qkv": FLOATS - {"float8_e4m3fn"}},
    flash_attn.flash_decode_func: {
        "q": {"float16", "bfloat16", "float64"}
    },  # with caches of 8 bits
    flash_attn.flash_attn_with_kvcache: {"cache_seqlens": {"integer"}},
    bert_padding.index_first_axis: {"input": ROWS},
    bert_padding.index_first_axis_residual: {"input": ROWS},
    bert_padding.index_put_first_axis: {"values": ROWS},
    bert_padding.unpad_input: {"hidden_states": ROWS},
    bert_padding.unpad_input_for_concatenated_sequences: {"hidden_states": ROWS},
    bert_padding.pad_input: {"hidden_states": ROWS},
    rotary.apply_rotary_emb: TABLES | {"x": FLOATS, "cu_seqlens": {"int8", "int64"}},
    rotary.apply_rotary_emb_qkv_: TABLES | {"qkv": FLOATS, "cos_k": FLOATS, "sin_k": FLOATS},
    rotary.apply_rotary_emb_kv_: TABLES | {"kv": FLOATS},
}
# What a call does not look at: options of another op, or of a shape that it does not have.
OF_DECODE = ["cache_batch_idx", "cache_leftpad", "cache_seqlens", "batch_invariant", "num_splits"]
OF_DECODE += ["shared_prefix", "tree_mask"]
OF_FORWARD = ["causal_alignment", "deterministic", "dropout_p", "return_attn_probs"]
OF_FORWARD += ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "leftpad_k"]
UNUSED: dict[Callable[[], dict], list[str]] = {
    dense_can_use: [*OF_DECODE, "k_descale", "v_descale"],
    varlen_can_use: [*OF_DECODE, "k_descale", "v_descale"],
    can_use_decode: [*OF_FORWARD, "seqused_q", "seqused_k"],
    varlen_paged: ["cu_seqlens_k"],  # seqused_k has the lengths
    decode_paged: ["rotary_interleaved"],
    rotated: ["max_seqlen"],
    rotated_varlen: ["max_seqlen"],
    packed_5d: ["num_heads_q"],
}


ARGUMENTS = [
    pytest.param(function, make, argument, id=f"{function.__name__}-{make.__name__}-{argument}")
    for function, makes in CALLS.items()
    for make in makes
    for argument in inspect.signature(function).parameters
]


def test_every_public_function_is_here() -> None:
    public = {getattr(flash_attn, name) for name in flash_attn.__all__}
    results = {flash_attn.Support, flash_attn.SharedPrefix}
    functions = {x for x in public if callable(x)} - results
    assert functions <= set(CALLS)
    makers = {x for name in masks.__all__ if inspect.isfunction(x := getattr(masks, name))}
    assert makers - {masks.causal} == {call.__wrapped__ for call in MASKS}


def taken(function: Callable, make: Callable[[], dict], argument: str) -> set[str]:
    if argument in UNUSED.get(make, []):
        return ANYTHING
    given = TAKEN_BY.get(function, {}).get(argument, TAKEN.get(argument, set()))
    return given | {"None"} if is_optional(function, argument) else given


@pytest.mark.parametrize("function, make, argument", ARGUMENTS)
def test_wrong_value(function: Callable, make: Callable[[], dict], argument: str) -> None:
    also = "attn_bias|cu_seqlens_q" if function in MASKS else None
    check_wrong_values(function, make, argument, taken(function, make, argument), also)


MISFITS = {
    "3 and 2 batches": lambda: flash_attn.scaled_dot_product_attention(
        normal(2, 4, 3, 4), normal(3, 4, 3, 4), normal(3, 4, 3, 4)
    ),
    "no heads": lambda: flash_attn.scaled_dot_product_attention(
        normal(1, 4, 3, 4), normal(1, 0, 3, 4), normal(1, 2, 3, 4), enable_gqa=True
    ),
    "an empty mask": lambda: bert_padding.unpad_input(
        normal(0, 3, 4), torch.zeros(0, 3, dtype=INT32)
    ),
    "a window of 2^63": lambda: flash_attn.flash_attn_func(
        *[normal(1, 3, 2, 4)] * 3, window_size=(2**63, 0)
    ),
    "2^63 rows": lambda: bert_padding.pad_input(normal(1, 4), numbers(0), 2**63, 1),
    "max_seqlen of a dense op": lambda: torch.ops.flash_attn.fwd(
        *[normal(1, 5, 2, 4)] * 3,
        *[None] * 13,
        4,
        5,
        0.0,
        None,
        False,
        -1,
        -1,
        False,
        0.0,
        False,
        False,
        None,
    ),
}


@pytest.mark.parametrize("call", MISFITS.values(), ids=MISFITS)
def test_arguments_that_do_not_fit_together(call: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, TypeError, OverflowError)) as caught:
        call()
    words = str(caught.value).splitlines()[0]
    assert words.startswith("flash_attn: ") and len(words) <= 300


def test_a_window_of_bools_counts_as_ints() -> None:
    q = normal(1, 5, 2, 4)
    one = flash_attn.flash_attn_func(q, q, q, window_size=(1, 0))
    assert torch.equal(flash_attn.flash_attn_func(q, q, q, window_size=(True, False)), one)
