"""The same functions of q, k and v, or k and v, that lie side by side in one tensor."""

from torch import Tensor

from flash_attn._call import unpack
from flash_attn._errors import explain
from flash_attn.attention import Result, Window, flash_attn_func, flash_attn_varlen_func
from flash_attn.masks import Mask


def _unpack(packed: Tensor, argument: str, count: int, dims: int):
    """The q, k, v (count 3) or k, v (count 2) that lie side by side in dimension -3."""
    if packed.dim() != dims or packed.size(-3) != count:
        rows = "batch, seqlen" if dims == 5 else "total"
        raise RuntimeError(
            f"flash_attn: {argument}: must have shape ({rows}, {count}, heads, head_dim),"
            f" got {tuple(packed.shape)}"
        )
    return unpack(packed)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: bool = False,
) -> Result:
    """flash_attn_func(q, k, v, …) of qkv (batch, seqlen, 3, heads, d); packed gradient."""
    try:
        q, k, v = _unpack(qkv, "qkv", 3, 5)
        return flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            attn_bias=attn_bias,
            learnable_sink=learnable_sink,
            causal_alignment=causal_alignment,
            return_max_logits=return_max_logits,
        )
    except Exception as error:
        explain(error, flash_attn_qkvpacked_func, locals(), {"q": "qkv", "k": "qkv", "v": "qkv"})
        raise


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: bool = False,
) -> Result:
    """flash_attn_func(q, k, v, …) of q and kv (batch, seqlen_k, 2, heads_kv, d)."""
    try:
        k, v = _unpack(kv, "kv", 2, 5)
        return flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            attn_bias=attn_bias,
            learnable_sink=learnable_sink,
            causal_alignment=causal_alignment,
            return_max_logits=return_max_logits,
        )
    except Exception as error:
        explain(error, flash_attn_kvpacked_func, locals(), {"k": "kv", "v": "kv"})
        raise


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: bool = False,
) -> Result:
    """flash_attn_varlen_func(q, k, v, …) of qkv (total, 3, heads, d), one set of lengths."""
    try:
        q, k, v = _unpack(qkv, "qkv", 3, 4)
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            attn_bias=attn_bias,
            learnable_sink=learnable_sink,
            causal_alignment=causal_alignment,
            return_max_logits=return_max_logits,
        )
    except Exception as error:
        packed = {"q": "qkv", "k": "qkv", "v": "qkv"}
        lengths = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}
        longest = {"max_seqlen_q": "max_seqlen", "max_seqlen_k": "max_seqlen"}
        names = packed | lengths | longest
        explain(error, flash_attn_varlen_qkvpacked_func, locals(), names)
        raise


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: bool = False,
) -> Result:
    """flash_attn_varlen_func(q, k, v, …) of q and kv (total_k, 2, heads_kv, d)."""
    try:
        k, v = _unpack(kv, "kv", 2, 4)
        return flash_attn_varlen_func(
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
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            attn_bias=attn_bias,
            learnable_sink=learnable_sink,
            causal_alignment=causal_alignment,
            return_max_logits=return_max_logits,
        )
    except Exception as error:
        explain(error, flash_attn_varlen_kvpacked_func, locals(), {"k": "kv", "v": "kv"})
        raise
