"""scaled_dot_product_attention as a drop-in: torch's signature, torch's meaning."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch
from cases import ATEN_CPU, ATEN_CUDA, SM80, SM90, Target, each_target, use
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import flash_attn
from flash_attn._call import heads_first


def test_signature() -> None:
    parameters = inspect.signature(flash_attn.scaled_dot_product_attention).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    empty = inspect.Parameter.empty
    assert list(defaults.items()) == [
        ("query", empty),
        ("key", empty),
        ("value", empty),
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]


@dataclass(frozen=True)
class Call:
    name: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    bool_mask: bool = False
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict:
        return {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.enable_gqa}


CALLS = [
    Call("plain", (2, 3, 33, 16), (2, 3, 40, 16)),
    Call("causal", (2, 3, 33, 16), (2, 3, 33, 16), is_causal=True),
    Call("causal, fewer queries", (2, 3, 20, 16), (2, 3, 33, 16), is_causal=True),
    Call("causal, more queries", (2, 3, 33, 16), (2, 3, 20, 16), is_causal=True),
    Call("three dimensions", (6, 33, 16), (6, 40, 16)),
    Call("two dimensions", (33, 16), (40, 16)),
    Call("five dimensions", (2, 2, 3, 9, 16), (2, 2, 3, 12, 16)),
    Call("value's head dim", (2, 3, 9, 16), (2, 3, 12, 16), (2, 3, 12, 24)),
    Call("gqa", (2, 6, 9, 16), (2, 2, 12, 16), enable_gqa=True),
    Call("gqa, causal", (2, 6, 12, 16), (2, 3, 12, 16), enable_gqa=True, is_causal=True),
    Call("broadcast batch", (2, 3, 9, 16), (1, 3, 12, 16)),
    Call("broadcast heads", (2, 3, 9, 16), (2, 1, 12, 16)),
    Call("scale", (2, 3, 9, 16), (2, 3, 12, 16), scale=0.05),
    Call("scale, one batch for two", (2, 3, 9, 16), (1, 3, 12, 16), scale=0.3),
    Call("negative scale", (2, 3, 9, 16), (2, 3, 12, 16), scale=-0.3),
    Call("negative scale, causal", (2, 3, 9, 16), (2, 3, 9, 16), scale=-0.3, is_causal=True),
    Call("zero scale, causal", (2, 3, 9, 16), (2, 3, 9, 16), scale=0.0, is_causal=True),
    Call("mask of rows and keys", (2, 3, 9, 16), (2, 3, 12, 16), mask=(9, 12)),
    Call("mask of keys", (2, 3, 9, 16), (2, 3, 12, 16), mask=(2, 1, 1, 12)),
    Call("mask, full", (2, 3, 9, 16), (2, 3, 12, 16), mask=(2, 3, 9, 12)),
    Call("mask, three dimensions", (6, 9, 16), (6, 12, 16), mask=(6, 9, 12)),
    Call("mask, five dimensions", (2, 2, 3, 9, 16), (2, 2, 3, 12, 16), mask=(2, 1, 3, 9, 12)),
    Call("bool mask", (2, 3, 9, 16), (2, 3, 12, 16), mask=(2, 1, 9, 12), bool_mask=True),
    Call(
        "bool mask and gqa",
        (2, 6, 9, 16),
        (2, 2, 12, 16),
        mask=(9, 12),
        bool_mask=True,
        enable_gqa=True,
    ),
]


def outcome(function, tensors: list[torch.Tensor], dout: torch.Tensor, mask, options: dict):
    leaves = [x.detach().requires_grad_() for x in tensors]
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().requires_grad_()
        leaves.append(mask)
    out = function(*leaves[:3], attn_mask=mask, **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_same_as_torch(call: Call, target: Target) -> None:
    """Output and gradients in float64, mask's included."""
    make = dict(dtype=torch.float64, device=target.device)
    tensors = [
        torch.randn(shape, **make) for shape in (call.query, call.key, call.value or call.key)
    ]
    mask = None
    if call.mask is not None:
        mask = torch.randn(call.mask, **make)
        mask = mask > -0.8 if call.bool_mask else mask
    with sdpa_kernel(SDPBackend.MATH):
        shape = torch_sdpa(*tensors, attn_mask=mask, **call.options).shape
        dout = torch.randn(shape, **make)
        expected = outcome(torch_sdpa, tensors, dout, mask, call.options)
    with use(target):
        actual = outcome(flash_attn.scaled_dot_product_attention, tensors, dout, mask, call.options)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11)


@each_target(ATEN_CPU, ATEN_CUDA, SM80)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sixteen_bits(is_causal: bool, target: Target) -> None:
    tensors = [
        torch.randn(2, 4, 65, 64, device=target.device, dtype=torch.bfloat16) for _ in range(3)
    ]
    with use(target):
        actual = flash_attn.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch_sdpa(*(x.double() for x in tensors), is_causal=is_causal)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-7)


@each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
@pytest.mark.parametrize(
    "options",
    [{}, dict(is_causal=True, scale=0.3), dict(masked=True), dict(dropout_p=0.4)],
    ids=str,
)
def test_short_way(options: dict, target: Target) -> None:
    """Ordinary tensors are turned in C++, without nodes in the graph: the same bits as here."""
    options = dict(options)
    make = dict(device=target.device, dtype=torch.float16)
    leaves = [torch.randn(2, 4, 33, 64, **make, requires_grad=True) for _ in range(3)]
    mask = torch.randn(2, 1, 33, 33, **make) if options.pop("masked", False) else None
    dout = torch.randn(2, 4, 33, 64, **make)

    def long_way() -> torch.Tensor:
        return flash_attn.flash_attn_func(
            *(x.transpose(1, 2) for x in leaves),
            options.get("dropout_p", 0.0),
            options.get("scale"),
            options.get("is_causal", False),
            attn_bias=mask,
            causal_alignment="top-left",
        ).transpose(1, 2)

    with use(target):
        torch.manual_seed(0)
        out = flash_attn.scaled_dot_product_attention(*leaves, attn_mask=mask, **options)
        assert all("AccumulateGrad" in str(f) for f, _ in out.grad_fn.next_functions if f)
        torch.manual_seed(0)
        expected = long_way()
        grads = torch.autograd.grad(out, leaves, dout)
        expected_grads = torch.autograd.grad(expected, leaves, dout)
        with torch.no_grad():
            torch.manual_seed(0)
            alone = flash_attn.scaled_dot_product_attention(*leaves, attn_mask=mask, **options)
    assert torch.equal(out, expected) and torch.equal(alone, expected)
    assert out.stride() == expected.stride()
    for grad, wanted in zip(grads, expected_grads, strict=True):
        if target.device == "cpu":
            assert torch.equal(grad, wanted)
        else:  # dq's sums come in any order
            torch.testing.assert_close(grad, wanted, rtol=1e-2, atol=1e-2)


def test_what_takes_the_long_way() -> None:
    """The short one does nothing with what it does not know, and the result is the same."""
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    negative = torch.complex(torch.zeros_like(x), x).conj().imag  # negated on reading
    assert negative.is_neg()
    fake = torch._subclasses.FakeTensorMode().from_tensor(x)
    defaults = (None, 0.0, None, False, False)
    taken = heads_first(x, x, x, *defaults)
    assert torch.equal(taken, flash_attn.scaled_dot_product_attention(x, x, x))
    for query, key in ((negative, x), (x, negative), (fake, fake), (x[0], x[0]), (x, x[:1])):
        assert heads_first(query, key, key, *defaults) is None
    assert heads_first(x, x, x, None, 0.0, 0.0, False, False) is None
    actual = flash_attn.scaled_dot_product_attention(negative, x, x)
    torch.testing.assert_close(actual, flash_attn.scaled_dot_product_attention(-x, x, x))
    assert flash_attn.scaled_dot_product_attention(fake, fake, fake).shape == x.shape


def test_autocast() -> None:
    leaf = torch.randn(2, 4, 6, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn.scaled_dot_product_attention(leaf, leaf, leaf)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and leaf.grad.dtype == torch.float32


@pytest.mark.parametrize("which", ["query", "value", "result"])
def test_what_the_backward_needs_is_written_to(which: str) -> None:
    """It raises, as after torch's own."""
    leaf = torch.randn(2, 4, 6, 8, requires_grad=True)
    query, value = leaf.sin(), leaf.cos()
    result = flash_attn.scaled_dot_product_attention(query, query, value)
    {"query": query, "value": value, "result": result}[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_causal_and_mask_together_raise() -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="is_causal"):
        flash_attn.scaled_dot_product_attention(
            x, x, x, attn_mask=torch.ones(4, 4) > 0, is_causal=True
        )


def test_different_heads_need_enable_gqa() -> None:
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="enable_gqa"):
        flash_attn.scaled_dot_product_attention(q, k, k)


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("heads", [(4, 2), (2, 4), (8, 2), (1, 8)], ids=str)
def test_gqa_with_other_heads_of_key_than_of_value(heads: tuple[int, int], target: Target) -> None:
    """Query head h reads key head h // (8 // heads_k) and value head h // (8 // heads_v)."""
    heads_k, heads_v = heads
    q = torch.randn(2, 8, 5, 16, device=target.device)
    k = torch.randn(2, heads_k, 7, 16, device=target.device)
    v = torch.randn(2, heads_v, 7, 16, device=target.device)
    with use(target):
        actual = flash_attn.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for h in range(8):
        one = [q[:, h], k[:, h // (8 // heads_k)], v[:, h // (8 // heads_v)]]
        torch.testing.assert_close(actual[:, h], torch_sdpa(*one))


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("leading", [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("heads, rows", [(1, 1), (4, 5), (1, 5)])
def test_masks_of_five_dimensions(
    heads: int, rows: int, leading: tuple[int, int], target: Target
) -> None:
    q, k, v = torch.randn(3, 2, 3, 4, 5, 16, device=target.device)
    mask = torch.randn(*leading, heads, rows, 5, device=target.device)
    with use(target):
        for given in (mask, mask > -0.5):
            actual = flash_attn.scaled_dot_product_attention(q, k, v, attn_mask=given)
            expected = torch_sdpa(q, k, v, attn_mask=given)
            torch.testing.assert_close(actual, expected.nan_to_num())


@each_target(ATEN_CPU, ATEN_CUDA)
def test_dropout(target: Target) -> None:
    """Every weight is 0 or 1 / (1 - p) times its value, about p of them 0, and the seed repeats
    it."""
    n = 64
    q = torch.zeros(1, 2, n, n, device=target.device)
    v = torch.eye(n, device=target.device).expand(1, 2, n, n)
    torch.manual_seed(1)
    with use(target):
        weights = flash_attn.scaled_dot_product_attention(q, q, v, dropout_p=0.25)
        torch.manual_seed(1)
        again = flash_attn.scaled_dot_product_attention(q, q, v, dropout_p=0.25)
    assert torch.equal(weights, again)
    kept = weights > 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / n / 0.75))
    assert abs(kept.double().mean() - 0.75) < 6 * (0.25 * 0.75 / kept.numel()) ** 0.5


@each_target(ATEN_CPU, ATEN_CUDA)
def test_a_row_that_the_mask_empties_is_zero(target: Target) -> None:
    q = torch.randn(1, 2, 4, 8, device=target.device)
    mask = torch.ones(4, 4, dtype=torch.bool, device=target.device)
    mask[2] = False
    with use(target):
        out = flash_attn.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert not out[:, :, 2].count_nonzero() and out[:, :, [0, 1, 3]].abs().min() > 0


def ragged(target: Target, *lengths: int) -> torch.Tensor:
    """A leaf (batch, ragged, 4 * 16)."""
    make = dict(device=target.device, dtype=torch.float64)
    parts = [torch.randn(n, 64, **make) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def by_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, [4, 16]).transpose(1, 2)


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize(
    "is_causal, scale", [(False, None), (True, None), (True, 0.5), (False, -2)]
)
def test_nested_jagged(is_causal: bool, scale: float | None, target: Target) -> None:
    """Each sequence by itself, with other lengths of the queries than of the keys."""
    query, key, value = ragged(target, 5, 3, 8), ragged(target, 4, 7, 8), None
    value = torch.nested.nested_tensor_from_jagged(torch.randn_like(key.values()), key.offsets())
    value = value.detach().requires_grad_()
    with use(target):
        out = flash_attn.scaled_dot_product_attention(
            *map(by_heads, (query, key, value)), is_causal=is_causal, scale=scale
        )
    assert out.shape == by_heads(query).shape and out.layout == torch.jagged
    gradients = torch.autograd.grad(out.values().square().sum(), (query, key, value))
    for i, tensors in enumerate(zip(query.unbind(), key.unbind(), value.unbind(), strict=True)):
        leaves = [x.detach().requires_grad_() for x in tensors]
        turned = [x.unflatten(-1, [4, 16]).transpose(0, 1) for x in leaves]
        with sdpa_kernel(SDPBackend.MATH):
            expected = torch_sdpa(*turned, is_causal=is_causal, scale=scale)
        torch.testing.assert_close(out.unbind()[i], expected, rtol=1e-9, atol=1e-11)
        parts = torch.autograd.grad(expected.square().sum(), leaves)
        for gradient, part in zip(gradients, parts, strict=True):
            torch.testing.assert_close(gradient.unbind()[i], part, rtol=1e-9, atol=1e-11)


def test_nested_tensors_that_are_refused() -> None:
    query = by_heads(ragged(ATEN_CPU, 5, 3)).detach()
    others = by_heads(ragged(ATEN_CPU, 3, 5)).detach()
    ours = flash_attn.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="value: expected the lengths of key, got others"):
        ours(query, query, others)
    with pytest.raises(RuntimeError, match="key: expected a nested tensor.* got a dense tensor"):
        ours(query, torch.randn(2, 4, 5, 16), query)
    with pytest.raises(RuntimeError, match="attn_mask: expected None with nested tensors"):
        ours(query, query, query, attn_mask=torch.ones(5, 5))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap(grad)": lambda f, x: torch.vmap(torch.func.grad(f))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "grad(vmap)": lambda f, x: torch.func.grad(lambda t: torch.vmap(f)(t).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device, dtype=x.dtype))[0],
}


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms(transform: str, masked: bool, target: Target) -> None:
    """torch.func gives what autograd gives, of the mask as well."""
    make = dict(device=target.device, dtype=torch.float64)
    x, bias = torch.randn(2, 1, 3, 5, 8, **make), torch.randn(5, 5, **make)

    def total(t: torch.Tensor) -> torch.Tensor:
        mask = t[..., 0, :, :5] * bias if masked else None
        if masked:
            mask = mask.unsqueeze(-3)
        return flash_attn.scaled_dot_product_attention(t, t, t, attn_mask=mask).square().sum()

    leaf = x.clone().requires_grad_()
    with use(target):
        (expected,) = torch.autograd.grad(total(leaf), leaf)
        torch.testing.assert_close(TRANSFORMS[transform](total, x), expected)


def test_second_derivative_of_a_transform_raises() -> None:
    def total(t: torch.Tensor) -> torch.Tensor:
        return flash_attn.scaled_dot_product_attention(t, t, t).square().sum()

    with pytest.raises(RuntimeError, match="not implemented"):
        torch.func.hessian(total)(torch.randn(1, 1, 3, 8))


def test_symbolic_trace() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return flash_attn.scaled_dot_product_attention(x, x, x, is_causal=True) * 2

    traced = torch.fx.symbolic_trace(Attention())
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert flash_attn.scaled_dot_product_attention in called
    x = torch.randn(2, 3, 5, 8)
    assert torch.equal(traced(x), Attention()(x))
