"""What torch's FlopCounterMode counts for our ops."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.flop_counter import FlopCounterMode

import flash_attn
from flash_attn import flash_attn_interface


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("d_v", [16, 24])
def test_dense_as_torch_counts(d_v: int) -> None:
    """Its formula in matrix products recomputes no scores in the backward; ours does."""
    q = torch.randn(2, 4, 9, 16, requires_grad=True)
    k = torch.randn(2, 4, 12, 16, requires_grad=True)
    v = torch.randn(2, 4, 12, d_v, requires_grad=True)

    def forward(function) -> int:
        return flops(lambda: function(q, k, v))

    def both(function) -> int:
        return flops(lambda: function(q, k, v).sum().backward())

    ours = flash_attn.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):
        assert forward(ours) == forward(torch_sdpa)
        recomputed = 2 * (2 * 4 * 9 * 12) * 16
        assert both(ours) == both(torch_sdpa) + recomputed


def test_heads_of_queries_count() -> None:
    q, k = torch.randn(2, 9, 6, 16), torch.randn(2, 12, 2, 16)
    assert flops(lambda: flash_attn.flash_attn_func(q, k, k)) == 4 * (2 * 9 * 12) * 6 * 16


def test_varlen_counts_the_sequences() -> None:
    q, k = torch.randn(12, 4, 16, requires_grad=True), torch.randn(20, 4, 16)
    cu_q = torch.tensor([0, 5, 12], dtype=torch.int32)
    cu_k = torch.tensor([0, 13, 20], dtype=torch.int32)
    pairs = 5 * 13 + 7 * 7
    lengths = (cu_q, cu_k, 7, 13)

    def both() -> None:
        flash_attn.flash_attn_varlen_func(q, k, k, *lengths).sum().backward()

    assert flops(both) == (4 + 10) * pairs * 4 * 16
    on_meta = [x.to("meta") for x in (q, k, k, cu_q, cu_k)]
    longest = flops(
        lambda: torch.ops.flash_attn._flash_attn_varlen_forward(*on_meta, 7, 13, 0.0, None, False)
    )
    assert longest == 4 * (2 * 7 * 13) * 4 * 16


def test_upstreams_ops() -> None:
    q = torch.randn(2, 9, 4, 16)
    options = (0.0, None, False, -1, -1, 0.0, None)
    forward = torch.ops.flash_attn._flash_attn_forward
    out, lse, *_ = forward(q, q, q, *options, False)
    assert flops(lambda: forward(q, q, q, *options, False)) == 4 * (2 * 9 * 9) * 4 * 16
    backward = torch.ops.flash_attn._flash_attn_backward
    given = (q, q, q, q, out, lse, None, None, None, *options, False)
    assert flops(lambda: backward(*given)) == 10 * (2 * 9 * 9) * 4 * 16
    assert flash_attn_interface._flash_attn_forward(q, q, q, *options, False)[0].equal(out)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("appends", [False, True])
def test_decode_counts_the_cached(appends: bool, paged: bool) -> None:
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    caches = torch.zeros(2, 8, 16, 2, 16).unbind(0) if paged else torch.zeros(2, 2, 64, 2, 16)
    lengths = torch.tensor([30, 50], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4) if paged else None
    cached = 80 + (2 if appends else 0)

    def step(lengths: torch.Tensor | None) -> None:
        appended = (new, new) if appends else ()
        options = dict(cache_seqlens=lengths, block_table=table)
        flash_attn.flash_attn_with_kvcache(q, *caches, *appended, **options)

    assert flops(lambda: step(lengths)) == 4 * cached * 4 * 16
    if not appends:
        assert flops(lambda: step(None)) == 4 * (2 * 64) * 4 * 16
