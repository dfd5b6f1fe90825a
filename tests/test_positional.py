"""flash_attn_2_cuda: upstream's extension, by position, into the tensors of its callers."""

from __future__ import annotations

import pytest
import torch
from cases import ATEN_CPU, SM80, Target, each_target

import flash_attn
import flash_attn_2_cuda

OPTIONS = dict(causal=True, window_size=(3, 1), softcap=0.0, alibi_slopes=None)


def tensors(target: Target, varlen: bool) -> list[torch.Tensor]:
    dtype = torch.float32 if target == ATEN_CPU else torch.float16
    shapes = [(7, 4, 8), (9, 2, 8)] if varlen else [(2, 7, 4, 8), (2, 7, 2, 8)]
    shapes = [*shapes, shapes[-1]][:3]
    return [torch.randn(shape, device=target.device, dtype=dtype) for shape in shapes]


def lengths(target: Target) -> list[torch.Tensor]:
    """Of queries and of keys; the longest sequences have 4 and 5."""
    each = [0, 3, 7], [0, 5, 9]
    return [torch.tensor(x, dtype=torch.int32, device=target.device) for x in each]


def expected(inputs: list[torch.Tensor], dout: torch.Tensor, packed: tuple) -> list[torch.Tensor]:
    """out, softmax_lse, dq, dk, dv of the public function."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    name = "flash_attn_varlen_func" if packed else "flash_attn_func"
    out, lse, _ = getattr(flash_attn, name)(
        *leaves, *packed, softmax_scale=0.3, return_attn_probs=True, deterministic=True, **OPTIONS
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


@each_target(ATEN_CPU, SM80)
@pytest.mark.parametrize("given", [False, True], ids=["None", "given"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_forward_and_backward(varlen: bool, given: bool, target: Target) -> None:
    q, k, v = tensors(target, varlen)
    dout, cu = torch.randn_like(q), lengths(target)
    out, lse, *gradients = expected([q, k, v], dout, (*cu, 4, 5) if varlen else ())
    mask = (True, 3, 1, 0.0)  # causal, window, softcap

    mine = torch.full_like(q, 7) if given else None
    if varlen:
        rest = (*cu, None, None, None, None, 4, 5, 0.0, 0.3, False, *mask, False)
        found = flash_attn_2_cuda.varlen_fwd(q, k, v, mine, *rest)
    else:
        found = flash_attn_2_cuda.fwd(q, k, v, mine, None, 0.0, 0.3, *mask, False)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    assert not given or found[0] is mine

    into = [torch.full_like(x, 7) if given else None for x in (q, k, v)]
    saved = (dout, q, k, v, found[0], found[1], *into)
    if varlen:
        lengths_and_options = (*cu, None, 4, 5, 0.0, 0.3, False, *mask, True)
        back = flash_attn_2_cuda.varlen_bwd(*saved, *lengths_and_options)
    else:
        back = flash_attn_2_cuda.bwd(*saved, None, 0.0, 0.3, *mask, True)
    for mine, a, e in zip(into, back, gradients, strict=False):
        torch.testing.assert_close(a, e, atol=2e-3 if a.dtype == torch.float16 else 1e-6, rtol=0)
        assert not given or a is mine
    softmax_d = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    torch.testing.assert_close(back[3], softmax_d, atol=1e-2, rtol=0)


@each_target(ATEN_CPU)
@pytest.mark.parametrize("given", [False, True], ids=["None", "given"])
def test_kvcache(given: bool, target: Target) -> None:
    q, k, v = tensors(target, varlen=False)
    pools = [torch.randn(2, 20, 2, 8) for _ in range(2)]
    copies = [x.clone() for x in pools]
    used = torch.tensor([5, 9], dtype=torch.int32)
    options = dict(cache_seqlens=used, softmax_scale=0.3, causal=True, window_size=(3, 1))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *pools, k, v, **options, return_softmax_lse=True
    )
    mine = torch.full_like(q, 7) if given else None
    rest = (None, None, None, None, None, None, mine, 0.3, True, 3, 1, 0.0, True, 0)
    found = flash_attn_2_cuda.fwd_kvcache(q, *copies, k, v, used, *rest)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    assert not given or found[0] is mine
    for a, e in zip(copies, pools, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("wrong", ["dtype", "shape"])
def test_a_result_of_another_form_is_refused(wrong: str) -> None:
    q, k, v = tensors(ATEN_CPU, varlen=False)
    mine = q.double() if wrong == "dtype" else q[:, :3].clone()
    rest = (None, 0.0, 0.3, True, -1, -1, 0.0)
    with pytest.raises(RuntimeError, match="flash_attn: out: expected .*float32.*2, 7, 4, 8"):
        flash_attn_2_cuda.fwd(q, k, v, mine, *rest, False)
    out, lse, *_ = flash_attn_2_cuda.fwd(q, k, v, None, *rest, False)
    with pytest.raises(RuntimeError, match="flash_attn: dq: expected .*float32.*2, 7, 4, 8"):
        flash_attn_2_cuda.bwd(q, q, k, v, out, lse, mine, None, None, *rest, True)


def test_a_generator_is_refused() -> None:
    q, k, v = tensors(ATEN_CPU, varlen=False)
    rest = (None, 0.0, 0.3, True, -1, -1, 0.0, False)
    with pytest.raises(RuntimeError, match="flash_attn: gen: .*expected None, got Generator"):
        flash_attn_2_cuda.fwd(q, k, v, None, *rest, torch.Generator())
