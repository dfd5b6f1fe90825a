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


# How much larger the error may be than that of one process. Its result is rounded to 16 bits, and
# so is each rank's part before it is merged: twice as much rounding, and a little for chance.
ERROR_OF_ROUNDED_PARTS = 1.5


def check_error(ranks: int, cache: torch.dtype, device: str) -> None:
    """Of out in bf16 and its LSE against float64 over the same numbers."""
    device, group = place(ranks, device)
    if group is None:
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    q = normal(4, 1, 32, 64).bfloat16()
    caches, scales = [normal(4, 512, 4, 64) for _ in range(2)], {}
    exact = [x.bfloat16().double() for x in caches]
    held = [x.bfloat16() for x in caches]
    if cache == torch.int8:
        scale = torch.tensor([0.02, 0.025, 0.03, 0.035], device=device)  # of each key head
        held = [(x / scale[:, None]).round().clamp(-127, 127).to(cache) for x in caches]
        exact = [x * scale[:, None].double() for x in held]
        scales = dict(k_descale=scale, v_descale=scale)
    seqlens = torch.tensor([512, 300, 0, 450], dtype=torch.int32, device=device)
    wanted = flash_attn.flash_decode_func(q.double(), *exact, seqlens, return_softmax_lse=True)
    options = dict(return_softmax_lse=True, **scales)
    one = flash_attn.flash_decode_func(q, *held, seqlens, **options)

    rows = 512 // size
    mine = slice(rank * rows, (rank + 1) * rows)
    lengths = (seqlens - rank * rows).clamp(0, rows)
    parts = [x[:, mine].contiguous() for x in held]
    found = context_parallel.flash_decode_func(q, *parts, lengths, group=group, **options)
    empty = seqlens == 0
    assert torch.equal(found[0][empty], torch.zeros_like(found[0][empty]))
    assert (found[1][empty] == -torch.inf).all()
    for name, x, alone, right in zip(("out", "lse"), found, one, wanted, strict=True):
        errors = [(y.double() - right)[~empty].norm().item() for y in (x, alone)]
        # The LSE is merged in fp32.
        merging = 2**-24 * right[~empty].norm().item() if name == "lse" else 0
        limit = ERROR_OF_ROUNDED_PARTS * errors[1] + merging
        assert errors[0] <= limit, f"{name}: {errors[0]:.3g}, one: {errors[1]:.3g}"


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8], ids=["bf16", "int8"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_error_is_that_of_one_process(ranks: int, cache: torch.dtype, pool: Pool) -> None:
    pool.need(ranks)
    pool.run(check_error, ranks, cache, pool.device)


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
