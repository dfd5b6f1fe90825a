"""transformers' own calls of flash-attn and flash-attn-3, in fp32.

On a CPU it refuses them, so its checks of the device are taken away there, and nothing else; on a
GPU it runs as it is. In test_transformers.py it does so in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import flash_attn_interface
import pytest
import torch
from models import MODELS, VOCABULARY, Model
from test_transformers import logits_and_gradients
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    modeling_flash_attention_utils,
)

import flash_attn

FLASH = {"flash_attention_2": flash_attn, "flash_attention_3": flash_attn_interface}
BY_KIND = {model.kind: model for model in MODELS}
# Not GPT-2, whose layers transformers does not find a dtype for where it is fp32.
DECODERS = [BY_KIND[kind] for kind in ("Llama", "Mistral", "Gemma2", "Qwen3", "DeepseekV3")]
each_attention = pytest.mark.parametrize("attention", FLASH)
each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, attention: str, device: str) -> Iterator[list[Callable]]:
    """Without the check of the device: the functions that transformers has called, in the end."""
    if device == "cpu":
        monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
        for version in (2, 3):
            name = f"is_flash_attn_{version}_available"
            monkeypatch.setattr(modeling_flash_attention_utils, name, lambda *_, **__: True)
    calls = []
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(FLASH[attention], name, counted(getattr(FLASH[attention], name), calls))
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    yield calls
    assert calls


def counted(function: Callable, calls: list[Callable]) -> Callable:
    @functools.wraps(function)  # transformers looks at the signature
    def call(*arguments, **options):
        calls.append(function)
        return function(*arguments, **options)

    return call


def built(model: Model, attention: str, device: str) -> PreTrainedModel:
    return model.build(attention, device, torch.float32)


@each_device
@each_attention
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("model", [*DECODERS, BY_KIND["Bert"]], ids=str)
def test_logits_and_gradients(model: Model, side: str | None, attention: str, device: str) -> None:
    inputs = model.inputs(device, side)
    expected = logits_and_gradients(model, built(model, "eager", device), inputs)
    actual = logits_and_gradients(model, built(model, attention, device), inputs)
    assert actual.keys() == expected.keys()
    largest = {name: e.abs().max().item() for name, e in expected.items()}
    # The gradient of a key's bias is 0 but for rounding, which grows with the other gradients.
    rounding = 1e-6 * max(largest.values())
    for name, e in expected.items():
        error = (actual[name] - e).abs().max().item()
        assert error <= 2e-5 * largest[name] + rounding, name


@each_device
@each_attention
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("model", DECODERS, ids=str)
def test_generated_tokens(
    model: Model, side: str | None, cache: str, attention: str, device: str
) -> None:
    inputs = model.inputs(device, side)
    options = dict(max_new_tokens=12, do_sample=False, cache_implementation=cache)
    expected = built(model, "eager", device).generate(**inputs, **options)
    assert torch.equal(built(model, attention, device).generate(**inputs, **options), expected)


@each_device
@each_attention
def test_beam_search(attention: str, device: str) -> None:
    model = BY_KIND["Llama"]
    inputs = model.inputs(device, "left")
    options = dict(max_new_tokens=8, do_sample=False, num_beams=3)
    expected = built(model, "eager", device).generate(**inputs, **options)
    assert torch.equal(built(model, attention, device).generate(**inputs, **options), expected)


@each_device
@each_attention
def test_packed_sequences(attention: str, device: str) -> None:
    """Position ids that start again separate two documents of one row."""
    tokens = torch.randint(2, VOCABULARY, (1, 15), device=device)
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None].to(device)
    model = built(BY_KIND["Llama"], attention, device)
    packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    eager = built(BY_KIND["Llama"], "eager", device)
    apart = [eager(input_ids=part).logits for part in tokens.split([6, 9], 1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=0, atol=1e-4)


@each_device
@each_attention
@pytest.mark.parametrize("model", DECODERS[:2], ids=str)
def test_continuous_batching(
    model: Model, attention: str, device: str, calls: list[Callable]
) -> None:
    """Prompts of different lengths over pages: the tokens of each alone."""
    prompts = [torch.randint(2, VOCABULARY, (length,)).tolist() for length in (5, 19, 11)]
    options = dict(max_new_tokens=6, do_sample=False)
    eager = built(model, "eager", device)
    expected = [
        eager.generate(torch.tensor([prompt], device=device), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    config = GenerationConfig(**options, eos_token_id=-1, pad_token_id=0)
    # Without these numbers it takes most of a GPU's memory.
    pages = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, max_blocks_per_request=4)
    results = built(model, attention, device).generate_batch(
        prompts, generation_config=config, continuous_batching_config=pages
    )
    assert [result.generated_tokens for result in results.values()] == expected
    if device == "cuda" and model.kind != "Mistral":  # elsewhere it has no block tables
        assert "flash_attn_with_kvcache" in {function.__name__ for function in calls}
