"""Every argument of the functions of flash_attn.reference, given each kind of wrong value: one line
that names it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from wrong_values import (
    FLOATS,
    NUMBERS,
    check_wrong_values,
    each_argument,
    is_optional,
    normal,
    numbers,
)

from flash_attn import reference
from flash_attn.reference.arguments import Options


def with_options(function: Callable) -> Callable:
    """The function with the options that it takes by name in its signature."""
    own = inspect.signature(function).parameters.values()
    of_options = inspect.signature(Options).parameters.values()
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is not p.VAR_KEYWORD]

    @functools.wraps(function)
    def call(**arguments: object) -> object:
        return function(**arguments)

    call.__signature__ = inspect.Signature([*named, *of_options])
    return call


def scores() -> dict:
    return dict(x=normal(3, 5))


def head() -> dict:
    return dict(q=normal(4, 8), k=normal(5, 8), v=normal(5, 6))


def pieces() -> dict:
    piece = reference.Partial(normal(4, 6), normal(4, 1).abs(), normal(4, 1))
    return dict(a=piece, b=piece)


def words_of_4() -> dict:
    return dict(counter=(torch.arange(4), *torch.arange(3)), key=(1, 2))


def words_of_2() -> dict:
    return dict(counter=(torch.arange(4), torch.tensor(1)), key=torch.arange(4))


def one_probability() -> dict:
    return dict(dropout_p=0.3)


def places() -> dict:
    state = dict(rng_state=torch.tensor([1, 2]), dropout_p=0.3)
    return state | dict(batch=2, heads=3, seqlen_q=4, seqlen_k=5)


def terms() -> dict:
    dropout = dict(dropout_p=0.3, rng_state=torch.tensor([1, 2]))
    return dropout | dict(alibi_slopes=normal(4), learnable_sink=normal(4))


def dense() -> dict:
    q, k, v = normal(2, 4, 4, 8), normal(2, 5, 2, 8), normal(2, 5, 2, 8)
    return terms() | dict(q=q, k=k, v=v, attn_bias=normal(2, 4, 4, 5))


def varlen() -> dict:
    lengths = dict(cu_seqlens_q=numbers(0, 3, 7), cu_seqlens_k=numbers(0, 3, 7))
    used = dict(seqused_q=numbers(2, 4), seqused_k=numbers(3, 3), leftpad_k=numbers(0, 1))
    tensors = dict(q=normal(7, 4, 8), k=normal(7, 2, 8), v=normal(7, 2, 8))
    return terms() | tensors | lengths | used | dict(attn_bias=normal(2, 4, 1, 1))


def dense_of_logits() -> dict:
    call = dense()
    del call["v"]
    return call


def varlen_of_logits() -> dict:
    call = varlen()
    del call["v"]
    return call


def dense_gradients() -> dict:
    return dense() | dict(dout=normal(2, 4, 4, 8), dlse=normal(2, 4, 4))


def varlen_gradients() -> dict:
    return varlen() | dict(dout=normal(7, 4, 8), dlse=normal(4, 7))


CALLS: dict[Callable, list[Callable[[], dict]]] = {
    reference.naive_softmax: [scores],
    reference.safe_softmax: [scores],
    reference.online_softmax: [scores],
    reference.standard_attention: [head],
    reference.one_pass_attention: [head],
    reference.flash_attention_1: [head],
    reference.flash_attention_2: [head],
    reference.split_kv: [head],
    reference.combine: [pieces],
    reference.philox4x32: [words_of_4],
    reference.philox2x32: [words_of_2],
    reference.dropout_threshold: [one_probability],
    reference.keep_probability: [one_probability],
    reference.philox_keep_mask: [places],
    with_options(reference.attention_ref): [dense, varlen],
    with_options(reference.max_logits_ref): [dense_of_logits, varlen_of_logits],
    with_options(reference.attention_ref_grads): [dense_gradients, varlen_gradients],
    with_options(reference.condition_tensors): [dense_gradients, varlen_gradients],
}
RESULTS = {reference.Conditions, reference.Gradients, reference.Partial}
WIDE = FLOATS - {"float8_e4m3fn"}
# What is right for an argument, of the values; None besides where the signature says so.
TAKEN: dict[str, set[str]] = {
    "x": WIDE | {"rank + 1", "rank - 1", "meta"},
    **dict.fromkeys(["block_q", "block_k", "num_splits", "rounds"], {"integer"}),
    **dict.fromkeys(["batch", "heads", "seqlen_q", "seqlen_k"], {"integer"}),
    "key": {"integer", "rank + 1", "rank - 1", "0-dim"},
    **dict.fromkeys(["softmax_scale", "softcap", "max_lse"], NUMBERS),
    "causal": {"None", *NUMBERS},
    **dict.fromkeys(["alibi_slopes", "learnable_sink", "dout", "dlse"], FLOATS),
    "attn_bias": FLOATS | {"bool", "rank - 1", "0-dim"},
    **dict.fromkeys(["max_seqlen_q", "max_seqlen_k"], {"integer"}),
    **dict.fromkeys(["cu_seqlens_q", "cu_seqlens_k", "leftpad_k"], {"int64"}),
    **dict.fromkeys(["seqused_q", "seqused_k"], {"int64"}),
}
OF_HEADS = dict.fromkeys(["q", "k", "v"], WIDE)
# What is right in one call.
MORE: dict[Callable[[], dict], dict[str, set[str]]] = {
    **dict.fromkeys([dense, dense_of_logits, dense_gradients], OF_HEADS),
    **dict.fromkeys([varlen, varlen_of_logits, varlen_gradients], OF_HEADS),
}


@each_argument(CALLS)
def test_wrong_value(function: Callable, make: Callable[[], dict], argument: str) -> None:
    right = MORE.get(make, {}).get(argument, TAKEN.get(argument, set()))
    if is_optional(function, argument):
        right = right | {"None"}
    check_wrong_values(function, make, argument, right)


def test_every_public_name_is_here() -> None:
    assert {x.__name__ for x in (*CALLS, *RESULTS)} == set(reference.__all__)


def test_sequences_that_a_call_has_no_room_for() -> None:
    """What only the lengths tell."""
    long = dict(cu_seqlens_q=numbers(0, 7), cu_seqlens_k=numbers(0, 7))
    q = normal(7, 4, 8)
    with pytest.raises(RuntimeError, match="flash_attn: max_seqlen_k: expected at least 7, the lo"):
        reference.attention_ref(q, q, q, **long, max_seqlen_q=7, max_seqlen_k=6)
    with pytest.raises(RuntimeError, match=r"flash_attn: attn_bias: expected a shape that broadca"):
        reference.attention_ref(q, q, q, **long, attn_bias=normal(7, 6))
