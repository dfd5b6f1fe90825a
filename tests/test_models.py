"""Gemma 4's kinds of layers, head dims of 256 behind a window and of 512 without one: the small
model of the benchmarks trains and generates as it does with torch's SDPA, and on a GPU without
aten."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
import torch
from cases import ATEN_CPU, DECODE_CUDA, SM80, Target, use

import flash_attn
from flash_attn import _log

WORDS = 31
pytestmark = pytest.mark.usefixtures("benchmarks")


def tiny(window: int = 17):
    """Two layers behind a window and one without, each with two query heads and one of keys."""
    from benchmarks.small_models import MODELS

    gemma = MODELS["gemma4"]
    local, whole = (dataclasses.replace(gemma.layers[i], heads=2, heads_kv=1) for i in (0, -1))
    assert (local.head_dim, whole.head_dim, whole.window) == (256, 512, None)
    local = dataclasses.replace(local, window=window)
    return dataclasses.replace(gemma, layers=(local, whole, local))


def built(parts, target: Target, seqlen: int, seed: int):
    """The model, and what its numbers may be off by."""
    from benchmarks.small_models import Transformer

    torch.manual_seed(seed)
    model = Transformer(parts, seqlen, hidden=48, vocabulary=WORDS)
    with torch.no_grad():  # scores that differ: a wrong window or scale changes the logits
        for layer in model.layers:
            for norm in layer.qk_norms:
                norm.weight.mul_(2)
    kernels = target.backend != "aten"
    model = model.to(target.device, torch.bfloat16 if kernels else torch.float32)
    return model, 4e-2 if kernels else 1e-4


def attends(name: str, parts, words: torch.Tensor) -> list:
    """Of each layer, for whole sequences."""
    from benchmarks import backends

    cases = parts.cases(*words.shape)
    inputs = [backends.make_inputs(case, torch.float32, words.device) for case in cases]
    return [backends.attention(name, *both) for both in zip(cases, inputs, strict=True)]


def random_words(target: Target, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, shape, generator=generator).to(target.device)


def each_kernel(target: Target):
    marks = [*target.marks, pytest.mark.real_gpu]
    params = [
        pytest.param(ATEN_CPU, id=str(ATEN_CPU)),
        pytest.param(target, id=str(target), marks=marks),
    ]
    return pytest.mark.parametrize("target", params)


def train(model, words: torch.Tensor, layers: Sequence) -> list[float]:
    """The losses of four steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        loss = model.loss(words, layers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each_kernel(SM80)
def test_trains(target: Target, seed: int) -> None:
    """No call leaves the backend: a kernel has the forward and the backward of each layer."""
    words, losses = random_words(target, seed, 2, 70), {}
    for name in ("ours", "sdpa"):
        model, tolerance = built(tiny(), target, words.size(1), seed)
        with use(target):
            losses[name] = train(model, words, attends(name, tiny(), words))
    assert losses["sdpa"][-1] < losses["sdpa"][0] - 10 * tolerance
    assert losses["ours"] == pytest.approx(losses["sdpa"], abs=tolerance)


def test_sdpa_sees_what_the_window_leaves(seed: int) -> None:
    """What the others are compared with is masked itself: by the window, and by nothing else."""
    words = random_words(ATEN_CPU, seed, 1, 40)
    model, tolerance = built(tiny(), ATEN_CPU, 40, seed)
    logits = {w: model(words, attends("sdpa", tiny(w), words)) for w in (17, 40, 41)}
    torch.testing.assert_close(logits[40], logits[41])
    difference = (logits[17] - logits[40]).abs().amax((0, 2))
    assert difference[:17].max() <= tolerance < difference[17:].min()


@each_kernel(DECODE_CUDA)
@torch.no_grad()
def test_generates(target: Target, seed: int) -> None:
    """A prompt and then word after word against caches: the logits of the whole sequence."""
    from benchmarks import race_generate

    length, prompt = 40, 7
    model, tolerance = built(tiny(), target, length, seed)
    words, seen, logits = random_words(target, seed, 1, prompt), 0, []
    caches = [
        torch.zeros(2, 1, length, x.heads_kv, x.head_dim).to(model.embed.weight)
        for x in tiny().layers
    ]
    with use(target):
        while words.size(1) < length:
            layers = zip(tiny().cases(1, words.size(1) - seen), caches, strict=True)
            attend = [race_generate.ours(case, cache, seen) for case, cache in layers]
            logits.append(model(words[:, seen:], attend, seen))
            seen = words.size(1)
            words = torch.cat([words, logits[-1][:, -1:].argmax(-1)], dim=1)
    whole = model(words[:, :-1], attends("sdpa", tiny(), words[:, :-1]))
    worst = (torch.cat(logits, dim=1) - whole).abs().max()
    assert worst <= tolerance * whole.abs().max()


@pytest.mark.gpu
def test_no_layer_falls_to_aten(
    seed: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The library's own choice for each call of the race's model, by its log, which has no
    backward passes: can_use says which backend those have."""
    from benchmarks import backends, race_generate
    from benchmarks.small_models import MODELS

    monkeypatch.setattr(_log, "ENABLED", True)
    monkeypatch.setattr(_log, "_seen", set())
    device, parts = torch.device("cuda"), MODELS["gemma4"]
    words = random_words(SM80, seed, 1, 600)
    model, _ = built(parts, SM80, 600, seed)
    train(model, words, attends("ours", parts, words))
    case = race_generate.GenerationCase("gemma4", batch=2, prompt=600)
    generation = race_generate.Generation(case, device, torch.bfloat16)
    caches = generation.caches()
    generation.call(caches, "ours", 0, 600)()
    generation.call(caches, "ours", 600, 601)()

    lines = capfd.readouterr().err.splitlines()
    calls = [json.loads(x.removeprefix(_log.PREFIX)) for x in lines if x.startswith(_log.PREFIX)]
    made = [(c["op"], c["arguments"]["q"]["shape"][1::2]) for c in calls]
    wanted = [("fwd", 600), ("kvcache", 600), ("kvcache", 1)]
    assert sorted(made) == sorted((op, [n, d]) for op, n in wanted for d in (256, 512))
    assert all(c["backend"] != "aten" for c in calls), [(c["op"], c["reasons"]) for c in calls]
    for layer in parts.cases(1, 600):
        x = backends.make_inputs(layer, torch.bfloat16, device)
        window = (-1 if layer.window is None else layer.window, 0)
        served = flash_attn.can_use(x.q, x.k, x.v, op="bwd", causal=True, window_size=window)
        assert served.backend != "aten", str(served)
