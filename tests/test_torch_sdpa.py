"""torch's own attention on this library: enable(), and torch's registry of flash kernels."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.flop_counter import FlopCounterMode

from flash_attn import sdpa

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def ops_of_ours(call) -> int:
    """How many of our ops a call runs."""
    with FlopCounterMode(display=False) as counter:
        call()
    counted = counter.get_flop_counts().get("Global", {})
    return sum(op is torch.ops.flash_attn.fwd for op in counted)


@pytest.fixture
def enabled() -> Iterator[None]:
    with sdpa.enable():
        yield


def tensors(device: str, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, device=device, requires_grad=True) for _ in range(3)]


def out_and_gradients(call, leaves) -> list[torch.Tensor]:
    out = call()
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves))]


def assert_same(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-5)


OPTIONS = [
    dict(),
    dict(is_causal=True),
    dict(scale=-0.3),
    dict(attn_mask=torch.arange(49.0).reshape(7, 7).sin()),
    dict(attn_mask=torch.ones(7, 7).tril().bool()),
]
NAMES = ["plain", "causal", "scale", "float mask", "bool mask"]


@each_device
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_enabled_function(options: dict, device: str) -> None:
    """Under a name that was imported before, too."""
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    leaves = tensors(device, 2, 3, 7, 16)

    def call() -> torch.Tensor:
        return imported_before(*leaves, **options)

    with sdpa_kernel(SDPBackend.MATH):
        expected = out_and_gradients(call, leaves)
    with sdpa.enable():
        assert F.scaled_dot_product_attention is imported_before
        assert ops_of_ours(call) == 1
        assert_same(out_and_gradients(call, leaves), expected)
        with torch.no_grad():
            torch.testing.assert_close(call(), expected[0], rtol=1e-4, atol=1e-5)
        with torch.inference_mode():
            assert ops_of_ours(call) == 1
    assert ops_of_ours(call) == 0


def encoder(device: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).to(device)


@each_device
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer_encoder(padded: bool, training: bool, device: str) -> None:
    """In evaluation without gradients torch would take its fast path, which is not ours."""
    model = encoder(device).train(training)
    x = torch.randn(3, 6, 32, device=device)
    padding = torch.zeros(3, 6, dtype=torch.bool, device=device)
    padding[1, 4:] = padded
    leaves = list(model.parameters()) if training else []

    def call() -> torch.Tensor:
        with torch.set_grad_enabled(training):
            return model(x, src_key_padding_mask=padding if padded else None)[~padding]

    expected = out_and_gradients(call, leaves) if training else [call()]
    with sdpa.enable():
        assert ops_of_ours(call) == 1
        actual = out_and_gradients(call, leaves) if training else [call()]
    assert_same(actual, expected)
    assert torch.backends.mha.get_fastpath_enabled()


@each_device
def test_multihead_attention(device: str) -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).to(device)
    x = torch.randn(3, 6, 32, device=device)

    def call() -> torch.Tensor:
        return model(x, x, x, need_weights=False)[0]

    expected = out_and_gradients(call, model.parameters())
    with sdpa.enable():
        for train in (True, False):
            assert ops_of_ours(lambda train=train: model.train(train) and call() is None) == 1
        assert_same(out_and_gradients(call, model.parameters()), expected)


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "jacrev", "vmap"])
def test_transforms_of_the_enabled_function(transform: str, enabled: None) -> None:
    x = torch.randn(2, 1, 3, 5, 8)

    def total(t: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(t, t, t, is_causal=True).square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    calls = {
        "grad": lambda: torch.func.grad(total)(x),
        "vmap(grad)": lambda: torch.vmap(torch.func.grad(total))(x),
        "jacrev": lambda: torch.func.jacrev(total)(x),
        "vmap": lambda: torch.func.grad(lambda t: torch.vmap(total)(t).sum())(x),
    }
    assert ops_of_ours(calls[transform]) == 1
    torch.testing.assert_close(calls[transform](), expected)


def test_compiled_function(enabled: None) -> None:
    leaves = tensors("cpu", 2, 3, 7, 16)
    compiled = torch.compile(imported_before, backend="aot_eager", fullgraph=True)
    expected = out_and_gradients(lambda: imported_before(*leaves), leaves)
    assert ops_of_ours(lambda: compiled(*leaves)) == 1
    assert_same(out_and_gradients(lambda: compiled(*leaves), leaves), expected)
    torch.compiler.reset()


def test_nested_tensors_of_strides_stay_torchs(enabled: None) -> None:
    nested = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 3, 8)])
    out = imported_before(nested, nested, nested)
    for actual, x in zip(out.unbind(), nested.unbind(), strict=True):
        torch.testing.assert_close(actual, imported_before(x, x, x))


def test_the_last_one_restores() -> None:
    x = torch.randn(1, 2, 3, 8)

    def is_ours() -> bool:
        return ops_of_ours(lambda: imported_before(x, x, x)) == 1

    torch.backends.mha.set_fastpath_enabled(False)
    first, second = sdpa.enable(), sdpa.enable()
    first.remove()
    first.remove()
    seen_elsewhere = []
    thread = threading.Thread(target=lambda: seen_elsewhere.append(is_ours()))
    thread.start()
    thread.join()
    assert is_ours() and seen_elsewhere == [True]
    second.remove()
    assert not is_ours()
    assert not torch.backends.mha.get_fastpath_enabled(), "as it was before"
    torch.backends.mha.set_fastpath_enabled(True)


def test_enabling_says_nothing() -> None:
    code = "import flash_attn; h = flash_attn.sdpa.enable(); h.remove()"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert result.returncode == 0 and result.stderr == b""


@pytest.fixture
def activated() -> Iterator[None]:
    registry.activate_flash_attention_impl("flash_attn")
    yield
    registry.restore_flash_attention_impl()


def test_nothing_is_activated_by_import() -> None:
    code = """
import flash_attn
from torch.nn import attention
assert "flash_attn" in attention.list_flash_attention_impls()
assert attention.current_flash_attention_impl() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@each_device
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(scale=-0.3)], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("turned", [False, True])
def test_registry(turned: bool, dropout_p: float, options: dict, device: str, monkeypatch) -> None:
    """What torch gives to its flash kernel. On a CPU that takes no dropout."""
    if device == "cpu" and dropout_p:
        pytest.skip("torch's formula serves it")
    dtype = torch.float32 if device == "cpu" else torch.float16
    shape = (2, 33, 3, 16) if turned else (2, 3, 33, 16)
    leaves = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) if turned else x for x in leaves)

    def call() -> torch.Tensor:
        torch.manual_seed(5)
        return imported_before(q, k, v, dropout_p=dropout_p, **options)

    ours = sdpa.scaled_dot_product_attention
    torch.manual_seed(5)
    expected = out_and_gradients(lambda: ours(q, k, v, dropout_p=dropout_p, **options), leaves)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torchs = call()
        registry.activate_flash_attention_impl("flash_attn")
        try:
            out = call()
            actual = out_and_gradients(call, leaves)
        finally:
            registry.restore_flash_attention_impl()
        # torch's kernel answers a negative scale with NaN.
        torch.testing.assert_close(call(), torchs, rtol=0, atol=0, equal_nan=True)
    assert out.stride() == torchs.stride()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_registry_serves_a_model(activated: None) -> None:
    """Every attention of an unchanged encoder, in training and in evaluation."""
    from flash_attn import _upstream

    model = encoder("cpu")
    x = torch.randn(3, 6, 32)
    with pytest.MonkeyPatch.context() as patch:
        forwards = []
        forward = _upstream._forward
        patch.setattr(_upstream, "_forward", lambda *a, **k: forwards.append(1) or forward(*a, **k))
        out = model(x)
        out.sum().backward()
    assert len(forwards) == 2


@pytest.mark.gpu
def test_registry_serves_nested_and_varlen(activated: None) -> None:
    """torch's own routes to its flash kernel for ragged sequences."""
    from torch.nn.attention.varlen import varlen_attn

    q = torch.randn(12, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    cu = torch.tensor([0, 5, 12], device="cuda", dtype=torch.int32)
    nested = torch.nested.nested_tensor_from_jagged(q, cu.long()).transpose(1, 2)
    expected = [imported_before(x, x, x) for x in (p.transpose(0, 1) for p in q.split([5, 7]))]
    expected = torch.cat([x.transpose(0, 1) for x in expected])
    (gradient,) = torch.autograd.grad(expected.square().sum(), q)
    for out in (
        varlen_attn(q, q, q, cu, cu, 7, 7),
        imported_before(nested, nested, nested).transpose(1, 2).values(),
    ):
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
        (actual,) = torch.autograd.grad(out.square().sum(), q)
        torch.testing.assert_close(actual, gradient, rtol=2**-5, atol=2**-5)
