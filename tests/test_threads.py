"""The CPU's cores: results that do not depend on how many there are, nor on who is first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import flash_attn


@pytest.fixture(params=[2, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """That many workers, also where there are fewer cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(40, 40), (8, 1, 40, 40), (1, 8, 1, 40)], ids=str)
def test_slices_that_share_a_bias_take_turns(shape: tuple[int, ...], threads: int) -> None:
    """Every slice of the call adds to the same small gradient: none of it is lost, and the same
    bits come every time, as they would not if workers added in the order in which they finish."""
    q, k, v = torch.randn(3, 8, 40, 8, 8)
    bias = torch.randn(shape, requires_grad=True)
    full = bias.detach().expand(8, 8, 40, 40).clone().requires_grad_()

    def gradient(given: torch.Tensor) -> torch.Tensor:
        out = flash_attn.flash_attn_func(q, k, v, attn_bias=given, deterministic=True)
        return torch.autograd.grad(out.square().sum(), given)[0]

    first = gradient(bias)
    torch.testing.assert_close(first, gradient(full).sum_to_size(shape))
    for _ in range(10):
        assert torch.equal(gradient(bias), first)


@pytest.mark.parametrize(
    "tokens, heads, head_dim, dtype",
    [(16, 4, 100, torch.float32), (33, 1, 64, torch.float64), (3, 8, 100, torch.float32)],
    ids=str,
)
def test_batch_invariant_on_any_number_of_cores(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, threads: int
) -> None:
    """One sequence alone has the bits that it has among others, though alone it is too little work
    for all cores, and a product that they share is summed in another order."""
    q = torch.randn(12, tokens, heads, head_dim, dtype=dtype)
    k, v = torch.randn(2, 12, 1024, 1, head_dim, dtype=dtype)
    options = dict(causal=False, batch_invariant=True)
    together = flash_attn.flash_decode_func(q, k, v, **options)
    for b in range(12):
        alone = flash_attn.flash_decode_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options)
        assert torch.equal(alone[0], together[b]), b
