"""The CPU's cores: results that do not depend on how many there are, nor on who is first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import ATEN_CPU, Case, check
from test_decode import DecodeCase
from test_decode import check as check_decode

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


@pytest.mark.parametrize("batch, seqlen", [(1, 6), (1, 48), (3, 48), (2, 150)])
def test_heads_that_share_a_tile(batch: int, seqlen: int, threads: int) -> None:
    """Five kv heads are cut into unlike parts, as many as there are cores and as fit a cache; the
    terms that differ from head to head follow them."""
    case = Case(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen + 20,
        heads_q=10,
        heads_kv=5,
        d=72,
        d_v=40,
        causal=True,
        bias="head",
        alibi="head",
        sink=True,
        dropout_p=0.25,
    )
    check(case, ATEN_CPU, seed=seqlen + batch)


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_heads_that_share_a_tile_in_decode(paged: bool, threads: int) -> None:
    """The shorter a sequence, the more of its heads share a tile: five, five, three and one of
    them on two cores."""
    pages = dict(page_size=16) if paged else {}
    case = DecodeCase(
        batch=4, capacity=2000, lengths=(1, 40, 300, 2000), heads_q=10, heads_kv=5, d=128, **pages
    )
    check_decode(case, ATEN_CPU, seed=5)
