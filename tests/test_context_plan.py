"""The plan of context_parallel against the mask written out: each pair of a query and a key is in
exactly one call if it is seen and in none otherwise."""

from __future__ import annotations

import random

import pytest
import torch

from flash_attn.context_parallel.exchange import copy
from flash_attn.context_parallel.heads import head_shares, shares_in_groups
from flash_attn.context_parallel.plan import Documents, Mask, calls, share_rows
from flash_attn.context_parallel.shards import Shards, in_order, size_of


def tokens(ranges) -> list[int]:
    return [token for first, last in ranges for token in range(first, last)]


def seen_by_call(call, rows: int, keys: int) -> torch.Tensor:
    """bool (rows, keys), from what the op does with the arguments of each rectangle."""
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for r in call:
        offset = 0 if r.top_left else r.keys - r.rows
        steps = torch.arange(r.keys) - torch.arange(r.rows)[:, None] - offset
        part = torch.ones_like(steps, dtype=torch.bool)
        if r.left >= 0:
            part &= steps >= -r.left
        if r.right >= 0:
            part &= steps <= r.right
        seen[slice(*r.q), slice(*r.k)] |= part
    return seen


def diagonal_steps(mask: Mask, documents: Documents) -> torch.Tensor:
    """How many keys each key lies right of each query's diagonal; far outside of its document."""
    steps = torch.full((documents.q[-1], documents.k[-1]), 1 << 30)
    for document in range(len(documents.q) - 1):
        q0, q1 = documents.q[document : document + 2]
        k0, k1 = documents.k[document : document + 2]
        offset = 0 if mask.top_left else (k1 - k0) - (q1 - q0)
        inside = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None] - offset
        steps[q0:q1, k0:k1] = inside
    return steps


def seen_by_mask(mask: Mask, steps: torch.Tensor) -> torch.Tensor:
    seen = steps < 1 << 29
    if mask.left >= 0:
        seen &= steps >= -mask.left
    if mask.right >= 0:
        seen &= steps <= mask.right
    return seen


def random_documents(rng: random.Random) -> Documents:
    if rng.random() < 0.5:
        return Documents((0, rng.randint(1, 40)), (0, rng.randint(1, 40)))
    count = rng.randint(1, 6)
    ends = [sorted(rng.choices(range(40), k=count)) for _ in range(2)]
    if rng.random() < 0.5:
        ends[1] = ends[0]
    return Documents(*((0, *e) for e in ends), varlen=True)


@pytest.mark.parametrize("seed", range(60))
def test_every_pair_is_in_one_call(seed: int) -> None:
    rng = random.Random(seed)
    documents = random_documents(rng)
    limits = [rng.choice([-1, 0, rng.randint(0, 12), 60]) for _ in range(2)]
    mask = Mask(*limits, top_left=rng.random() < 0.5, alibi=rng.random() < 0.4)
    layout, size = rng.choice(["zigzag", "contiguous"]), rng.choice([1, 2, 3, 4])
    steps = diagonal_steps(mask, documents)
    expected = seen_by_mask(mask, steps)
    shards_q = Shards(documents.q[-1], layout, size)
    shards_k = Shards(documents.k[-1], layout, size)
    for rank_q in range(size):
        for k in [shards_k.ranges(rank) for rank in range(size)] + [((0, documents.k[-1]),)]:
            q = shards_q.ranges(rank_q)
            times = torch.zeros(size_of(q), size_of(k), dtype=torch.int)
            calls_of_row = torch.zeros(size_of(q), dtype=torch.int)
            planned = calls(mask, documents, q, k)
            for call in planned:
                assert len(call) == 1 or documents.varlen
                seen = seen_by_call(call, *times.shape)
                times += seen
                calls_of_row += seen.any(1)
                if mask.alibi:
                    check_alibi(call, seen, steps[tokens(q)][:, tokens(k)])
            assert torch.equal(times, expected[tokens(q)][:, tokens(k)].int())
            assert share_rows(planned) or (calls_of_row <= 1).all()


def check_alibi(call, seen: torch.Tensor, steps: torch.Tensor) -> None:
    """The distance from the diagonal that a call adds is that of the whole sequences."""
    for r in call:
        row, key = torch.arange(r.rows)[:, None], torch.arange(r.keys)
        offset = 0 if r.top_left else r.keys - r.rows
        distance = r.side * (key - row - r.distance) if r.side else (key - row - offset).abs()
        part = (slice(*r.q), slice(*r.k))
        assert torch.equal(distance[seen[part]], steps[part].abs()[seen[part]])


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("outer, inner", [(1, 1), (4, 1), (3, 2), (1, 4)])
@pytest.mark.parametrize("length", [0, 1, 5, 24, 37])
def test_every_token_is_on_one_rank(length: int, outer: int, inner: int, layout: str) -> None:
    shards = Shards(length, layout, outer, inner)
    held = [shards.ranges(o, i) for o in range(outer) for i in range(inner)]
    assert sorted(token for ranges in held for token in tokens(ranges)) == list(range(length))
    rows = [size_of(ranges) for ranges in held]
    if length % len(held) == 0:
        assert len(set(rows)) == 1
    for o in range(outer):
        whole = tokens(shards.outer_ranges(o))
        parts = [[whole[t] for t in tokens(ranges)] for ranges in shards.inner_ranges(o)]
        assert parts == [tokens(held[o * inner + i]) for i in range(inner)]
    order = [tokens(held[rank])[row : row + n] for rank, row, n in in_order(tuple(held))]
    assert [token for piece in order for token in piece] == list(range(length))


def work(mask: Mask, length: int, layout: str, size: int) -> list[int]:
    """Pairs of query and key that each rank computes, in all steps."""
    shards = Shards(length, layout, size)
    documents = Documents((0, length), (0, length))
    held = [shards.ranges(rank) for rank in range(size)]
    return [
        sum(
            int(seen_by_call(call, size_of(q), size_of(k)).sum())
            for k in held
            for call in calls(mask, documents, q, k)
        )
        for q in held
    ]


def test_zigzag_evens_out_causal_work() -> None:
    assert len(set(work(Mask(right=0), 64, "zigzag", 4))) == 1
    contiguous = work(Mask(right=0), 64, "contiguous", 4)
    assert contiguous == sorted(contiguous) and contiguous[-1] > 5 * contiguous[0]


def test_a_window_talks_to_neighbours_only() -> None:
    """The keys of the rank before, and no others, where the window is no longer than a part."""
    shards, documents = Shards(64, "contiguous", 4), Documents((0, 64), (0, 64))
    for q in range(4):
        needed = [
            k for k in range(4) if calls(Mask(16, 0), documents, shards.ranges(q), shards.ranges(k))
        ]
        assert needed == ([q - 1, q] if q else [0])


def test_neighbouring_pieces_are_one_call() -> None:
    """Zigzag costs no launches: a rank's own keys are one causal call, others' one full one."""
    shards, documents = Shards(64, "zigzag", 4), Documents((0, 64), (0, 64))
    for q in range(4):
        for k in range(4):
            plan = calls(Mask(right=0), documents, shards.ranges(q), shards.ranges(k))
            assert len(plan) == 1 and len(plan[0]) == 1
            assert plan[0][0].full == (q != k)


@pytest.mark.parametrize(
    "mask, shared",
    [
        (Mask(), False),
        (Mask(right=0, alibi=True), False),
        (Mask(alibi=True), True),
        (Mask(9, 5, alibi=True), True),  # keys behind the last diagonal are seen from row 5 on
    ],
    ids=str,
)
def test_rows_of_several_calls(mask: Mask, shared: bool) -> None:
    """ALiBi has a call for each side of the diagonal."""
    documents = Documents((0, 20), (0, 20))
    assert share_rows(calls(mask, documents, ((0, 10),), ((0, 20),))) == shared
    assert share_rows(2 * calls(mask, documents, ((0, 10),), ((0, 20),)))


def test_documents_share_a_varlen_call() -> None:
    documents = Documents((0, 5, 9, 30), (0, 5, 9, 30), varlen=True)
    (call,) = calls(Mask(right=0), documents, ((0, 30),), ((0, 30),))
    assert [r.q for r in call] == [(0, 5), (5, 9), (9, 30)]


@pytest.mark.parametrize(
    "heads_q, heads_kv, ranks", [(8, 8, 4), (8, 2, 4), (6, 3, 2), (12, 4, 8), (2, 1, 4), (5, 5, 3)]
)
def test_head_shares(heads_q: int, heads_kv: int, ranks: int) -> None:
    """Every query head on one rank, beside its key head; query heads of a rank fill its key heads
    evenly, as a call of its own needs it."""
    shares = head_shares(heads_q, heads_kv, ranks)
    group = heads_q // heads_kv
    assert len(shares) == ranks
    assert [h for q, _ in shares for h in range(*q)] == list(range(heads_q))
    for (q0, q1), (k0, k1) in shares:
        if q0 == q1:
            assert k0 == k1
            continue
        local = (q1 - q0) // (k1 - k0)
        assert [h // group for h in range(q0, q1)] == [k0 + i // local for i in range(q1 - q0)]


@pytest.mark.parametrize("rows", [1, 1 << 14, 1 << 17])
@pytest.mark.parametrize("heads_q, heads_kv, ranks", [(32, 8, 2), (14, 7, 2), (4, 4, 4), (2, 1, 4)])
def test_shares_in_groups(heads_q: int, heads_kv: int, ranks: int, rows: int) -> None:
    """One after the other the groups are the whole shares, and none but the last is smaller than
    what fills a GPU."""
    groups = shares_in_groups(heads_q, heads_kv, ranks, rows)
    for rank, (whole_q, whole_kv) in enumerate(head_shares(heads_q, heads_kv, ranks)):
        for side, whole in enumerate((whole_q, whole_kv)):
            parts = [group[rank][side] for group in groups]
            assert [h for part in parts for h in range(*part)] == list(range(*whole))
    for group in groups[:-1]:
        assert max(rows * (last - first) for (first, last), _ in group) >= 1 << 17


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_copy_between_strides(dtype: torch.dtype, device: str) -> None:
    """Of heads, of heads whose size or place is no multiple of 16 bytes, of turned ones, and of
    another dtype: each number where it belongs, and none elsewhere."""
    source = torch.randn(2, 5, 6, 24).to(device, dtype)
    for part in (
        source[:, :, 1:3],
        source[..., 1:17],
        source[..., 8:21],
        source.mT,
        source[:, 1:4, ::2],
        source[:, :, 2:2],
        source.bfloat16(),
    ):
        around = torch.zeros(*(n + 2 for n in part.shape), device=device, dtype=dtype)
        for margins in ((1, 1, 1, 1), (1, 1, 0, 0)):
            inside = tuple(slice(m, m + n) for m, n in zip(margins, part.shape, strict=True))
            expected = around.clone()
            expected[inside] = part.to(dtype)
            actual = around.clone()
            copy(actual[inside], part)
            assert torch.equal(actual, expected)
