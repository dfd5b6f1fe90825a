"""A user's script, for type checkers: what each function returns, as its flags say."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import flash_attn
from flash_attn import flash_attn_func, flash_attn_with_kvcache, flash_decode_func
from flash_attn.flash_attn_interface import FlashAttnFunc, flash_attn_varlen_func

Probabilities = tuple[Tensor, Tensor, Tensor]


def attend(q: Tensor, cu: Tensor, flag: bool) -> None:
    assert_type(flash_attn_func(q, q, q), Tensor)
    assert_type(flash_attn_func(q, q, q, 0.0, None, True, (-1, 0)), Tensor)
    assert_type(flash_attn_func(q, q, q, return_attn_probs=False), Tensor)
    assert_type(flash_attn_func(q, q, q, causal=True, return_attn_probs=True), Probabilities)
    assert_type(flash_attn_func(q, q, q, return_attn_probs=flag), Tensor | Probabilities)
    assert_type(flash_attn.flash_attn_qkvpacked_func(q), Tensor)
    assert_type(flash_attn.flash_attn_kvpacked_func(q, q, return_attn_probs=True), Probabilities)
    assert_type(flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, block_table=cu), Tensor)
    out, lse, _ = flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, return_attn_probs=True)
    assert_type((out, lse), tuple[Tensor, Tensor])
    assert_type(flash_attn.flash_attn_varlen_qkvpacked_func(q, cu, 7), Tensor)
    assert_type(flash_attn.flash_attn_varlen_kvpacked_func(q, q, cu, cu, 7, 7), Tensor)
    FlashAttnFunc.apply(q, q, q)


def serve(q: Tensor, cache: Tensor, flag: bool) -> None:
    assert_type(flash_decode_func(q, cache, cache), Tensor)
    assert_type(flash_decode_func(q, cache, cache, return_softmax_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3), Tensor)
    both = flash_attn_with_kvcache(q, cache, cache, q, q, return_softmax_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=flag)
    assert_type(either, Tensor | tuple[Tensor, Tensor])


def others(q: Tensor) -> None:
    assert_type(flash_attn.scaled_dot_product_attention(q, q, q, is_causal=True), Tensor)
    assert_type(flash_attn.can_use(q, q, q).backend, str | None)
    with flash_attn.use_backend("aten"), flash_attn.sdpa.enable():
        assert_type(torch.nn.functional.scaled_dot_product_attention(q, q, q), Tensor)
