"""How fast do transformers' models train and generate on this library, beside sdpa and eager?

    python -m benchmarks.models [--models llama,gpt2] [--out FILE.json]

Llama, Mistral (window), Gemma 2 (softcap, window), Gemma 4 (five layers with a window at a head dim
of 256, then one without at 512), GPT-2 with dropout, BERT: a few layers of the real models' heads,
random weights, bf16. Each takes a training step (forward, backward, AdamW) of whole sequences and,
but for BERT, generates from a prompt; with each of

    eager                transformers' own, which stores the scores
    sdpa                 torch's scaled_dot_product_attention; of Gemma 2 without its softcap
    flash_attention_2    transformers' own calls of the package flash_attn: this one
    exact_attention      flash_attn.integrations.transformers

Steps take turns and are settled as benchmarks/timing.py says, in shorter phases; the fastest of two
counts. Generations take turns, too, to and fro; the median of nine counts. Memory is the
allocator's peak above the model and its optimiser. The error is that of the logits, rms against
eager attention in fp32 with the same weights. On a CPU the models are tiny, in fp32, and
flash_attention_2, which transformers refuses there, is left out.

Needs transformers.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from benchmarks import results
from benchmarks.timing import Recipe, Timer
from flash_attn.cli.measure import synchronize
from flash_attn.integrations.transformers import register

OURS, OURS_UNCHANGED = register(), "flash_attention_2"
CONTESTANTS = ("eager", "sdpa", OURS_UNCHANGED, OURS)
RECIPE, ROUNDS = Recipe(product=0.05, settle=0.15, timed=0.2), 2
GENERATIONS = 9  # of each contestant


@dataclass(frozen=True)
class Size:
    layers: int
    batch: int
    seqlen: int
    prompt: int
    new: int
    vocabulary: int
    head_dim: int  # at most


FULL = Size(layers=4, batch=4, seqlen=4096, prompt=2048, new=32, vocabulary=8192, head_dim=256)
TINY = Size(layers=1, batch=1, seqlen=48, prompt=9, new=3, vocabulary=61, head_dim=8)


@dataclass(frozen=True)
class Model:
    """kind: the name of its class without its head. heads: (query, key), of `head_dim`."""

    kind: str
    head: str
    heads: tuple[int, int]
    head_dim: int
    options: dict = field(default_factory=dict)
    generates: bool = True
    layers: int = 0  # 0: as the size says

    def depth(self, size: Size) -> int:
        return self.layers or size.layers

    def build(self, attention: str, size: Size, device: torch.device, dtype: torch.dtype):
        heads, heads_kv = self.heads
        head_dim = min(self.head_dim, size.head_dim)
        config = dict(
            vocab_size=size.vocabulary,
            hidden_size=heads * head_dim,
            intermediate_size=3 * heads * head_dim,
            num_hidden_layers=self.depth(size),
            num_attention_heads=heads,
            num_key_value_heads=heads_kv,
            head_dim=head_dim,
            max_position_embeddings=size.seqlen,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
        if self.kind in ("GPT2", "Bert"):  # which have no such choice
            del config["num_key_value_heads"], config["head_dim"]
        if self.kind == "Gemma4":  # whose layers without a window are twice as wide
            config["global_head_dim"] = 2 * head_dim
        kind = "Gemma4Text" if self.kind == "Gemma4" else self.kind
        config = getattr(transformers, f"{kind}Config")(**config | self.options)
        torch.manual_seed(1)
        model = getattr(transformers, f"{self.kind}{self.head}")
        with device:
            return model._from_config(config, attn_implementation=attention).to(dtype)


MODELS = {
    "llama": Model("Llama", "ForCausalLM", (16, 4), 128),
    "mistral": Model("Mistral", "ForCausalLM", (16, 4), 128, dict(sliding_window=1024)),
    "gemma2": Model(
        "Gemma2",
        "ForCausalLM",
        (8, 4),
        256,
        dict(sliding_window=1024, attn_logit_softcapping=50.0, query_pre_attn_scalar=256),
    ),
    "gemma4": Model(
        "Gemma4",
        "ForCausalLM",
        (8, 4),
        256,
        # Of the large ones: fewer heads of keys without a window, no embeddings of each layer.
        dict(
            sliding_window=256,
            attention_k_eq_v=True,
            num_global_key_value_heads=2,
            hidden_size_per_layer_input=0,
        ),
        layers=6,
    ),
    "gpt2": Model("GPT2", "LMHeadModel", (16, 16), 64),  # dropout 0.1, as it comes
    "bert": Model("Bert", "ForMaskedLM", (16, 16), 64, generates=False),  # likewise
}


class Contest:
    """One model with one attention after the other, from the same weights."""

    def __init__(self, name: str, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self.size, self.device, self.dtype = name, size, device, dtype
        self.model = MODELS[name]
        self.timer = Timer(device, RECIPE)
        generator = torch.Generator().manual_seed(2)
        shape = (size.batch, size.seqlen)
        self.tokens = torch.randint(2, size.vocabulary, shape, generator=generator).to(device)
        self.refused: dict[str, str] = {}

    def attempt(self, attention: str, work: Callable[[str], object]):
        """What work returns; None, and a reason, where a contestant cannot."""
        if attention in self.refused:
            return None
        try:
            return work(attention)
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
            self.refused[attention] = (str(error).splitlines() or [type(error).__name__])[0]
            tqdm.write(f"{self.name}, {attention}: {self.refused[attention]}")
            return None
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def build(self, attention: str, dtype: torch.dtype | None = None):
        return self.model.build(attention, self.size, self.device, dtype or self.dtype)

    def memory(self) -> float:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def above(self, before: float) -> float | None:
        """GiB of the peak, since it was reset."""
        if self.device.type != "cuda":
            return None
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**30

    def reset_peak(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return self.memory()

    def train(self, attention: str) -> tuple[float, float | None]:
        """Seconds and GiB of a step."""
        model = self.build(attention).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        # Encoders have no cache to leave out.
        options = dict(use_cache=False) if self.model.generates else {}

        def step() -> None:
            model(input_ids=self.tokens, labels=self.tokens, **options).loss.backward()
            optimiser.step()
            optimiser.zero_grad()

        step()
        before = self.reset_peak()
        step()
        peak = self.above(before)
        return self.timer(step), peak

    @torch.inference_mode()
    def generate(self, names: list[str]) -> dict[str, tuple[float, float | None]]:
        """Seconds and GiB of a prompt and the new tokens, greedy. Everyone in turns: of a small
        model it is the host's time, which drifts."""
        prompt = self.tokens[:, : self.size.prompt]
        options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=self.size.new)
        runs, peaks = {}, {}

        def prepare(attention: str) -> bool:
            model = self.build(attention).eval()
            run = partial(model.generate, prompt, do_sample=False, **options)
            run()
            before = self.reset_peak()
            run()
            peaks[attention] = self.above(before)
            runs[attention] = run
            return True

        present = [name for name in names if self.attempt(name, prepare)]
        times: dict[str, list[float]] = {name: [] for name in present}
        for turn in range(GENERATIONS):
            for name in present if turn % 2 else reversed(present):
                synchronize(self.device)
                start = time.perf_counter()
                runs[name]()
                synchronize(self.device)
                times[name].append(time.perf_counter() - start)
        return {name: (statistics.median(times[name]), peaks[name]) for name in present}

    @torch.inference_mode()
    def logits(self, attention: str, dtype: torch.dtype) -> Tensor:
        return self.build(attention, dtype).eval()(self.tokens[:1]).logits.float()

    def error(self, exact: Tensor, attention: str) -> float:
        return (self.logits(attention, self.dtype) - exact).square().mean().sqrt().item()


def measure(contest: Contest, names: list[str], kinds: list[str], bar: tqdm) -> list[dict]:
    """The records of a model."""
    size, records, layers = contest.size, [], contest.model.depth(contest.size)
    shapes = {
        "train": dict(batch=size.batch, seqlen=size.seqlen),
        "generate": dict(batch=size.batch, prompt=size.prompt, new=size.new),
    }
    for kind in kinds:
        times: dict[str, float | None] = dict.fromkeys(names)
        peaks: dict[str, float | None] = dict.fromkeys(names)
        for _ in range(ROUNDS if kind == "train" else 1):
            bar.set_postfix_str(f"{contest.name}, {kind}")
            measured = (
                contest.generate(names)
                if kind == "generate"
                else {name: contest.attempt(name, contest.train) for name in names}
            )
            for name, (seconds, peak) in ((n, m) for n, m in measured.items() if m):
                times[name] = min(times[name] or seconds, seconds)
                peaks[name] = peak
            bar.update()
        shape = dict(model=contest.name, layers=layers, **shapes[kind])
        milliseconds = {name: t and 1e3 * t for name, t in times.items()}
        faster = {}
        for ours in (OURS_UNCHANGED, OURS):
            faster |= results.ratios(times, ours, ("sdpa", "eager"), "less") or {}
        records.append(results.record(f"models.{kind}", shape, "ms", milliseconds, faster or None))
        records.append(results.record(f"models.{kind}.memory", shape, "GiB", peaks))
    exact = contest.logits("eager", torch.float32)
    errors = {name: contest.attempt(name, partial(contest.error, exact)) for name in names}
    shape = dict(model=contest.name, layers=layers, seqlen=size.seqlen)
    records.append(results.record("models.error", shape, "rms", errors))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="some of these, by commas")
    parser.add_argument("--kinds", default="train,generate", help="one of them, or both")
    parser.add_argument("--out", metavar="FILE.json")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    size, dtype = (FULL, torch.bfloat16) if cuda else (TINY, torch.float32)
    names = [name for name in CONTESTANTS if cuda or name != OURS_UNCHANGED]
    models = [name for name in MODELS if name in arguments.models.split(",")]
    transformers.logging.set_verbosity_error()
    method = (
        f"training: the fastest of {ROUNDS}, {RECIPE.describe(device)};"
        f" generation: the median of {GENERATIONS}, in turns"
    )
    records = [results.run_record(device, method, transformers=transformers.__version__)]
    kinds = {
        name: [x for x in arguments.kinds.split(",") if x == "train" or MODELS[name].generates]
        for name in models
    }
    rounds = sum(ROUNDS if kind == "train" else 1 for of in kinds.values() for kind in of)
    with tqdm(total=rounds, unit="round") as bar:
        for name in models:
            records += measure(Contest(name, size, device, dtype), names, kinds[name], bar)
            results.write(arguments.out, records)
    print(results.show(records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
