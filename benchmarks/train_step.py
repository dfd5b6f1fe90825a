"""A training step of small models in plain torch: what does the attention inside change?

    python -m benchmarks.train_step [--models llama128,llama64,gpt2,gemma2,gemma4]
    [--tokens 4096,16384] [--out FILE.json]

Forward, backward and AdamW of the models of small_models.py: four layers, or six of which the last
has no window and wider heads; hidden 1024, bf16, 16384 tokens in sequences of these lengths. The
same weights and tokens go through each attention: ours, SDPA by its own choice of backend, SDPA
held to cuDNN, FlexAttention where a model has a softcap or a window. Beside the step, the attention
call of each kind of layer is timed alone, forward and backward: `gain` is the time that the step
saves, over what the attention calls of all layers save alone. Contestants take turns in rounds, of
which the mean counts: a step is mostly the same work, so that the difference is small beside drift.
Everybody begins equally often, and every other round goes backwards, so that nobody always comes
behind the one that heats the chip most.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import backends, results
from benchmarks.contest import progress
from benchmarks.shapes import Case
from benchmarks.small_models import MODELS, VOCABULARY, Model, Transformer
from benchmarks.timing import QUICK, Recipe, Timer

Attends = dict[Case, backends.Attend]  # of each kind of layer
TOKENS = 16384
ROUNDS = 6  # all orders of three contestants


def training_step(
    model: Model, tokens: torch.Tensor, attends: Sequence[backends.Attend]
) -> Callable:
    """One step, with weights that do not depend on the attention."""
    torch.manual_seed(0)
    built = Transformer(model, tokens.size(1)).to(tokens.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = built.loss(tokens, attends)
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


def first_steps(
    name: str, tokens: torch.Tensor, inputs: dict[Case, backends.Inputs]
) -> tuple[dict[str, Attends], dict[str, Callable], dict[str, float | None]]:
    """What each contestant attends with, its step, and the loss of the first one: None, with a line
    that says why, where a peer cannot."""
    model = MODELS[name]
    attends, steps, losses = {}, {}, {}
    for contestant in ("ours", *model.peers):
        losses[contestant] = None
        try:
            of = {case: backends.attention(contestant, case, x) for case, x in inputs.items()}
            step = training_step(model, tokens, [of[case] for case in model.cases(*tokens.shape)])
            losses[contestant] = step().item()
        except Exception as error:  # of any kind: peers compile on the way
            if contestant == "ours":
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(f"cannot: {name} {contestant}: {reason}", file=sys.stderr)
            continue
        attends[contestant], steps[contestant] = of, step
    return attends, steps, losses


def compare(name: str, seqlen: int, timer: Timer) -> list[dict]:
    layers = MODELS[name].cases(TOKENS // seqlen, seqlen)
    inputs = {
        case: backends.make_inputs(case, torch.bfloat16, timer.device)
        for case in dict.fromkeys(layers)
    }
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (TOKENS // seqlen, seqlen), device=timer.device)
    attends, calls, losses = first_steps(name, tokens, inputs)
    peers = [contestant for contestant in calls if contestant != "ours"]
    steps = mean_times(calls, timer)
    shape = {"model": name, "seqlen": seqlen, "tokens": TOKENS}
    ratio = results.ratios(steps, "ours", peers, "less")
    records = [results.record("step", shape, "ms", dict.fromkeys(losses) | steps, ratio)]
    alone = {}
    for case, x in inputs.items():
        of_case = {n: attention_alone(of[case], x) for n, of in attends.items()}
        alone[case] = mean_times(of_case, timer)
        ratio = results.ratios(alone[case], "ours", peers, "less")
        of_layer = shape | case.shape()
        records.append(results.record("step.attention", of_layer, "ms", alone[case], ratio))
    gains = {
        peer: (steps[peer] - steps["ours"])
        / sum(alone[case][peer] - alone[case]["ours"] for case in layers)
        for peer in peers
    }
    records.append(results.record("step.gain", shape, "of predicted", gains))
    records.append(results.record("step.loss", shape, "nats", losses))
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
