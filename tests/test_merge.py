"""merge_attention: partial results over disjoint keys give the result over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from cases import ATTENTION_TARGETS, Target, each_target

from flash_attn import flash_attn_func, flash_attn_varlen_func, reference, use_backend
from flash_attn.context_parallel import merge_attention

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def inputs(device: str, dtype: torch.dtype, seqlen_q=70, seqlen_k=200, d=16):
    torch.manual_seed(0)
    q = torch.randn(2, seqlen_q, 4, d, device=device, dtype=dtype)
    k, v = torch.randn(2, 2, seqlen_k, 2, d, device=device, dtype=dtype).unbind(0)
    return q, k, v


def pieces(q, k, v, cuts, **options):
    """The results over the keys between neighbouring cuts, keys behind the last causal one too."""
    results = [
        flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True, **options)[:2]
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    return zip(*results, strict=True)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@each_device
@pytest.mark.parametrize("cuts", [(0, 200), (0, 1, 200), (0, 64, 64, 130, 200)], ids=str)
def test_keys_in_pieces(cuts: tuple[int, ...], device: str) -> None:
    q, k, v = inputs(device, torch.float64)
    expected, expected_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    out, lse = merge_attention(*pieces(q, k, v, cuts))
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-14, atol=1e-14)


def rounding_of_lses(outs, lses, out, lse) -> tuple[float, float]:
    """The rms error of the merged out and LSE from the rounding of the pieces' LSE alone: within
    half a unit in its last place, evenly, and each is a relative error of its piece's weight."""
    of_out, of_lse = torch.zeros_like(out), torch.zeros_like(lse)
    for piece, piece_lse in zip(outs, lses, strict=True):
        last_place = torch.nextafter(piece_lse, torch.full_like(piece_lse, torch.inf)) - piece_lse
        error = (piece_lse - lse).exp() * last_place / 12**0.5
        of_lse += error.square()
        of_out += error.square().mT.unsqueeze(-1) * (piece - out).square()
    return of_out.mean().sqrt().item(), of_lse.mean().sqrt().item()


@each_device
def test_fp32_error_is_that_of_one_call(device: str) -> None:
    """And of the rounding of what is merged."""
    q, k, v = inputs(device, torch.float32, seqlen_q=300, seqlen_k=600)
    exact = reference.attention_ref(q, k, v)[:2]
    whole = flash_attn_func(q, k, v, return_attn_probs=True)[:2]
    partial = list(pieces(q, k, v, (0, 150, 300, 450, 600)))
    rounding = rounding_of_lses(*partial, *exact)
    merged = merge_attention(*partial)
    for m, w, e, r in zip(merged, whole, exact, rounding, strict=True):
        assert r < rms(w - e)
        assert rms(m - e) <= 1.1 * math.hypot(rms(w - e), r)


@each_target(*ATTENTION_TARGETS)
def test_half_precision(target: Target) -> None:
    """Rounded partial results cost one more rounding, no more."""
    q, k, v = inputs(target.device, torch.bfloat16, d=64)
    exact, exact_lse, _ = reference.attention_ref(q, k, v)
    with use_backend(target.backend):
        whole = flash_attn_func(q, k, v)
        out, lse = merge_attention(*pieces(q, k, v, (0, 100, 200)))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert rms(out - exact) <= 1.5 * rms(whole - exact)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@each_device
def test_rows_without_keys(device: str) -> None:
    """-inf in one piece takes nothing from it, NaN included; in all of them gives 0, -inf and no
    gradient."""
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([[[[1.0]], [[nan]], [[nan]]]], device=device, dtype=torch.float64)
    b = torch.tensor([[[[3.0]], [[5.0]], [[7.0]]]], device=device, dtype=torch.float64)
    lse_a = torch.tensor([[[0.5, -inf, -inf]]], device=device, dtype=torch.float64)
    lse_b = torch.tensor([[[0.5, 2.0, -inf]]], device=device, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (a, b, lse_a, lse_b)]
    out, lse = merge_attention([a, b], [lse_a, lse_b])
    assert out.flatten().tolist() == [2.0, 5.0, 0.0]
    expected = [0.5 + torch.tensor(2.0, dtype=torch.float64).log().item(), 2.0, -inf]
    assert lse.flatten().tolist() == pytest.approx(expected)
    (out.sum() + lse[..., :2].sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all() and leaf.grad.flatten()[2] == 0


def test_large_scores_do_not_overflow() -> None:
    out = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1, 1)
    merged, lse = merge_attention(list(out), [torch.full((1, 1, 1), 3e4)] * 2)
    assert merged.item() == 2.0
    assert lse.item() == pytest.approx(3e4 + 0.6931)


def test_gradients() -> None:
    torch.manual_seed(1)
    outs = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def merged(*x):
        return merge_attention(x[:3], x[3:])

    assert torch.autograd.gradcheck(merged, (*outs, *lses))
    assert torch.autograd.gradgradcheck(merged, (*outs, *lses))


@each_device
def test_gradients_through_the_pieces(device: str) -> None:
    """q, k and v get the gradient of one call, by way of out and LSE of each piece."""
    q, k, v = (x.requires_grad_() for x in inputs(device, torch.float64))
    whole = flash_attn_func(q, k, v, return_attn_probs=True)[:2]
    merged = merge_attention(*pieces(q, k, v, (0, 30, 200)))
    flow = [torch.randn_like(x) for x in whole]
    expected = torch.autograd.grad(whole, (q, k, v), flow)
    for grad, wanted in zip(torch.autograd.grad(merged, (q, k, v), flow), expected, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-13)


@each_device
def test_varlen(device: str) -> None:
    q, k, v = (x.flatten(0, 1) for x in inputs(device, torch.float64))
    cu_q, cu_k, cu_half = (
        torch.tensor([0, n, 2 * n], device=device, dtype=torch.int32) for n in (70, 200, 100)
    )
    options = dict(max_seqlen_q=70, return_attn_probs=True)
    whole = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_seqlen_k=200, **options)
    halves = []
    for part in (slice(0, 100), slice(100, 200)):
        k_part, v_part = (x.unflatten(0, (2, 200))[:, part].flatten(0, 1) for x in (k, v))
        halves.append(
            flash_attn_varlen_func(q, k_part, v_part, cu_q, cu_half, max_seqlen_k=100, **options)
        )
    out, lse = merge_attention([h[0] for h in halves], [h[1] for h in halves])
    torch.testing.assert_close(out, whole[0], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, whole[1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, l: ([], []), "outs: expected at least one partial result"),
        (lambda o, l: (o, l[:1]), "lses: expected 2 tensors as in outs, got 1"),
        (lambda o, l: ([o[0], o[1].half()], l), "outs: expected torch.float32 of shape"),
        (lambda o, l: ([o[0], o[1][:, :2]], l), "outs: expected torch.float32 of shape"),
        (lambda o, l: (o, [l[0], l[1].mT]), r"lses: expected shape \(1, 2, 3\)"),
    ],
)
def test_refusals(change, message: str) -> None:
    outs, lses = [torch.zeros(1, 3, 2, 4)] * 2, [torch.zeros(1, 2, 3)] * 2
    with pytest.raises(RuntimeError, match=message):
        merge_attention(*change(outs, lses))
