"""flash_attn_with_kvcache: append, rotate, attend; the cache is written where it must be and
nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from cases import ATEN_CPU, ATEN_CUDA, DECODE_CUDA, Target, each_target, use

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.reference import attention_ref


def problem(target: Target, new: int = 3, capacity: int = 40, heads: int = 2):
    make = dict(device=target.device, dtype=torch.float32)
    q = torch.randn(3, new, 2 * heads, 16, **make)
    k, v = torch.randn(3, new, heads, 16, **make), torch.randn(3, new, heads, 16, **make)
    caches = [torch.randn(3, capacity, heads, 16, **make) for _ in range(2)]
    lengths = torch.tensor([5, 0, 30], dtype=torch.int32, device=target.device)
    return q, k, v, *caches, lengths


def expect(q, k_cache, v_cache, lengths, **options) -> torch.Tensor:
    cpu = [x.cpu() for x in (q, k_cache, v_cache)]
    return attention_ref(*cpu, seqused_k=lengths.cpu(), **options)[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("causal", [False, True])
def test_append(causal: bool, target: Target) -> None:
    q, k, v, k_cache, v_cache, lengths = problem(target)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    for b, n in enumerate(lengths.tolist()):
        wanted_k[b, n : n + 3], wanted_v[b, n : n + 3] = k[b], v[b]
    with use(target):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=causal, return_softmax_lse=True
        )
    assert torch.equal(k_cache, wanted_k) and torch.equal(v_cache, wanted_v)
    assert_close(out, expect(q, k_cache, v_cache, lengths + 3, causal=causal))
    assert lse.shape == (3, 4, 3)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("start", [38, 39, 40, 41, 1000, -1, -3, -1000])
def test_append_never_writes_outside(start: int, target: Target) -> None:
    """A full cache, more than full, a negative length: what fits is written, the rest is
    dropped."""
    q, k, v, *_ = problem(target)
    buffer = torch.randn(2, 5, 40, 2, 16, device=target.device)
    before = buffer.clone()
    k_cache, v_cache = buffer[:, 1:4]
    lengths = torch.tensor([3, start, 7], dtype=torch.int32, device=target.device)
    with use(target):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    wanted = before.clone()
    for b, n in enumerate(lengths.tolist()):
        for i in range(3):
            if 0 <= n + i < 40:
                wanted[0, b + 1, n + i], wanted[1, b + 1, n + i] = k[b, i], v[b, i]
    assert torch.equal(buffer, wanted)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_append_to_pages(page_size: int, target: Target) -> None:
    q, k, v, k_cache, v_cache, lengths = problem(target, capacity=42)
    pages_each = -(-42 // page_size)
    table = torch.randperm(3 * pages_each + 2)[: 3 * pages_each].view(3, -1).int().to(target.device)
    pools = []
    for cache in (k_cache, v_cache):
        pool = torch.full((3 * pages_each + 2, page_size, 2, 16), math.nan, device=target.device)
        padded = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, pages_each * page_size - 42))
        pool[table.flatten().long()] = padded.reshape(-1, page_size, 2, 16)
        pools.append(pool)
    with use(target):
        expected = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        )
        actual = flash_attn.flash_attn_with_kvcache(
            q, *pools, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )
    assert_close(actual, expected.cpu())
    for pool, cache in zip(pools, (k_cache, v_cache), strict=True):
        assert torch.equal(pool[table.long()].flatten(1, 2)[:, :42], cache)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(causal: bool, interleaved: bool, target: Target) -> None:
    q, k, v, k_cache, v_cache, lengths = problem(target)
    angles = torch.randn(40, 4, device=target.device)
    cos, sin = angles.cos(), angles.sin()
    wanted_k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=lengths)
    turned_q = apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=lengths)
    if not causal:
        turned_q = torch.cat(
            [
                apply_rotary_emb(q[:, i : i + 1], cos, sin, interleaved, seqlen_offsets=lengths)
                for i in range(3)
            ],
            1,
        )
    with use(target):
        out = flash_attn.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=lengths,
            causal=causal,
            rotary_interleaved=interleaved,
        )
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(k_cache[b, n : n + 3], wanted_k[b])
    assert_close(out, expect(turned_q, k_cache, v_cache, lengths + 3, causal=causal))


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_cache_rows_of_a_larger_pool(target: Target) -> None:
    q, k, v, *_, lengths = problem(target)
    k_cache, v_cache = torch.randn(2, 7, 40, 2, 16, device=target.device)
    before = k_cache.clone()
    rows = torch.tensor([6, 2, 0], dtype=torch.int32, device=target.device)
    with use(target):
        out = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows
        )
    assert torch.equal(k_cache[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
    assert_close(out, expect(q, k_cache[rows.long()], v_cache[rows.long()], lengths + 3))


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_leftpad(target: Target) -> None:
    q, _, _, k_cache, v_cache, lengths = problem(target)
    left = torch.tensor([2, 0, 11], dtype=torch.int32, device=target.device)
    with use(target):
        out = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=left, causal=True
        )
    assert_close(out, expect(q, k_cache, v_cache, lengths, leftpad_k=left.cpu(), causal=True))


@pytest.mark.parametrize("length", [0, 17, 40])
def test_length_as_a_number(length: int) -> None:
    q, _, _, k_cache, v_cache, _ = problem(ATEN_CPU)
    lengths = torch.full((3,), length, dtype=torch.int32)
    actual = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length)
    assert torch.equal(
        actual, flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    )
    assert_close(actual, expect(q, k_cache, v_cache, lengths))


BAD = {
    "k without v": (dict(k=torch.zeros(3, 3, 2, 16)), "flash_attn: v: "),
    "no length to append at": (
        dict(k=torch.zeros(3, 3, 2, 16), v=torch.zeros(3, 3, 2, 16)),
        "flash_attn: cache_seqlens: ",
    ),
    "cos without sin": (dict(rotary_cos=torch.zeros(40, 4)), "flash_attn: rotary_sin: "),
    "length above the capacity": (
        dict(cache_seqlens=41),
        "flash_attn: cache_seqlens: .*40.*got 41",
    ),
    "int64 lengths": (
        dict(cache_seqlens=torch.tensor([1, 2, 3])),
        "flash_attn: cache_seqlens: .*int32",
    ),
    "too many splits": (dict(num_splits=257), "flash_attn: num_splits: "),
    "rotary without new keys": (
        dict(rotary_cos=torch.zeros(40, 4), rotary_sin=torch.zeros(40, 4)),
        "flash_attn: rotary_cos: ",
    ),
}


@pytest.mark.parametrize("mistake", BAD)
def test_errors(mistake: str) -> None:
    q, _, _, k_cache, v_cache, _ = problem(ATEN_CPU)
    options, message = BAD[mistake]
    with pytest.raises(RuntimeError, match=message):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **options)


def test_generating_token_by_token_is_one_forward() -> None:
    """Eight steps through the cache: the rows of one causal call."""
    q, k, v = torch.randn(3, 2, 8, 2, 16)
    k_cache, v_cache = torch.full((2, 2, 8, 2, 16), math.nan)
    steps = []
    for i in range(8):
        now = slice(i, i + 1)
        steps.append(
            flash_attn.flash_attn_with_kvcache(
                q[:, now], k_cache, v_cache, k[:, now], v[:, now], cache_seqlens=i, causal=True
            )
        )
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(torch.cat(steps, 1), expected)


def appended_to(caches: tuple[torch.Tensor, torch.Tensor], **changes: object) -> torch.Tensor:
    new = torch.ones(2, 1, 2, 16, device=caches[0].device)
    call = (
        dict(q=new, k=new, v=new, cache_seqlens=torch.tensor([1, 3], dtype=torch.int32)) | changes
    )
    call = {n: x.to(new.device) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    return flash_attn.flash_attn_with_kvcache(k_cache=caches[0], v_cache=caches[1], **call)


def buffer(target: Target, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device=target.device)


SHAPE = (2, 9, 2, 16)
# Caches that share a byte, or have two elements in one place, from a buffer of 2000 zeros.
OVERLAPS = {
    "k_cache and v_cache the same": lambda x: (x[:576].view(SHAPE),) * 2,
    "v_cache inside k_cache": lambda x: (
        x[:1152].view(2, 9, 2, 32)[..., :16],
        x[8:1160].view(2, 9, 2, 32)[..., :16],
    ),
    "other strides, one element": lambda x: (
        x[:576].view(SHAPE),
        x.as_strided(SHAPE, (16, 64, 32, 1), 575),
    ),
    "the end of v_cache, the begin of k_cache": lambda x: (
        x[572:1148].view(SHAPE),
        x[:576].view(SHAPE),
    ),
    "rows of v_cache overlap": lambda x: (
        x[1000:1576].view(SHAPE),
        x.as_strided(SHAPE, (287, 32, 16, 1)),
    ),
    "a window of k_cache": lambda x: (
        x[:320].view(10, 32).unfold(0, 9, 1).permute(0, 2, 1).unflatten(2, (2, 16)),
        x[1000:1576].view(SHAPE),
    ),
    "an expanded k_cache": lambda x: (
        x[:288].view(1, *SHAPE[1:]).expand(SHAPE),
        x[1000:1576].view(SHAPE),
    ),
}
# Caches that lie in one another, and share nothing.
INTERLEAVED = {
    "in rows": lambda x: x[:1152].view(2, 9, 2, 2, 16).unbind(2),
    "in head dims": lambda x: x[:1152].view(2, 9, 2, 32).split(16, -1),
    "in heads": lambda x: x[:1152].view(2, 9, 4, 16).split(2, -2),
    "in every other head": lambda x: (x[:1152].view(2, 9, 4, 16)[:, :, i::2] for i in range(2)),
    "in batches": lambda x: x[:1152].view(2, *SHAPE).unbind(0),
    "other strides": lambda x: (x[:576].view(SHAPE), x.as_strided(SHAPE, (16, 64, 32, 1), 576)),
    "transposed": lambda x: x[:1152].view(2, 2, 2, 9, 16).transpose(2, 3).unbind(1),
}


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("name", OVERLAPS)
def test_caches_that_overlap_are_refused(name: str, target: Target) -> None:
    memory = buffer(target, 2000)
    places = "memory of its own|one place in memory for each element"
    with use(target), pytest.raises(RuntimeError, match=f"flash_attn: [kv]_cache: .*({places})"):
        appended_to(OVERLAPS[name](memory))
    assert not memory.any()


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_pages_of_one_pool(target: Target) -> None:
    """K's pages are V's under another number; the table has one name for each."""
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    pool = torch.randn(9, 4, 2, 16, device=target.device, dtype=dtype)
    q, k, v = torch.randn(3, 2, 2, 2, 16, device=target.device, dtype=dtype)
    table, lens = (
        torch.tensor(numbers, dtype=torch.int32, device=target.device)
        for numbers in ([[4, 0], [2, 6]], [5, 3])
    )
    call = dict(k=k, v=v, cache_seqlens=lens, causal=True)
    apart = pool[:-1].clone(), pool[1:].clone()
    with use(target):
        expected = flash_attn.flash_attn_with_kvcache(q, *apart, block_table=table, **call)
        pages = pool[:-1], pool[1:]
        actual = flash_attn.flash_attn_with_kvcache(q, *pages, block_table=table, **call)
        with pytest.raises(RuntimeError, match="flash_attn: v_cache: .*memory of its own"):
            flash_attn.flash_attn_with_kvcache(q, pool, pool, block_table=table, **call)
    assert torch.equal(actual, expected)
    used = table.flatten().long()
    for page, alone in zip(pages, apart, strict=True):
        assert torch.equal(page[used], alone[used])


def test_caches_of_8_bits_that_share_a_byte_are_refused() -> None:
    """And such as meet without sharing one are written."""
    memory = torch.zeros(1200, dtype=torch.int8)
    new = torch.ones(2, 1, 2, 16)
    call = dict(q=new, k=new, v=new, cache_seqlens=torch.tensor([1, 3], dtype=torch.int32))
    call |= dict(k_descale=torch.ones(2), v_descale=torch.ones(2))
    k_cache = memory[:576].view(SHAPE)
    with pytest.raises(RuntimeError, match="flash_attn: v_cache: .*memory of its own"):
        v_cache = memory[575:1151].view(SHAPE)
        flash_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **call)
    assert not memory.any()
    v_cache = memory[576:1152].view(SHAPE)
    flash_attn.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **call)
    assert k_cache[0, 1].bool().all() and v_cache[1, 3].bool().all()


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_a_table_of_one_key(target: Target) -> None:
    """The least capacity, with rows of a larger table."""
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    k, v = torch.randn(2, 3, 1, 2, 16, device=target.device, dtype=dtype)
    q = torch.randn(2, 1, 2, 16, device=target.device, dtype=dtype)
    table, rows, length = (
        torch.tensor(numbers, dtype=torch.int32, device=target.device)
        for numbers in ([[2], [0]], [1, 0], [1, 1])
    )
    with use(target):
        out = flash_attn.flash_decode_func(q, k, v, length, block_table=table, cache_batch_idx=rows)
    torch.testing.assert_close(out, v[[0, 2]], rtol=1e-3, atol=1e-3)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("name", INTERLEAVED)
def test_caches_that_interleave_are_written(name: str, target: Target) -> None:
    k_cache, v_cache = INTERLEAVED[name](buffer(target, 2000))
    with use(target):
        appended_to((k_cache, v_cache), v=torch.full((2, 1, 2, 16), 2.0))
    for cache, value in ((k_cache, 1), (v_cache, 2)):
        wanted = torch.zeros_like(cache)
        wanted[0, 1] = wanted[1, 3] = value
        assert torch.equal(cache, wanted)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_an_append_of_nothing_writes_nothing(target: Target) -> None:
    """And so takes any cache."""
    caches = [buffer(target, 1, *SHAPE[1:]).expand(SHAPE)] * 2
    none = torch.ones(2, 0, 2, 16, device=target.device)
    with use(target):
        assert appended_to(caches, k=none, v=none).shape == (2, 1, 2, 16)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_an_append_to_inference_tensors(target: Target) -> None:
    """Written in inference mode, whatever the other tensors are; outside refused, unwritten."""
    with torch.inference_mode():
        caches = buffer(target, *SHAPE), buffer(target, *SHAPE)
    normal = [buffer(target, *SHAPE) for _ in range(2)]
    new = torch.ones(2, 1, 2, 16, device=target.device)
    with use(target):
        for mixed in (caches, (normal[0], caches[1]), (caches[0], normal[1])):
            for mode in (torch.enable_grad, torch.no_grad):
                with mode(), pytest.raises(RuntimeError, match="cache: .*inference mode"):
                    appended_to(mixed)
                assert not any(cache.any() for cache in mixed)
        with torch.inference_mode():
            appended_to(caches, q=new, k=new, v=new)
    assert all(cache[0, 1].all() and cache[1, 3].all() for cache in caches)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_append_to_a_negative_view(mode: type, which: int, target: Target) -> None:
    caches = [buffer(target, *SHAPE), buffer(target, *SHAPE)]
    views = [torch._neg_view(x) if i == which else x for i, x in enumerate(caches)]
    name = ("k_cache", "v_cache")[which]
    with use(target), mode(), pytest.raises(RuntimeError, match=f"flash_attn: {name}: .*negated"):
        appended_to(views)
    assert not any(cache.any() for cache in caches)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_an_append_to_a_conjugate_view(target: Target) -> None:
    caches = [torch.zeros(*SHAPE, device=target.device, dtype=torch.complex64) for _ in range(2)]
    with use(target), pytest.raises(RuntimeError, match="flash_attn: v_cache: .*conjugated"):
        appended_to((caches[0], caches[1].conj()))
    assert not any(cache.any() for cache in caches)


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
def test_negative_views_are_appended(target: Target) -> None:
    caches = [buffer(target, *SHAPE), buffer(target, *SHAPE)]
    view = torch._neg_view(torch.full((2, 1, 2, 16), -3.0, device=target.device))
    with use(target):
        appended_to(caches, k=view)
    assert (caches[0][0, 1] == 3).all() and (caches[1][0, 1] == 1).all()


@each_target(ATEN_CPU)
def test_one_length_at_the_end_of_the_caches(target: Target) -> None:
    """Tokens beyond the end: an int as cache_seqlens means the same as a tensor of it."""
    q, k, v, *caches, _ = problem(target)
    length = caches[0].size(1) - 1
    results = []
    with use(target):
        for lengths in (length, torch.full((len(q),), length, dtype=torch.int32)):
            written = [x.clone() for x in caches]
            out = flash_attn.flash_attn_with_kvcache(
                q, *written, k[:, :3], v[:, :3], cache_seqlens=lengths
            )
            results.append((out, *written))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@each_target(ATEN_CPU, ATEN_CUDA, DECODE_CUDA)
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("length", [0, 5, 29])
def test_one_length_for_all_pages(length: int, new: int, target: Target) -> None:
    """An int as cache_seqlens means the same as a tensor of it: of pages nothing is cut off."""
    q, k, v, k_cache, v_cache, _ = problem(target)
    table = torch.arange(12, dtype=torch.int32, device=target.device).flip(0).view(3, 4)
    pages = [x.reshape(12, 10, 2, 16) for x in (k_cache, v_cache)]
    tokens = (k[:, :new], v[:, :new]) if new else ()
    results = []
    with use(target):
        for lengths in (length, torch.full((3,), length, dtype=torch.int32, device=q.device)):
            written = [x.clone() for x in pages]
            out, lse = flash_attn.flash_attn_with_kvcache(
                q,
                *written,
                *tokens,
                cache_seqlens=lengths,
                block_table=table,
                causal=True,
                return_softmax_lse=True,
            )
            results.append([out, lse, *written])
    for a, e in zip(*results, strict=True):
        assert torch.equal(a, e)
