"""A small byte-level GPT of torch.nn modules; how it attends is given to it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .peers import Attention

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_dim: int
    context: int  # tokens a sequence
    batch: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


# cpu: two models train in about a minute on two cores; seqlen 512 is long enough for the naive
# scores to weigh.
SIZES = {
    "cpu": Size(layers=3, heads=4, head_dim=32, context=512, batch=2),
    "cuda": Size(layers=8, heads=8, head_dim=64, context=1024, batch=16),
}


class KVCache:
    """Keys and values of every layer, (batch, capacity, heads, head_dim), and their length."""

    def __init__(
        self, size: Size, batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ):
        shape = (batch, capacity, size.heads, size.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(size.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(size.layers)]
        self.length = 0
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        end = self.length + k.shape[1]
        self.keys[layer][:, self.length : end] = k
        self.values[layer][:, self.length : end] = v
        self.seqlens.fill_(end)


class SelfAttention(nn.Module):
    def __init__(self, size: Size, layer: int, attention: Attention):
        super().__init__()
        self.size, self.layer, self.attention = size, layer, attention
        # No biases: a key bias shifts all scores of a row alike, its gradient is rounding noise
        # that Adam would amplify.
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(x).view(batch, seqlen, 3, self.size.heads, self.size.head_dim)
        q, k, v = rotate(qkv[:, :, 0], rotary), rotate(qkv[:, :, 1], rotary), qkv[:, :, 2]
        if cache is None:
            out = self.attention(q, k, v)
        else:
            from flash_attn import flash_decode_func

            cache.append(self.layer, k, v)
            out = flash_decode_func(
                q, cache.keys[self.layer], cache.values[self.layer], cache.seqlens
            )
        return self.out(out.reshape(batch, seqlen, self.size.width))


class Block(nn.Module):
    def __init__(self, size: Size, layer: int, attention: Attention):
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = SelfAttention(size, layer, attention)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width, bias=False),
        )

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, cache)
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(nn.Module):
    """Bytes (batch, seqlen) int64 -> logits (batch, seqlen, 256) fp32."""

    def __init__(self, size: Size, attention: Attention, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size, i, attention) for i in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2: the layers that end a residual branch start smaller, by the number of
                # branches.
                ends_branch = name.endswith(("attention.out.weight", "mlp.2.weight"))
                scale = (2 * size.layers) ** -0.5 if ends_branch else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        start = 0 if cache is None else cache.length
        rotary = rotary_angles(start, tokens.shape[1], self.size.head_dim, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.head(self.norm(x)).float()

    def attend_with(self, attention: Attention) -> None:
        for block in self.blocks:
            block.attention.attention = attention

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy (nats a byte) of predicting each next byte of (batch, context + 1)."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rotary_angles(start: int, count: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """RoPE: position · 10000^(-2i / head_dim), (count, 1, head_dim / 2), from position start."""
    frequency = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    position = torch.arange(start, start + count, device=device)
    return (position[:, None] * frequency)[:, None, :]


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[i], x[i + head_dim / 2]) of (batch, seqlen, heads, head_dim)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
