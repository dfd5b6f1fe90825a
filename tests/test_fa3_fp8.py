"""FlashAttention-3's names with q, k and v in float8_e4m3fn: values, tracing and errors."""

from __future__ import annotations

import pytest
import torch
from fp8_inputs import DESCALES, assert_attended, attended, descales, quantized
from test_fa3 import CU, DEVICES, LENGTHS, fa3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 1)])
@pytest.mark.parametrize("names", [(), *((name,) for name in DESCALES), DESCALES])
def test_fp8(names: tuple[str, ...], window: tuple[int, int], device: str) -> None:
    """Any of the descales; the public function, the private one and the op."""
    q, k, v = (quantized(2, s, h, 16, device=device) for s, h in ((9, 4), (12, 2), (12, 2)))
    given = {name: x for name, x in descales(2, device).items() if name in names}
    actual = fa3.flash_attn_func(q, k, v, **given, window_size=window, return_attn_probs=True)
    assert_attended(actual, attended(q, k, v, given, window))
    sides = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    place = torch.empty_like(actual[0])
    private = fa3._flash_attn_forward(q, k, v, out_=place, **given, **sides)
    assert private[0] is place
    for out, lse, *_ in (private, torch.ops.flash_attn_3.fwd(q, k, v, **given, **sides)):
        assert torch.equal(out, actual[0]) and torch.equal(lse, actual[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("names", [(), ("k_descale",), DESCALES])
def test_fp8_of_each_sequence(names: tuple[str, ...], causal: bool, device: str) -> None:
    """One sequence has no queries, one has no keys, and tokens behind the last one are of none."""
    cu_q = torch.tensor([0, 4, 4, 7, 12], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 5, 9, 9, 15], dtype=torch.int32, device=device)
    q, k, v = (quantized(s, h, 16, device=device) for s, h in ((14, 4), (16, 2), (16, 2)))
    given = {name: x for name, x in descales(4, device).items() if name in names}
    lengths = (cu_q, cu_k, 5, 6)
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, *lengths, causal=causal, **given, return_attn_probs=True
    )
    for b in range(4):
        queries, keys = (slice(*cu[b : b + 2].tolist()) for cu in (cu_q, cu_k))
        own = {name: x[b : b + 1] for name, x in given.items()}
        window = (-1, 0 if causal else -1)
        expected = attended(q[None, queries], k[None, keys], v[None, keys], own, window)
        assert_attended((out[queries], lse[:, queries]), [x[0] for x in expected])
    names = dict(zip(LENGTHS.split(", "), lengths, strict=True))
    private = fa3._flash_attn_forward(q, k, v, causal=causal, **names, **given)
    assert torch.equal(private[0][:12], out[:12]) and torch.equal(private[1][:, :12], lse[:, :12])


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_without_sequences(device: str) -> None:
    q, k, v = (quantized(3, h, 16, device=device) for h in (4, 2, 2))
    none = torch.zeros(1, dtype=torch.int32, device=device)
    given = {name: torch.ones(0, 2, device=device) for name in DESCALES}
    out = fa3.flash_attn_varlen_func(q, k, v, none, none, 0, 0, **given)
    assert out.dtype == torch.bfloat16 and not out.any()


def test_fp8_packed() -> None:
    given = descales(2)
    q, k, v = (quantized(2, 12, h, 16) for h in (4, 2, 2))
    expected = fa3.flash_attn_func(q, k, v, causal=True, **given)
    packed = torch.cat([q, k, v], 2)
    actual = fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4, **given)
    assert torch.equal(actual, expected)
    expected = fa3.flash_attn_func(k, k, v, **given)
    actual = fa3.flash_attn_qkvpacked_func(torch.stack([k, k, v], 2), **given)
    assert torch.equal(actual, expected)


def test_fp8_with_a_chunk_and_lengths_of_use() -> None:
    """What follows the dequantisation is the call of 16 bits, whatever its options."""
    q, k, v = (quantized(12, h, 16) for h in (4, 2, 2))
    used = torch.tensor([3, 6], dtype=torch.int32)
    options = dict(attention_chunk=4, softcap=3.0, softmax_scale=0.3, causal=True)
    wide = fa3.flash_attn_varlen_func(
        *(x.to(torch.bfloat16) for x in (q, k, v)), CU, CU, 7, 7, used, used, **options
    )
    actual = fa3.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7, used, used, **options)
    assert torch.equal(actual, wide)


def test_fp8_is_traced() -> None:
    q, k, v = (quantized(2, 12, h, 16) for h in (4, 2, 2))
    dense, varlen = descales(2), descales(3)
    op = torch.ops.flash_attn_3.fwd.default
    torch.library.opcheck(op, (q, k, v), dense, test_utils="test_faketensor")
    compiled = torch.compile(fa3.flash_attn_func, backend="aot_eager", fullgraph=True)
    actual = compiled(q, k, v, causal=True, **dense)
    assert torch.equal(actual, fa3.flash_attn_func(q, k, v, causal=True, **dense))
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    compiled = torch.compile(fa3.flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    actual = compiled(q[0], k[0], v[0], cu, cu, 7, 7, **varlen)
    assert torch.equal(actual, fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 7, 7, **varlen))


def fp8_call(form: str) -> dict:
    shape = (12,) if form == "varlen" else (2, 12)
    call = dict(zip("qkv", (quantized(*shape, h, 16) for h in (4, 2, 2)), strict=True))
    lengths = dict(zip(LENGTHS.split(", "), (CU, CU, 7, 7), strict=True))
    return call | (lengths if form == "varlen" else {})


@pytest.mark.parametrize("form", ["dense", "varlen"])
@pytest.mark.parametrize("name", DESCALES)
def test_wrong_descale(name: str, form: str) -> None:
    function = getattr(fa3, "flash_attn_varlen_func" if form == "varlen" else "flash_attn_func")
    expected = (
        rf"flash_attn: {name}: expected torch.float32 and shape \(2, 2\) on cpu as q has, got"
    )
    for wrong in (
        torch.ones(2, 2, dtype=torch.float64),
        torch.ones(2),
        torch.ones(2, 4),
        torch.ones(1, 2),
        torch.ones(2, 2, device="meta"),
    ):
        with pytest.raises(RuntimeError, match=expected):
            function(**fp8_call(form), **{name: wrong})
    wide = {n: x.to(torch.float16) if n in "qkv" else x for n, x in fp8_call(form).items()}
    expected = f"flash_attn: {name}: expected with (q, k and v in torch.float8_e4m3fn|a cache of)"
    for call in (function, fa3._flash_attn_forward):  # a dense k of the latter may be a cache
        with pytest.raises(RuntimeError, match=expected):
            call(**wide, **{name: torch.ones(2, 2)})


@pytest.mark.parametrize("form", ["dense", "varlen"])
@pytest.mark.parametrize("name", list("qkv"))
def test_fp8_is_of_all_three_and_has_no_gradient(name: str, form: str) -> None:
    function = getattr(fa3, "flash_attn_varlen_func" if form == "varlen" else "flash_attn_func")
    call = fp8_call(form)
    wrong = call | {name: call[name].to(torch.bfloat16)}
    named = "k" if name == "q" else name
    with pytest.raises(RuntimeError, match=f"flash_attn: {named}: expected .* as q has, got"):
        function(**wrong)
    call[name].requires_grad_()
    out = function(**call)
    with pytest.raises(NotImplementedError, match="flash_attn: q, k, v: expected 16 bits or more"):
        out.sum().backward()
    with torch.no_grad():
        assert not function(**call).requires_grad
    assert not fa3._flash_attn_forward(**call)[0].requires_grad


def test_heads_and_batch_of_fp8() -> None:
    q, k, v = fp8_call("dense").values()
    given = descales(2)
    for call, name in (
        ((q[:, :, :3], k, v), "k: expected heads that divide the 3 of q, got 2"),
        ((q, k, v[:, :, :1]), "v: expected 2 heads as k has, got 1"),
        ((q, k[:1], v), "k: expected batch 2 as q has, got 1"),
        ((q, k, v[0]), "v: expected torch.float8_e4m3fn and 4 dimensions on cpu as q has, got"),
    ):
        with pytest.raises(RuntimeError, match=f"flash_attn: {name}"):
            fa3.flash_attn_func(*call, **given)
    q, k, v, *lengths = fp8_call("varlen").values()
    lengths[1] = CU[:2]
    with pytest.raises(RuntimeError, match="flash_attn: cu_seqlens_k: expected torch.int32 and"):
        fa3.flash_attn_varlen_func(q, k, v, *lengths, **given)
