"""Memory: O(seqlen) beyond inputs and outputs, measured. The matrix S would be O(seqlen^2)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases import (
    ATEN_CUDA,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    each_case,
    each_target,
    op_arguments,
    use,
)

import flash_attn

# Peak resident memory above what it was before the call, in MiB, in a process of its own: what
# malloc took, whoever asked.
CPU_SCRIPT = """
import sys, torch, flash_attn
torch.set_num_threads(2)
seqlen, backward, bias = int(sys.argv[1]), sys.argv[2] == "backward", sys.argv[3] == "bias"

def peak_mib():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

def attend(n):
    q, k, v = (torch.randn(1, n, 2, 64, requires_grad=backward) for _ in range(3))
    attn_bias = torch.randn(1, 2, 1, n, requires_grad=backward) if bias else None
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_mib()
    out = flash_attn.flash_attn_func(q, k, v, attn_bias=attn_bias, causal=True)
    if backward:
        out.sum().backward()
    return peak_mib() - before

attend(256)
print(attend(seqlen))
"""


def cpu_peak_mib(seqlen: int, direction: str, bias: str) -> float:
    arguments = [sys.executable, "-c", CPU_SCRIPT, str(seqlen), direction, bias]
    done = subprocess.run(arguments, check=True, timeout=300, capture_output=True, text=True)
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("bias", ["plain", "bias"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_cpu_memory_is_linear(direction: str, bias: str) -> None:
    """Four times the length takes about four times the memory; S alone would take 512 MiB."""
    short, long = cpu_peak_mib(2048, direction, bias), cpu_peak_mib(8192, direction, bias)
    row_mib = 8192 * 2 * 64 * 4 / 2**20
    tensors = 1 if direction == "forward" else 5
    assert long < tensors * row_mib + 48, f"{long:.1f} MiB at length 8192"
    assert long < 4 * short + 24, f"{short:.1f} MiB at 2048, {long:.1f} MiB at 8192"


PAGED_SCRIPT = """
import torch, flash_attn
torch.set_num_threads(2)
page, pages = 16, 16384
k, v = torch.randn(2, pages, page, 2, 64)
q = torch.randn(1, 1, 4, 64)
table = torch.randperm(pages, dtype=torch.int32)[None]

def peak_mib():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

def decode(length):
    lengths = torch.tensor([length], dtype=torch.int32)
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_mib()
    flash_attn.flash_decode_func(q, k, v, lengths, block_table=table)
    return peak_mib() - before

# Both threads' workspaces of the matrix library come first; a quarter of the keys hides nothing.
decode(page * pages // 4)
print(decode(page * pages))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_paged_cache_is_not_copied_together() -> None:
    """K or V of the sequence alone would take 128 MiB; what is freed and kept takes 53 to 80."""
    arguments = [sys.executable, "-c", PAGED_SCRIPT]
    done = subprocess.run(arguments, check=True, timeout=300, capture_output=True, text=True)
    assert float(done.stdout) < 112, f"{done.stdout.strip()} MiB"


def cuda_peak_mib(target: Target, seqlen: int, backward: bool) -> float:
    """Above the inputs."""
    q, k, v = (
        torch.randn(1, seqlen, 4, 64, device="cuda", dtype=torch.float16, requires_grad=backward)
        for _ in range(3)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with use(target):
        out = flash_attn.flash_attn_func(q, k, v, causal=True)
        if backward:
            out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@each_target(ATEN_CUDA, SM80, SM90)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_cuda_memory_is_linear(backward: bool, target: Target) -> None:
    cuda_peak_mib(target, 128, backward)
    short, long = (cuda_peak_mib(target, n, backward) for n in (4096, 16384))
    assert long < 4.4 * short + 1
    if target.backend != "aten":
        output_mib = 16384 * 4 * 64 * 2 / 2**20
        lse_mib = 16384 * 4 * 4 / 2**20
        # Backward: dout, dq, dk, dv in 16 bits, delta, and dq in fp32 (twice an output).
        expected = output_mib + lse_mib + (6 * output_mib + lse_mib) * backward
        assert long <= expected * 1.05 + 2, f"{long:.1f} MiB, expected {expected:.1f}"


@each_target(SM80)
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1)], ids=["whole", "sequences", "heads"])
def test_the_gradient_of_a_bias_needs_no_workspace(shape: tuple, target: Target) -> None:
    """Whatever shares the bias: beside what the call takes without it, the gradient alone."""
    n = 1024
    q, k, v = torch.randn(3, 2, n, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    bias = torch.randn(*shape, n, n, device="cuda", dtype=torch.bfloat16)

    def peak(bias: torch.Tensor) -> int:
        with use(target):
            out = flash_attn.flash_attn_func(q, k, v, attn_bias=bias)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs = [q, bias] if bias.requires_grad else [q]
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    without = peak(bias)
    assert peak(bias.requires_grad_()) - without <= bias.numel() * bias.element_size() + 2**20


@each_target(SM90)
@pytest.mark.parametrize("seqlen_k, sums", [(256, 0), (1024, 1)], ids=["apart", "in memory"])
def test_dq_of_short_calls_needs_no_sums(seqlen_k: int, sums: int, target: Target) -> None:
    """A kernel of its own computes dq at d = 256 where queries see few keys."""
    queries, heads = 1024, 4
    q, k, v = (
        torch.randn(1, n, heads, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (queries, seqlen_k, seqlen_k)
    )
    with use(target):
        out = flash_attn.flash_attn_func(q, k, v)
    dout = torch.ones_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(x.numel() * x.element_size() for x in gradients)
    sums_bytes = queries * heads * 256 * 4
    assert results + sums * sums_bytes <= peak < results + (sums + 0.5) * sums_bytes


HEAD_DIMS = (16, 40, 64, 72, 80, 96, 120, 128, 136, 192, 200, 256)
# The columns of sums that have more than q's head dim (csrc/sm90/bwd_config.h): those of a class
# that keeps them, and where sums come in order.
CLASS_COLUMNS = {120: 128}
ORDERED_COLUMNS = CLASS_COLUMNS | {40: 48, 72: 80, 200: 256}
LONG = dict(dtype="bf16", batch=1, seqlen_q=8192, heads_q=8, heads_kv=8)
IN_SUMS = [Case(**LONG, d=d, causal=d % 64 > 0) for d in HEAD_DIMS] + [
    Case(**LONG, d=192, d_v=128),
    *(Case(**LONG, d=d, causal=True, deterministic=True) for d in (40, 64, 72, 96, 128, 192)),
    *(Case(**LONG, d=d, causal=True, deterministic=True) for d in (200, 256)),
    *(Case(**LONG | dict(heads_kv=2), d=d) for d in (192, 256)),
    *(
        Case(dtype="bf16", lengths_q=(4000, 7, 0, 3001, 129) * 4, heads_q=8, heads_kv=8, d=d)
        for d in (64, 128, 192)
    ),
]
# Few tiles, so several thread blocks share the queries of each.
IN_SPLITS = [
    Case(**LONG | dict(seqlen_k=n_k, heads_kv=h_kv), d=d, causal=n_k is None)
    for n_k, h_kv, d in [(128, 1, 128), (256, 8, 64), (None, 1, 128), (None, 2, 40)]
]


def bytes_beside_the_results(case: Case, target: Target, seed: int) -> int:
    """The most that a backward has beside its inputs and its results."""
    problem = Problem(case, seed, target.device)
    leaves = {name: getattr(problem, name).requires_grad_() for name in ("q", "k", "v")}
    arguments = op_arguments(problem) | problem.index_tensors() | leaves
    out, *_ = torch.ops.flash_attn.fwd(**arguments, backend=target.backend)
    torch.cuda.empty_cache()  # so that no tensor gets a block that is larger than it asks for
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(out, list(leaves.values()), problem.dout)
    peak = torch.cuda.max_memory_allocated() - before
    return peak - sum(x.numel() * x.element_size() for x in gradients)


@each_case(IN_SUMS + IN_SPLITS, [SM90], marks=[pytest.mark.real_gpu])
def test_the_backward_needs_sums_of_dq_and_rows(case: Case, target: Target, seed: int) -> None:
    """An fp32 dq and two numbers for each query and head. This dq has 16 rows more for each
    sequence and 128 for each head, and the columns of a class from 88 to 128 and in order.

    Where tiles are split there are dk and dv of a tile besides for every two splits of one, or two
    of three. At most four splits are there for each multiprocessor, so this does not grow with the
    sequences.
    """
    rows, sequences = case.batch * case.seqlen_q, case.batch
    if case.is_varlen:
        rows, sequences = sum(case.lengths_q), len(case.lengths_q)
    columns = (ORDERED_COLUMNS if case.deterministic else CLASS_COLUMNS).get(case.d, case.d)
    sums = 4 * case.heads_q * rows * columns
    padding = 4 * case.heads_q * (16 * sequences + 128) * columns
    row_vectors = 8 * case.heads_q * rows
    splits = 0
    if case in IN_SPLITS:
        tile = 4 * 128 * 2 * (64 if case.d <= 64 else 128)
        splits = 4 * torch.cuda.get_device_properties(0).multi_processor_count * tile * 2 // 3
    found = bytes_beside_the_results(case, target, seed)
    assert sums <= found <= sums + padding + row_vectors + splits + 4 * 2**20


@each_target(SM80)
def test_plain_forward_allocates_the_output_and_the_lse_alone(target: Target) -> None:
    q = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.float16)
    with use(target):
        flash_attn.flash_attn_func(q, q, q)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out, lse, probs = flash_attn.flash_attn_func(q, q, q, return_attn_probs=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2
    assert probs.numel() == 0 and out.numel() and lse.numel()


@each_target(SM80)
def test_aligned_views_are_read_in_place(target: Target) -> None:
    """A packed qkv takes no more memory than three tensors; a misaligned one takes copies."""

    def count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
        with use(target):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            flash_attn.flash_attn_func(q, k, v)
            return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    packed = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.float16)
    plain = count(*(x.contiguous() for x in packed.unbind(2)))
    assert count(*packed.unbind(2)) == plain
    odd = torch.randn(2, 300, 3, 4, 65, device="cuda", dtype=torch.float16)[..., :64]
    assert count(*odd.unbind(2)) == plain + 3
