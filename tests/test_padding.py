"""bert_padding and rotary: between padded and packed batches, and positions turned into angles."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

import flash_attn
from flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(LENGTHS.filter(any))
def test_unpad_and_pad(lengths: list[int]) -> None:
    batch, seqlen = len(lengths), max(lengths)
    x = torch.randn(batch, seqlen, 2, 3, requires_grad=True)
    mask = torch.arange(seqlen) < torch.tensor(lengths)[:, None]
    tokens, indices, cu_seqlens, longest, seqused = unpad_input(x, mask.int())
    assert torch.equal(tokens, torch.cat([x[b, :n] for b, n in enumerate(lengths)]))
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0
    assert cu_seqlens.diff().tolist() == seqused.tolist() == lengths
    assert longest == max(lengths)
    padded = pad_input(tokens, indices, batch, seqlen)
    assert torch.equal(padded, x * mask[..., None, None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())


def test_unused_tokens_take_room_and_do_not_count() -> None:
    x = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 1, 1]])
    tokens, indices, cu_seqlens, longest, seqused = unpad_input(x, mask, unused)
    assert cu_seqlens.tolist() == [0, 3, 8] and seqused.tolist() == [2, 3] and longest == 5
    assert torch.equal(tokens, x.flatten(0, 1)[indices])


def test_concatenated_sequences() -> None:
    x = torch.randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [1, 1, 2, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 6, 7, 9] and longest == 3
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :4]]))
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_indexing_is_differentiable() -> None:
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 5])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), x)
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x[:3], indices, 8), x)
    assert torch.autograd.gradcheck(lambda x: index_first_axis_residual(x, indices), x)
    put = index_put_first_axis(x[:3], indices, 8)
    assert torch.equal(put[indices], x[:3]) and not put[[1, 2, 3, 6, 7]].count_nonzero()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_either_width(dtype: torch.dtype, device: str) -> None:
    """transformers makes int32 ones where it generates with padding."""
    x = torch.randn(6, 3, device=device)
    indices = torch.tensor([4, 0, 5], device=device)
    narrow = indices.to(dtype)
    assert torch.equal(index_first_axis(x, narrow), x[indices])
    assert torch.equal(index_first_axis_residual(x, narrow)[0], x[indices])
    padded = pad_input(x[:3], narrow, 2, 4)
    assert torch.equal(padded.flatten(0, 1)[indices], x[:3])
    assert torch.equal(padded, index_put_first_axis(x[:3], narrow, 8).view(2, 4, 3))
    assert padded.count_nonzero() == x[:3].count_nonzero()


def test_padded_attention_through_varlen() -> None:
    """unpad, attend, pad: what a padded call with a key mask gives, in the rows that count."""
    lengths, seqlen = [7, 1, 12], 12
    x = torch.randn(3, seqlen, 2, 16)
    mask = torch.arange(seqlen) < torch.tensor(lengths)[:, None]
    tokens, indices, cu, longest, _ = unpad_input(x, mask)
    packed = flash_attn.flash_attn_varlen_func(tokens, tokens, tokens, cu, cu, longest, longest)
    expected = flash_attn.flash_attn_func(x, x, x, attn_bias=mask[:, None, None])
    actual = pad_input(packed, indices, 3, seqlen)
    torch.testing.assert_close(actual[mask], expected[mask])
    assert not actual[~mask].count_nonzero()


def complex_rotation(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The definition: a pair of dimensions as one complex number, times exp(i angle)."""
    half = angles.size(-1)
    turned, kept = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    form = "... (p two) -> ... p two" if interleaved else "... (two p) -> ... p two"
    pairs = torch.view_as_complex(rearrange(turned, form, two=2).contiguous())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    left, right = form.split(" -> ")
    turned = rearrange(torch.view_as_real(pairs), f"{right} -> {left}")
    return torch.cat([turned, kept], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 5, "tensor"])
@pytest.mark.parametrize(
    "dtype, rotary_dim", [(torch.float64, 8), (torch.float32, 16), (torch.bfloat16, 12)]
)
def test_rotary(dtype: torch.dtype, rotary_dim: int, offset, interleaved: bool) -> None:
    x = torch.randn(2, 7, 3, 16).to(dtype)
    theta = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    table = torch.arange(40).double()[:, None] * theta
    offsets = torch.tensor([3, 11], dtype=torch.int32) if offset == "tensor" else offset
    starts = offsets if offset == "tensor" else torch.full((2,), offset)
    positions = starts[:, None].double() + torch.arange(7)
    angles = (positions[..., None] * theta)[:, :, None].expand(2, 7, 3, -1)
    cos, sin = table.cos().to(dtype), table.sin().to(dtype)
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    expected = complex_rotation(x, angles, interleaved)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_rotary_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    angles = torch.arange(50).double()[:, None] * torch.rand(8, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()

    def product(i: int, j: int) -> torch.Tensor:
        return (
            apply_rotary_emb(q, cos, sin, seqlen_offsets=i)
            * apply_rotary_emb(k, cos, sin, seqlen_offsets=j)
        ).sum()

    torch.testing.assert_close(product(3, 10), product(33, 40))
    assert not torch.isclose(product(3, 10), product(3, 11))


def test_rotary_of_packed_sequences() -> None:
    lengths = [3, 0, 5]
    x = torch.randn(8, 2, 8)
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    angles = torch.randn(10, 4)
    out = apply_rotary_emb(x, angles.cos(), angles.sin(), cu_seqlens=cu, max_seqlen=5)
    parts = [
        apply_rotary_emb(part[None], angles.cos(), angles.sin())[0] for part in x.split(lengths)
    ]
    torch.testing.assert_close(out, torch.cat(parts))


def test_rotary_is_differentiable() -> None:
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(5, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: apply_rotary_emb(x, angles.cos(), angles.sin(), True), x
    )


ANGLES = torch.linspace(0, 3, 36, dtype=torch.float64).view(9, 4)
COS, SIN = ANGLES.cos(), ANGLES.sin()
ROWS = torch.tensor([0, 2, 5])
RIGHT_TANGENTS = {
    "rotary": (lambda x: apply_rotary_emb(x, COS, SIN), (2, 4, 4, 8)),
    "cos": (lambda cos: apply_rotary_emb(torch.ones(2, 9, 4, 8).double(), cos, SIN), (9, 4)),
    "qkv": (lambda x: apply_rotary_emb_qkv_(x.clone(), COS, SIN), (2, 4, 3, 4, 8)),
    "kv": (lambda x: apply_rotary_emb_kv_(x.clone(), COS, SIN), (2, 4, 2, 4, 8)),
    "first": (lambda x: index_first_axis(x, ROWS), (9, 4)),
    "put": (lambda x: index_put_first_axis(x, ROWS, 9), (3, 4)),
    "unpad": (lambda x: unpad_input(x, torch.tensor([[1, 1, 1], [1, 0, 0]]))[0], (2, 3, 4)),
    "pad": (lambda x: pad_input(x, ROWS, 2, 4), (3, 4)),
}


@pytest.mark.parametrize("name", RIGHT_TANGENTS)
def test_forward_mode_gives_the_tangent(name: str) -> None:
    """These are linear: the tangent is the function of the tangent, less that of zeros."""
    function, shape = RIGHT_TANGENTS[name]
    x, tangent = torch.randn(2, *shape, dtype=torch.float64)
    expected = function(tangent) - function(torch.zeros_like(x))
    torch.testing.assert_close(torch.func.jvp(function, (x,), (tangent,))[1], expected)
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected)


def test_rotary_in_place_forms() -> None:
    qkv = torch.randn(2, 5, 3, 2, 8)
    angles = torch.randn(9, 4)
    cos, sin = angles.cos(), angles.sin()
    q, k, v = (x.clone() for x in qkv.unbind(2))
    expected = [apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v]
    kv = torch.stack([k, v], 2)
    assert apply_rotary_emb_qkv_(qkv, cos, sin).data_ptr() == qkv.data_ptr()
    assert apply_rotary_emb_kv_(kv, cos, sin).data_ptr() == kv.data_ptr()
    torch.testing.assert_close(qkv, torch.stack(expected, 2))
    torch.testing.assert_close(kv, torch.stack(expected[1:], 2))


def test_rotary_module() -> None:
    rotary = RotaryEmbedding(8, base=100.0)
    qkv = torch.randn(2, 5, 3, 2, 8)
    theta = 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    angles = (torch.arange(4, 9).double()[:, None] * theta)[None, :, None].expand(2, 5, 2, 4)
    expected = [complex_rotation(x, angles, False) for x in qkv.unbind(2)[:2]]
    v = qkv[:, :, 2].clone()
    out = rotary(qkv.clone(), seqlen_offset=4)
    for actual, e in zip(out.unbind(2), [*expected, v.double()], strict=True):
        torch.testing.assert_close(actual.double(), e, rtol=1e-5, atol=1e-5)


def tokens(form: str, x: torch.Tensor) -> torch.Tensor:
    """x as one of the tensors into which programs rotate."""
    if form == "computed":
        return x * 1
    if form == "view":
        return (x * 1).flatten(0, 1).view_as(x)
    if form == "split":
        return torch.cat([x, x]).split(len(x))[1]
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["leaf", "computed", "view", "split"])
@pytest.mark.parametrize("function", ["x", "qkv", "gqa", "kv"])
def test_rotary_in_place_under_grad(function: str, form: str, device: str) -> None:
    """The same values and gradients as out of place, and x's memory holds the values."""
    shape = {"x": (2, 5, 4, 8), "qkv": (2, 5, 3, 2, 8), "gqa": (2, 5, 8, 8), "kv": (2, 5, 2, 2, 8)}
    leaf = torch.randn(shape[function], dtype=torch.float64, device=device)
    angles = torch.randn(9, 3, dtype=torch.float64, device=device)
    cos, sin = angles.cos(), angles.sin()

    def out_of_place(x: torch.Tensor) -> torch.Tensor:
        turn = partial(apply_rotary_emb, cos=cos, sin=sin, interleaved=True, seqlen_offsets=2)
        if function == "x":
            return turn(x)
        if function == "gqa":
            return torch.cat([turn(x[:, :, :6]), x[:, :, 6:]], 2)
        kept = 1 if function == "kv" else 2
        return torch.stack([*map(turn, x.unbind(2)[:kept]), x[:, :, -1]], 2)

    def in_place(x: torch.Tensor) -> torch.Tensor:
        if function == "x":
            return apply_rotary_emb(x, cos, sin, True, True, 2)
        if function == "kv":
            return apply_rotary_emb_kv_(x, cos, sin, True, 2)
        heads = 4 if function == "gqa" else None
        return apply_rotary_emb_qkv_(x, cos, sin, None, None, True, 2, heads)

    weight = torch.randn_like(leaf)
    first, second = leaf.clone().requires_grad_(), leaf.clone().requires_grad_()
    expected = out_of_place(tokens(form, first))
    given = tokens(form, second)
    actual = in_place(given)
    assert actual.data_ptr() == given.data_ptr()
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad((actual * weight).sum(), second)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected * weight).sum(), first)[0])


def test_rotary_in_place_tells_what_was_saved_before() -> None:
    x = torch.randn(1, 3, 2, 8, requires_grad=True)
    squared = x.square().sum()
    apply_rotary_emb(x, torch.ones(3, 4), torch.ones(3, 4), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_rotary_table_too_short() -> None:
    with pytest.raises(RuntimeError, match="flash_attn: cos: expected at least 7 rows.*got 5"):
        apply_rotary_emb(
            torch.randn(1, 4, 1, 8), torch.ones(5, 4), torch.zeros(5, 4), seqlen_offsets=3
        )
