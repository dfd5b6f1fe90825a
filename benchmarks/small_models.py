"""Small models in plain torch, whose attention is whatever function a benchmark gives each layer.

They have the heads, windows and score terms of the models that they are named after, and else the
parts that all have today.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.backends import Attend
from benchmarks.shapes import Case

HIDDEN, VOCABULARY = 1024, 8192


@dataclass(frozen=True)
class Heads:
    """The attention of a layer."""

    head_dim: int
    heads: int
    heads_kv: int
    window: int | None = None  # keys that a query sees, its own among them; None: no such limit


@dataclass(frozen=True)
class Model:
    """What its layers attend with, and the contestants that can compute it."""

    layers: tuple[Heads, ...]
    dropout: float = 0.0
    softcap: float = 0.0
    normed: bool = False  # each head of the queries and of the keys, in place of their size
    peers: tuple[str, ...] = ("sdpa", "cudnn")

    def cases(self, batch: int, seqlen: int) -> list[Case]:
        """The attention call of each layer."""
        return [
            Case(
                *(batch, seqlen, layer.heads, layer.head_dim, True),
                heads_kv=layer.heads_kv,
                window=None if layer.window is None else layer.window - 1,
                dropout=self.dropout,
                softcap=self.softcap,
            )
            for layer in self.layers
        ]


MODELS = {
    "llama128": Model(4 * (Heads(128, 8, 2),)),
    "llama64": Model(4 * (Heads(64, 16, 4),)),
    "gpt2": Model(4 * (Heads(64, 16, 16),), dropout=0.1),
    "gemma2": Model(4 * (Heads(128, 8, 4),), softcap=50.0, peers=("flex",)),
    # Gemma 4's scores are not divided by √d, which the weights of its norms make up for: ours are
    # divided, and those weights begin with 1.
    "gemma4": Model(
        (*5 * (Heads(256, 8, 4, window=256),), Heads(512, 8, 2)),
        normed=True,
        peers=("sdpa", "flex"),
    ),
}


class Layer(nn.Module):
    """RMSNorm, grouped-query attention with rotated positions, a gated feed-forward part."""

    def __init__(self, heads: Heads, normed: bool, seqlen: int, hidden: int) -> None:
        super().__init__()
        d, inner = heads.head_dim, 11 * hidden // 4
        self.sizes = [heads.heads, heads.heads_kv, heads.heads_kv]
        self.qkv = nn.Linear(hidden, sum(self.sizes) * d, bias=False)
        self.out = nn.Linear(heads.heads * d, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qk_norms = nn.ModuleList(nn.RMSNorm(d) if normed else nn.Identity() for _ in range(2))
        angles = torch.outer(torch.arange(seqlen), 10000.0 ** (-torch.arange(0, d, 2) / d))
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])

    def forward(self, x: torch.Tensor, attend: Attend, first: int) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.sizes), -1))
        *qk, v = qkv.split(self.sizes, dim=2)
        q, k = (
            self.rotated(norm(heads), first) for norm, heads in zip(self.qk_norms, qk, strict=True)
        )
        x = x + self.out(attend(q, k, v).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def rotated(self, x: torch.Tensor, first: int) -> torch.Tensor:
        cos, sin = (table[first : first + x.size(1)] for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Transformer(nn.Module):
    """seqlen: of the longest sequence."""

    def __init__(
        self, model: Model, seqlen: int, hidden: int = HIDDEN, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            Layer(heads, model.normed, seqlen, hidden) for heads in model.layers
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(
        self, tokens: torch.Tensor, attends: Sequence[Attend], first: int = 0
    ) -> torch.Tensor:
        """The logits of tokens that begin at this position. attends: of each layer."""
        x = self.embed(tokens)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend, first)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, attends: Sequence[Attend]) -> torch.Tensor:
        """Of each token behind those before it."""
        logits = self(tokens, attends)
        return F.cross_entropy(logits.flatten(0, 1)[:-1].float(), tokens.flatten()[1:])
