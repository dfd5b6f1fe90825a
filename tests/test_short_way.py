"""Dense calls of which out alone is wanted take fewer hops to the op: the same bits; what is not
ordinary goes the long way."""

from __future__ import annotations

import pytest
import torch
from cases import ATEN_CPU, ATEN_CUDA, SM80, SM90, Target, each_target, use
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import attention
from flash_attn._call import rows_first

DEFAULTS = (None, 0.0, None, False, (-1, -1), "bottom-right", 0.0, False)
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "top-left window": dict(window_size=(20, 3), causal_alignment="top-left"),
    "scale": dict(softmax_scale=0.3),
    "dropout": dict(dropout_p=0.3, causal=True),
    "softcap": dict(softcap=3.0),
    "deterministic": dict(deterministic=True),
    "bias": dict(attn_bias=True),
}


def leaves_of(target: Target) -> list[torch.Tensor]:
    shapes = ((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    make = dict(device=target.device, dtype=torch.float16, requires_grad=True)
    return [torch.randn(shape, **make) for shape in shapes]


@each_target(ATEN_CPU, ATEN_CUDA, SM80, SM90)
@pytest.mark.parametrize("name", OPTIONS)
def test_short_way(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(OPTIONS[name])
    leaves = leaves_of(target)
    if options.pop("attn_bias", False):
        bias = torch.randn(4, 70, 90, device=target.device, dtype=torch.float16)
        leaves.append(bias.requires_grad_())
        options["attn_bias"] = bias
    dout = torch.randn(2, 70, 4, 64, device=target.device, dtype=torch.float16)
    results = []
    with use(target):
        for closed, instead in (("attend", None), ("rows_first", lambda *_: None)):
            with monkeypatch.context() as patch:
                patch.setattr(attention, closed, instead)
                torch.manual_seed(0)
                out = flash_attn.flash_attn_func(*leaves[:3], **options)
                results.append([out, *torch.autograd.grad(out, leaves, dout)])
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.manual_seed(0)
                alone = flash_attn.flash_attn_func(*leaves[:3], **options)
            assert torch.equal(alone, results[0][0])
            assert alone.is_inference() == (mode is torch.inference_mode)
    for short, long in zip(*results, strict=True):
        assert short.stride() == long.stride()
        if target.device == "cpu" or options.get("deterministic"):
            assert torch.equal(short, long)
        else:  # sums in any order
            torch.testing.assert_close(short, long, rtol=1e-2, atol=1e-2)


def test_what_takes_the_long_way() -> None:
    x = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    negative = torch.complex(torch.zeros_like(x), x).conj().imag  # negated on reading
    fake = torch._subclasses.FakeTensorMode().from_tensor(x)
    parameter = torch.nn.Parameter(x)
    assert torch.equal(rows_first(x, x, x, *DEFAULTS), flash_attn.flash_attn_func(x, x, x))
    assert rows_first(parameter, x, x, *DEFAULTS).requires_grad
    for q, k, v in (
        (negative, x, x),
        (x, negative, x),
        (x, x, negative),
        (fake, fake, fake),
        (x[0], x, x),
    ):
        assert rows_first(q, k, v, *DEFAULTS) is None
    assert rows_first(x, x, x, negative[:1, :, :, :6].mT, *DEFAULTS[1:]) is None
    with torch.autocast("cpu", torch.bfloat16):
        single = x.float()
        assert rows_first(single, single, single, *DEFAULTS) is None
        assert flash_attn.flash_attn_func(single, single, single).dtype == torch.bfloat16
    assert torch.func.vmap(flash_attn.flash_attn_func)(x[None], x[None], x[None]).shape[0] == 1
    expected = flash_attn.flash_attn_func(-x, x, x)
    torch.testing.assert_close(flash_attn.flash_attn_func(negative, x, x), expected)
    assert flash_attn.flash_attn_func(fake, fake, fake).shape == x.shape


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize(
    "attend", [flash_attn.flash_attn_func, flash_attn.scaled_dot_product_attention]
)
def test_who_listens_hears_the_op(attend, with_graph: bool) -> None:
    """Modes and the profiler, though the short way passes the dispatcher by; and meta tensors have
    no values."""

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            heard.append(str(function))
            return function(*args, **kwargs or {})

    heard: list[str] = []
    x = torch.randn(2, 6, 6, 8, requires_grad=with_graph)
    with Listener():
        attend(x, x, x)
    assert "flash_attn.fwd.default" in heard
    with torch.profiler.profile() as profile:
        attend(x, x, x)
    assert "flash_attn::fwd" in {event.key for event in profile.key_averages()}
    meta = x.detach().to("meta").requires_grad_(with_graph)
    out = attend(meta, meta, meta)
    assert out.is_meta and out.shape == x.shape and out.requires_grad == with_graph


def test_a_write_to_the_result_is_seen_by_its_backward() -> None:
    leaves = leaves_of(ATEN_CPU)
    out = flash_attn.flash_attn_func(*leaves)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
