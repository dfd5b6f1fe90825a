"""The public functions as type checkers see them: what comes back follows return_attn_probs."""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from flash_attn import _positional
from flash_attn._functions import _Applied as _Applied
from flash_attn._functions import _get_block_size_n as _get_block_size_n
from flash_attn._functions import maybe_contiguous as maybe_contiguous
from flash_attn._functions import round_multiple as round_multiple
from flash_attn._upstream import _flash_attn_backward as _flash_attn_backward
from flash_attn._upstream import _flash_attn_forward as _flash_attn_forward
from flash_attn._upstream import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from flash_attn._upstream import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from flash_attn._upstream import _wrapped_flash_attn_backward as _wrapped_flash_attn_backward
from flash_attn._upstream import _wrapped_flash_attn_forward as _wrapped_flash_attn_forward
from flash_attn._upstream import (
    _wrapped_flash_attn_varlen_backward as _wrapped_flash_attn_varlen_backward,
)
from flash_attn._upstream import (
    _wrapped_flash_attn_varlen_forward as _wrapped_flash_attn_varlen_forward,
)
from flash_attn.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
from flash_attn.kvcache import flash_decode_func as flash_decode_func
from flash_attn.masks import Mask

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_decode_func",
]

flash_attn_gpu = _positional
USE_TRITON_ROCM: bool
Window = Sequence[int | None] | Tensor
WithProbs = tuple[Tensor, Tensor, Tensor]

class FlashAttnFunc(_Applied): ...
class FlashAttnKVPackedFunc(_Applied): ...
class FlashAttnQKVPackedFunc(_Applied): ...
class FlashAttnVarlenFunc(_Applied): ...
class FlashAttnVarlenKVPackedFunc(_Applied): ...
class FlashAttnVarlenQKVPackedFunc(_Applied): ...

@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> WithProbs: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    return_max_logits: Literal[False] = False,
) -> Tensor | WithProbs: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    return_attn_probs: Literal[False] = False,
    block_table: Tensor | None = None,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    *,
    return_attn_probs: Literal[True],
    block_table: Tensor | None = None,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    return_max_logits: Literal[False] = False,
) -> WithProbs: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_table: Tensor | None = None,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    return_max_logits: Literal[False] = False,
) -> Tensor | WithProbs: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_table: Tensor | None = None,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> WithProbs: ...
@overload
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
    return_max_logits: Literal[False] = False,
) -> Tensor | WithProbs: ...
@overload
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
) -> Tensor | tuple[Tensor, ...]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> WithProbs: ...
@overload
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
    return_max_logits: Literal[False] = False,
) -> Tensor | WithProbs: ...
@overload
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
) -> Tensor | tuple[Tensor, ...]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> WithProbs: ...
@overload
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
    return_max_logits: Literal[False] = False,
) -> Tensor | WithProbs: ...
@overload
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
) -> Tensor | tuple[Tensor, ...]: ...
@overload
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
    return_attn_probs: Literal[False] = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
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
    *,
    return_attn_probs: Literal[True],
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: Literal[False] = False,
) -> WithProbs: ...
@overload
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
    return_max_logits: Literal[False] = False,
) -> Tensor | WithProbs: ...
@overload
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
) -> Tensor | tuple[Tensor, ...]: ...
