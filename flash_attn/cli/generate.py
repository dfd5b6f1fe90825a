"""Text from a KV cache, each token checked against recomputing the whole sequence."""

from dataclasses import dataclass

import torch

from .model import ByteGPT, KVCache


@dataclass(frozen=True)
class Generated:
    prompt: bytes
    text: bytes
    agreed: int  # tokens that full recomputation chose as well
    difference: float  # largest between the logits of the two ways, relative to the largest logit


@torch.no_grad()
def generate(
    model: ByteGPT, prompt: torch.Tensor, count: int, dtype: torch.dtype, seed: int
) -> Generated:
    """``count`` bytes after ``prompt`` (length,), sampled at temperature 0.7.

    Each byte is argmax(logits / 0.7 + Gumbel noise), a draw from the softmax; both ways get the
    same noise, so that they choose the same byte unless rounding decides a tie; ``difference``
    bounds how close a tie must have been.
    """
    device = prompt.device
    noise = torch.Generator(device="cpu").manual_seed(seed)
    cache = KVCache(model.size, 1, len(prompt) + count, device, dtype)
    tokens = prompt.long()[None]
    fresh = tokens
    agreed, difference = 0, 0.0
    for _ in range(count):
        cached = model(fresh, cache)[0, -1]
        full = model(tokens)[0, -1]
        gumbel = -torch.empty(cached.shape).exponential_(generator=noise).log().to(device)
        chosen = (cached / 0.7 + gumbel).argmax()
        agreed += int(chosen == (full / 0.7 + gumbel).argmax())
        error = (cached - full).abs().max() / full.abs().max()
        difference = max(difference, error.item())
        fresh = chosen.view(1, 1)
        tokens = torch.cat((tokens, fresh), dim=1)
    generated = bytes(tokens[0, len(prompt) :].tolist())
    return Generated(bytes(prompt.tolist()), generated, agreed, difference)
