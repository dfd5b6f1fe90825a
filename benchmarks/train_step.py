"""A training step of small models in plain torch: what does the attention inside change?

    python -m benchmarks.train_step [--models llama128,llama64,gpt2,gemma2] [--tokens 4096,16384]
    [--out FILE.json]

Forward, backward and AdamW of four layers, hidden 1024, bf16, 16384 tokens in sequences of these
lengths. The same weights and tokens go through each attention: ours, SDPA by its own choice of
backend, SDPA held to cuDNN, FlexAttention where a model has a softcap. Beside the step, the
attention call of one layer is timed alone, forward and backward: `gain` is the time that the step
saves, over what the attention calls of all layers save alone. Contestants take turns in rounds, of
which the mean counts: a step is mostly the same work, so that the difference is small beside drift.
Everybody begins equally often, and every other round goes backwards, so that nobody always comes
behind the one that heats the chip most.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import backends, results
from benchmarks.contest import progress
from benchmarks.shapes import Case
from benchmarks.timing import QUICK, Recipe, Timer

TOKENS, LAYERS, HIDDEN, VOCABULARY = 16384, 4, 1024, 8192
ROUNDS = 6  # all orders of three contestants


@dataclass(frozen=True)
class Model:
    """The attention of a model, and the contestants that can compute it."""

    head_dim: int
    heads_kv: int
    dropout: float = 0.0
    softcap: float = 0.0
    peers: tuple[str, ...] = ("sdpa", "cudnn")

    def case(self, seqlen: int) -> Case:
        return Case(
            *(TOKENS // seqlen, seqlen, HIDDEN // self.head_dim, self.head_dim, True),
            heads_kv=self.heads_kv,
            dropout=self.dropout,
            softcap=self.softcap,
        )


MODELS = {
    "llama128": Model(128, 2),
    "llama64": Model(64, 4),
    "gpt2": Model(64, 16, dropout=0.1),
    "gemma2": Model(128, 4, softcap=50.0, peers=("flex",)),
}


class Layer(nn.Module):
    """RMSNorm, grouped-query attention with rotated positions, a gated feed-forward part."""

    def __init__(self, case: Case, attend: backends.Attend):
        super().__init__()
        self.attend, self.sizes = attend, [case.heads, case.kv_heads, case.kv_heads]
        self.qkv = nn.Linear(HIDDEN, sum(self.sizes) * case.head_dim, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * 2816, bias=False)
        self.down = nn.Linear(2816, HIDDEN, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.sizes), -1))
        q, k, v = qkv.split(self.sizes, dim=2)
        x = x + self.out(self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Transformer(nn.Module):
    def __init__(self, case: Case, attend: backends.Attend):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(case, attend) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, case.head_dim, 2) / case.head_dim)
        angles = torch.outer(torch.arange(case.seqlen), frequencies)[:, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1)[:-1].float(), tokens.flatten()[1:])


def training_step(case: Case, attend: backends.Attend, device: torch.device) -> Callable:
    """One step, with weights and tokens that do not depend on the attention."""
    torch.manual_seed(0)
    model = Transformer(case, attend).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (case.batch, case.seqlen), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        return loss

    return step


def attention_alone(attend: backends.Attend, inputs: backends.Inputs) -> Callable:
    """Forward and backward of one layer's attention."""

    def call() -> tuple[torch.Tensor, ...]:
        out = attend(inputs.q, inputs.k, inputs.v)
        return torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)

    return call


def orders(names: list[str]) -> Iterator[list[str]]:
    """Who comes after whom, for each round."""
    for turn in range(ROUNDS):
        first = turn // 2 % len(names)
        order = names[first:] + names[:first]
        yield order[::-1] if turn % 2 else order


def mean_times(calls: dict[str, Callable], timer: Timer) -> dict[str, float]:
    """ms a call."""
    rounds = [{name: timer(calls[name]) * 1e3 for name in order} for order in orders(list(calls))]
    return {name: statistics.mean(times[name] for times in rounds) for name in calls}


def compare(name: str, seqlen: int, timer: Timer) -> list[dict]:
    model, device = MODELS[name], timer.device
    case = model.case(seqlen)
    inputs = backends.make_inputs(case, torch.bfloat16, device)
    names = ("ours", *model.peers)
    attends = {name: backends.attention(name, case, inputs) for name in names}
    calls = {name: training_step(case, attend, device) for name, attend in attends.items()}
    losses = {name: step().item() for name, step in calls.items()}
    steps = mean_times(calls, timer)
    alone = mean_times({n: attention_alone(attend, inputs) for n, attend in attends.items()}, timer)
    shape = {"model": name, "seqlen": seqlen, "tokens": TOKENS}
    ratio = results.ratios(steps, "ours", model.peers, "less")
    gains = {
        peer: (steps[peer] - steps["ours"]) / (LAYERS * (alone[peer] - alone["ours"]))
        for peer in model.peers
    }
    records = [
        results.record("step", shape, "ms", steps, ratio),
        results.record(
            "step.attention", shape, "ms", alone, results.ratios(alone, "ours", model.peers, "less")
        ),
        results.record("step.gain", shape, "of predicted", gains),
        results.record("step.loss", shape, "nats", losses),
    ]
    for r in records:
        progress(r)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="4096,16384", help="lengths of a sequence")
    parser.add_argument("--quick", action="store_true", help="short phases: does it run?")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    names = args.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(
            f"--models: expected some of {','.join(MODELS)}, got {','.join(sorted(unknown))}"
        )
    device, recipe = torch.device("cuda"), QUICK if args.quick else Recipe()
    timer = Timer(device, recipe)
    records = [results.run_record(device, recipe.describe(device))]
    for name in names:
        for seqlen in map(int, args.tokens.split(",")):
            records += compare(name, seqlen, timer)
            results.write(args.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
