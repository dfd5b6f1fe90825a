"""Inputs in float8_e4m3fn with descales, and what attention makes of them in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP8 = torch.float8_e4m3fn
DESCALES = ("q_descale", "k_descale", "v_descale")


def quantized(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, device=device).to(FP8)


def descales(batch: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """For two heads of k and v; each is a tenth from the next."""
    powers = torch.randperm(6 * batch, device=device).view(3, batch, 2)
    return dict(zip(DESCALES, 0.3 * 1.1**powers, strict=True))


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: dict[str, torch.Tensor],
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse of dequantised values in float64; window: as for flash_attn_func."""
    values = []
    for name, x in zip(DESCALES, (q, k, v), strict=True):
        x = x.double()
        if name in given:
            heads = torch.arange(x.size(2)) // (x.size(2) // 2)
            x = x * given[name].double()[:, None, heads, None]
        values.append(x.repeat_interleave(q.size(2) // x.size(2), 2))
    scores = torch.einsum("bqhd,bkhd->bhqk", values[0], values[1]) / q.size(-1) ** 0.5
    left, right = (side if side >= 0 else 99 for side in window)
    queries = torch.arange(q.size(1), device=q.device)[:, None] + k.size(1) - q.size(1)
    off = torch.arange(k.size(1), device=q.device) - queries
    scores = scores.masked_fill((off > right) | (off < -left), -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhqk,bkhd->bqhd", p, values[2]), lse


def assert_attended(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """A descale of another head, sequence or tensor is a tenth away."""
    (out, lse), (expected_out, expected_lse) = actual, expected
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (out - expected_out).norm() <= 0.01 * expected_out.norm()
    torch.testing.assert_close(lse.double(), expected_lse, atol=0.02, rtol=0.01)
