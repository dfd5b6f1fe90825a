"""Attention between projections as torch.nn modules, under upstream's names."""

import math

import torch
from torch import Tensor, nn

from flash_attn._errors import explained, flag, shown
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

_MOST_HEADS = 1 << 20


@explained()
def get_alibi_slopes(nheads: int) -> list[float]:
    """The ALiBi slopes of Press et al. 2022: 2^(-8/n), 2^(-16/n), … for n heads, a power of 2.

    For another number: those of the power of 2 below, then every second one of the power above.
    """
    if not 1 <= nheads <= _MOST_HEADS:
        raise RuntimeError(f"flash_attn: nheads: expected 1 to {_MOST_HEADS}, got {shown(nheads)}")
    power = 2 ** math.floor(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    if power == nheads:
        return slopes
    return slopes + get_alibi_slopes(2 * power)[::2][: nheads - power]


class _FlashAttention(nn.Module):
    def __init__(
        self,
        causal: bool,
        softmax_scale: float | None,
        attention_dropout: float,
        window_size: tuple[int, int],
        alibi_slopes: Tensor | None,
        deterministic: bool,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        if alibi_slopes is not None and not alibi_slopes.is_floating_point():
            raise RuntimeError(
                f"flash_attn: alibi_slopes: expected a floating dtype, got {shown(alibi_slopes)}"
            )
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.deterministic = deterministic

    def _options(self, causal: bool | None) -> dict:
        slopes = self.alibi_slopes
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            # A model cast to 16 bits has cast the buffer as well.
            "alibi_slopes": None if slopes is None else slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    """flash_attn_qkvpacked_func as a module; dropout in training mode only.

    Arguments: as the function's; attention_dropout is its dropout_p.
    """

    @explained(of_torch=True)
    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic
        )

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """qkv (batch, seqlen, 3, heads, d) → (batch, seqlen, heads, d).

        With cu_seqlens and max_seqlen: (total, 3, heads, d) → (total, heads, d). causal overrides
        the module's.
        """
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal))
        return flash_attn_varlen_qkvpacked_func(
            qkv, cu_seqlens, max_seqlen, **self._options(causal)
        )


class FlashCrossAttention(_FlashAttention):
    """flash_attn_kvpacked_func as a module; dropout in training mode only.

    Arguments: as the function's; attention_dropout is its dropout_p.
    """

    @explained(of_torch=True)
    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic
        )

    @explained({"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"})
    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """q (batch, seqlen_q, heads_q, d), kv (batch, seqlen_k, 2, heads_kv, d) → q's shape.

        With cu_seqlens, max_seqlen (of q), cu_seqlens_k and max_seqlen_k: (total_q, heads_q, d) and
        (total_k, 2, heads_kv, d). causal overrides the module's.
        """
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal))
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self._options(causal)
        )


def _check_padding(key_padding_mask: Tensor) -> None:
    if key_padding_mask.dtype != torch.bool or key_padding_mask.dim() != 2:
        raise RuntimeError(
            "flash_attn: key_padding_mask: expected bool and shape (batch, seqlen_k), got"
            f" {shown(key_padding_mask)}"
        )


class CrossAttention(nn.Module):
    """Attention with padding given as a mask; dropout in training mode only.

    Arguments: as flash_attn_func's; attention_dropout is its dropout_p.
    """

    @explained(of_torch=True)
    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = flag("causal", causal)
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    @explained({"attn_bias": "key_padding_mask"}, of_torch=True)
    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """q (batch, seqlen_q, heads_q, d), kv (batch, seqlen_k, 2, heads_kv, d) → q's shape.

        key_padding_mask: bool (batch, seqlen_k), True: a key. With causal, the last query sees as
        many keys as there are. causal overrides the module's.
        """
        causal = self.causal if causal is None else causal
        seen = None
        if key_padding_mask is not None:
            _check_padding(key_padding_mask)
            seen = key_padding_mask[:, None, None]
            if causal:
                key = torch.arange(kv.size(1), device=q.device)
                query = torch.arange(q.size(1), device=q.device)[:, None]
                lengths = key_padding_mask.sum(-1)[:, None, None, None]
                seen = seen & (key <= query + lengths - q.size(1))
        return flash_attn_kvpacked_func(
            q,
            kv,
            self.drop.p if self.training else 0.0,
            self.softmax_scale,
            causal and seen is None,
            attn_bias=seen,
        )


class SelfAttention(CrossAttention):
    """CrossAttention of packed q, k and v."""

    @explained({"attn_bias": "key_padding_mask"}, of_torch=True)
    def forward(
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """qkv (batch, seqlen, 3, heads, d) → (batch, seqlen, heads, d).

        key_padding_mask: bool (batch, seqlen), True: a key. With causal, query i sees the keys up
        to i. causal overrides the module's.
        """
        if key_padding_mask is not None:
            _check_padding(key_padding_mask)
        return flash_attn_qkvpacked_func(
            qkv,
            self.drop.p if self.training else 0.0,
            self.softmax_scale,
            self.causal if causal is None else causal,
            attn_bias=None if key_padding_mask is None else key_padding_mask[:, None, None],
        )
