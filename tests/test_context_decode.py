"""Decoding against a cache that lies on many ranks, against one process with the whole cache."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import INNER_OF_TWO, TWO_DIMENSIONS, Pool, everyone, place

import flash_attn
from flash_attn import context_parallel

LENGTHS = (61, 7, 0, 40)  # tokens of each sequence
CAPACITY, PAGE = 64, 4  # each rank holds as much of the capacity, in a row


def check_decode(tokens: int, options: dict, dtype: torch.dtype, paged: bool, device: str) -> None:
    device, group = everyone(device)
    rank, capacity = dist.get_rank(group), CAPACITY // dist.get_world_size(group)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k, v = normal(4, tokens, 4, 8), normal(4, CAPACITY, 2, 8), normal(4, CAPACITY, 2, 8)
    sink = normal(4) if options.pop("sink", False) else None
    alibi = options.pop("alibi", None)
    slopes = None if alibi is None else normal(*((4,) if alibi == "heads" else (4, 4))).float()
    options |= dict(alibi_slopes=slopes, learnable_sink=sink, return_softmax_lse=True)
    seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    whole = flash_attn.flash_decode_func(q, k, v, seqlens, **options)

    first = rank * capacity
    held = (seqlens - first).clamp(0, capacity)
    caches = [x[:, first : first + capacity] for x in (k, v)]
    if paged:  # the same, in pages in another order
        order = torch.randperm(4 * capacity // PAGE, generator=generator).to(device)
        options["block_table"] = order.argsort().int().view(4, capacity // PAGE)
        caches = [x.reshape(-1, PAGE, 2, 8)[order] for x in caches]
    firsts = torch.full_like(seqlens, first)
    ranks = context_parallel.flash_decode_func(
        q, *caches, held, group=group, seqlens=seqlens, first_key=firsts, **options
    )
    tolerance = dict(rtol=1e-12, atol=1e-13) if dtype == torch.float64 else dict(rtol=0, atol=1e-6)
    for actual, wanted in zip(ranks, whole, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, **tolerance)


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize(
    "tokens, options",
    [
        (1, {}),
        (3, {}),
        (3, dict(causal=False, softcap=2.0)),
        (1, dict(window_size=(20, 0))),
        (3, dict(window_size=(20, -1), sink=True)),
        (2, dict(window_size=(20, 1), causal=False)),
        (1, dict(alibi="heads")),
        (3, dict(alibi="sequences", sink=True)),
        (2, dict(alibi="heads", window_size=(9, 0))),
    ],
    ids=str,
)
def test_decode(tokens: int, options: dict, paged: bool, pool: Pool) -> None:
    pool.run(check_decode, tokens, options, torch.float64, paged, pool.device)


def test_decode_fp32(pool: Pool) -> None:
    pool.run(check_decode, 2, dict(sink=True), torch.float32, False, pool.device)


def check_any_order(device: str) -> None:
    """One token sees all keys, wherever they lie; and the ranks of a mesh count alike."""
    device, group = everyone(device)
    size = dist.get_world_size(group)
    mesh = place(TWO_DIMENSIONS if size == 4 else INNER_OF_TWO, device)[1]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 8, dtype=torch.float64).to(device) for n in (1, 40, 40))
    whole = flash_attn.flash_decode_func(q, k, v)
    for members in (group, mesh):
        mine = slice(dist.get_rank(), None, size)
        ranks = context_parallel.flash_decode_func(q, k[:, mine], v[:, mine], group=members)
        torch.testing.assert_close(ranks, whole, rtol=1e-12, atol=1e-13)


def test_any_order(pool: Pool) -> None:
    pool.run(check_any_order, pool.device)


def check_refusals(device: str) -> None:
    device, group = everyone(device)
    q, cache = torch.zeros(1, 2, 2, 8, device=device), torch.zeros(1, 4, 2, 8, device=device)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    decode = context_parallel.flash_decode_func
    with pytest.raises(RuntimeError, match="seqlens: expected int32 .* got None"):
        decode(q, cache, cache, group=group)
    with pytest.raises(RuntimeError, match="first_key: expected int32 .* got torch.int64"):
        decode(q, cache, cache, group=group, seqlens=lengths, first_key=lengths.long())
    with pytest.raises(NotImplementedError, match="alibi_slopes: expected causal=True"):
        decode(
            *(q, cache, cache),
            causal=False,
            alibi_slopes=torch.ones(2, device=device),
            group=group,
            seqlens=lengths,
            first_key=lengths,
        )


def test_refusals(pool: Pool) -> None:
    pool.run(check_refusals, pool.device)
