"""Ways to compute attention, on our layout (batch, seqlen, heads, head_dim)."""

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .common import forced_backend

# Name in tables -> torch's backend. On a CPU torch has flash (a tiled kernel) and math only.
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(Q Kᵀ / √d) V as separate operations that read and write all seqlen² scores.

    hidden: bool (seqlen_q, seqlen_k), True where a query must not look (:func:`causal_hidden`).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


@functools.lru_cache(maxsize=2)
def causal_hidden(seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """The keys after each query's diagonal, aligned bottom-right."""
    ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return ones.triu(seqlen_k - seqlen_q + 1)


def naive(causal: bool) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = causal_hidden(q.shape[1], k.shape[1], q.device) if causal else None
        return naive_attention(q, k, v, hidden)

    return attend


def sdpa(
    name: str | None, causal: bool, bias: torch.Tensor | None = None, dropout_p: float = 0.0
) -> Attention:
    """torch's scaled_dot_product_attention held to one backend: that one or an error. None: the one
    that torch chooses."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPA[name]) if name else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, bias, dropout_p, causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return attend


def ours(backend: str | None, causal: bool) -> Attention:
    from flash_attn import flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with forced_backend(backend):
            return flash_attn_func(q, k, v, causal=causal)

    return attend
