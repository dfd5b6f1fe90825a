"""The public functions as type checkers see them: what comes back follows return_attn_probs.

Each overload repeats the signature, as an overload has no way to share arguments that may be given
by position; tests/test_api.py holds them to the function.
"""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from flash_attn.masks import Mask

Window = Sequence[int | None] | Tensor
Result = Tensor | tuple[Tensor, ...]
WithProbs = tuple[Tensor, Tensor, Tensor]

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
