"""The distribution flash-attn-3: FlashAttention-3's names and signatures, our results."""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch._C import parse_schema

import flash_attn
from flash_attn.layers import rotary

fa3 = pytest.importorskip("flash_attn_3.flash_attn_interface")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CU = torch.tensor([0, 5, 12], dtype=torch.int32)

# hopper/flash_attn_interface.py, 3.0.0.
DESCALE = "q_descale=None, k_descale=None, v_descale=None"
MIDDLE = f"qv=None, {DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0"
TAIL = "deterministic=False, sm_margin=0, return_attn_probs=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIDES = "window_size_left=-1, window_size_right=-1"
UPSTREAM = {
    "flash_attn_func": (
        f"q, k, v, softmax_scale=None, causal=False, {MIDDLE}, num_splits=1, pack_gqa=None, {TAIL}"
    ),
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {DESCALE}, window_size=(-1, -1),"
        " attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,"
        " return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False,"
        f" {MIDDLE}, num_splits=1, pack_gqa=None, {TAIL}"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,"
        " cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,"
        " cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,"
        f" {DESCALE}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,"
        " softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0,"
        " pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,"
        " qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,"
        " cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,"
        " window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None,"
        " sm_margin=0"
    ),
    "_flash_attn_forward": (
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None,"
        " cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None,"
        " max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None,"
        f" rotary_cos=None, rotary_sin=None, seqlens_rotary=None, {DESCALE}, softmax_scale=None,"
        f" causal=False, {SIDES}, attention_chunk=0, softcap=0.0, rotary_interleaved=True,"
        " scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
    ),
    "_flash_attn_backward": (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,"
        " sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,"
        f" softmax_scale=None, is_causal=False, {SIDES}, softcap=0.0, deterministic=False,"
        " sm_margin=0"
    ),
}


@pytest.mark.parametrize("module", ["flash_attn_interface", "flash_attn_3.flash_attn_interface"])
@pytest.mark.parametrize("name", UPSTREAM)
def test_signature(name: str, module: str) -> None:
    wanted: dict = {"torch": torch}
    exec(f"def f({UPSTREAM[name]}): ...", wanted)
    expected = inspect.signature(wanted["f"]).parameters.values()
    imported: dict = {}
    exec(f"from {module} import {name}", imported)
    actual = inspect.signature(imported[name]).parameters.values()
    assert [(p.name, p.default) for p in actual] == [(p.name, p.default) for p in expected]


def test_how_programs_find_it() -> None:
    """transformers asks which distribution a module comes from, TransformerEngine for a version
    that is not a beta of 3.0.0."""
    assert packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    assert Version(version("flash-attn-3")) >= Version("3.0.0")
    (needed,) = map(Requirement, requires("flash-attn-3"))
    assert needed.name == "flash-attn" and needed.specifier.contains(flash_attn.__version__)
    assert str(needed.specifier) == f"=={flash_attn.__version__}"
    from flash_attn_3.flash_attn_config import CONFIG

    assert CONFIG["build_flags"]["FLASHATTENTION_DISABLE_HDIM256"] is False
    assert CONFIG["build_flags"]["FLASHATTENTION_DISABLE_FP8"] is True


def test_the_xformers_schema() -> None:
    """What xformers 0.0.35 asks of the registered ops."""
    lengths = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
    used = "Tensor? seqused_q=None, Tensor? seqused_k=None"
    longest = "int? max_seqlen_q=None, int? max_seqlen_k=None"
    mask = "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1"
    forward = parse_schema(
        "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, "
        "Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None, "
        f"{lengths}, Tensor? cu_seqlens_k_new=None, {used}, {longest}, Tensor? page_table=None, "
        "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
        "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
        f"Tensor? k_descale=None, Tensor? v_descale=None, {mask}, int window_size_right=-1, "
        "int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, "
        "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
        "-> (Tensor(out!), Tensor, Tensor, Tensor)"
    )
    backward = parse_schema(
        "flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
        "Tensor softmax_lse, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, "
        f"{lengths}, {used}, {longest}, {mask}, int window_size_right=-1, float softcap=0., "
        "bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    ops = torch.ops.flash_attn_3
    assert ops.fwd.default._schema.is_backward_compatible_with(forward)
    assert ops.bwd.default._schema.is_backward_compatible_with(backward)


def qkv(form: str, device: str = "cpu") -> list[torch.Tensor]:
    shape = (12,) if form == "varlen" else (2, 12)
    heads = (4, 2, 2, 4)
    return [torch.randn(*shape, h, 16, device=device, requires_grad=True) for h in heads]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["dense", "varlen"])
def test_public_and_private(form: str, device: str) -> None:
    """Values and gradients of the functions, of the private ones and of the ops."""
    q, k, v, dout = qkv(form, device)
    lengths = (CU.to(device), CU.to(device), 7, 7) if form == "varlen" else ()
    infix = "_varlen" if lengths else ""
    ours = getattr(flash_attn, f"flash_attn{infix}_func")
    theirs = getattr(fa3, f"flash_attn{infix}_func")
    options = dict(softmax_scale=0.3, causal=True, window_size=(4, 0), softcap=5.0)
    expected, lse, _ = ours(q, k, v, *lengths, **options, return_attn_probs=True)
    actual = theirs(q, k, v, *lengths, **options, return_attn_probs=True, num_splits=3)
    assert len(actual) == 2 and torch.equal(actual[0], expected) and torch.equal(actual[1], lse)
    gradients = [
        torch.autograd.grad((o, s), (q, k, v), (dout, torch.ones_like(s)))
        for o, s in ((expected, lse), actual)
    ]
    for a, e in zip(*gradients, strict=True):
        torch.testing.assert_close(a, e)

    names = dict(zip(LENGTHS.split(", "), lengths, strict=True)) if lengths else {}
    sides = dict(window_size_left=4, window_size_right=0)
    mask = dict(softmax_scale=0.3, softcap=5.0, **sides)
    place = torch.empty_like(expected)
    out, private_lse, *empty = fa3._flash_attn_forward(
        q, k, v, out_=place, causal=True, **names, **mask
    )
    assert out is place and torch.equal(out, expected) and torch.equal(private_lse, lse)
    assert not out.requires_grad and [x.numel() for x in empty] == [0, 0]
    wanted = torch.autograd.grad(ours(q, k, v, *lengths, **options), (q, k, v), dout)
    places = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    saved = (dout, q, k, v, out, lse)
    fa3._flash_attn_backward(
        *saved,
        **names,
        **dict(zip(("dq", "dk", "dv"), places, strict=True)),
        is_causal=True,
        **mask,
    )
    for a, e in zip(places, wanted, strict=True):
        torch.testing.assert_close(a, e)
    with torch.no_grad():
        out = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True, **names, **mask)[0]
        assert torch.equal(out, expected)
        places = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        torch.ops.flash_attn_3.bwd(*saved, *places, **names, is_causal=True, **mask)
    for a, e in zip(places, wanted, strict=True):
        torch.testing.assert_close(a, e)


def test_varlen_with_seqused() -> None:
    q, k, v, _ = qkv("varlen")
    used = torch.tensor([3, 6], dtype=torch.int32)
    expected = flash_attn.flash_attn_varlen_func(
        q, k, v, CU, CU, 7, 7, seqused_q=used, seqused_k=used
    )
    assert torch.equal(fa3.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7, used, used), expected)
    private = fa3._flash_attn_forward(
        q,
        k,
        v,
        cu_seqlens_q=CU,
        cu_seqlens_k=CU,
        max_seqlen_q=7,
        max_seqlen_k=7,
        seqused_q=used,
        seqused_k=used,
    )
    assert torch.equal(private[0], expected)


def test_packed() -> None:
    q, k, v, _ = qkv("dense")
    expected = flash_attn.flash_attn_func(q, k, v, causal=True, softcap=3.0)
    packed = torch.cat([q, k, v], 2)
    options = dict(causal=True, softcap=3.0)
    out = fa3.flash_attn_qkvpacked_func(packed, num_heads_q=4, **options)
    assert torch.equal(out, expected)
    out = fa3.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), **options)
    assert torch.equal(out, flash_attn.flash_attn_func(q, q, q, **options))
    with pytest.raises(RuntimeError, match="flash_attn: num_heads_q: expected an int"):
        fa3.flash_attn_qkvpacked_func(packed)


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


def test_combine() -> None:
    """Two halves of the keys, one of them empty for some query."""
    q, k, v = torch.randn(3, 2, 8, 4, 16)
    whole, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [
        flash_attn.flash_attn_func(q, a, b, return_attn_probs=True)[:2]
        for a, b in zip(k.split([5, 3], 1), v.split([5, 3], 1), strict=True)
    ]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([s.transpose(1, 2) for _, s in parts])
    out, combined = fa3.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(combined, lse.transpose(1, 2))
    lses[:, 0, 3] = -torch.inf
    place = torch.empty(2, 8, 4, 16, dtype=torch.float64)
    out, combined = fa3.flash_attn_combine(outs, lses, place, torch.float64)
    assert out is place and not out[0, 3].any() and (combined[0, 3] == -torch.inf).all()

    place = torch.empty_like(out)
    op = torch.ops.flash_attn_3.fwd_combine
    op_out, op_lse = op(outs, lses, place, torch.float32)
    assert torch.equal(op_out, out.float()) and torch.equal(op_lse, combined)
    assert op.default._schema.is_backward_compatible_with(
        parse_schema(
            "flash_attn_3::fwd_combine(Tensor out_partial, Tensor lse_partial,"
            " Tensor(out!)? out=None, ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)"
        )
    )


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("seqlen_q", [4, 7, 12])
def test_attention_chunk(seqlen_q: int, chunk: int, device: str) -> None:
    """A query sees its own chunk of the positions, which count from the end of the keys."""
    q = torch.randn(2, seqlen_q, 2, 16, device=device, requires_grad=True)
    k, v = torch.randn(2, 2, 7, 2, 16, device=device)
    start = [(i - seqlen_q + 7) // chunk * chunk for i in range(seqlen_q)]
    seen = [[a <= j < a + chunk for j in range(7)] for a in start]
    seen = torch.tensor(seen, device=device)
    options = dict(causal=True, softmax_scale=0.4)
    expected = flash_attn.flash_attn_func(q, k, v, attn_bias=seen, **options)
    actual = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, **options)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(x.square().sum(), q)[0] for x in (actual, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_chunk_of_each_sequence(device: str, used: bool) -> None:
    q, k, v = (x.detach() for x in qkv("varlen", device)[:3])
    cu = CU.to(device)
    lens = torch.tensor([3, 6], dtype=torch.int32, device=device) if used else None
    actual = fa3.flash_attn_varlen_func(
        q, k, v, cu, cu, 7, 7, seqused_k=lens, attention_chunk=2, causal=True
    )
    for begin, end, length in ((0, 5, 3 if used else 5), (5, 12, 6 if used else 7)):
        part = [q[None, begin:end], *(x[None, begin : begin + length] for x in (k, v))]
        expected = fa3.flash_attn_func(*part, attention_chunk=2, causal=True)
        torch.testing.assert_close(actual[begin:end], expected[0])


UNSUPPORTED = {
    "flash_attn_func": ["qv", "q_descale", "k_descale", "v_descale"],
    "flash_attn_varlen_func": ["qv", "q_descale", "k_descale", "v_descale"],
    "flash_attn_with_kvcache": ["qv", "q_descale"],
    "_flash_attn_forward": ["qv", "q_descale", "seqused_q"],
    "_flash_attn_backward": ["sequed_q", "sequed_k"],
}


@pytest.mark.parametrize(
    "function, argument", [(f, name) for f, names in UNSUPPORTED.items() for name in names]
)
def test_refused_by_name(function: str, argument: str) -> None:
    q = torch.randn(1, 4, 2, 16)
    lse = torch.zeros(1, 2, 4)
    inputs = {"flash_attn_varlen_func": (q[0], q[0], q[0], CU, CU, 7, 7)}.get(function, (q, q, q))
    inputs = (q, q, q, q, q, lse) if "backward" in function else inputs
    with pytest.raises(NotImplementedError, match=f"flash_attn: {argument}: not supported, got"):
        getattr(fa3, function)(*inputs, **{argument: torch.ones(1)})


def test_what_a_cache_refuses_with_lengths_or_chunks() -> None:
    q, cache = torch.randn(2, 3, 2, 16), torch.randn(2, 8, 2, 16)
    call = functools.partial(fa3.flash_attn_with_kvcache, q, cache, cache, attention_chunk=2)
    lens, cu = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="flash_attn: k_descale: not supported, got"):
        call(k_descale=torch.ones(2))
    with pytest.raises(RuntimeError, match="flash_attn: attention_chunk: expected at least 0"):
        call(attention_chunk=-1)
    with pytest.raises(RuntimeError, match="flash_attn: v: expected k and v together"):
        call(k=cache)
    with pytest.raises(RuntimeError, match="flash_attn: rotary_cos: expected k and v to append"):
        call(rotary_cos=torch.ones(8, 4), rotary_sin=torch.ones(8, 4))
    with pytest.raises(RuntimeError, match="flash_attn: v: expected 3 dimensions, got shape"):
        call(k=cache, v=cache, cache_seqlens=lens, cu_seqlens_k_new=cu)


def test_never_in_the_place_of_another_build(tmp_path: Path, monkeypatch) -> None:
    """setup.py finds a flash-attn-3 of somebody else's, by whichever spelling, and not ours."""
    source = (Path(__file__).parent.parent / "fa3" / "setup.py").read_text()
    functions: dict = {}
    exec(source.partition("if other :=")[0], functions)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert functions["other_build"]() is None
    for name, number, found in (("flash_attn_3", "3.0.0+r1", None), ("flash_attn_3", "3.0.0b1", 1)):
        folder = tmp_path / f"{name}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {number}\n")
        assert functions["other_build"]() == (number if found else None)
