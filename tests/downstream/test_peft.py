"""LoRA adapters of peft on models that this library serves."""

from __future__ import annotations

import pytest
import torch
from models import MODELS, VOCABULARY
from peft import LoraConfig, get_peft_model

from flash_attn.integrations.transformers import register

EXACT = register()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_steps(device: str) -> None:
    """Three steps with checkpointing give the adapters that eager attention gives."""
    tokens = torch.randint(2, VOCABULARY, (2, 17), device=device)
    trained = []
    for attention in ("eager", EXACT):
        model = MODELS[0].build(attention, device, torch.float32)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
        optimizer = torch.optim.SGD((x for x in model.parameters() if x.requires_grad), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        trained.append({n: x.detach() for n, x in model.named_parameters() if x.requires_grad})
    expected, actual = trained
    assert any("lora_B" in name and x.abs().max() > 1e-3 for name, x in expected.items())
    for name, e in expected.items():
        torch.testing.assert_close(actual[name], e, rtol=1e-3, atol=1e-5, msg=name)
