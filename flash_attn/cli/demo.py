"""Trains a small GPT with flash_attn beside the same one with naive attention, then generates."""

import argparse
import contextlib
import sys
import time
from dataclasses import astuple, dataclass

import torch

from . import peers
from .common import (
    add_device_arguments,
    check_backend,
    forced_backend,
    human_bytes,
    optional_import,
    pick_device,
    positive_int,
    table,
    usual_dtype,
)
from .generate import Generated, generate
from .measure import peak_memory, synchronize
from .model import SIZES, ByteGPT, Size
from .text import read_text

HELP = "train a small GPT on real text beside naive attention, then generate with a KV cache"

SEED = 1
STEPS = {"cpu": 200, "cuda": 300}
GENERATED = 160  # bytes
# Training is chaotic: it doubles a difference in rounding every few steps, whatever computed it,
# and in bf16 two runs part. What must agree is what either attention makes of the same weights.
COMPARE_EVERY = 20  # steps


@dataclass(frozen=True)
class Difference:
    """|loss - exact| / |exact|, and the same with norms for the gradient of all parameters. Exact
    is naive attention, and all else, in fp32."""

    loss: float
    gradient: float


# What ours may add to twice the difference that rounding makes for naive attention. In bf16
# rounding is most of it. On a CPU all is fp32: 8e-8 was seen of the loss, 2e-7 of the gradient.
SLACK = Difference(loss=1e-5, gradient=1e-3)
# |logits - recomputed| in generation, of the largest elements. 8e-7 was seen in fp32, 8e-3 in bf16.
LOGITS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        metavar="FILE_OR_FOLDER",
        help="what to learn (default: the prose of Python's own help topics)",
    )
    parser.add_argument(
        "--steps", type=positive_int, help="training steps (default: 200 on a CPU, 300 on a GPU)"
    )
    add_device_arguments(parser)


class Trainer:
    """One model with its optimizer; measures its own steps."""

    def __init__(self, name: str, attention: peers.Attention, size: Size, device: torch.device):
        self.name, self.attention, self.device = name, attention, device
        self.dtype = usual_dtype(device)
        self.model = ByteGPT(size, attention, SEED).to(device)
        # Adam divides by the size of past gradients: with its default eps, 1e-8, gradients that are
        # all rounding become full steps and equal runs drift apart a hundred times faster.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-5
        )
        # Adam's first steps are as large as the learning rate allows: start low.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20)
        )
        self.tokens, self.seconds, self.peak, self.loss = 0, 0.0, None, 0.0

    def autocast(self) -> contextlib.AbstractContextManager:
        """Matrix products and attention in bf16 on a GPU; all fp32 on a CPU."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16
        )

    def _backward(self, tokens: torch.Tensor, exact: bool = False) -> float:
        with contextlib.nullcontext() if exact else self.autocast():
            loss = self.model.loss(tokens)
        loss.backward()
        return loss.item()

    def gradient(
        self, tokens: torch.Tensor, attention: peers.Attention, exact: bool = False
    ) -> tuple[float, torch.Tensor]:
        """The loss of these weights with that attention, and its gradient as one vector. exact: all
        in fp32."""
        self.model.attend_with(attention)
        loss = self._backward(tokens, exact)
        self.model.attend_with(self.attention)
        gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.optimizer.zero_grad(set_to_none=True)
        return loss, gradient

    def _step(self, tokens: torch.Tensor) -> None:
        self.loss = self._backward(tokens)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()

    def step(self, index: int, tokens: torch.Tensor) -> None:
        """The first step warms up, the second is measured for memory, the others for time."""
        if index == 0:
            self._step(tokens)
        elif index == 1:
            self.peak = peak_memory(lambda: self._step(tokens), self.device)
        else:
            synchronize(self.device)
            start = time.perf_counter()
            self._step(tokens)
            synchronize(self.device)
            self.seconds += time.perf_counter() - start
            self.tokens += tokens.shape[0] * (tokens.shape[1] - 1)

    def row(self) -> list[str | None]:
        speed = f"{self.tokens / self.seconds:,.0f}" if self.seconds else None
        return [self.name, f"{self.loss:.4f}", speed, human_bytes(self.peak)]


def batches(text: torch.Tensor, size: Size, device: torch.device):
    """Random windows (batch, context + 1) of the text, the same for every run."""
    generator = torch.Generator().manual_seed(SEED)
    offsets = torch.arange(size.context + 1)
    while True:
        starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
        yield text[starts + offsets].long().to(device)


def compare(ours: Trainer, naive: Trainer, tokens: torch.Tensor) -> tuple[Difference, Difference]:
    """How far ours and naive attention are from the exact loss and gradient of our weights."""
    tokens = tokens[: max(1, len(tokens) // 4)]  # naive scores in fp32 are the largest tensors here
    exact_loss, exact = ours.gradient(tokens, naive.attention, exact=True)

    def difference(attention: peers.Attention) -> Difference:
        loss, gradient = ours.gradient(tokens, attention)
        distance = torch.linalg.vector_norm(gradient - exact) / torch.linalg.vector_norm(exact)
        return Difference(abs(loss - exact_loss) / abs(exact_loss), distance.item())

    return difference(ours.attention), difference(naive.attention)


def largest(found: list[Difference]) -> Difference:
    loss, gradient = torch.tensor([astuple(d) for d in found]).amax(0).tolist()  # NaN stays NaN
    return Difference(loss, gradient)


def train(ours: Trainer, naive: Trainer, steps: int, feed) -> tuple[Difference, Difference]:
    """Trains both on the same batches; the largest differences that compare() found, of ours and of
    naive attention."""
    tqdm = optional_import("tqdm", "the demo's progress bar").tqdm
    found: list[tuple[Difference, Difference]] = []
    with tqdm(total=steps, unit="step") as bar:
        for index in range(steps):
            tokens = next(feed)
            if index % COMPARE_EVERY == 0 or index == steps - 1:
                found.append(compare(ours, naive, tokens))
            ours.step(index, tokens)
            naive.step(index, tokens)
            bar.set_postfix(ours=f"{ours.loss:.4f}", naive=f"{naive.loss:.4f}", refresh=False)
            bar.update()
            if index % 10 == 0 or index == steps - 1:
                bar.write(
                    f"step {index + 1:4d}   loss: ours {ours.loss:.5f}   naive {naive.loss:.5f}"
                    f"   difference {ours.loss - naive.loss:+.1e}"
                )
    of_ours, of_naive = zip(*found, strict=True)
    return largest(of_ours), largest(of_naive)


def continue_text(trainer: Trainer, text: torch.Tensor, backend: str | None) -> Generated:
    """Continues the middle of the text. Decode has backends of its own: only aten serves both."""
    middle = len(text) // 2
    prompt = text[middle : middle + trainer.model.size.context // 8].to(trainer.device)
    trainer.model.eval()
    with trainer.autocast(), forced_backend(backend if backend == "aten" else None):
        return generate(trainer.model, prompt, GENERATED, trainer.dtype, SEED)


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    size = SIZES[device.type]
    text = read_text(args.text, at_least=2 * (size.context + 1))
    check_backend(args.backend, device, size.head_dim)
    ours = Trainer("flash_attn", peers.ours(args.backend, causal=True), size, device)
    naive = Trainer("naive", peers.naive(causal=True), size, device)
    parameters = sum(p.numel() for p in ours.model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {size.layers} layers, {size.heads} heads of "
        f"{size.head_dim}; {len(text):,} bytes of text, {size.batch} x {size.context} a step; "
        f"{device}, {ours.dtype}"
    )
    rounding, expected = train(
        ours, naive, args.steps or STEPS[device.type], batches(text, size, device)
    )
    rows = [ours.row(), naive.row()]
    print(table(["attention", "last loss", "tokens/s", "peak memory of a step"], rows))
    allowed = Difference(
        loss=2 * expected.loss + SLACK.loss, gradient=2 * expected.gradient + SLACK.gradient
    )
    print(
        f"distance from fp32 naive attention on the same weights, largest of every {COMPARE_EVERY} "
        f"steps: loss {rounding.loss:.1e} (naive {expected.loss:.1e}, allowed {allowed.loss:.1e}), "
        f"gradient {rounding.gradient:.1e} (naive {expected.gradient:.1e}, allowed "
        f"{allowed.gradient:.1e})"
    )

    result = continue_text(ours, text, args.backend)
    print(f"\n{result.prompt.decode(errors='replace')}|{result.text.decode(errors='replace')}\n")
    logits_tolerance = LOGITS_TOLERANCE[ours.dtype]
    print(
        f"after '|': flash_decode_func and a KV cache. Full recomputation chose {result.agreed} of "
        f"{GENERATED} bytes alike; logits differ by {result.difference:.1e} (tolerance "
        f"{logits_tolerance:.0e})"
    )
    right = (
        rounding.loss <= allowed.loss
        and rounding.gradient <= allowed.gradient
        and result.difference <= logits_tolerance
    )
    if not right:  # NaN too
        print(
            "flash_attn: demo: the differences are larger than rounding explains", file=sys.stderr
        )
        return 1
    return 0
