"""Trains a small GPT on the source code of torch.nn.functional, then writes some more of it.

python examples/train_gpt.py [--steps 100]
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from flash_attn import flash_attn_qkvpacked_func

WIDTH, HEADS, LAYERS, CONTEXT = 96, 4, 2, 96
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        x = x + self.out(flash_attn_qkvpacked_func(qkv, causal=True).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.position(positions)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(F.__file__).read_bytes()), dtype=torch.uint8).long()
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (8, 1))
        batch = text[starts + torch.arange(CONTEXT + 1)].to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)

    tokens = torch.tensor([list(b"def ")], device=DEVICE)
    with torch.inference_mode():
        for _ in range(80):
            logits = model(tokens[:, -CONTEXT:])[:, -1].float()
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    print(bytes(tokens[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
