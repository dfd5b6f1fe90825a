"""flash_attn_with_kvcache and flash_decode_func: every form of cache, in any combination, against
float64; what the index tensors hold never reaches beyond the cache."""

from __future__ import annotations

import pytest
import torch
from caches import INT_MAX, CacheCase, CacheProblem, each_cache, skip_unless_served
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    DECODE_CUDA,
    DECODE_TARGETS,
    SIMULATED,
    Target,
    each_target,
    sample,
    use,
)

import flash_attn

HEADS = [(4, 2), (6, 1), (2, 2), (3, 3)]
FORMS = dict(
    seqlen_q=[1, 1, 2, 5],
    new=[0, 1, 1, 3, 7],
    capacity=[70, 33, 130],
    heads=HEADS,
    d=[32, 48, 64],
    d_v=[None, None, 40],
    dtype=["bf16", "fp16", "bf16", "fp32", "fp64"],
    cache=["", "", "", "fp8", "int8"],
    descale=["head", "sequence", ""],
    page_size=[0, 0, 1, 3, 16, 64, 256],
    lengths=["tensor", "tensor", "tensor", "int", "none"],
    rows=[False, True],
    leftpad=[False, True],
    rotary=["", "interleaved", "halves"],
    rotary_dim=[32, 16, 8],
    causal=[True, True, False],
    window=[(-1, -1), (-1, -1), (20, 0), (16, 9)],
    softcap=[0.0, 0.0, 4.0],
    alibi=[False, False, True],
    sink=[False, False, True],
    num_splits=[0, 1, 3, 16],
    batch_invariant=[False, False, True],
    garbage=[False, False, True],
)


def cache_cases(count: int, seed: int, **choices) -> list[CacheCase]:
    cases = []
    for point in sample(count, seed, **choices):
        point["heads_q"], point["heads_kv"] = point.pop("heads")
        if not point["new"]:
            point["rotary"] = ""
        elif point["lengths"] == "none":
            point["lengths"] = "tensor"
        if not point["rotary"]:
            point.pop("rotary_dim")
        if not point["cache"]:
            point.pop("descale")
        cases.append(CacheCase(**point))
    return cases


def check(case: CacheCase, target: Target, seed: int, **overrides: object) -> None:
    problem = CacheProblem(case, seed, target.device)
    skip_unless_served(problem, target, **overrides)
    problem.compare(*problem.run(target.backend, **overrides))


@each_cache(cache_cases(240, 1, **FORMS))
def test_forms(case: CacheCase, target: Target, seed: int) -> None:
    check(case, target, seed)


PLAIN = {name: [getattr(CacheCase(), name)] for name in FORMS if name != "heads"}


@each_cache(
    cache_cases(
        60,
        2,
        **PLAIN
        | {name: FORMS[name] for name in ("page_size", "rows", "new", "lengths", "heads")}
        | dict(d=[64, 128], dtype=["bf16", "fp16"], num_splits=[0, 3]),
    )
    + cache_cases(
        24,
        4,
        **PLAIN
        | {name: FORMS[name] for name in ("page_size", "rows", "new", "lengths", "heads")}
        | dict(d=[64, 128, 192, 256], dtype=["fp32"], num_splits=[0, 3]),
    )
    + cache_cases(
        36,
        6,
        **PLAIN
        | {
            name: FORMS[name]
            for name in ("page_size", "rows", "new", "lengths", "heads", "descale")
        }
        | dict(d=[64, 96, 128], dtype=["bf16", "fp16"], num_splits=[0, 3], sink=[False, True])
        | dict(cache=["fp8", "int8"], capacity=[70, 1100], batch_invariant=[False, False, True]),
    )
)
def test_plain_forms(case: CacheCase, target: Target, seed: int) -> None:
    """Where most of serving lives: no score terms, nothing wrong in the tensors."""
    check(case, target, seed)


MANY = FORMS | dict(
    seqlen_q=[17, 33, 64, 100, 130, 200, 300],
    new=[0, 17, 40, 129, 200],
    capacity=[210, 400, 1500],  # sm90 cuts the keys of long ones
    d=[32, 48, 64, 128],
    dtype=["bf16", "fp16"],
    cache=[""],
    window=[(-1, -1), (-1, -1), (60, 0), (16, 9), (150, 40)],
    softcap=[0.0],
    alibi=[False],
    sink=[False],
    num_splits=[0, 1],
    batch_invariant=[False],
)


@each_cache(cache_cases(120, 3, **MANY) + cache_cases(30, 5, **MANY | dict(dtype=["fp32"])))
def test_many_tokens(case: CacheCase, target: Target, seed: int) -> None:
    """What the prefill kernels serve."""
    check(case, target, seed)


GROUPS = MANY | dict(
    seqlen_q=[1, 2, 3, 5, 8, 13, 16, 31, 33, 64],
    new=[0, 1, 16, 64],
    heads=[(8, 1), (14, 2), (40, 1), (12, 4), (24, 3)],
    d=[48, 64, 128, 200, 256],
    d_v=[None, None, None, 40],
    page_size=[0, 0, 3, 16, 64],
)


@each_cache(cache_cases(60, 3, **GROUPS))
def test_heads_that_share_tiles(case: CacheCase, target: Target, seed: int) -> None:
    """On sm90 heads that read one kv head have rows of one tile, each a power of two of them."""
    check(case, target, seed)


@each_cache(
    [
        CacheCase(seqlen_q=n, new=n, capacity=400, rotary="halves", **form, **terms)
        for n in (17, 200)
        for form in (dict(), dict(page_size=16, rows=True))
        for terms in (
            dict(softcap=4.0),
            dict(alibi=True),
            dict(sink=True),
            dict(cache="int8"),
            dict(num_splits=3),
            dict(batch_invariant=True),
            dict(dtype="fp32", sink=True),
        )
    ]
)
def test_many_tokens_of_decode(case: CacheCase, target: Target, seed: int) -> None:
    """What they do not serve: nothing changes but who runs it."""
    check(case, target, seed)


@each_cache(
    [
        CacheCase(batch=0, new=1),
        CacheCase(batch=2, seqlen_q=0, new=2),
        CacheCase(capacity=1, new=1),
        CacheCase(capacity=4, page_size=4, new=4),
        CacheCase(capacity=600, page_size=256, lengths="none"),
        CacheCase(capacity=2500, page_size=16, leftpad=True, heads_q=1, heads_kv=1),
        CacheCase(capacity=1100, page_size=1000, lengths="int", new=2),
        CacheCase(capacity=70, lengths="int", new=36, rotary="halves"),
        CacheCase(capacity=70, lengths="int", new=35, rows=True, rotary="halves"),
        CacheCase(d=576, d_v=512, heads_q=4, heads_kv=1, page_size=16),
        CacheCase(d=512, seqlen_q=40, new=40, capacity=64, rotary="interleaved", rotary_dim=512),
        CacheCase(d=512, d_v=328, new=3, capacity=64, rotary="halves", rotary_dim=400),
        CacheCase(d=512, heads_q=8, heads_kv=2, capacity=600, page_size=16, new=2, rotary="halves"),
        CacheCase(d=512, capacity=1500, page_size=7, batch_invariant=True, lengths="none"),
        CacheCase(d=320, d_v=512, capacity=200, cache="int8", descale="head", leftpad=True),
        CacheCase(d=512, d_v=272, capacity=200, cache="fp8", page_size=16, sink=True, softcap=8.0),
        CacheCase(d=264, seqlen_q=70, new=33, capacity=140, rows=True, window=(40, 0)),
        CacheCase(seqlen_q=40, new=40, capacity=64, page_size=16, heads_q=12, cache="fp8"),
        CacheCase(seqlen_q=300, new=40, capacity=64, page_size=16),
        CacheCase(seqlen_q=20, new=40, capacity=64, page_size=16, d=192, d_v=128, rows=True),
        CacheCase(batch=70, seqlen_q=18, new=18, capacity=50, page_size=5, leftpad=True),
        CacheCase(seqlen_q=18, capacity=1500, page_size=2, lengths="none", window=(3, 2)),
        CacheCase(dtype="fp32", d=256, capacity=900, page_size=7, new=3, rotary="halves"),
        CacheCase(dtype="fp32", d=192, d_v=40, heads_q=40, seqlen_q=2, leftpad=True, softcap=8.0),
        CacheCase(
            dtype="fp32", d=72, d_v=256, new=2, rotary="interleaved", rotary_dim=72, rows=True
        ),
        CacheCase(
            dtype="fp32", d=128, capacity=600, page_size=16, batch_invariant=True, alibi=True
        ),
    ]
)
def test_edges(case: CacheCase, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_cache(
    [
        CacheCase(garbage=True, page_size=page, rows=rows, leftpad=True, new=new, batch=4, **form)
        for page in (0, 1, 16)
        for rows in (False, True)
        for new in (0, 5)
        for form in (dict(), dict(cache="int8"), dict(dtype="fp32"))
    ]
    + [
        CacheCase(
            garbage=True,
            page_size=page,
            rows=rows,
            leftpad=True,
            new=new,
            batch=4,
            seqlen_q=40,
            window=window,
            rotary="halves" if new else "",
            causal=causal,
        )
        for page in (0, 1, 16)
        for rows in (False, True)
        for new, causal, window in ((0, True, (-1, -1)), (40, True, (30, 0)), (40, False, (-1, -1)))
    ]
)
def test_garbage_in_index_tensors(case: CacheCase, target: Target, seed: int) -> None:
    """Nothing is written outside, nothing outside is read; several kinds of garbage each."""
    for shift in range(4):
        check(case, target, seed + shift)


@each_cache(
    [
        CacheCase(batch=batch, capacity=capacity, page_size=16, beyond=100_000, **form)
        for batch, capacity in ((3, 4700), (37, 160))
        for form in (
            dict(),
            dict(d=128, leftpad=True, rows=True),
            dict(d=192, seqlen_q=3, heads_q=14, heads_kv=1),
            dict(d=96, seqlen_q=2, dtype="fp16"),
            dict(garbage=True, leftpad=True),
            dict(d=128, cache="fp8"),
            dict(d=128, dtype="fp32", leftpad=True),
        )
    ]
)
def test_a_table_for_far_longer_sequences(case: CacheCase, target: Target, seed: int) -> None:
    """Cut by the lengths that there are, not by those that there could be."""
    if SIMULATED and target.backend == "aten":
        pytest.skip("aten on a device visits every position, which takes a simulated one minutes")
    check(case, target, seed)


@each_target(*DECODE_TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dropped_token_hides_no_other(dtype: torch.dtype, target: Target) -> None:
    """A sequence without a row has its clamped place where another one appends."""
    rows = torch.tensor([INT_MAX, 0, -1], dtype=torch.int32, device=target.device)
    make = dict(device=target.device, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 2, 8, 2, 32, **make)
    q, k, v = torch.randn(3, 3, 1, 2, 32, **make)
    lengths = torch.tensor([3, 3, 3], dtype=torch.int32, device=target.device)
    support = flash_attn.can_use(q, k_cache, v_cache, op="decode", cache_batch_idx=rows)
    if support.reasons.get(target.backend):
        pytest.skip("not served")
    with use(target):
        flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows
        )
    assert torch.equal(k_cache[0, 3], k[1, 0]) and torch.equal(v_cache[0, 3], v[1, 0])
    assert k_cache.count_nonzero() == k[1].count_nonzero()


@each_target(ATEN_CPU, ATEN_CUDA)
def test_quantised_append_to_the_last_bit(target: Target) -> None:
    """Round to nearest even, saturate, NaN: fp8 keeps it, int8 has 0 for it."""
    inf, nan = float("inf"), float("nan")
    values = {
        torch.int8: (
            [0.5, 1.5, -2.5, 126.5, 127.5, -129.0, inf, nan],
            [0, 2, -2, 126, 127, -128, 127, 0],
        ),
        torch.float8_e4m3fn: (
            [17.0, 19.0, -464.0, 1e4, -inf, 2.0**-10, 3 * 2.0**-10, nan],
            [16, 20, -448, 448, -448, 0, 2 * 2.0**-9, nan],
        ),
    }
    for dtype, (given, wanted) in values.items():
        for descale in (1.0, 0.25):
            new = (torch.tensor(given) * descale).view(1, 1, 1, 8).to(target.device)
            caches = [torch.zeros(1, 2, 1, 8, device=target.device).to(dtype) for _ in range(2)]
            scale = torch.full((1,), descale, device=target.device)
            with use(target):
                flash_attn.flash_attn_with_kvcache(
                    torch.zeros_like(new),
                    *caches,
                    new,
                    new,
                    cache_seqlens=1,
                    k_descale=scale,
                    v_descale=scale,
                )
            for cache in caches:
                stored = cache[0, 1, 0].float().cpu()
                torch.testing.assert_close(
                    stored, torch.tensor(wanted).float(), rtol=0, atol=0, equal_nan=True
                )
                assert not cache[0, 0].float().any()


INVARIANT = [
    CacheCase(batch=5, capacity=capacity, num_splits=splits, batch_invariant=True, **form)
    for capacity, splits in ((200, 0), (200, 3), (5000, 0))
    for form in (
        dict(),
        dict(page_size=16, leftpad=True),
        dict(page_size=64, cache="int8", seqlen_q=3),
        dict(rows=True, dtype="fp32", heads_q=16, heads_kv=1),
        dict(page_size=16, heads_q=40, heads_kv=1, seqlen_q=2, window=(2500, 0)),
        dict(page_size=16, softcap=4.0, alibi=True, leftpad=True),
        dict(d=192, d_v=128, page_size=16),
        dict(d=256, softcap=4.0, page_size=64, seqlen_q=2),
    )
] + [
    # Alone it has few rows, which the merge would take in slices, and pieces enough for an order.
    CacheCase(
        batch=5, capacity=1000, num_splits=8, batch_invariant=True, d=128, heads_q=16, heads_kv=1
    )
]


@each_cache(INVARIANT)
def test_batch_invariant(case: CacheCase, target: Target, seed: int) -> None:
    """A sequence has the same bits alone, in a batch, and among other neighbours."""
    problem = CacheProblem(case, seed, target.device)
    skip_unless_served(problem, target)
    problem.lengths[:] = torch.tensor([150, 3, 200, 0, 65]) * case.capacity // 200
    tensors = {n: x.to(target.device) for n, x in dict(k=problem.k_pool, v=problem.v_pool).items()}
    pools = [x if x.dtype == torch.int8 else x.nan_to_num(1.0) for x in tensors.values()]

    def decode(batches: list[int], **changes) -> list[torch.Tensor]:
        def take(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[batches]

        options = problem.options() | changes
        for name in ("cache_batch_idx", "cache_leftpad", "block_table"):
            options[name] = take(options[name])
        dense = problem.table is None and problem.rows is None
        with use(target):
            return flash_attn.flash_decode_func(
                problem.q.to(target.device)[batches],
                *(take(x) if dense else x for x in pools),
                problem.lengths.to(target.device)[batches],
                **options,
            )

    whole = decode([0, 1, 2, 3, 4])
    for batches in ([0], [4], [2, 0], [1, 4, 0, 3]):
        for got, expected in zip(decode(batches), whole, strict=True):
            assert torch.equal(got, expected[batches]), batches


@each_target(ATEN_CPU)
def test_garbage_leaves_the_bits_of_other_sequences(target: Target, seed: int) -> None:
    case = CacheCase(batch=4, page_size=8, rows=True, leftpad=True, new=2)
    clean = CacheProblem(case, seed, target.device)
    dirty = CacheProblem(case, seed, target.device)
    dirty.lengths[1], dirty.rows[3], dirty.leftpad[1] = INT_MAX, -4, -9
    dirty.table[dirty.rows[1], ::2] = INT_MAX
    expected, actual = clean.run(target.backend), dirty.run(target.backend)
    for sequence in (0, 2):
        for got, wanted in zip(actual, expected, strict=True):
            assert torch.equal(got[sequence], wanted[sequence])


@each_target(ATEN_CPU, ATEN_CUDA)
def test_descale_is_a_factor(target: Target, seed: int) -> None:
    """int8 with its scales is the cache that those scales spell out."""
    case = CacheCase(cache="int8", descale="sequence", dtype="fp32", lengths="none")
    problem = CacheProblem(case, seed, target.device)
    pools = [x.to(target.device) for x in (problem.k_pool, problem.v_pool)]
    options = problem.options()
    plain = [
        pool.float() * options.pop(f"{name}_descale")[:, None, :, None]
        for name, pool in zip("kv", pools, strict=True)
    ]
    q = problem.q.to(target.device)
    with use(target):
        actual = flash_attn.flash_decode_func(q, *pools, **problem.options())
        expected = flash_attn.flash_decode_func(q, *plain, **options)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_two_functions_agree() -> None:
    for case in (CacheCase(page_size=16, rows=True, leftpad=True), CacheCase(cache="fp8")):
        problem = CacheProblem(case, 5)
        expected = problem.run("aten")
        actual = flash_attn.flash_decode_func(
            problem.q, problem.k_pool, problem.v_pool, problem.lengths, **problem.options()
        )
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.sanitize
@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("page_size", [0, 16])
def test_values_that_lie_in_the_keys(page_size: int, target: Target, seed: int) -> None:
    """Multi-head latent attention stores a row a token, whose first columns are its value."""
    torch.manual_seed(seed)
    make = dict(device=target.device, dtype=torch.bfloat16)
    rows = torch.randn(*((8, 16) if page_size else (2, 64)), 1, 576, **make)
    table = torch.tensor([[3, 0, 5, 1], [2, 6, 4, 7]], dtype=torch.int32, device=target.device)
    lengths = torch.tensor([5, 64], dtype=torch.int32, device=target.device)
    values = rows[..., :512]
    options = dict(cache_seqlens=lengths, block_table=table if page_size else None)
    q = torch.randn(2, 3, 20, 576, **make)
    support = flash_attn.can_use(q, rows, values, op="decode", **options)
    if support.reasons.get(target.backend):
        pytest.skip("not served")
    with use(target):
        out = flash_attn.flash_decode_func(q, rows, values, **options)
        apart = flash_attn.flash_decode_func(q, rows, values.clone(), **options)
    # Strides decide in which order products of torch are added.
    torch.testing.assert_close(out, apart, rtol=2.0**-7, atol=2.0**-9)
