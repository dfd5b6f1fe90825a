"""The five functions of upstream's extension module `flash_attn_2_cuda`, by position as there
(csrc/flash_attn/flash_api.cpp of flash-attn 2.8.4), on our ops, any device.
"""

import torch

from flash_attn import _upstream
from flash_attn._errors import explained, shown
from flash_attn.kvcache import flash_attn_with_kvcache

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def _check_generator(gen):
    if gen is not None:
        raise RuntimeError(
            "flash_attn: gen: the `generator` argument is no longer supported, expected None,"
            f" got {type(gen).__name__}"
        )


def _into(given, value):
    if given is None:
        return value
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"flash_attn: out: expected torch.Tensor or None, got {shown(given)}")
    _upstream.check_result("out", given, "the result", value)
    return given.copy_(value)


def fwd(
    q,
    k,
    v,
    out_,
    alibi_slopes,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    return_softmax,
    gen=None,
):
    """Returns [out, softmax_lse, S_dmask, rng_state]; out is out_ where that is given."""
    _check_generator(gen)
    out, *others = _upstream._flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    )
    return [_into(out_, out), *others]


def varlen_fwd(
    q,
    k,
    v,
    out_,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    block_table,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    return_softmax,
    gen=None,
    num_splits=0,
):
    """Returns [out, softmax_lse, S_dmask, rng_state]; out is out_ where that is given."""
    _check_generator(gen)
    out, *others = _upstream._flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
        block_table,
        leftpad_k,
        seqused_k,
        zero_tensors,
        num_splits,
    )
    return [_into(out_, out), *others]


def _gradients(q, k, v, dq_, dk_, dv_):
    given = zip((dq_, dk_, dv_), (q, k, v), strict=True)
    return [torch.empty_like(like) if x is None else x for x, like in given]


def bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq_,
    dk_,
    dv_,
    alibi_slopes,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    gen=None,
    rng_state=None,
):
    """Returns [dq, dk, dv, softmax_d]; dq is dq_ where that is given, and so on."""
    _check_generator(gen)
    gradients = _gradients(q, k, v, dq_, dk_, dv_)
    softmax_d = _upstream._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *gradients,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
    )
    return [*gradients, softmax_d]


def varlen_bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq_,
    dk_,
    dv_,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    gen=None,
    rng_state=None,
):
    """Returns [dq, dk, dv, softmax_d]; dq is dq_ where that is given, and so on."""
    _check_generator(gen)
    gradients = _gradients(q, k, v, dq_, dk_, dv_)
    softmax_d = _upstream._flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *gradients,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
        zero_tensors,
    )
    return [*gradients, softmax_d]


@explained(_upstream._NAMES)
def fwd_kvcache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    cache_seqlens,
    rotary_cos,
    rotary_sin,
    cache_batch_idx,
    cache_leftpad,
    block_table,
    alibi_slopes,
    out_,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    rotary_interleaved,
    num_splits,
):
    """flash_attn_with_kvcache. Returns [out, softmax_lse]; out is out_ where that is given."""
    out, softmax_lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        rotary_interleaved,
        alibi_slopes,
        num_splits,
        return_softmax_lse=True,
    )
    return [_into(out_, out), softmax_lse]
