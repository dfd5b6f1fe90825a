"""Decode: new tokens against a cache, dense and paged, cut into any number of splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from cases import (
    ATEN_CPU,
    DECODE_CUDA,
    DECODE_TARGETS,
    DTYPES,
    PREFILL_TARGETS,
    SM80,
    SM90,
    SPLIT_TARGETS,
    Target,
    each_target,
    param,
    sample,
    use,
)
from einops import rearrange
from numerics import assert_close, assert_lse_close
from poison import Guarded, dirty_allocator

import flash_attn
from flash_attn.reference import attention_ref, condition_tensors


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    batch: int = 3
    seqlen_q: int = 1
    capacity: int = 200
    lengths: tuple[int, ...] | None = None  # None: capacity
    heads_q: int = 4
    heads_kv: int = 2
    d: int = 64
    d_v: int | None = None
    dtype: str = "bf16"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    num_splits: int = 0
    page_size: int = 0  # 0: dense
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False

    def __str__(self) -> str:
        changed = [
            f"{name}={value}".replace(" ", "")
            for name, value in vars(self).items()
            if value != type(self).__dataclass_fields__[name].default
        ]
        return "-".join([self.dtype, *(part for part in changed if not part.startswith("dtype"))])

    def served_by(self, backend: str) -> bool:
        if backend == "aten":
            return True
        if backend != "cuda" and (self.softcap or self.alibi or self.sink or self.num_splits > 1):
            return False
        widest = {SM90.backend: 256, DECODE_CUDA.backend: 576}.get(backend, 512)
        widest = min(widest, 256) if self.dtype == "fp32" else widest
        dtypes = ("fp16", "bf16") if backend == SM90.backend else ("fp16", "bf16", "fp32")
        fits = all(d % 8 == 0 and d <= widest for d in (self.d, self.d_v or self.d))
        return self.dtype in dtypes and fits


def each_decode(
    cases: list[DecodeCase], targets: Sequence[Target] = DECODE_TARGETS, marks: Sequence = ()
) -> pytest.MarkDecorator:
    unique = dict.fromkeys(cases)
    pairs = [param(c, t, *marks) for c in unique for t in targets if c.served_by(t.backend)]
    return pytest.mark.parametrize("case, target", pairs)


class DecodeProblem:
    """Caches whose unused slots, unused pages and table entries past the lengths are poisoned."""

    def __init__(self, case: DecodeCase, seed: int, device: str) -> None:
        self.case, c = case, case
        generator = torch.Generator().manual_seed(seed)
        dtype = DTYPES[c.dtype]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        d_v = c.d if c.d_v is None else c.d_v
        page = c.page_size or 1
        capacity = -(-c.capacity // page) * page
        self.q = normal(c.batch, c.seqlen_q, c.heads_q, c.d)
        self.k = normal(c.batch, capacity, c.heads_kv, c.d)
        self.v = normal(c.batch, capacity, c.heads_kv, d_v)
        self.lengths = None
        used = torch.full((c.batch,), capacity)
        if c.lengths is not None or c.page_size:
            lengths = used if c.lengths is None else c.lengths
            self.lengths = torch.as_tensor(lengths, dtype=torch.int32, device=device)
            used = self.lengths.cpu().clamp(0, capacity)
        for b in range(c.batch):
            self.k[b, used[b] :] = math.nan
            self.v[b, used[b] :] = math.nan
        self.slopes = self.sink = None
        if c.alibi:
            self.slopes = torch.rand(c.batch, c.heads_q, generator=generator).to(device) * 0.3
        if c.sink:
            self.sink = normal(c.heads_q)
        self.k_cache, self.v_cache, self.block_table = self.k, self.v, None
        if c.page_size:
            self.page(generator, used)

    def page(self, generator: torch.Generator, used: torch.Tensor) -> None:
        c = self.case
        pages_each = self.k.size(1) // c.page_size
        spare = 3
        count = c.batch * pages_each + spare
        where = torch.randperm(count, generator=generator)[: c.batch * pages_each]
        table = rearrange(where, "(b n) -> b n", b=c.batch).to(torch.int32)

        def pool(cache: torch.Tensor) -> torch.Tensor:
            pages = cache.new_full((count, c.page_size, *cache.shape[2:]), math.nan)
            pages[where] = rearrange(cache, "b (n p) h d -> (b n) p h d", p=c.page_size)
            return pages

        self.k_cache, self.v_cache = pool(self.k), pool(self.v)
        for b in range(c.batch):
            first_unused = -(-int(used[b]) // c.page_size)
            garbage = torch.tensor([2147480000, -1, -(2**31)], dtype=torch.int32).repeat(pages_each)
            table[b, first_unused:] = garbage[: pages_each - first_unused]
        self.block_table = table.to(self.q.device)

    def run(self, backend: str, **overrides: object) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.case
        guards = {
            "q": Guarded(self.q),
            "k_cache": Guarded(self.k_cache),
            "v_cache": Guarded(self.v_cache),
        }
        options = dict(
            cache_seqlens=self.lengths,
            causal=c.causal,
            window_size=c.window,
            softcap=c.softcap,
            alibi_slopes=self.slopes,
            learnable_sink=self.sink,
            block_table=self.block_table,
            num_splits=c.num_splits,
        )
        with flash_attn.use_backend(backend), dirty_allocator(self.q.device.type):
            results = flash_attn.flash_decode_func(
                *(guard.tensor for guard in guards.values()),
                **options | overrides,
                return_softmax_lse=True,
            )
        for name, guard in guards.items():
            guard.assert_untouched(name)
        return results

    def reference(self) -> dict[str, object]:
        """The call as attention_ref takes it."""
        c = self.case
        return dict(
            q=self.q.cpu(),
            k=self.k.cpu(),
            v=self.v.cpu(),
            causal=c.causal,
            window_size=c.window,
            softcap=c.softcap,
            alibi_slopes=None if self.slopes is None else self.slopes.cpu(),
            learnable_sink=None if self.sink is None else self.sink.cpu(),
            seqused_k=None if self.lengths is None else self.lengths.cpu(),
        )

    def compare(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        options = self.reference()
        expected, expected_lse, _ = attention_ref(**options)
        conditions = condition_tensors(torch.zeros_like(expected), **options)
        assert_close("out", out, expected, conditions.out, self.q.dtype)
        assert_lse_close(lse, expected_lse, conditions.largest_score)


def check(case: DecodeCase, target: Target, seed: int) -> None:
    problem = DecodeProblem(case, seed, target.device)
    problem.compare(*problem.run(target.backend))


LENGTHS = [None, (0, 1, 200), (63, 64, 65), (199, 128, 2), (1000, -5, 77), (0, 0, 0)]
CHOICES = dict(
    seqlen_q=[1, 1, 2, 5, 17],
    capacity=[200, 256, 130],
    lengths=LENGTHS,
    heads=[(1, 1), (4, 2), (6, 1), (8, 8), (5, 1), (16, 1), (3, 3)],
    d=[32, 64, 96, 128, 192, 256, 264, 512],
    dtype=["fp16", "bf16"],
    causal=[True, True, False],
    window=[(-1, -1), (-1, -1), (40, 0), (0, 0), (16, 9)],
    num_splits=[0, 1, 2, 3, 7, 64],
)
WIDE = dict(dtype=["fp32"], d=[32, 64, 96, 128, 192, 256])
PAGES = dict(page_size=[1, 2, 3, 16, 61, 64, 128, 256])


def decode_cases(count: int, seed: int, **choices) -> list[DecodeCase]:
    cases = []
    for point in sample(count, seed, **choices):
        heads_q, heads_kv = point.pop("heads")
        cases.append(DecodeCase(heads_q=heads_q, heads_kv=heads_kv, **point))
    return cases


@each_decode(decode_cases(60, 1, **CHOICES) + decode_cases(24, 6, **CHOICES | WIDE))
def test_dense(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_decode(decode_cases(36, 2, **CHOICES | PAGES) + decode_cases(18, 7, **CHOICES | WIDE | PAGES))
def test_paged(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


MANY = CHOICES | dict(
    seqlen_q=[17, 64, 100, 129, 193, 300],
    capacity=[300, 1400],  # sm90 cuts the keys of long ones
    lengths=[None, (0, 1, 300), (127, 128, 129), (299, 40, 2), (1000, -5, 277), (0, 0, 0)],
    num_splits=[0, 1],
)


@each_decode(decode_cases(48, 4, **MANY) + decode_cases(18, 8, **MANY | WIDE))
def test_many_tokens(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_decode(
    [
        case
        for count, seed, wide in ((36, 5, {}), (15, 9, WIDE))
        for case in decode_cases(
            count, seed, **MANY | wide | {"page_size": [1, 3, 16, 61, 128, 256]}
        )
    ]
)
def test_many_tokens_paged(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_decode(
    decode_cases(
        36,
        3,
        **CHOICES
        | dict(
            dtype=["fp32", "fp64", "bf16"],
            d=[13, 40, 300],
            d_v=[None, 24],
            softcap=[0.0, 4.0],
            alibi=[False, True],
            sink=[False, True],
            page_size=[0, 16],
        ),
    )
    + decode_cases(
        18,
        10,
        **CHOICES
        | WIDE
        | dict(
            d_v=[None, 24, 136],
            softcap=[0.0, 4.0],
            alibi=[False, True],
            sink=[False, True],
            page_size=[0, 16],
        ),
    )
)
def test_score_terms(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_decode(
    [DecodeCase(d=d, heads_q=8, lengths=(0, 77, 130)) for d in range(8, 257, 8)][::3]
    + [DecodeCase(d=d, dtype="fp32", lengths=(0, 77, 130)) for d in range(8, 257, 8)][1::4]
)
def test_head_dims(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_decode(
    [
        DecodeCase(
            capacity=300, lengths=(0, 33, 300), num_splits=n, heads_q=6, window=window, seqlen_q=2
        )
        for n in (1, 2, 3, 4, 5, 8, 16, 33, 128, 256)
        for window in ((-1, -1), (20, 0))
    ]
    + [
        DecodeCase(capacity=300, lengths=(0, 33, 300), num_splits=n, dtype="fp32", d=d)
        for n in (2, 5, 33)
        for d in (64, 128, 256)
    ]
)
def test_split_counts(case: DecodeCase, target: Target, seed: int) -> None:
    """More splits than blocks, splits without keys, rows whose splits are all empty."""
    check(case, target, seed)


@each_decode(
    [
        DecodeCase(batch=0, lengths=()),
        DecodeCase(batch=2, seqlen_q=0),
        DecodeCase(batch=2, capacity=0),
        DecodeCase(batch=2, seqlen_q=9, capacity=4),
        DecodeCase(batch=2, seqlen_q=9, lengths=(5, 0)),
        DecodeCase(batch=1, capacity=2000, num_splits=0, heads_q=1, heads_kv=1),
        DecodeCase(batch=2, seqlen_q=0, dtype="fp32"),
        DecodeCase(batch=2, capacity=0, dtype="fp32"),
        DecodeCase(batch=2, seqlen_q=9, capacity=4, dtype="fp32", d=256),
    ]
    # Longer than the ring of tiles.
    + [
        DecodeCase(batch=1, capacity=2200, heads_q=1, heads_kv=1, dtype="fp32", d=d, page_size=page)
        for d, page in ((64, 0), (128, 16), (192, 0), (256, 61))
    ]
)
def test_edges(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_target(*DECODE_TARGETS)
def test_same_bits_every_time(target: Target, seed: int) -> None:
    splits = 5 if target in SPLIT_TARGETS else 0
    case = DecodeCase(lengths=(7, 200, 130), num_splits=splits, seqlen_q=20)
    problem = DecodeProblem(case, seed, target.device)
    first = problem.run(target.backend)
    for _ in range(5):
        again = problem.run(target.backend)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@each_target(*DECODE_TARGETS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sequence_does_not_depend_on_its_batch(
    num_splits: int, target: Target, seed: int
) -> None:
    """With the number of splits fixed: the same bits alone, in a batch, whatever the neighbours'
    lengths."""
    if num_splits > 1 and target not in SPLIT_TARGETS:
        pytest.skip("num_splits above 1")
    case = DecodeCase(batch=4, lengths=(150, 3, 200, 65), num_splits=num_splits)
    problem = DecodeProblem(case, seed, target.device)
    out, lse = problem.run(target.backend)
    for b in range(4):
        alone = DecodeProblem(case, seed, target.device)
        one = slice(b, b + 1)
        alone.q, alone.k_cache, alone.v_cache = alone.q[one], alone.k[one], alone.v[one]
        alone.lengths = alone.lengths[one]
        own_out, own_lse = alone.run(target.backend)
        assert torch.equal(own_out, out[one]) and torch.equal(own_lse, lse[one]), b


@each_target(ATEN_CPU, DECODE_CUDA, SM80, SM90)
def test_the_allocated_capacity_does_not_matter(target: Target, seed: int) -> None:
    """Not aten on CUDA, which knows no lengths on the host: its products are as wide as the
    capacity."""
    case = DecodeCase(
        lengths=(70, 3, 129), num_splits=2 if target in SPLIT_TARGETS else 1, seqlen_q=40
    )
    problem = DecodeProblem(case, seed, target.device)
    expected = problem.run(target.backend)
    longer = torch.full_like(problem.k, math.nan)
    problem.k_cache = torch.cat([problem.k, longer], 1)
    problem.v_cache = torch.cat([problem.v, longer], 1)
    actual = problem.run(target.backend)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@each_target(ATEN_CPU)
@pytest.mark.parametrize("page_size", [1, 16, 61])
def test_pages_change_no_bit(page_size: int, target: Target, seed: int) -> None:
    case = DecodeCase(lengths=(70, 3, 129), num_splits=2, dtype="fp32", capacity=16 * 61)
    expected = DecodeProblem(case, seed, target.device).run(target.backend)
    paged = DecodeCase(**vars(case) | {"page_size": page_size})
    actual = DecodeProblem(paged, seed, target.device).run(target.backend)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@each_target(*DECODE_TARGETS)
def test_pages_that_do_not_exist(target: Target, seed: int) -> None:
    """An impossible page inside the length is no fault, and the other sequences keep their bits."""
    dtype = "bf16" if target == SM90 else "fp32"
    case = DecodeCase(lengths=(200, 200, 200), page_size=16, dtype=dtype, seqlen_q=20)
    problem = DecodeProblem(case, seed, target.device)
    clean, _ = problem.run(target.backend)
    problem.block_table[1, 2:6] = torch.tensor(
        [-1, 10**6, -(2**31), 2**31 - 1], device=target.device
    )
    dirty, _ = problem.run(target.backend)
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[2], clean[2])


@each_target(*PREFILL_TARGETS)
def test_more_keys_than_a_copy_has_room_for(target: Target, seed: int) -> None:
    """Four sequences share pages, of a size that is copied; the last one's keys exceed 1 GiB and
    stay where they are."""
    torch.manual_seed(seed)
    make = dict(device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 64, 12, 8, 256, **make)
    table = torch.randint(64, (4, 3334), dtype=torch.int32, device="cuda")
    q = torch.randn(4, 17, 8, 256, **make)
    with use(target):
        out, lse = flash_attn.flash_decode_func(q, k, v, block_table=table, return_softmax_lse=True)
    with use(DECODE_CUDA):
        expected, expected_lse = flash_attn.flash_decode_func(
            q, k, v, block_table=table, num_splits=1, return_softmax_lse=True
        )
    assert torch.equal(out[3], expected[3]) and torch.equal(lse[3], expected_lse[3])
    assert not torch.equal(out[:3], expected[:3])
    torch.testing.assert_close(out, expected, rtol=2.0**-6, atol=1e-3)  # rounded P: out is 0.05
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)


@each_target(*DECODE_TARGETS)
@pytest.mark.parametrize("layout", ["heads first", "interleaved", "sliced", "expanded"])
def test_cache_layouts(layout: str, target: Target, seed: int) -> None:
    case = DecodeCase(lengths=(150, 3, 200))
    problem = DecodeProblem(case, seed, target.device)
    k, v = problem.k, problem.v
    if layout == "heads first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif layout == "interleaved":
        k, v = torch.stack([k, v], 2).unbind(2)
    elif layout == "sliced":
        k, v = (torch.cat([x, x], -1)[..., : case.d] for x in (k, v))
    else:
        k, v = (x[:1].expand_as(x) for x in (k, v))
        problem.k, problem.v = k, v
        problem.lengths = problem.lengths.clamp(max=150)
    with use(target):
        out, lse = flash_attn.flash_decode_func(
            problem.q, k, v, problem.lengths, return_softmax_lse=True
        )
    problem.compare(out, lse)


@each_target(*DECODE_TARGETS)
def test_decode_agrees_with_forward(target: Target, seed: int) -> None:
    """The newest row of a causal forward, out and LSE."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 2, 90, 4, 64).to(target.device, torch.bfloat16)
    backend = "sm80" if target.backend == "cuda" else target.backend
    with flash_attn.use_backend(backend):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    with use(target):
        last, last_lse = flash_attn.flash_decode_func(q[:, -1:], k, v, return_softmax_lse=True)
    assert (last - out[:, -1:]).abs().max() <= 2.0**-7
    assert (last_lse - lse[..., -1:]).abs().max() <= 1e-5


@each_target(*DECODE_TARGETS)
def test_decode_has_no_gradient(target: Target, seed: int) -> None:
    problem = DecodeProblem(DecodeCase(), seed, target.device)
    with use(target):
        out = flash_attn.flash_decode_func(problem.q.requires_grad_(), problem.k, problem.v)
        with pytest.raises(RuntimeError):
            out.sum().backward()


@each_target(*SPLIT_TARGETS)
@pytest.mark.parametrize("pages, columns", [(0, 3), (4, 0), (0, 0)])
def test_no_pages(pages: int, columns: int, target: Target) -> None:
    """No keys, and no error: neither in decode nor in an append, which drops its tokens."""
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    make = dict(device=target.device, dtype=dtype)
    q, cache = torch.randn(2, 1, 4, 32, **make), torch.randn(pages, 16, 2, 32, **make)
    before = cache.clone()
    index = dict(device=target.device, dtype=torch.int32)
    options = dict(
        block_table=torch.zeros(2, columns, **index),
        cache_seqlens=torch.full((2,), 5, **index),
        return_softmax_lse=True,
    )
    new = torch.randn(2, 0 if columns == 0 else 1, 2, 32, **make)
    with use(target):
        results = [
            flash_attn.flash_decode_func(q, cache, cache, **options),
            flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, **options),
        ]
    for out, lse in results:
        assert not out.any() and (lse == -torch.inf).all()
    assert torch.equal(cache, before)
