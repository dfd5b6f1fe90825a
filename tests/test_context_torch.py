"""context_parallel beside the rest of torch: torch.compile, checkpointing, autocast, time-outs,
torch's own context_parallel."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import lonely_rank
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_cases import SEED, seed_ranks
from ranks import TWO_DIMENSIONS, Pool, everyone, group_of, one_at_a_time, place
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import context_parallel
from flash_attn.context_parallel import hooks

SCHEMES = ["ring", "all-gather", "ulysses"]


def inputs(device: str, dtype=torch.float64, seqlen: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(1, seqlen, heads, 8, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for heads in (4, 2, 2)
    ]


def grads_of(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A call that is compiled."""

    scheme: str | None = "ring"
    dropout_p: float = 0.0
    ranks: int = 2
    documents: tuple[int, ...] | None = None


def check_compiled(case: Compiled, device: str) -> None:
    device, group = place(case.ranks, device)
    if group is None:
        return
    whole, dim = inputs(device), 1
    options = dict(causal=True, dropout_p=case.dropout_p)
    one, ours = flash_attn.flash_attn_func, context_parallel.flash_attn_func
    if case.documents is not None:
        whole, dim = [x.detach()[0].requires_grad_() for x in whole], 0
        cu = torch.tensor(case.documents, dtype=torch.int32, device=device)
        one = partial(flash_attn.flash_attn_varlen_func, **lengths_of(cu))
        ours = partial(
            context_parallel.flash_attn_varlen_func,
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), case.documents),
        )
    torch.manual_seed(SEED)
    out = one(*whole, **options)
    grads = grads_of(out, whole)
    parts = [context_parallel.split(x, group, dim).detach().requires_grad_() for x in whole]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        shared = dict(group=group, scheme=case.scheme, softmax_scale=8**-0.5 / 2)
        return ours(2 * q, k, v, **shared, **options)

    torch.compiler.reset()  # cases before count towards its limit of compilations
    seed_ranks(group)
    actual = attend(*parts)
    torch.testing.assert_close(actual, context_parallel.split(out, group, dim))
    seed_ranks(group)
    with torch.inference_mode():
        torch.testing.assert_close(attend(*(x.clone() for x in parts)), actual)
    for grad, wanted in zip(grads_of(actual, parts), grads, strict=True):
        torch.testing.assert_close(grad, context_parallel.split(wanted, group, dim))


def lengths_of(cu: torch.Tensor) -> dict:
    longest = int(cu.diff().max())
    return dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)


@pytest.mark.parametrize(
    "case",
    [
        *(Compiled(scheme, p) for scheme in (*SCHEMES, None) for p in (0.0, 0.3)),
        Compiled(documents=(0, 5, 5, 32), dropout_p=0.3),
        Compiled(None, 0.3, ranks=TWO_DIMENSIONS),
    ],
    ids=str,
)
def test_compile(case: Compiled, pool: Pool) -> None:
    """One graph without a break, forward and backward."""
    pool.need(case.ranks)
    pool.run(check_compiled, case, pool.device)


def check_checkpointed(scheme: str, reentrant: bool, device: str) -> None:
    device, group = everyone(device)
    whole = inputs(device)
    parts = [context_parallel.split(x, group).detach().requires_grad_() for x in whole]

    def attend(q, k, v):
        options = dict(causal=True, group=group, scheme=scheme, dropout_p=0.2)
        return context_parallel.flash_attn_func(q.sin(), k, v, **options)

    def grads(**options) -> list[torch.Tensor]:
        seed_ranks(group)
        out = checkpoint(attend, *parts, use_reentrant=reentrant, **options)
        torch.rand(3, device=device)  # the generator goes on before the backward
        torch.autograd.backward(out.square().sum())
        found = [x.grad for x in parts]
        for x in parts:
            x.grad = None
        return found

    torch.manual_seed(SEED)
    q, k, v = whole
    out = flash_attn.flash_attn_func(q.sin(), k, v, dropout_p=0.2, causal=True)
    expected = [context_parallel.split(x, group) for x in grads_of(out, whole)]
    for grad, wanted in zip(grads(), expected, strict=True):
        torch.testing.assert_close(grad, wanted)
    # Of another mask than the forward had.
    lost = zip(grads(preserve_rng_state=False), expected, strict=True)
    assert not any(torch.allclose(grad, wanted) for grad, wanted in lost)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_activation_checkpointing(scheme: str, reentrant: bool, pool: Pool) -> None:
    """The forward that runs again draws the mask of the first one, from a generator of each rank's
    own."""
    pool.run(check_checkpointed, scheme, reentrant, pool.device)


def check_autocast(scheme: str, device: str) -> None:
    device, group = everyone(device)
    kind = torch.device(device).type
    parts = [context_parallel.split(x, group) for x in inputs(device, torch.float32)]
    with torch.autocast(kind, torch.bfloat16):
        out = context_parallel.flash_attn_func(*parts, group=group, scheme=scheme)
    half = [x.bfloat16() for x in parts]
    assert out.dtype == torch.bfloat16
    wanted = context_parallel.flash_attn_func(*half, group=group, scheme=scheme)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast(scheme: str, pool: Pool) -> None:
    pool.run(check_autocast, scheme, pool.device)


def check_without_grad(scheme: str, device: str) -> None:
    device, group = everyone(device)
    whole = [x.detach() for x in inputs(device)]
    expected = flash_attn.flash_attn_func(*whole, causal=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            parts = [context_parallel.split(x, group) for x in whole]
            out = context_parallel.flash_attn_func(*parts, causal=True, group=group, scheme=scheme)
            torch.testing.assert_close(context_parallel.join(out, group), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_grad(scheme: str, pool: Pool) -> None:
    """Under no_grad and in inference mode."""
    pool.run(check_without_grad, scheme, pool.device)


def check_torch_context_parallel(causal: bool, balanced: bool, device: str) -> None:
    device, _ = everyone(device)
    kind = torch.device(device).type
    mesh = dist.device_mesh.init_device_mesh(kind, (dist.get_world_size(),))
    torch_side = hooks._torch_side()
    whole = [x.detach().transpose(1, 2) for x in inputs(device)]
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    expected_grads = grads_of(expected, leaves)

    before = F.scaled_dot_product_attention
    buffers = [x.clone() for x in whole]
    shown = dict(buffers=buffers, buffer_seq_dims=[2] * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_side._cp_options, "enable_load_balance", balanced)
        with context_parallel.serve_torch(), torch_context_parallel(mesh, **shown):
            parts = [x.clone().requires_grad_() for x in buffers]
            out = F.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True)
            results = [out, *grads_of(out, parts)]
            with pytest.raises(NotImplementedError, match="attn_mask: expected None"):
                F.scaled_dot_product_attention(*parts, attn_mask=torch.ones(8, 8, device=device))
        results = context_parallel_unshard(mesh, results, [2] * 4)
    assert F.scaled_dot_product_attention is before
    for actual, wanted in zip(results, [expected, *expected_grads], strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_context_parallel(causal: bool, balanced: bool, pool: Pool) -> None:
    pool.run(check_torch_context_parallel, causal, balanced, pool.device)


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = hooks._torch_side()
    monkeypatch.delattr(module, hooks._BEGIN)
    message = f"serve_torch: expected torch's .* 2.11 .* got torch {re.escape(torch.__version__)}"
    with (
        pytest.raises(NotImplementedError, match=message),
        context_parallel.serve_torch(),
    ):
        pass


def check_transformers(device: str) -> None:
    device, group = everyone(device)
    q, k, v = (x.detach() for x in inputs(device))
    sink = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=q.dtype).to(device)
    attend = context_parallel.transformers_attention(group, layout="contiguous")
    module = torch.nn.Module()
    module.is_causal = True
    parts = [
        context_parallel.split(x, group, layout="contiguous").transpose(1, 2) for x in (q, k, v)
    ]
    options = dict(scaling=0.2, sliding_window=5, softcap=3.0, s_aux=sink, position_ids=None)
    out, weights = attend(module, *parts, None, **options)
    # Position p sees the 5 keys p - 4 to p.
    whole = flash_attn.flash_attn_func(
        *(q, k, v),
        softmax_scale=0.2,
        causal=True,
        window_size=(4, 0),
        softcap=3.0,
        learnable_sink=sink,
    )
    assert weights is None
    torch.testing.assert_close(out, context_parallel.split(whole, group, layout="contiguous"))
    with pytest.raises(NotImplementedError, match="attention_mask: expected None"):
        attend(module, *parts, torch.ones(1, 1, 8, 8, device=device))


def test_transformers(pool: Pool) -> None:
    pool.run(check_transformers, pool.device)


def check_slow_rank(scheme: str) -> None:
    """Rank 1 does not come; rank 0 hears of it from its group."""
    dist.barrier()  # the ranks of the new group wait for each other no longer than its time-out
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        parts = [context_parallel.split(x, group) for x in inputs("cpu")]
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)timed out|connection closed"):
            context_parallel.flash_attn_func(*parts, group=group, scheme=scheme)
        assert time.monotonic() - start < 20


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slow_rank(scheme: str, pool: Pool) -> None:
    if pool.device == "cuda":
        pytest.skip("NCCL's watchdog ends the process")
    pool.run(check_slow_rank, scheme)


def check_dead_rank() -> None:
    """Of four ranks the last one has a group with each of the others, and a scheme with each."""
    rank, last = dist.get_rank(), len(SCHEMES)
    groups = [group_of(other, last) for other in range(last)]
    waiting = []
    for group, scheme in zip(groups, SCHEMES, strict=True):
        if group is not None:
            parts = [context_parallel.split(x, group) for x in inputs("cpu")]
            out = context_parallel.flash_attn_func(*parts, group=group, scheme=scheme)
            waiting.append((out, parts))
    if rank == last:
        os._exit(0)
    ((out, parts),) = waiting
    with pytest.raises(
        RuntimeError, match="(?i)timed out|connection closed|reset by peer|broken pipe"
    ):
        grads_of(out, parts)


def test_dead_rank() -> None:
    """A rank that is gone before the backward: an error in its neighbour's, no wrong gradient, with
    each scheme."""
    pool = Pool(len(SCHEMES) + 1, "cpu", seconds=60)
    try:
        *others, last = pool.outcomes(check_dead_rank)
        assert others == [(True, None)] * len(SCHEMES)
        assert last == (False, "the process has ended")
    finally:
        pool.close()


@dataclasses.dataclass
class Lonely:
    """A rank that tests/lonely_rank.py runs: its process, and what it writes."""

    name: str
    process: subprocess.Popen
    output: Path
    ended: float | None = None

    def check(self, slow: bool) -> None:
        """It ended by itself, soon after the time-out, with an error and without a result. slow:
        NCCL's watchdog may have ended it before its call, as the other one did not get through. Or
        its call found what the other one had sent before that ended, and is right."""
        text = self.output.read_text()
        assert self.ended is not None, f"{self.name} hangs: {text}"
        call = re.search(r"^call (\S+)$", text, re.MULTILINE)
        assert call or slow, f"{self.name} fails before its call: {text}"
        if call:
            assert self.ended - float(call[1]) < lonely_rank.TIME_OUT + 30, self.name
        if result := re.search(r"^result (\S+)$", text, re.MULTILINE):
            assert slow and float(result[1]) == lonely_rank.RIGHT, f"{self.name}: {text}"
            return
        assert self.process.returncode != 0, f"{self.name}: {text}"
        reasons = "(?i)timed? ?out|remote process|connection (closed|reset)|broken pipe"
        assert re.search(reasons, text), f"{self.name}: {text}"


def lonely_ranks(backend: str, cases: list[tuple[str, str]], folder: Path) -> Iterator[Lonely]:
    """Both ranks of each case, a scheme and what happens to rank 1."""
    for scheme, fate in cases:
        for rank in "01":
            name = f"{scheme}-{fate}-{rank}"
            arguments = [backend, scheme, fate, rank, str(folder / f"{scheme}-{fate}")]
            with (folder / name).open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, lonely_rank.__file__, *arguments],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            yield Lonely(name, process, folder / name)


def wait_for_all(ranks: list[Lonely], seconds: float) -> None:
    """Notes when each ends; ends those that have not after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(r.ended is None for r in ranks):
        for rank in ranks:
            if rank.ended is None and rank.process.poll() is not None:
                rank.ended = time.monotonic()
        time.sleep(0.05)
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()


@pytest.mark.gpu
@pytest.mark.gpu_ranks
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_lonely_rank_on_nccl(tmp_path: Path) -> None:
    """The group's time-out, of 4 s, ends a rank whose neighbour is slow or dead, or dies before the
    backward, as NCCL's watchdog is set to do; and the slow one, too, whose neighbour has ended. All
    cases at a time."""
    cases = list(itertools.product(SCHEMES, ("slow", "dead", "backward")))
    with one_at_a_time("cuda"):
        ranks = list(lonely_ranks("nccl", cases, tmp_path))
        wait_for_all(ranks, 240)
    for rank in ranks:
        if not rank.name.endswith(("dead-1", "backward-1")):
            rank.check(slow=rank.name.endswith("1"))
