"""Models of transformers give with this library what they give with transformers' own attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from models import MODELS, VOCABULARY, Model
from transformers import PreTrainedModel

import flash_attn
from flash_attn.integrations import transformers as integration
from flash_attn.integrations.transformers import attention as attention_function
from flash_attn.integrations.transformers import register

EXACT = register()
GPU = pytest.mark.gpu
# (attention, device, dtype, what the logits and gradients may differ by, of their root mean square)
REGISTERED = (EXACT, "cpu", torch.float32, 2e-5)
REGISTERED_GPU = pytest.param(EXACT, "cuda", torch.float32, 1e-3, marks=GPU)
UNCHANGED = pytest.param("flash_attention_2", "cuda", torch.bfloat16, 6e-2, marks=GPU)
EVERYWHERE = pytest.mark.parametrize(
    "attention, device, dtype, tolerance", [REGISTERED, REGISTERED_GPU, UNCHANGED]
)


def skip_what_transformers_refuses(model: Model, attention: str) -> None:
    if attention != EXACT and model.name.split(",")[0] in ("t5", "gpt-oss"):
        pytest.skip("transformers has no flash_attention_2 for it")


def logits_and_gradients(model: Model, built: PreTrainedModel, inputs: dict) -> dict:
    """By name; the gradients are of the logits with the same weights each time."""
    logits = model.logits(built, inputs)
    torch.manual_seed(5)
    dlogits = torch.randn(logits.shape).to(logits)
    (logits * dlogits).sum().backward()
    gradients = {name: x.grad for name, x in built.named_parameters() if x.grad is not None}
    return {"logits": logits.detach()} | gradients


@EVERYWHERE
@pytest.mark.parametrize("model, side", [(m, side) for m in MODELS for side in m.sides()], ids=str)
def test_logits_and_gradients(
    model: Model,
    side: str | None,
    attention: str,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    skip_what_transformers_refuses(model, attention)
    inputs = model.inputs(device, side)
    eager = logits_and_gradients(model, model.build("eager", device, dtype), inputs)
    actual = logits_and_gradients(model, model.build(attention, device, dtype), inputs)
    expected = eager
    if dtype == torch.bfloat16:  # the weights as they are, and nothing else rounded
        exact = model.build("eager", device, dtype).float()
        expected = logits_and_gradients(model, exact, inputs)
    assert actual.keys() == expected.keys()
    root_mean_square = {name: e.norm().item() / e.numel() ** 0.5 for name, e in expected.items()}
    # The gradient of a key's bias is 0 but for rounding, which grows with the other gradients.
    rounding = tolerance / 20 * max(root_mean_square.values())
    for name, e in expected.items():
        error = (actual[name] - e).norm().item() / e.numel() ** 0.5
        # What a model in 16 bits loses outside of attention, eager attention's loses as well: two
        # draws of that error differ by less than a half.
        of_eager = (eager[name] - e).norm().item() / e.numel() ** 0.5
        assert error <= max(tolerance * root_mean_square[name], 1.5 * of_eager) + rounding, name


@EVERYWHERE
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("model", [m for m in MODELS if m.generates], ids=str)
def test_generated_tokens(
    model: Model,
    side: str | None,
    cache: str,
    attention: str,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    skip_what_transformers_refuses(model, attention)
    inputs = model.inputs(device, side)
    inputs.pop("decoder_input_ids", None)
    options = dict(max_new_tokens=12, do_sample=False, cache_implementation=cache)
    expected = model.build("eager", device, dtype).generate(**inputs, **options)
    actual = model.build(attention, device, dtype).generate(**inputs, **options)
    assert actual.shape == expected.shape
    if dtype != torch.bfloat16:
        assert torch.equal(actual, expected)
    else:
        # Two tokens may be as likely as 16 bits can tell: the first new one is nearly the best.
        first = inputs["input_ids"].size(1)
        assert torch.equal(actual[:, :first], expected[:, :first])
        options |= dict(max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
        exact = model.build("eager", device, dtype).float().generate(**inputs, **options)
        logits = exact.logits[0].float()
        chosen = logits.gather(1, actual[:, first : first + 1]).squeeze(1)
        assert (logits.max(1).values - chosen <= tolerance * logits.abs().max()).all()


def test_beam_search() -> None:
    """The beams of a sequence share its prompt, and the cache is put into another order."""
    model = MODELS[0]
    inputs = model.inputs("cpu", "left")
    options = dict(max_new_tokens=8, do_sample=False, num_beams=3)
    expected = model.build("eager", "cpu", torch.float32).generate(**inputs, **options)
    actual = model.build(EXACT, "cpu", torch.float32).generate(**inputs, **options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_windows_are_no_tensors(
    cached: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is padded, Mistral's mask reaches the library as a window, after a cache too;
    only then the tiles outside of it cost nothing."""
    calls = []

    def noted(*tensors, **options):
        calls.append(options)
        return flash_attn.flash_attn_func(*tensors, **options)

    monkeypatch.setattr(integration, "flash_attn_func", noted)
    (mistral,) = (m for m in MODELS if m.kind == "Mistral")
    inputs = mistral.inputs("cpu", "left" if padded else None)
    logits = {}
    for attention in ("eager", EXACT):
        model, past = mistral.build(attention, "cpu", torch.float32), None
        if cached:
            past = transformers.DynamicCache()
            first = {name: x[:, :11] for name, x in inputs.items()}
            past = model(**first, past_key_values=past, use_cache=True).past_key_values
        given = inputs | dict(input_ids=inputs["input_ids"][:, 11 * cached :])
        logits[attention] = model(**given, past_key_values=past).logits
    valid = inputs["attention_mask"].bool()[:, 11 * cached :]
    torch.testing.assert_close(logits[EXACT][valid], logits["eager"][valid], rtol=0, atol=1e-4)
    for options in calls:
        assert (options["attn_bias"] is None) != padded
        assert options["window_size"] == ((-1, -1) if padded else (4, 0))


def test_packed_sequences() -> None:
    """Position ids that start again separate two documents of one row."""
    model = MODELS[0]
    tokens = torch.randint(2, VOCABULARY, (1, 15))
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    built = model.build(EXACT, "cpu", torch.float32)
    packed = built(input_ids=tokens, position_ids=positions, use_cache=False).logits
    apart = [built(input_ids=part).logits for part in tokens.split([6, 9], 1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_dropout_of_attention_weights(device: str) -> None:
    """GPT-2's, alone: the same mean and variance of the layer's output as with eager attention."""
    dropout = dict(attn_pdrop=0.2, resid_pdrop=0.0, embd_pdrop=0.0, num_hidden_layers=1)
    (gpt2,) = (m for m in MODELS if m.kind == "GPT2")
    x = torch.randn(1, 9, 64, device=device).repeat(4096, 1, 1)
    causal = torch.full((1, 1, 9, 9), torch.finfo(x.dtype).min, device=device).triu(1)
    samples = {}
    for attention in ("eager", EXACT):
        layer = gpt2.build(attention, device, torch.float32, **dropout).transformer.h[0].attn
        with torch.no_grad():
            clean = layer(x[:1], attention_mask=causal)[0]
            samples[attention] = layer.train()(x, attention_mask=causal)[0] - clean
    variance = {name: s.var(0) for name, s in samples.items()}
    for s in samples.values():
        assert (s.mean(0).abs() <= 6 * (s.var(0) / len(s)).sqrt() + 1e-5).all()
    ratio = (variance[EXACT].sum(-1) / variance["eager"].sum(-1)).log().abs()
    assert (ratio < 0.1).all(), ratio


def test_the_name_is_checked() -> None:
    with pytest.raises(ValueError, match='name: expected a str without "flash" in it'):
        register("my_flash_attention")


def test_weights_are_refused() -> None:
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="output_attentions: expected False"):
        attention_function(torch.nn.Identity(), x, x, x, None, output_attentions=True)
