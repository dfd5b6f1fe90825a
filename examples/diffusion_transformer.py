"""Trains a diffusion transformer on pictures of discs, then draws some, as text.

    python examples/diffusion_transformer.py [STEPS]

Flow matching (Lipman et al. 2023), blocks with adaptive norms (Peebles and Xie 2023).
"""

import sys

import torch
from torch import nn

from flash_attn import flash_attn_qkvpacked_func

SIZE, PATCH, WIDTH, HEADS, LAYERS = 12, 2, 64, 4, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time).chunk(6, -1)
        qkv = self.qkv(self.norm(x) * (1 + scale1) + shift1).unflatten(-1, (3, HEADS, -1))
        x = x + gate1 * self.out(flash_attn_qkvpacked_func(qkv).flatten(2))
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, WIDTH)
        self.position = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) / WIDTH**0.5)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.velocity = nn.Linear(WIDTH, PATCH * PATCH)

    def forward(self, pictures: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pixel_unshuffle(pictures, PATCH).flatten(2).mT
        x, time = self.patches(x) + self.position, self.time(time[:, None, None])
        for block in self.blocks:
            x = block(x, time)
        x = self.velocity(x).mT.unflatten(2, (SIZE // PATCH, -1))
        return nn.functional.pixel_shuffle(x, PATCH)


def discs(count: int) -> torch.Tensor:
    """(count, 1, SIZE, SIZE): 1 inside a disc somewhere, -1 outside."""
    y, x = 3 + (SIZE - 7) * torch.rand(2, count, 1, 1, 1, device=DEVICE)
    row = torch.arange(SIZE, device=DEVICE)
    return (3 - torch.hypot(row[:, None] - y, row - x)).clamp(-1, 1)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    torch.manual_seed(0)
    model = DiffusionTransformer().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        pictures, time = discs(32), torch.rand(32, device=DEVICE)
        noise, t = torch.randn_like(pictures), time[:, None, None, None]
        loss = (model(noise + t * (pictures - noise), time) - (pictures - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)

    pictures = torch.randn(4, 1, SIZE, SIZE, device=DEVICE)
    with torch.inference_mode():
        for i in range(20):
            pictures += model(pictures, torch.full((4,), i / 20, device=DEVICE)) / 20
    for rows in zip(*(pictures[:, 0] > 0).tolist(), strict=True):
        print("   ".join("".join(".#"[pixel] for pixel in row) for row in rows))
