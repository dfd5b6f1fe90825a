"""The distribution flash-attn-3: FlashAttention-3's names and signatures, our results."""

from __future__ import annotations

import inspect
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch._C import parse_schema

import flash_attn

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
    assert CONFIG["build_flags"]["FLASHATTENTION_DISABLE_FP8"] is False


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["dense", "varlen"])
def test_qv(form: str, device: str) -> None:
    """Values and gradients, of the public function and, without the latter, of the private one."""
    q, k, v, qv = (
        torch.randn(12, h, d, dtype=torch.float64, device=device, requires_grad=True)
        for h, d in ((4, 8), (2, 8), (2, 24), (4, 24))
    )
    cu = CU.to(device)
    scores = sum(
        torch.einsum("qhd,khd->hqk", x, y.repeat_interleave(2, 1)) for x, y in ((q, k), (qv, v))
    )
    sequence = torch.bucketize(torch.arange(12, device=device), cu[1:], right=True)
    seen = torch.ones(12, 12, dtype=torch.bool, device=device).tril()
    if form == "varlen":
        seen &= sequence[:, None] == sequence
        inputs, function = (q, k, v, cu, cu, 7, 7), fa3.flash_attn_varlen_func
    else:
        inputs, function = (q[None], k[None], v[None]), fa3.flash_attn_func
    scores = (scores / 32**0.5).masked_fill(~seen, -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
    given = qv if form == "varlen" else qv[None]
    out, lse = function(*inputs, qv=given, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out.view_as(expected), expected)
    torch.testing.assert_close(lse.view(4, 12), scores.logsumexp(-1))
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, (q, k, v, qv), dout.view_as(out))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v, qv), dout))
    lengths = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=7, max_seqlen_k=7)
    lengths = lengths if form == "varlen" else {}
    private = fa3._flash_attn_forward(*inputs[:3], qv=given, **lengths, causal=True)
    torch.testing.assert_close(private[0], out)


def test_qv_by_name() -> None:
    q, k, v, qv = (torch.randn(2, 5, h, d) for h, d in ((4, 8), (2, 8), (2, 16), (4, 16)))
    for name, wrong, expected in (
        ("qv", dict(qv=qv[:, :4]), r"expected torch.float32 and shape \(2, 5, 4, 16\) on cpu"),
        ("qv", dict(qv=qv.double()), "expected torch.float32 and shape"),
        ("v", dict(v=v[:, :4]), r"expected shape \(2, 5, 2, 16\) as k has, got \(2, 4, 2, 16\)"),
        ("k", dict(k=k.double()), "expected torch.float32 on cpu as q has"),
        ("q", dict(q=q.to(torch.float8_e4m3fn)), "expected a floating dtype of at least 16 bits"),
    ):
        with pytest.raises(RuntimeError, match=f"flash_attn: {name}: {expected}"):
            fa3.flash_attn_func(**dict(q=q, k=k, v=v, qv=qv) | wrong)


UNSUPPORTED = {
    "_flash_attn_forward": ["seqused_q"],
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
