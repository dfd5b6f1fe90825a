"""Upstream's names for what torch has: cross entropy, norms, the bare rotation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.rms_norm import DropoutAddRMSNorm, dropout_add_rms_norm
from flash_attn.ops.rms_norm import RMSNorm as PlainRMSNorm
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn
from flash_attn.ops.triton.rotary import apply_rotary

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale, z_scale", [(1.0, 0.0), (0.5, 1e-2)])
def test_cross_entropy(
    scale: float, z_scale: float, smoothing: float, dtype: torch.dtype, device: str
) -> None:
    """Against the definition in float64, loss and gradient; one row is ignored."""
    logits = (3 * torch.randn(6, 11, device=device)).to(dtype).requires_grad_()
    labels = torch.tensor([0, 10, -100, 3, 3, 7], device=device)
    losses, z_losses = cross_entropy_loss(
        logits, labels, label_smoothing=smoothing, logit_scale=scale, lse_square_scale=z_scale
    )
    wide = logits.detach().double().requires_grad_()
    x = scale * wide
    lse = x.logsumexp(-1)
    counts = labels != -100
    picked = x.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    z = z_scale * lse.square() * counts
    expected = (lse - (1 - smoothing) * picked - smoothing * x.mean(-1)) * counts + z
    assert losses.dtype == z_losses.dtype == torch.promote_types(dtype, torch.float32)
    assert losses[2] == 0 and not z_losses.requires_grad
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z_losses.double(), z, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(losses.square().sum(), logits)
    (wanted,) = torch.autograd.grad(expected.square().sum(), wide)
    assert not gradient[2].count_nonzero()
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_module(reduction: str) -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([1, -1, 6, 0, -1])
    module = CrossEntropyLoss(-1, reduction, 0.2)
    expected = functional.cross_entropy(
        logits, labels, ignore_index=-1, reduction=reduction, label_smoothing=0.2
    )
    torch.testing.assert_close(module(logits, labels), expected)
    loss, z = CrossEntropyLoss(-1, reduction, lse_square_scale=0.5, return_z_loss=True)(
        logits, labels
    )
    plain = functional.cross_entropy(logits, labels, ignore_index=-1, reduction=reduction)
    torch.testing.assert_close(loss - z, plain)
    lse = 0.5 * logits.logsumexp(-1).square() * (labels != -1)
    expected_z = {"mean": lse.sum() / 3, "sum": lse.sum(), "none": lse}[reduction]
    torch.testing.assert_close(z, expected_z)


def test_cross_entropy_refuses() -> None:
    with pytest.raises(NotImplementedError, match="flash_attn: process_group: .* got str"):
        cross_entropy_loss(torch.zeros(1, 2), torch.zeros(1).long(), process_group="a group")
    with pytest.raises(NotImplementedError, match='reduction: expected "mean", "none" or "sum"'):
        CrossEntropyLoss(reduction="max")


def plain_norm(h, weight, bias, eps: float, is_rms: bool) -> torch.Tensor:
    """The definition."""
    centred = h if is_rms else h - h.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("form", ["plain", "residual", "parallel", "rowscale"])
def test_norm(form: str, is_rms: bool, dtype: torch.dtype, device: str) -> None:
    """Values and gradients of every part, against the definition in float64."""

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    given = {"x": new(2, 5, 16), "weight": new(16), "bias": None if form == "plain" else new(16)}
    if form == "residual":
        given["residual"] = new(2, 5, 16)
    if form == "parallel":
        given |= {"x1": new(2, 5, 16), "weight1": new(16), "bias1": new(16)}
    if form == "rowscale":
        given["rowscale"] = new(2, 5)
    options = {"eps": 1e-3, "prenorm": True, "zero_centered_weight": form == "rowscale"}
    function = rms_norm_fn if is_rms else layer_norm_fn
    actual = function(**given, **options)

    wide = {
        n: None if x is None else x.detach().double().requires_grad_() for n, x in given.items()
    }
    scale = wide["rowscale"][..., None] if form == "rowscale" else 1.0
    h = wide["x"] * scale + wide.get("x1", 0.0) + wide.get("residual", 0.0)
    centre = float(form == "rowscale")
    expected = [plain_norm(h, wide["weight"] + centre, wide["bias"], 1e-3, is_rms)]
    if form == "parallel":
        expected.append(plain_norm(h, wide["weight1"], wide["bias1"], 1e-3, is_rms))
    expected.append(h)
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-4
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance)
    weights = [torch.randn_like(e) for e in expected]
    inputs = [[x for x in t.values() if x is not None] for t in (given, wide)]
    gradients = [
        torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, ys, strict=True)), xs)
        for ys, xs in zip((actual, expected), inputs, strict=True)
    ]
    for a, e in zip(*gradients, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=10 * tolerance)


def test_norm_dtypes_and_places() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.ones(8)
    y, h = rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16 and h.dtype == torch.float32 and torch.equal(h, x.float())
    out, residual_out = torch.empty(3, 8), torch.empty(3, 8)
    y = layer_norm_fn(x, weight, None, prenorm=True, out=out, residual_out=residual_out)
    assert y[0] is out and y[1] is residual_out and torch.equal(residual_out, x.float())
    y = rms_norm_fn(x, weight, None, residual=x.float(), prenorm=True, out_dtype=torch.float64)
    assert y[0].dtype == torch.float64 and y[1].dtype == torch.float32
    with pytest.raises(RuntimeError, match="flash_attn: rowscale: expected None with x1"):
        rms_norm_fn(x, weight, None, x1=x, rowscale=torch.ones(3))


def test_norm_dropout() -> None:
    """The masks tell what was dropped; the rest is scaled."""
    x, x1, weight = torch.rand(64, 32) + 1, torch.rand(64, 32) + 1, torch.ones(32)
    y, h, mask, mask1 = rms_norm_fn(
        x, weight, None, x1=x1, dropout_p=0.25, prenorm=True, return_dropout_mask=True
    )
    torch.testing.assert_close(h, (x * mask + x1 * mask1) / 0.75)
    torch.testing.assert_close(y, functional.rms_norm(h, (32,), weight, 1e-6))
    assert not torch.equal(mask, mask1)
    assert all(0.65 < m.float().mean() < 0.85 for m in (mask, mask1))
    assert layer_norm_fn(x, weight, None, return_dropout_mask=True)[1:] == (None, None)


def test_norm_modules() -> None:
    x, residual = torch.randn(2, 4, 8)
    for module in (RMSNorm(8), PlainRMSNorm(8)):
        assert list(module.state_dict()) == ["weight"] and module.bias is None
        torch.testing.assert_close(module(x), functional.rms_norm(x, (8,), eps=1e-5))
    centred = RMSNorm(8, zero_centered_weight=True)
    assert not centred.weight.count_nonzero()
    torch.testing.assert_close(centred(x), functional.rms_norm(x, (8,), eps=1e-5))
    for dropping in (RMSNorm(8, dropout_p=0.9), DropoutAddRMSNorm(8, p=0.9)):
        expected = functional.rms_norm(x + residual, (8,), eps=1e-5)
        assert not torch.allclose(dropping(x, residual), expected)
        torch.testing.assert_close(dropping.eval()(x, residual), expected)


def test_dropout_add_rms_norm() -> None:
    x, residual = torch.randn(2, 4, 8)
    weight, bias, columns, rows = torch.rand(8), torch.rand(8), torch.rand(8), torch.rand(4)
    y, h, mask = dropout_add_rms_norm(
        x, residual, weight, bias, 0.0, 1e-4, rows, columns, True, return_dropout_mask=True
    )
    expected = x * rows[:, None] * columns + residual
    torch.testing.assert_close(h, expected)
    torch.testing.assert_close(y, functional.rms_norm(expected, (8,), weight, 1e-4) + bias)
    assert mask.all() and mask.dtype == torch.bool


@pytest.mark.parametrize("inplace", [False, True])
def test_bare_rotation(inplace: bool) -> None:
    """Upstream's order of arguments; conjugate turns back."""
    x = torch.randn(2, 5, 3, 8)
    angles = torch.randn(9, 4)
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_emb(x, cos, sin, True, seqlen_offsets=3)
    given = x.clone()
    out = apply_rotary(given, cos, sin, 3, None, None, True, inplace)
    assert torch.equal(out, expected) and (out is given) == inplace
    back = apply_rotary(out, cos, sin, 3, interleaved=True, conjugate=True)
    torch.testing.assert_close(back, x)


def test_rearrange_is_where_programs_look_for_it() -> None:
    from flash_attn.bert_padding import rearrange

    x = torch.randn(2, 3, 4)
    assert torch.equal(rearrange(x, "b s d -> (b s) d"), x.flatten(0, 1))
