"""FlashAttention-3's calls against a cache: one token and many, new keys, pages, rotation."""

from __future__ import annotations

import functools
import itertools
from importlib import import_module

import pytest
import torch
from fp8_inputs import DESCALES, FP8, assert_attended, attended, descales, quantized

import flash_attn
from flash_attn.layers import rotary

fa3 = pytest.importorskip("flash_attn_3.flash_attn_interface")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def is_view_of(x: torch.Tensor, base: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
def test_cache(paged: bool, device: str) -> None:
    """Append, rotate and attend, with a page table and cache rows."""
    caches = torch.randn(2, 6, 16, 2, 16, device=device)
    q, k, v = (torch.randn(2, 1, h, 16, device=device) for h in (4, 2, 2))
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32, device=device) if paged else None
    rows = torch.tensor([3, 1], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 11], dtype=torch.int32, device=device)
    angles = torch.randn(32, 8, device=device)
    options = dict(
        k=k,
        v=v,
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        cache_seqlens=lengths,
        cache_batch_idx=None if paged else rows,
        causal=True,
        window_size=(9, 0),
        rotary_interleaved=False,
        softcap=4.0,
    )
    first, second = caches.clone(), caches.clone()
    expected = flash_attn.flash_attn_with_kvcache(
        q, *first, block_table=table, return_softmax_lse=True, **options
    )
    plan = fa3.get_scheduler_metadata(2, 1, 16, 4, 2, 16, lengths)
    actual = fa3.flash_attn_with_kvcache(
        q, *second, page_table=table, return_softmax_lse=True, scheduler_metadata=plan, **options
    )
    assert len(actual) == 4 and torch.equal(first, second) and not torch.equal(first, caches)
    for a, e in zip(actual[:2], expected, strict=True):
        assert torch.equal(a, e)
    third = caches.clone()
    private = fa3._flash_attn_forward(
        q,
        *third,
        k_new=k,
        v_new=v,
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        seqused_k=lengths,
        page_table=table,
        kv_batch_idx=None if paged else rows,
        causal=True,
        window_size_left=9,
        window_size_right=0,
        rotary_interleaved=False,
        softcap=4.0,
    )
    assert torch.equal(third, first)
    torch.testing.assert_close(private[0], expected[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[7, 11], 9, None], ids=str)
@pytest.mark.parametrize("form", ["dense", "rows", "leftpad", "paged", "paged rows"])
def test_queries_of_different_lengths_against_a_cache(form: str, lengths, device: str) -> None:
    """What continuous batching calls: each sequence as if it were alone."""
    paged = form.startswith("paged")
    caches = torch.randn(2, 6, 8 if paged else 16, 2, 16, device=device)
    caches = caches if paged or form == "rows" else caches[:, :2]
    q = torch.randn(7, 4, 16, device=device)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = ints([[4, 1], [0, 5], [2, 3]]) if form == "paged rows" else ints([[4, 1], [0, 5]])
    given = {
        "dense": {},
        "rows": dict(cache_batch_idx=ints([3, 1])),
        "leftpad": dict(cache_leftpad=ints([2, 1])),
        "paged": dict(page_table=table),
        "paged rows": dict(page_table=table, cache_batch_idx=ints([2, 0])),
    }[form]
    used = ints(lengths) if isinstance(lengths, list) else lengths
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q,
        *caches,
        cache_seqlens=used,
        cu_seqlens_q=cu,
        max_seqlen_q=4,
        causal=True,
        return_softmax_lse=True,
        **given,
    )
    each = ints(lengths if isinstance(lengths, list) else [lengths or 16] * 2)
    for b, (start, end) in enumerate(((0, 3), (3, 7))):
        alone = {
            n: x if n == "page_table" and len(given) > 1 else x[b : b + 1] for n, x in given.items()
        }
        alone["block_table"] = alone.pop("page_table", None)
        whole = caches if paged or form == "rows" else caches[:, b : b + 1]
        expected, expected_lse = flash_attn.flash_attn_with_kvcache(
            q[None, start:end],
            *whole,
            cache_seqlens=each[b : b + 1],
            causal=True,
            return_softmax_lse=True,
            **alone,
        )
        torch.testing.assert_close(out[start:end], expected[0])
        torch.testing.assert_close(lse[:, start:end], expected_lse[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", ["equal", "of queries", "of both"])
@pytest.mark.parametrize("form", ["dense", "rows", "leftpad", "paged rows"])
def test_new_keys_of_different_lengths(
    form: str, lengths: str, causal: bool, chunk: int, device: str
) -> None:
    """Rotated, appended and attended to as if each sequence were alone."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    paged = form == "paged rows"
    caches = torch.randn(2, 6, 8 if paged else 16, 2, 16, device=device)
    rows = ints(0, 1) if form in ("dense", "leftpad") else ints(3, 1)
    table = torch.stack([ints(4, 1), ints(0, 5), ints(2, 2), ints(3, 2)]) if paged else None
    pads = ints(2, 1) if form == "leftpad" else None
    used, cu = ints(4, 9), ints(0, 3, 6) if lengths == "equal" else ints(0, 2, 6)
    cu_new = ints(0, 4, 5) if lengths == "of both" else ints(0, 2, 4)
    q = torch.randn(7 if lengths != "equal" else 6, 4, 16, device=device)
    k, v = torch.randn(2, 6 if lengths == "of both" else 4, 2, 16, device=device)
    angles = torch.randn(16, 4, device=device)
    turns = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
    cut = dict(cu_seqlens_q=cu, max_seqlen_q=4) if lengths != "equal" else {}
    cut |= dict(cu_seqlens_k_new=cu_new) if lengths == "of both" else {}
    written, expected = caches.clone(), caches.clone()
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q if cut else q.unflatten(0, (2, 3)),
        *(written if form != "dense" else written[:, :2]),
        *((k, v) if lengths == "of both" else (x.unflatten(0, (2, 2)) for x in (k, v))),
        cache_seqlens=used,
        cache_batch_idx=None if form == "dense" else rows,
        cache_leftpad=pads,
        page_table=table,
        attention_chunk=chunk,
        causal=causal,
        return_softmax_lse=True,
        **cut,
        **turns,
    )
    if not cut:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    for b in range(2):
        (begin, end), (first, last) = cu[b : b + 2].tolist(), cu_new[b : b + 2].tolist()
        flash_attn.flash_attn_with_kvcache(
            q[None, begin:end],
            *expected,
            *(x[None, first:last] for x in (k, v)),
            cache_seqlens=used[b : b + 1],
            cache_batch_idx=rows[b : b + 1],
            block_table=table,
            **turns,
        )
        row = int(rows[b])
        keys = slice(0 if pads is None else int(pads[b]), int(used[b]) + last - first)
        own = (x[table[row].long()].flatten(0, 1) if paged else x[row] for x in expected)
        at = used[b] + torch.arange(end - begin, device=device) * causal
        turned = rotary.apply_rotary_emb(
            q[begin:end, None], angles.cos(), angles.sin(), seqlen_offsets=at.int()
        )
        alone, alone_lse = fa3.flash_attn_func(
            turned.transpose(0, 1),
            *(x[None, keys] for x in own),
            causal=causal,
            attention_chunk=chunk,
            return_attn_probs=True,
        )
        torch.testing.assert_close(out[begin:end], alone[0])
        torch.testing.assert_close(lse[:, begin:end], alone_lse[0])
    torch.testing.assert_close(written, expected)
    assert not torch.equal(written, caches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_seqlens(causal: bool, interleaved: bool, device: str) -> None:
    """Those of the cache are the default; others turn by other positions."""
    torch.manual_seed(7)
    q, k, v = torch.randn(3, 2, 3, 2, 16, device=device)
    caches = torch.randn(2, 2, 12, 2, 16, device=device)
    angles = torch.arange(12)[:, None] / 5 ** torch.arange(4)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    lens = torch.tensor([4, 9], dtype=torch.int32, device=device)
    results = []
    for shift, rotary_seqlens in ((0, None), (0, lens), (-3, lens - 3)):
        k_cache, v_cache = caches.clone()
        out = fa3.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=lens,
            rotary_seqlens=rotary_seqlens,
            rotary_interleaved=interleaved,
            causal=causal,
        )
        turned = rotary.apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=lens + shift)
        for b in range(2):
            new = slice(int(lens[b]), int(lens[b]) + 3)
            torch.testing.assert_close(k_cache[b, new], turned[b])
            assert torch.equal(v_cache[b, new], v[b])
        results.append(out)
    torch.testing.assert_close(results[0], results[1])
    assert not torch.allclose(results[0], results[2], atol=1e-3)


def test_what_a_cache_refuses_with_lengths_or_chunks() -> None:
    q, cache = torch.randn(2, 3, 2, 16), torch.randn(2, 8, 2, 16)
    call = functools.partial(fa3.flash_attn_with_kvcache, q, cache, cache, attention_chunk=2)
    lens, cu = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    for name in ("q_descale", "k_descale", "v_descale"):
        for given in (dict(), dict(attention_chunk=0, cu_seqlens_q=cu)):
            with pytest.raises(
                NotImplementedError, match=f"flash_attn: {name}: not supported with"
            ):
                call(**given, **{name: torch.ones(2)})
    with pytest.raises(RuntimeError, match="flash_attn: q: expected a floating dtype of at least"):
        fa3.flash_attn_with_kvcache(q.to(FP8), cache.to(FP8), cache.to(FP8), attention_chunk=2)
    with pytest.raises(RuntimeError, match="flash_attn: attention_chunk: expected at least 0"):
        call(attention_chunk=-1)
    with pytest.raises(RuntimeError, match="flash_attn: v: expected k and v together"):
        call(k=cache)
    with pytest.raises(RuntimeError, match="flash_attn: rotary_cos: expected k and v to append"):
        call(rotary_cos=torch.ones(8, 4), rotary_sin=torch.ones(8, 4))
    with pytest.raises(RuntimeError, match="flash_attn: k: expected torch.float32 and 3 dim"):
        call(k=cache, v=cache, cache_seqlens=lens, cu_seqlens_k_new=cu)


def fp8_numbers(*shape: int, device: str) -> torch.Tensor:
    """Any of the bytes but the two NaNs."""
    numbers = torch.randint(0, 254, shape, dtype=torch.uint8, device=device)
    return (numbers + (numbers > 126)).view(FP8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("descaled", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_append_in_fp8_stores_the_same_bytes(paged: bool, descaled: bool, device: str) -> None:
    """What is dequantised and quantised again, of all numbers of fp8 and descales of any size."""
    caches = torch.zeros(2, 6 if paged else 3, 64, 2, 16, device=device).to(FP8)
    table = torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32, device=device)
    used = torch.tensor([7, 0, 20], dtype=torch.int32, device=device)
    k, v = fp8_numbers(2, 3, 40, 2, 16, device=device)
    given = {name: torch.randn(3, 2, device=device).mul(4).exp() for name in DESCALES[1:]}
    fa3.flash_attn_with_kvcache(
        torch.zeros(3, 1, 4, 16, device=device).to(FP8),
        *caches,
        k,
        v,
        cache_seqlens=used,
        page_table=table if paged else None,
        **(given if descaled else {}),
    )
    for cache, new in zip(caches, (k, v), strict=True):
        for b in range(3):
            row = cache[table[b].long()].flatten(0, 1) if paged else cache[b]
            stored = row[used[b] : used[b] + 40].view(torch.uint8)
            assert torch.equal(stored, new[b].view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("names", [(), *((name,) for name in DESCALES), DESCALES])
def test_queries_in_fp8(names: tuple[str, ...], causal: bool, device: str) -> None:
    """As dense attention to the keys that are there then; the private function and the op, too."""
    q, k, v = (quantized(2, 3, heads, 16, device=device) for heads in (4, 2, 2))
    caches = torch.stack([quantized(2, 16, 2, 16, device=device) for _ in "kv"])
    used = torch.tensor([7, 11], dtype=torch.int32, device=device)
    given = {name: x for name, x in descales(2, device).items() if name in names}
    written = caches.clone()
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *written, k, v, cache_seqlens=used, causal=causal, return_softmax_lse=True, **given
    )
    for b in range(2):
        keys, values = (
            torch.cat([cache[b, : used[b]], new[b]])[None]
            for cache, new in zip(caches, (k, v), strict=True)
        )
        own = {name: x[b : b + 1] for name, x in given.items()}
        expected = attended(q[b : b + 1], keys, values, own, (-1, 0 if causal else -1))
        assert_attended((out[b : b + 1], lse[b : b + 1]), expected)
    for function, mask in (
        (fa3._flash_attn_forward, dict(causal=causal)),
        (torch.ops.flash_attn_3.fwd, dict(is_causal=causal)),
    ):
        again = caches.clone()
        private = function(q, *again, k_new=k, v_new=v, seqused_k=used, **mask, **given)
        for actual, result in zip(private, (out, lse), strict=False):
            torch.testing.assert_close(actual, result)  # by another number of splits
        assert torch.equal(again.view(torch.uint8), written.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own_positions", [False, True])
def test_queries_in_fp8_turn_after_their_descale(own_positions: bool, device: str) -> None:
    """In pages: what flash_attn's function does with the values in bf16."""
    q, k, v = (quantized(2, 3, heads, 16, device=device) for heads in (4, 2, 2))
    caches = torch.stack([quantized(6, 8, 2, 16, device=device) for _ in "kv"])
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32, device=device)
    used = torch.tensor([7, 11], dtype=torch.int32, device=device)
    given = descales(2, device)
    angles = torch.randn(16, 8, device=device)
    options = dict(rotary_cos=angles.cos().bfloat16(), rotary_sin=angles.sin().bfloat16())
    options |= dict(cache_seqlens=used, causal=True, rotary_interleaved=False)
    wide = []
    for name, x in zip(DESCALES, (q, k, v), strict=True):
        each = given[name].repeat_interleave(x.size(2) // 2, 1)[:, None, :, None]
        wide.append((x.float() * each).bfloat16())
    first, second = caches.clone(), caches.clone()
    expected = flash_attn.flash_attn_with_kvcache(
        wide[0],
        *first,
        *wide[1:],
        block_table=table,
        k_descale=given["k_descale"],
        v_descale=given["v_descale"],
        **options,
    )
    options |= dict(rotary_seqlens=used) if own_positions else {}
    actual = fa3.flash_attn_with_kvcache(q, *second, k, v, page_table=table, **options, **given)
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.02)
    if not own_positions:
        assert torch.equal(actual, expected)
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_queries_of_16_bits_beside_a_cache_of_8(dtype: torch.dtype, device: str) -> None:
    """With a descale for each head, and one for each sequence besides."""
    q = torch.randn(2, 3, 4, 16, device=device).bfloat16()
    caches = (torch.randn(2, 2, 16, 2, 16, device=device) * 20).to(dtype)
    given = dict(k_descale=torch.rand(2, device=device), v_descale=torch.rand(2, 2, device=device))
    expected = flash_attn.flash_attn_with_kvcache(q, *caches, **given)
    assert torch.equal(fa3.flash_attn_with_kvcache(q, *caches, **given), expected)
    private = fa3._flash_attn_forward(q, *caches, **given)[0]
    torch.testing.assert_close(private, expected)  # by another number of splits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", ["fp8", "bf16"])
@pytest.mark.parametrize("form", ["dense", "rows", "leftpad", "paged", "paged rows"])
@pytest.mark.parametrize("lens", [(3, 0, 4), (1, 1, 1), (1, 1, 9)], ids=str)
def test_queries_of_different_lengths_beside_a_cache_of_8_bits(
    lens: tuple[int, ...], form: str, queries: str, device: str
) -> None:
    """Each sequence as if it were alone, a descale of its own with it; a token behind the last one
    is of none. The longest may be much longer than the others."""
    paged, batch = form.startswith("paged"), len(lens)

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = ints([3, 1, 0]) if form.endswith("rows") else None
    table = ints([[4, 1], [0, 5], [2, 3], [6, 7]]) if paged else None
    caches = torch.stack([quantized(8, 8 if paged else 16, 2, 16, device=device) for _ in "kv"])
    if form in ("dense", "leftpad"):
        caches = caches[:, :batch]
    elif form == "paged":
        table = table[:batch]
    used, cu = ints([9, 12, 16]), ints([0, *itertools.accumulate(lens)])
    leftpad = ints([2, 0, 1]) if form == "leftpad" else None
    q = quantized(sum(lens) + 1, 4, 16, device=device)
    q = q if queries == "fp8" else q.bfloat16()
    given = descales(batch, device)
    if queries == "bf16":
        del given["q_descale"]
    options = dict(cache_leftpad=leftpad, cache_batch_idx=rows, page_table=table)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q,
        *caches,
        cache_seqlens=used,
        cu_seqlens_q=cu,
        max_seqlen_q=max(lens),
        causal=True,
        return_softmax_lse=True,
        **options,
        **given,
    )
    assert out.shape == (*q.shape[:2], 16) and lse.shape == (4, q.size(0))
    assert not out[-1].any() and (lse[:, -1] == -torch.inf).all()
    for b, first in enumerate(cu[:-1].tolist()):
        own = slice(first, first + lens[b])
        row = b if rows is None else rows[b]
        keys, values = (
            cache[table[row].long()].flatten(0, 1) if paged else cache[row] for cache in caches
        )
        seen = slice(0 if leftpad is None else leftpad[b], used[b])
        of_b = {name: x[b : b + 1] for name, x in given.items()}
        expected = attended(q[None, own], keys[None, seen], values[None, seen], of_b, (-1, 0))
        assert_attended((out[own], lse[:, own]), [x[0] for x in expected])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_qv_beside_a_cache(tokens: int, page_size: int, device: str) -> None:
    """One row a token, as a cache of multi-head latent attention has them, is read in place; keys
    and values apart are copied. Both give what the joined call gives."""
    make = dict(device=device, dtype=torch.bfloat16)
    rows = torch.randn(*((8, 16) if page_size else (2, 64)), 1, 576, **make)
    table = torch.tensor([[3, 0, 5, 1], [2, 6, 4, 7]], dtype=torch.int32, device=device)
    used = torch.tensor([5, 64], dtype=torch.int32, device=device)
    side_by_side = import_module("flash_attn_3._ops")._side_by_side
    q, qv = (torch.randn(2, tokens, 6, d, **make) for d in (64, 512))
    v, k = rows.split([512, 64], -1)
    joined = torch.cat([qv, q], -1)
    given = table if page_size else None
    expected = flash_attn.flash_decode_func(joined, rows, v, used, block_table=given)
    call = functools.partial(
        fa3.flash_attn_with_kvcache, q, qv=qv, page_table=given, cache_seqlens=used, causal=True
    )
    assert torch.equal(call(k_cache=k, v_cache=v), expected)
    assert torch.equal(side_by_side(v, k), rows) and is_view_of(side_by_side(v, k), rows)
    for first, second in ((k, v), (v[..., :500], k), (v.clone(), k), (v[:1], k[1:2])):
        both = torch.cat([first, second], -1)
        copied = side_by_side(first, second)
        assert torch.equal(copied, both) and not is_view_of(copied, rows)
    apart = call(k_cache=k.clone(), v_cache=v.clone())
    torch.testing.assert_close(apart, expected, rtol=2.0**-7, atol=2.0**-9)
    private = fa3._flash_attn_forward(
        q, k, v, qv=qv, seqused_k=used, page_table=given, causal=True
    )[0]
    torch.testing.assert_close(private, expected, rtol=2.0**-7, atol=2.0**-9)
    with pytest.raises(NotImplementedError, match="flash_attn: qv: not supported with k and v"):
        call(k_cache=k, v_cache=v, k=k[:, :1], v=v[:, :1])


def test_what_a_cache_in_fp8_refuses() -> None:
    q, cache = quantized(2, 3, 4, 16), quantized(2, 8, 2, 16)
    wide = cache.to(torch.bfloat16)
    used = torch.tensor([0, 1], dtype=torch.int32)
    call = functools.partial(fa3.flash_attn_with_kvcache, cache_seqlens=used)
    for name in DESCALES:
        with pytest.raises(RuntimeError, match=rf"flash_attn: {name}: expected torch.float32 and"):
            call(q, cache, cache, **{name: torch.ones(2, 4)})
    alike = "expected torch.float8_e4m3fn and 4 dimensions on cpu as q has, got"
    for name, wrong in (
        ("k_cache", (q, wide, cache)),
        ("v_cache", (q, cache, wide)),
        ("k", (q, cache, cache, wide[:, :3], cache[:, :3])),
        ("v", (q, cache, cache, cache[:, :3], wide[:, :3])),
    ):
        with pytest.raises(RuntimeError, match=f"flash_attn: {name}: {alike}"):
            call(*wrong)
    for caches in (cache, wide):
        with pytest.raises(RuntimeError, match="flash_attn: q_descale: expected with q, k and v"):
            call(q.to(torch.bfloat16), caches, caches, q_descale=torch.ones(2, 2))
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    call = functools.partial(call, cu_seqlens_q=cu, max_seqlen_q=2)
    for wrong, expected in (
        (dict(q=q), r"q: expected shape \(total, heads, d\) beside cu_seqlens_q, got"),
        (dict(cu_seqlens_q=cu.long()), "cu_seqlens_q: expected torch.int32 and 1 dimensions on"),
        (dict(v_cache=wide), "v_cache: expected torch.float8_e4m3fn and 4 dimensions on cpu as q"),
        (dict(q_descale=torch.ones(2, 4)), "q_descale: expected torch.float32 and shape"),
        (dict(q=wide[0], q_descale=torch.ones(2, 2)), "q_descale: expected with q, k and v in"),
        (dict(k_descale=torch.ones(2)), "k_descale: expected torch.float32 and shape"),
        (dict(v_descale=torch.ones(3, 2)), "v_descale: expected torch.float32 and shape"),
        (dict(q=q[0, :, :3]), "k_cache: expected heads that divide the 3 of q, got 2"),
    ):
        with pytest.raises(RuntimeError, match=f"flash_attn: {expected}"):
            call(**dict(q=q[0], k_cache=cache, v_cache=cache) | wrong)
    with pytest.raises(TypeError, match="flash_attn: max_seqlen_q: expected an int, got NoneType"):
        call(q[0], cache, cache, max_seqlen_q=None)
