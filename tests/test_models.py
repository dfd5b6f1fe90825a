"""A model whose layers have head dims of 256 behind a window and of 512 without one trains and
generates as it does with attention in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import ATEN_CPU, DECODE_CUDA, SM80, Target, use
from torch import Tensor, nn
from torch.nn import functional

import flash_attn

WIDTH, WORDS, WINDOW = 48, 31, 17
LAYERS = ((256, WINDOW), (512, None), (256, WINDOW))  # head dim, keys that a query sees
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def window_size(keys: int | None) -> tuple[int, int]:
    return (-1, -1) if keys is None else (keys - 1, 0)


class Layer(nn.Module):
    """Two query heads share a kv head."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(WIDTH, 4 * head_dim, bias=False)
        self.out = nn.Linear(2 * head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:
        normed = functional.layer_norm(x, (WIDTH,))
        heads = self.qkv(normed).unflatten(-1, (4, self.head_dim))
        return x + self.out(attend(*heads.split([2, 1, 1], dim=2)).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(head_dim) for head_dim, _ in LAYERS)

    def forward(self, words: Tensor, attend: Attend) -> Tensor:
        """The logits. attend is told which layer asks."""
        x = self.words(words)
        for number, layer in enumerate(self.layers):
            x = layer(x, lambda *qkv, number=number: attend(number, *qkv))
        return functional.layer_norm(x, (WIDTH,)) @ self.words.weight.T


def naive(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    window = LAYERS[number][1]
    rows = torch.arange(q.size(1), device=q.device)
    distance = rows[:, None] - rows
    seen = (distance >= 0) & (distance < (window or q.size(1)))
    queries, keys, values = (x.transpose(1, 2).float() for x in (q, k, v))
    scores = (queries @ keys.mT * q.size(-1) ** -0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2).to(q.dtype)


def flash(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    window = window_size(LAYERS[number][1])
    return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window)


def model_for(target: Target, seed: int) -> tuple[Model, float]:
    """It, and what its numbers may be off by."""
    torch.manual_seed(seed)
    kernels = target.backend != "aten"
    dtype = torch.bfloat16 if kernels else torch.float32
    return Model().to(target.device, dtype), 4e-2 if kernels else 1e-4


def each_kernel(target: Target):
    marks = [*target.marks, pytest.mark.real_gpu]
    params = [
        pytest.param(ATEN_CPU, id=str(ATEN_CPU)),
        pytest.param(target, id=str(target), marks=marks),
    ]
    return pytest.mark.parametrize("target", params)


@each_kernel(SM80)
def test_trains(target: Target, seed: int) -> None:
    """No call leaves the backend: a kernel has the forward and the backward of each layer."""
    losses = {}
    words = torch.randint(WORDS, (2, 70), generator=torch.Generator().manual_seed(seed))
    words = words.to(target.device)
    for name, attend in (("flash", flash), ("naive", naive)):
        model, tolerance = model_for(target, seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses[name] = []
        with use(target):
            for _ in range(4):
                logits = model(words[:, :-1], attend)
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].ravel())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[name].append(loss.item())
    assert losses["naive"][-1] < losses["naive"][0] - 10 * tolerance
    assert losses["flash"] == pytest.approx(losses["naive"], abs=tolerance)


@each_kernel(DECODE_CUDA)
@torch.no_grad()
def test_generates(target: Target, seed: int) -> None:
    """A prompt and then word after word against caches: the logits of the whole sequence."""
    model, tolerance = model_for(target, seed)
    length, prompt = 40, 7
    kind = dict(device=target.device, dtype=model.words.weight.dtype)
    caches = [torch.zeros(2, 1, length, 1, head_dim, **kind) for head_dim, _ in LAYERS]
    words = torch.randint(WORDS, (1, prompt), generator=torch.Generator().manual_seed(seed))
    words, seen, logits = words.to(target.device), 0, []

    def cached(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = torch.full((1,), seen, dtype=torch.int32, device=target.device)
        return flash_attn.flash_attn_with_kvcache(
            *(q, *caches[number], k, v),
            cache_seqlens=lengths,
            causal=True,
            window_size=window_size(LAYERS[number][1]),
        )

    with use(target):
        while words.size(1) < length:
            logits.append(model(words[:, seen:], cached))
            seen = words.size(1)
            words = torch.cat([words, logits[-1][:, -1:].argmax(-1)], dim=1)
    whole = model(words[:, :-1], naive)
    worst = (torch.cat(logits, dim=1) - whole).abs().max()
    assert worst <= tolerance * whole.abs().max()
