"""torch's flash kernels, from this library: what torch.nn.attention's registry activates.

The functions have the signatures of torch's ops of the same names, (batch, heads, seqlen, d), and
stand below autograd: torch's own formulas call the backward ones.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn import _upstream

NAME = "flash_attn"


def _no_limit(side: int | None) -> int:
    return -1 if side is None else side


def _factor_and_scale(scale: float | None) -> tuple[int, float | None]:
    """What to multiply the query with so that the scale is above 0."""
    if scale is None or scale > 0:
        return 1, scale
    return (-1, -scale) if scale < 0 else (0, 1.0)


def _times(factor: int, x: Tensor) -> Tensor:
    return x if factor == 1 else x * factor


def _turned(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _laid_out_like(x: Tensor, model: Tensor) -> Tensor:
    """x with the strides of empty_like(model), which compiled code expects of the kernel."""
    expected = torch.empty_like(model, device="meta").stride()
    return x if x.stride() == expected else torch.empty_like(model).copy_(x)


def _flash_attention_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
):
    """(batch, seqlen, heads, d), or (total, heads, d) with cum_seq_q. Causal is bottom-right."""
    factor, scale = _factor_and_scale(scale)
    out, lse, S_dmask, rng_state = _upstream._forward(
        _times(factor, query),
        key,
        value,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        seqused_k=seqused_k,
        max_seqlen_q=None if cum_seq_q is None else max_q,
        max_seqlen_k=None if cum_seq_k is None else max_k,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        window_size=(_no_limit(window_size_left), _no_limit(window_size_right)),
        alibi_slopes=alibi_slopes,
        return_probs=return_debug_mask and dropout_p > 0.0,
    )
    unused = rng_state.new_empty((), dtype=torch.uint64)
    return out, lse, rng_state.view(torch.uint64), unused, S_dmask


def _flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    factor, scale = _factor_and_scale(scale)
    is_varlen = cum_seq_q is not None and cum_seq_q.numel() > 0
    with torch.no_grad():
        dq, dk, dv = _upstream.bwd(
            grad_out,
            _times(factor, query),
            key,
            value,
            out,
            logsumexp,
            cu_seqlens_q=cum_seq_q if is_varlen else None,
            cu_seqlens_k=cum_seq_k if is_varlen else None,
            alibi_slopes=None,
            rng_state=rng_state.view(torch.int64),
            max_seqlen_q=max_q if is_varlen else None,
            max_seqlen_k=max_k if is_varlen else None,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
            window_size=(_no_limit(window_size_left), _no_limit(window_size_right)),
            softcap=0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return _times(factor, dq), dk, dv


def _scaled_dot_product_flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    max_q, max_k = query.size(2), key.size(2)
    out, *others = _flash_attention_forward(
        *_turned(query, key, value),
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
    )
    lse, rng_state, unused, S_dmask = others
    out = _laid_out_like(out.transpose(1, 2), query)
    return out, lse, None, None, max_q, max_k, rng_state, unused, S_dmask


def _scaled_dot_product_flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    gradients = _flash_attention_backward(
        *_turned(grad_out, query, key, value, out),
        logsumexp,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    models = (query, key, value)
    return tuple(map(_laid_out_like, _turned(*gradients), models))


def _for_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """Causal is top-left."""
    factor, scale = _factor_and_scale(scale)
    out, lse, *_ = _upstream._forward(
        *_turned(_times(factor, query), key, value),
        attn_bias=attn_mask,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        causal_alignment="top-left",
    )
    out = _laid_out_like(out.transpose(1, 2), query)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _for_cpu_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    dropout_p,
    is_causal,
    *,
    attn_mask=None,
    scale=None,
):
    factor, scale = _factor_and_scale(scale)
    with torch.no_grad():
        gradients = _upstream.bwd(
            *_turned(grad_out, _times(factor, query), key, value, out),
            logsumexp.contiguous(),
            attn_bias=attn_mask,
            alibi_slopes=None,
            rng_state=None,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
            causal_alignment="top-left",
            window_size=(-1, -1),
            softcap=0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    dq, dk, dv = _turned(*gradients)
    return _times(factor, dq), dk, dv


KERNELS = {
    "CUDA": {
        "_flash_attention_forward": _flash_attention_forward,
        "_flash_attention_backward": _flash_attention_backward,
        "_scaled_dot_product_flash_attention": _scaled_dot_product_flash_attention,
        "_scaled_dot_product_flash_attention_backward": (
            _scaled_dot_product_flash_attention_backward
        ),
    },
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": _for_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _for_cpu_backward,
    },
}


def override(library: torch.library.Library, op: str, kernel: Callable, key: str) -> None:
    """Puts kernel in the place of torch's own, as long as the library lives, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(op, kernel, key)


class _Handle:
    """Ours are torch's flash kernels while it lives."""

    def __init__(self) -> None:
        self._libraries = []
        for device, kernels in KERNELS.items():
            library = torch.library.Library("aten", "IMPL", device)
            for name, kernel in kernels.items():
                override(library, name, kernel, device)
            self._libraries.append(library)

    def remove(self) -> None:
        """torch's own again."""
        self._libraries.clear()


def register() -> None:
    """Lists this library in torch's registry, where torch has one; activates nothing."""
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Handle)
