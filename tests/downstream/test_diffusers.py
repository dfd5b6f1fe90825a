"""Diffusion transformers of diffusers, unchanged, whose attention backends find this package."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models import attention_dispatch

BACKENDS = ["flash", "flash_varlen", "_flash_varlen_3"]
DEVICES = [
    ("cpu", torch.float32, 1e-5),
    pytest.param("cuda", torch.bfloat16, 5e-2, marks=pytest.mark.gpu),
]


def flux() -> tuple[torch.nn.Module, dict]:
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = dict(
        hidden_states=torch.randn(2, 16, 4),
        encoder_hidden_states=torch.randn(2, 7, 32),
        pooled_projections=torch.randn(2, 32),
        timestep=torch.tensor([0.3, 0.7]),
        img_ids=torch.cartesian_prod(*map(torch.arange, (1, 4, 4))).float(),
        txt_ids=torch.zeros(7, 3),
    )
    return model, inputs


def wan() -> tuple[torch.nn.Module, dict]:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    inputs = dict(
        hidden_states=torch.randn(2, 4, 3, 8, 8),
        encoder_hidden_states=torch.randn(2, 7, 16),
        timestep=torch.tensor([3, 7]),
    )
    return model, inputs


each_model = pytest.mark.parametrize("make", [flux, wan], ids=lambda make: make.__name__)
each_device = pytest.mark.parametrize("device, dtype, tolerance", DEVICES)


def placed(make, device: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict]:
    """The model with scores that matter, and its inputs."""
    model, inputs = make()
    for name, weight in model.named_parameters():
        if name.endswith(("to_q.weight", "to_k.weight")):
            torch.nn.init.normal_(weight, std=0.5)
    model.to(device, dtype)
    return model, {
        name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()
    }


@each_device
@pytest.mark.parametrize("backend", BACKENDS)
@each_model
def test_same_as_native(make, backend: str, device: str, dtype: torch.dtype, tolerance: float):
    """Output and the gradient of each weight, beside torch's attention."""
    model, inputs = placed(make, device, dtype)
    results = []
    for name in ("native", backend):
        model.set_attention_backend(name)
        model.zero_grad()
        out = model(**inputs, return_dict=False)[0]
        out.square().sum().backward()
        gradients = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        results.append({"out": out.detach()} | gradients)
    expected, actual = results
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        error = (actual[name] - e).abs().max().item()
        assert error <= tolerance * max(e.abs().max().item(), 1.0), name
    assert not torch.equal(actual["out"], expected["out"]), "torch's own attention ran"


@each_device
@each_model
@torch.no_grad()
def test_flash_3(make, device: str, dtype: torch.dtype, tolerance: float, monkeypatch):
    """diffusers makes it an op of its own, for CUDA alone and without a gradient; on a CPU the
    function under that op runs."""
    if device == "cpu":
        name = "_wrapped_flash_attn_3"
        under = getattr(attention_dispatch, name)._init_fn
        monkeypatch.setattr(attention_dispatch, name, under)
    model, inputs = placed(make, device, dtype)
    results = []
    for backend in ("native", "_flash_3"):
        model.set_attention_backend(backend)
        results.append(model(**inputs, return_dict=False)[0])
    expected, actual = results
    assert (actual - expected).abs().max() <= tolerance * max(expected.abs().max().item(), 1.0)
    assert not torch.equal(actual, expected), "torch's own attention ran"
