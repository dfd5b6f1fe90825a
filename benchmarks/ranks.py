"""One causal sequence over the ranks of one host: how much faster than one GPU, with what memory
and error?

    torchrun --nproc-per-node 2 -m benchmarks.ranks [--tokens 32768,131072] [--out FILE.json]

Forward and backward of 32 query and 8 key heads of d = 128 in bf16, batch 1. One GPU, then all
ranks: the scheme that a call takes by default; each scheme; the ring and the all-to-all over heads
with their transfers left out (the same kernels on buffers that are local already, with wrong
results); torch's own context parallel on its flash and its cuDNN kernels; and
ring_flash_attn's zigzag ring, which runs on flash_attn, where it is installed.

Times are settled as benchmarks/timing.py says, with as many calls on every rank, and the slowest
rank's; of short calls the fastest of two such rounds. A call of seconds settles by itself: then one
round of one call. Memory is the allocator's peak on one rank, with q, k, v, dout and the gradients.
Errors are those of out and the gradients against fp32 (fp64 where the inputs are fp32, which
ring_flash_attn does not serve), over all ranks.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from benchmarks import results
from benchmarks.timing import Recipe, Timer
from flash_attn import context_parallel, flash_attn_func
from flash_attn.cli.measure import synchronize, time_block
from flash_attn.context_parallel import attention, heads
from flash_attn.context_parallel.exchange import Transfer

HEADS_Q, HEADS_KV, D = 32, 8, 128
SCHEMES = ("ring", "all-gather", "ulysses")
ALONE, LOCAL = "one GPU", ("local ring", "local ulysses")
ERROR_TOKENS = 4096
SHORT_CALL_SECONDS, LONG_CALL_SECONDS = 0.2, 2.0
RECIPE, ROUNDS = Recipe(timed=0.4), 2
GROUP_SECONDS = 60  # the group's time-out: a rank that fails alone ends the run

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], object]


def slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def draw(tokens: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, alike on all ranks."""
    generator = torch.Generator(device).manual_seed(tokens)
    heads = (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    return [
        torch.randn(1, tokens, h, D, generator=generator, device=device, dtype=dtype) for h in heads
    ]


def results_of(attend: Attend, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """out, dq, dk, dv."""
    *leaves, dout = inputs
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def nothing_travels(group, sent, destination, received, source) -> Transfer:
    """exchange without the exchange: what a rank gets is its own, as kernels draw less power, and
    are faster, on what lies in new buffers."""
    return Transfer([], tuple(sent or received), tuple(sent))


def stays(sent, incoming, outgoing, group) -> Transfer:
    """with_each_rank without the exchange."""
    return Transfer([], (sent[: sum(incoming)],), (sent,))


def one_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


@contextlib.contextmanager
def ours(device: torch.device, scheme: str | None, travel: bool = True):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel.flash_attn_func(q, k, v, causal=True, scheme=scheme)

    with contextlib.ExitStack() as replaced:
        if not travel:
            replaced.enter_context(mock.patch.object(attention, "exchange", nothing_travels))
            replaced.enter_context(mock.patch.object(heads, "with_each_rank", stays))
        yield attend


@contextlib.contextmanager
def torch_sdpa(device: torch.device, backend: SDPBackend):
    """torch's context parallel, which shards zigzag, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    buffer = torch.empty(2 * dist.get_world_size(), device=device)
    sharded = torch_context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])
    replaced = F.scaled_dot_product_attention
    try:
        with sdpa_kernel(backend), sharded:
            yield attend
    finally:  # torch puts it back only where nothing was raised
        F.scaled_dot_product_attention = replaced


@contextlib.contextmanager
def ring_flash_attn(device: torch.device):
    # Its adapter imports names that transformers 5 no longer has.
    with mock.patch.dict(sys.modules, {"ring_flash_attn.adapters": mock.Mock()}):
        from ring_flash_attn import zigzag_ring_flash_attn_func

    yield lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True)


CONTESTANTS: dict[str, Callable] = {
    "automatic": lambda device: ours(device, None),
    "ring": lambda device: ours(device, "ring"),
    "ring_flash_attn": ring_flash_attn,
    "torch cuDNN": lambda device: torch_sdpa(device, SDPBackend.CUDNN_ATTENTION),
    LOCAL[1]: lambda device: ours(device, "ulysses", travel=False),
    LOCAL[0]: lambda device: ours(device, "ring", travel=False),
    "all-gather": lambda device: ours(device, "all-gather"),
    "ulysses": lambda device: ours(device, "ulysses"),
    "torch flash": lambda device: torch_sdpa(device, SDPBackend.FLASH_ATTENTION),
}


class Race:
    """Every contestant at one length after the other, as long as the time lasts."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, names: list[str], seconds: float
    ) -> None:
        self.device, self.dtype = device, dtype
        self.names = [ALONE, *names]
        self.timer = Timer(device, RECIPE)
        self.deadline = time.monotonic() + seconds
        self.refused: dict[str, str] = {}
        self.seconds_of_pair: dict[str, float] = {}  # of a call, by the tokens squared

    def contestant(self, name: str):
        return contextlib.nullcontext(one_gpu) if name == ALONE else CONTESTANTS[name](self.device)

    def inputs(self, name: str, tokens: int) -> list[Tensor]:
        inputs = draw(tokens, self.device, self.dtype)
        if name == ALONE:
            return inputs
        # Copies: where a rank's tokens are one piece, split gives a view, which keeps the whole.
        return [context_parallel.split(x).clone() for x in inputs]

    def attempt(self, name: str, work: Callable[[], object]):
        """What work returns; None, and a reason, where a contestant cannot."""
        if name in self.refused:
            return None
        try:
            return work()
        except (ImportError, RuntimeError, NotImplementedError, AssertionError) as error:
            self.refused[name] = (str(error).splitlines() or [type(error).__name__])[0]
            if dist.get_rank() == 0:
                tqdm.write(f"{name}: {self.refused[name]}")
            return None

    # Errors

    def errors(self) -> list[dict]:
        """Of out and the gradients: root mean squares, and times that of one GPU."""
        found: dict[str, list[float] | None] = {}
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        exact = results_of(one_gpu, [x.to(wide) for x in self.inputs(ALONE, ERROR_TOKENS)])
        for name in self.names:
            if name not in LOCAL:
                found[name] = self.attempt(name, partial(self.error_of, name, exact))
        records = []
        for index, result in enumerate(("out", "dq", "dk", "dv")):
            values = {name: error and error[index] for name, error in found.items()}
            more = {
                f"{n}/{ALONE}": e / values[ALONE] for n, e in values.items() if e and n != ALONE
            }
            shape = {"tokens": ERROR_TOKENS, "of": result}
            records.append(results.record("ranks.error", shape, "rms", values, more))
        return records

    def error_of(self, name: str, exact: tuple[Tensor, ...]) -> list[float]:
        with self.contestant(name) as attend:
            found = results_of(attend, self.inputs(name, ERROR_TOKENS))
        if name != ALONE:
            exact = [context_parallel.split(x) for x in exact]
        squares = [(x - y).square().mean() for x, y in zip(found, exact, strict=True)]
        mean = torch.stack(squares).double()
        dist.all_reduce(mean)
        return (mean / dist.get_world_size()).sqrt().tolist()

    # Times and memory

    def at(self, tokens: int, bar: tqdm) -> list[dict]:
        times: dict[str, float | None] = dict.fromkeys(self.names)
        peaks: dict[str, float | None] = dict.fromkeys(self.names)
        for round_ in range(ROUNDS):
            for name in self.names:
                bar.set_postfix_str(f"{tokens} tokens, {name}")
                if round_ == 0:
                    measured = self.attempt(name, partial(self.first, name, tokens))
                    if measured:
                        times[name], peaks[name] = measured
                elif times[name] and times[name] < SHORT_CALL_SECONDS:
                    again = self.attempt(name, partial(self.settled, name, tokens, times[name]))
                    times[name] = min(times[name], again or times[name])
                bar.update()
        return self.records(tokens, times, peaks)

    def first(self, name: str, tokens: int) -> tuple[float, float | None] | None:
        """Seconds and GiB of the first call, or of a settled one where a call is short."""
        expected = self.seconds_of_pair.get(name, 0) * tokens**2
        calls = 1 if expected > LONG_CALL_SECONDS else 3
        if slowest(time.monotonic() + calls * expected - self.deadline, self.device) > 0:
            if dist.get_rank() == 0:
                tqdm.write(f"{name} at {tokens} tokens: left out, as the time is up")
            return None
        synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        inputs = self.inputs(name, tokens)
        with self.contestant(name) as attend:
            step: Step = partial(results_of, attend, inputs)
            peak = None
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            each = self.timed(step)
            if self.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.device) - before
                peak = slowest(peak, self.device) / 2**30
            if each < LONG_CALL_SECONDS:
                each = self.settle(step, self.timed(step))
        self.seconds_of_pair[name] = each / tokens**2
        return each, peak

    def timed(self, step: Step) -> float:
        """One call."""
        dist.barrier()
        synchronize(self.device)
        return slowest(time_block(step, self.device, 1), self.device)

    def settled(self, name: str, tokens: int, each: float) -> float:
        inputs = self.inputs(name, tokens)
        with self.contestant(name) as attend:
            return self.settle(partial(results_of, attend, inputs), each)

    def settle(self, step: Step, each: float) -> float:
        """each: of a call, alike on all ranks, which have to make as many."""
        self.timer.products()
        for _ in range(max(1, round(RECIPE.settle / each))):
            step()
        calls = max(1, round(RECIPE.timed / each))
        return slowest(time_block(step, self.device, calls), self.device)

    def records(self, tokens: int, times: dict, peaks: dict) -> list[dict]:
        shape = {"tokens": tokens, "ranks": dist.get_world_size()}
        faster = results.ratios(times, ALONE, self.names[1:], "more")
        milliseconds = {name: None if t is None else 1e3 * t for name, t in times.items()}
        shares = {f"{n}/{ALONE}": p / peaks[ALONE] for n, p in peaks.items() if p and peaks[ALONE]}
        return [
            results.record("ranks", shape, "ms", milliseconds, faster),
            results.record("ranks.memory", shape, "GiB", peaks, shares or None),
        ]


def group_options(ctas: int):
    """Transfers that leave most of the GPU to what is computed meanwhile."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = ctas
    return options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", default="32768,131072,524288")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, by commas")
    parser.add_argument(
        "--seconds", type=float, default=600, help="cases that would end later are left out"
    )
    parser.add_argument(
        "--ctas",
        type=int,
        default=0,
        help="thread blocks of NCCL at most, on a stream of high priority (default: NCCL's choice)",
    )
    parser.add_argument("--out", metavar="FILE.json")
    arguments = parser.parse_args()
    names = [name for name in CONTESTANTS if name in arguments.only.split(",")]
    lengths = [int(n) for n in arguments.tokens.split(",")]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        device_id=device if cuda else None,
        timeout=timedelta(seconds=GROUP_SECONDS),
        pg_options=group_options(arguments.ctas) if cuda and arguments.ctas else None,
    )
    race = Race(device, torch.bfloat16 if cuda else torch.float32, names, arguments.seconds)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
    rounds = f"the fastest of {ROUNDS} rounds of calls below {SHORT_CALL_SECONDS} s"
    method = f"the slowest rank, {rounds}: {RECIPE.describe(device)}"
    run = results.run_record(device, method, nccl=nccl, ctas=arguments.ctas or None)
    records = [run, *race.errors()]
    first = dist.get_rank() == 0
    total = len(lengths) * ROUNDS * len(race.names)
    with tqdm(total=total, unit="case", disable=not first) as bar:
        for tokens in lengths:
            records += race.at(tokens, bar)
            if first:
                results.write(arguments.out, records)
    if first:
        print(results.show(records))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
