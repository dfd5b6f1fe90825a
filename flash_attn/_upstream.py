"""Upstream's private functions that other packages import.

Upstream's names and positional order (flash-attn 2.8.3), our ops. They take no part in autograd:
their callers sit inside autograd.Functions of their own.
"""

import torch
from torch import Tensor

from flash_attn._call import bwd, draw_rng_state, fwd, fwd_arguments
from flash_attn._errors import explain, shown

# The op's names of the arguments.
_NAMES = {"window_size": "window_size_left, window_size_right"}


@torch.no_grad()
def _forward(q, k, v, *, dropout_p, **options):
    rng_state = draw_rng_state(q) if dropout_p > 0.0 else q.new_zeros(2, dtype=torch.int64)
    arguments = fwd_arguments(q, k, v, dropout_p=dropout_p, rng_state=rng_state, **options)
    out, softmax_lse, S_dmask, _ = fwd(arguments)
    return out, softmax_lse, S_dmask, rng_state


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The dense forward: out, softmax_lse, S_dmask (or empty), rng_state (int64 (2))."""
    try:
        return _forward(
            q,
            k,
            v,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(window_size_left, window_size_right),
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            return_probs=return_softmax,
        )
    except Exception as error:
        explain(error, _flash_attn_forward, locals(), _NAMES)
        raise


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The varlen forward, returning as _flash_attn_forward.

    zero_tensors: rows outside every sequence are zero in any case. num_splits: 0 or 1, more raises
    NotImplementedError.
    """
    try:
        if num_splits > 1:
            raise NotImplementedError(
                "flash_attn: num_splits: num_splits > 1 is not supported with cu_seqlens,"
                f" got {num_splits}"
            )
        return _forward(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            block_table=block_table,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(window_size_left, window_size_right),
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            return_probs=return_softmax,
        )
    except Exception as error:
        explain(error, _flash_attn_varlen_forward, locals(), _NAMES)
        raise


def check_result(name: str, given: Tensor, like_name: str, like: Tensor) -> None:
    """Raises unless `given`, which a caller has for a result, has the form of `like`."""
    fits = not given.is_nested and given.layout == torch.strided and given.shape == like.shape
    if not fits or given.dtype != like.dtype or given.device != like.device:
        raise RuntimeError(
            f"flash_attn: {name}: expected {shown(like)} on {like.device} as {like_name} has, got"
            f" {shown(given)} on {given.device}"
        )


@torch.no_grad()
def _backward(dout, q, k, v, out, softmax_lse, gradients, **options):
    """Runs `bwd` and writes into the tensors of `gradients` (dq, dk, dv) that are not None.

    Returns softmax_d = rowsum(dout ∘ out), laid out like softmax_lse.
    """
    for name, given, like in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        if given is not None:
            check_result(name, given, name[1:], like)
    computed = bwd(dout, q, k, v, out, softmax_lse, **options)
    for given, gradient in zip(gradients, computed, strict=True):
        if given is not None:
            given.copy_(gradient)
    return (dout.to(softmax_lse.dtype) * out).sum(-1).transpose(-1, -2)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The dense backward: writes into dq, dk and dv; returns softmax_d (batch, heads_q, seqlen_q).

    rng_state: what _flash_attn_forward returned; needed with dropout.
    """
    try:
        return _backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            (dq, dk, dv),
            alibi_slopes=alibi_slopes,
            rng_state=rng_state,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(window_size_left, window_size_right),
            softcap=softcap,
            deterministic=deterministic,
        )
    except Exception as error:
        explain(error, _flash_attn_backward, locals(), _NAMES)
        raise


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The varlen backward: writes into dq, dk and dv; returns softmax_d (heads_q, total_q)."""
    try:
        return _backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            (dq, dk, dv),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            alibi_slopes=alibi_slopes,
            rng_state=rng_state,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(window_size_left, window_size_right),
            softcap=softcap,
            deterministic=deterministic,
        )
    except Exception as error:
        explain(error, _flash_attn_varlen_backward, locals(), _NAMES)
        raise


# Upstream wraps its functions as custom ops under these names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _register() -> torch.library.Library:
    """torch.ops.flash_attn._flash_attn_forward and its three sisters, whose schemas are upstream's.

    They run the functions above, whose ops have Meta kernels, so tracing needs no second formula.
    """
    library = torch.library.Library("flash_attn", "FRAGMENT")
    mask = "float softcap, Tensor? alibi_slopes"
    sides = "bool causal, SymInt window_size_left{0}, SymInt window_size_right{0}"
    options = f"float dropout_p, float? softmax_scale, {sides}"
    lengths = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
    saved = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse"
    written = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
    schemas = {
        _flash_attn_forward: (
            f"Tensor q, Tensor k, Tensor v, {options.format('')}, {mask}, bool return_softmax",
            "(Tensor, Tensor, Tensor, Tensor)",
        ),
        _flash_attn_varlen_forward: (
            f"Tensor q, Tensor k, Tensor v, {lengths}, {options.format('=-1')}, float softcap=0.0,"
            " Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None,"
            " Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False,"
            " SymInt num_splits=0",
            "(Tensor, Tensor, Tensor, Tensor)",
        ),
        _flash_attn_backward: (
            f"{saved}, {written}, {options.format('')}, {mask}, bool deterministic,"
            " Tensor? rng_state=None",
            "Tensor",
        ),
        _flash_attn_varlen_backward: (
            f"{saved}, {written}, {lengths}, {options.format('')}, {mask}, bool deterministic,"
            " Tensor? rng_state=None, bool zero_tensors=False",
            "Tensor",
        ),
    }
    for function, (arguments, result) in schemas.items():
        library.define(f"{function.__name__}({arguments}) -> {result}")
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
    return library


_LIBRARY = _register()
