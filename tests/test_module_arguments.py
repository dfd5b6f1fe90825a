"""Every argument of the functions and modules under upstream's names beside the attention calls,
given each kind of wrong value: one line that names it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from wrong_values import (
    ANYTHING,
    FLOATS,
    INTEGERS,
    MANY,
    MOST_CHARACTERS,
    NUMBERS,
    TRUTH,
    check_wrong_values,
    is_optional,
    normal,
    numbers,
    wrong_values,
)

from flash_attn.integrations import transformers
from flash_attn.layers import rotary as layers
from flash_attn.losses import cross_entropy as losses
from flash_attn.modules import attention, mha
from flash_attn.ops import rms_norm
from flash_attn.ops.triton import cross_entropy, layer_norm, rotary

WALKED = (rms_norm, cross_entropy, layer_norm, rotary, losses, attention, mha, layers, transformers)


def made(module: type[nn.Module], **inputs: torch.Tensor) -> Callable[..., object]:
    """The module's constructor, and a call of what it makes."""

    @functools.wraps(module, updated=())
    def call(**arguments: object) -> object:
        return module(**arguments)(**inputs)

    return call


def size() -> dict:
    return dict(hidden_size=4)


def normed() -> dict:
    tensors = dict(x=normal(2, 3, 4), residual=normal(2, 3, 4), x1=normal(2, 3, 4))
    columns = dict(weight=normal(4), bias=normal(4), weight1=normal(4), bias1=normal(4))
    return tensors | columns | dict(out=normal(2, 3, 4), residual_out=normal(2, 3, 4), prenorm=True)


def normed_with_scales() -> dict:
    call = normed() | dict(rowscale=normal(2, 3))
    del call["x1"]
    return call


def x_and_weight() -> dict:
    return dict(x=normal(2, 3, 4), weight=normal(4), epsilon=1e-5)


def dropped() -> dict:
    rows = dict(x0=normal(2, 3, 4), residual=normal(2, 3, 4), rowscale=normal(2, 3))
    columns = dict(weight=normal(4), bias=normal(4), layerscale=normal(4))
    return rows | columns | dict(dropout_p=0.0, epsilon=1e-5)


def of_norm() -> dict:
    return dict(x=normal(2, 3, 4), residual=normal(2, 3, 4))


def x_alone() -> dict:
    return dict(x=normal(2, 3, 4))


def of_dropped_norm() -> dict:
    return dict(x0=normal(2, 3, 4), residual=normal(2, 3, 4))


def scores() -> dict:
    return dict(logits=normal(3, 5), labels=torch.tensor([0, 4, 2]))


def of_loss() -> dict:
    return dict(input=normal(3, 5), target=torch.tensor([0, 4, 2]))


def rotated() -> dict:
    tables = dict(cos=normal(MANY, 4), sin=normal(MANY, 4))
    return dict(x=normal(2, 4, 4, 8), seqlen_offsets=numbers(0, 3)) | tables


def rotated_varlen() -> dict:
    return rotated() | dict(x=normal(7, 4, 8), cu_seqlens=numbers(0, 3, 7))


def rotated_qkv() -> dict:
    return dict(qkv=normal(2, 4, 3, 4, 8))


def rotated_heads() -> dict:
    return dict(qkv=normal(2, 4, 8, 8), num_heads_q=4, seqlen_offset=numbers(0, 3), max_seqlen=9)


def rotated_q_and_kv() -> dict:
    return dict(qkv=normal(2, 4, 4, 8), kv=normal(2, 4, 2, 2, 8))


def rotary_dim() -> dict:
    return dict(dim=8)


def rotary_of_xpos() -> dict:
    return dict(dim=8, scale_base=512.0)


def heads() -> dict:
    return dict(nheads=12)


def slopes() -> dict:
    return dict(alibi_slopes=normal(4))


def packed() -> dict:
    return dict(qkv=normal(2, 4, 3, 4, 8))


def packed_varlen() -> dict:
    return dict(qkv=normal(7, 3, 4, 8), cu_seqlens=numbers(0, 3, 7), max_seqlen=4)


def q_and_kv() -> dict:
    return dict(q=normal(2, 4, 4, 8), kv=normal(2, 5, 2, 2, 8))


def q_and_kv_varlen() -> dict:
    q = dict(q=normal(7, 4, 8), cu_seqlens=numbers(0, 3, 7), max_seqlen=4)
    return q | dict(kv=normal(7, 2, 2, 8), cu_seqlens_k=numbers(0, 3, 7), max_seqlen_k=4)


def packed_padded() -> dict:
    return packed() | dict(key_padding_mask=torch.ones(2, 4, dtype=torch.bool))


def q_and_kv_padded() -> dict:
    return q_and_kv() | dict(causal=True, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))


def layer() -> dict:
    return dict(embed_dim=32, num_heads=4)


def flash_layer() -> dict:
    return layer() | dict(use_flash_attn=True, use_alibi=True, rotary_emb_dim=8, num_heads_kv=2)


def tokens() -> dict:
    return dict(x=normal(2, 4, 32))


def tokens_padded() -> dict:
    return tokens() | dict(key_padding_mask=torch.ones(2, 4, dtype=torch.bool))


def tokens_varlen() -> dict:
    return dict(x=normal(7, 32), cu_seqlens=numbers(0, 3, 7), max_seqlen=4)


def tokens_and_memory() -> dict:
    return tokens() | dict(x_kv=normal(2, 5, 32))


def of_cache() -> dict:
    return dict(batch_size=2, max_seqlen=5)


def of_transformers() -> dict:
    q, k, v = normal(2, 4, 4, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)
    bias = dict(attention_mask=normal(2, 1, 4, 5), position_bias=normal(1, 4, 4, 5))
    return dict(module=nn.Identity(), query=q, key=k, value=v, s_aux=normal(4)) | bias


def of_transformers_causal() -> dict:
    return of_transformers() | dict(attention_mask=None)


CONSTRUCTORS: dict[Callable, list[Callable[[], dict]]] = {
    made(layer_norm.RMSNorm, **of_norm()): [size],
    made(rms_norm.RMSNorm, **x_alone()): [size],
    made(rms_norm.DropoutAddRMSNorm, **of_dropped_norm()): [size],
    made(losses.CrossEntropyLoss, **of_loss()): [dict],
    made(layers.RotaryEmbedding, **rotated_qkv()): [rotary_dim, rotary_of_xpos],
    made(attention.FlashSelfAttention, **packed()): [slopes],
    made(attention.FlashCrossAttention, **q_and_kv()): [slopes],
    made(attention.SelfAttention, **packed()): [dict],
    made(attention.CrossAttention, **q_and_kv()): [dict],
    made(mha.MHA, **tokens()): [layer, flash_layer],
}
CALLS: dict[Callable, list[Callable[[], dict]]] = {
    layer_norm.layer_norm_fn: [normed, normed_with_scales],
    layer_norm.rms_norm_fn: [normed, normed_with_scales],
    layer_norm.RMSNorm(4).forward: [of_norm],
    rms_norm.rms_norm: [x_and_weight],
    rms_norm.dropout_add_rms_norm: [dropped],
    rms_norm.RMSNorm(4).forward: [x_alone],
    rms_norm.DropoutAddRMSNorm(4).forward: [of_dropped_norm],
    cross_entropy.cross_entropy_loss: [scores],
    losses.CrossEntropyLoss().forward: [of_loss],
    rotary.apply_rotary: [rotated, rotated_varlen],
    layers.RotaryEmbedding(8).forward: [rotated_qkv, rotated_heads],
    layers.RotaryEmbedding(8, scale_base=512.0).forward: [rotated_q_and_kv],
    attention.get_alibi_slopes: [heads],
    attention.FlashSelfAttention().forward: [packed, packed_varlen],
    attention.FlashCrossAttention().forward: [q_and_kv, q_and_kv_varlen],
    attention.SelfAttention().forward: [packed_padded],
    attention.CrossAttention().forward: [q_and_kv_padded],
    mha.MHA(32, 4, layer_idx=0).forward: [tokens, tokens_padded],
    mha.MHA(32, 4, layer_idx=0, use_flash_attn=True).forward: [tokens_varlen],
    mha.MHA(32, 4, cross_attn=True).forward: [tokens_and_memory],
    transformers.attention: [of_transformers, of_transformers_causal],
    mha.MHA(32, 4).allocate_inference_cache: [of_cache],
} | CONSTRUCTORS
WIDE = FLOATS - {"float8_e4m3fn"}
# What is right for an argument, of the values; None besides where the signature says so.
TAKEN: dict[str, set[str]] = {
    **dict.fromkeys(["prenorm", "residual_in_fp32", "zero_centered_weight", "is_rms_norm"], TRUTH),
    **dict.fromkeys(["return_dropout_mask"], TRUTH),
    **dict.fromkeys(["interleaved", "inplace", "conjugate"], TRUTH),
    **dict.fromkeys(["eps", "epsilon", "logit_scale", "lse_square_scale"], NUMBERS),
    **dict.fromkeys(["hidden_size", "ignore_index", "nheads"], {"integer"}),
    **dict.fromkeys(["x", "x0", "logits", "input"], WIDE),
    **dict.fromkeys(["x1", "residual", "out", "residual_out", "rowscale", "layerscale"], FLOATS),
    **dict.fromkeys(["weight", "bias", "weight1", "bias1", "cos", "sin"], FLOATS),
    **dict.fromkeys(["labels", "target"], {"int32"}),
    "seqlen_offsets": {"integer", *INTEGERS},
    "cu_seqlens": {"int8", "int64"},
    **dict.fromkeys(["precomputed_lse", "inplace_backward", "fused_bias_fc"], ANYTHING),  # not read
    **dict.fromkeys(["qkv", "q", "kv"], WIDE),
    **dict.fromkeys(["causal", "deterministic"], {"None", *NUMBERS}),
    **dict.fromkeys(["softmax_scale", "base", "scale_base"], NUMBERS),
    **dict.fromkeys(["rotary_emb_base", "rotary_emb_scale_base"], NUMBERS),
    **dict.fromkeys(["seqlen_offset"], {"integer", *INTEGERS}),
    **dict.fromkeys(["max_seqlen", "max_seqlen_k", "batch_size"], {"integer"}),
    "alibi_slopes": FLOATS,
    **dict.fromkeys(["cross_attn", "qkv_proj_bias", "out_proj_bias", "dwconv"], TRUTH),
    **dict.fromkeys(["use_alibi", "use_flash_attn"], TRUTH),
    **dict.fromkeys(["rotary_emb_interleaved", "return_residual"], {"None", *NUMBERS}),
    **dict.fromkeys(["checkpointing", "return_z_loss"], {"None", *NUMBERS}),
    **dict.fromkeys(["attention_mask", "position_bias"], FLOATS | {"rank - 1", "0-dim"}),
    **dict.fromkeys(["scaling", "softcap"], NUMBERS),
    "is_causal": TRUTH,
    "output_attentions": {"None"},
    "s_aux": FLOATS,
    "module": ANYTHING,  # whose is_causal counts, if it has one
    "layer_idx": ANYTHING,  # a key
    "mixer_subset": {"list", "array"},  # an index
}
ROWS = {"rank + 1", "rank - 1"}  # of one argument alone, any number of dimensions
UNREAD = dict.fromkeys(["max_seqlen", "max_seqlen_k", "cu_seqlens_k", "num_heads_q"], ANYTHING)
UNREAD |= dict.fromkeys(["rotary_emb_base", "rotary_emb_scale_base"], ANYTHING)
UNREAD |= dict.fromkeys(["rotary_emb_interleaved"], ANYTHING)
# What is right in one call, or not read there.
MORE: dict[Callable[[], dict], dict[str, set[str]]] = {
    **dict.fromkeys([x_and_weight, x_alone], {"x": WIDE | ROWS}),
    **dict.fromkeys([rotated, rotated_varlen], UNREAD),
    rotated_qkv: UNREAD | {"qkv": WIDE | {"meta"}, "max_seqlen": {"integer"}},
    rotated_q_and_kv: {"num_heads_q": ANYTHING},
    packed: UNREAD | {"qkv": WIDE | {"meta"}},
    q_and_kv: UNREAD,
    q_and_kv_padded: {"causal": TRUTH},
    **dict.fromkeys([tokens, tokens_padded, tokens_and_memory], UNREAD),
    tokens_varlen: {"x": {"sparse"}},  # torch has that product
    layer: UNREAD,
    of_transformers: {
        "is_causal": ANYTHING,
        "attention_mask": FLOATS | {"bool", "rank - 1", "0-dim"},
    },
}
# What a wrong value is held against.
BESIDE = {
    "hidden_size": "weight",
    "seqlen_offset": "max_seqlen",
    "cu_seqlens": "max_seqlen",
    "num_heads": "embed_dim|num_heads_kv",
}
OF_OTHERS = {
    transformers.register,  # below
    mha.ParallelMHA,  # refuses everything
    # walked in test_wrong_arguments.py; the classes' apply hands on to them
    layers.apply_rotary_emb,
    layers.apply_rotary_emb_qkv_,
    layers.apply_rotary_emb_kv_,
    layers.ApplyRotaryEmb,
    layers.ApplyRotaryEmbQKV_,
    layers.ApplyRotaryEmbKV_,
}


def title(function: Callable) -> str:
    return f"{function.__module__.removeprefix('flash_attn.')}.{function.__qualname__}"


@pytest.mark.parametrize(
    "function, make, argument",
    [
        pytest.param(function, make, argument, id=f"{title(function)}-{make.__name__}-{argument}")
        for function, makes in CALLS.items()
        for make in makes
        for argument, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ],
)
def test_wrong_value(function: Callable, make: Callable[[], dict], argument: str) -> None:
    right = MORE.get(make, {}).get(argument, TAKEN.get(argument, set()))
    if is_optional(function, argument):
        right = right | {"None"}
    check_wrong_values(function, make, argument, right, BESIDE.get(argument))


@pytest.mark.parametrize("module", WALKED, ids=lambda module: module.__name__)
def test_every_public_function_is_here(module: ModuleType) -> None:
    """What the module defines under a public name; of a class, its constructor and forward."""
    own = {x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__}
    names = {x.__qualname__ for x in own - OF_OTHERS if not x.__qualname__.startswith("_")}
    names |= {f"{name}.forward" for name in names if inspect.isclass(getattr(module, name))}
    assert names <= {x.__qualname__ for x in CALLS if x.__module__ == module.__name__}


def test_a_name_for_transformers() -> None:
    for kind, value in wrong_values("flash"):
        if kind != "string":
            with pytest.raises(ValueError, match="^flash_attn: name: expected a str") as caught:
                transformers.register(value)
            assert len(str(caught.value)) <= MOST_CHARACTERS
