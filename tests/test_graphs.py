"""CUDA graphs, streams and devices."""

from __future__ import annotations

import pytest
import torch
from caches import CacheCase, CacheProblem, skip_unless_served
from cases import (
    ATEN_CUDA,
    DECODE_CUDA,
    PREFILL_TARGETS,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    compare,
    each_case,
    each_target,
    expect,
    leaves_of,
    op_arguments,
    use,
)

import flash_attn


def capture(function, warm_up: int = 3) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@each_target(ATEN_CUDA, SM80, SM90)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_graph_forward_and_backward(varlen: bool, target: Target) -> None:
    """Replayed on other data (and other lengths): what eager gives, bit for bit."""
    if varlen and target.backend == "aten":
        pytest.skip("aten reads the lengths on the host")
    shape = (100, 4, 64) if varlen else (2, 50, 4, 64)
    q, k, v = leaves_of(target, *shape)
    cu = torch.tensor([0, 30, 100], dtype=torch.int32, device="cuda")
    results: dict[str, tuple] = {}

    def step(name: str) -> None:
        with use(target):
            if varlen:
                out = flash_attn.flash_attn_varlen_func(
                    q, k, v, cu, cu, 100, 100, causal=True, deterministic=True
                )
            else:
                out = flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=True)
        results[name] = (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    graph = capture(lambda: step("graph"))
    with torch.no_grad():
        for x in (q, k, v):
            x.normal_()
        cu[1] = 77
    graph.replay()
    step("eager")
    for a, e in zip(results["graph"], results["eager"], strict=True):
        assert torch.equal(a, e)


# sm90's forms of the backward (csrc/sm90/bwd.cu): sums of dq as a pool, in any order and in one, in
# stretches, or of the whole call; splits of a tile's queries; a pair of thread blocks; two kernels.
BACKWARD_FORMS = {
    "pool": dict(batch=4, seqlen_q=600, d=64, causal=True),
    "pool in order": dict(batch=4, seqlen_q=500, d=128, deterministic=True),
    "pool in stretches": dict(batch=1, seqlen_q=4200, d=64, window=(100, 0)),
    "turns": dict(batch=1, seqlen_q=700, d=96, causal=True, deterministic=True),
    "splits": dict(batch=1, seqlen_q=1500, seqlen_k=140, d=64, heads_kv=1),
    "splits of 128": dict(batch=1, seqlen_q=900, seqlen_k=200, d=128, heads_kv=1),
    "pair": dict(batch=1, seqlen_q=300, d=192, causal=True),
    "pair in order": dict(batch=1, seqlen_q=300, d=192, causal=True, deterministic=True),
    "pair of 256": dict(batch=1, seqlen_q=140, seqlen_k=1300, d=256, deterministic=True),
    "two kernels": dict(batch=1, seqlen_q=200, seqlen_k=350, d=256, causal=True),
}


@each_case(
    [Case(dtype="bf16", **form) for form in BACKWARD_FORMS.values()], [ATEN_CUDA, SM80, SM90]
)
def test_graph_of_each_form_of_the_backward(case: Case, target: Target, seed: int) -> None:
    """Each replay counts its tiles, its turns and its sums anew: on other data it agrees with
    float64, and with eager bit for bit where sums come in order."""
    problem = Problem(case, seed, target.device)
    names = ("q", "k", "v")
    given = {name: getattr(problem, name).requires_grad_() for name in names}
    arguments = op_arguments(problem) | given | {"backend": target.backend}
    results: dict[str, dict] = {}

    def step(name: str) -> None:
        out, lse, *_ = torch.ops.flash_attn.fwd(**arguments)
        gradients = torch.autograd.grad(out, list(given.values()), problem.dout)
        found = {"out": out.detach(), "lse": lse.detach()}
        results[name] = found | dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    graph = capture(lambda: step("graph"))
    for draw in (1, 2):
        other = Problem(case, seed + draw, target.device)
        with torch.no_grad():
            for name in (*names, "dout"):
                getattr(problem, name).copy_(getattr(other, name))
        graph.replay()
        expected = expect(other, device=target.device)
        compare(other, results["graph"], expected, few_rows=False)
        if case.deterministic:
            step("eager")
            for name, found in results["graph"].items():
                assert torch.equal(found, results["eager"][name]), name


@each_target(DECODE_CUDA)
def test_graph_decode(target: Target) -> None:
    """A captured step serves longer caches on replay."""
    k, v = (torch.randn(2, 400, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([3, 50], dtype=torch.int32, device="cuda")
    results: dict[str, tuple] = {}

    def step(name: str) -> None:
        with use(target):
            results[name] = flash_attn.flash_decode_func(q, k, v, lengths, return_softmax_lse=True)

    graph = capture(lambda: step("graph"))
    for new in ([400, 1], [77, 399]):
        lengths.copy_(torch.tensor(new))
        q.normal_()
        graph.replay()
        step("eager")
        assert all(
            torch.equal(a, e) for a, e in zip(results["graph"], results["eager"], strict=True)
        )


@each_target(DECODE_CUDA)
@pytest.mark.parametrize("form", ["plain", "by_length", "int8"])
@pytest.mark.parametrize("before", ["kernel", "memset"])
def test_decode_right_behind_what_it_reads(before: str, form: str, target: Target) -> None:
    """Its blocks may come while the kernel before it still runs: the lengths, the queries and the
    last keys are that kernel's results, in a graph and outside of it."""
    shape = (3, 3000, 2, 64)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    options = {"batch_invariant": True} if form == "by_length" else {}
    if form == "int8":
        k, v = ((x * 16).to(torch.int8) for x in (k, v))
    q, query = (torch.zeros(3, 1, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    wanted = torch.zeros(3, dtype=torch.int32, device="cuda")
    noise = torch.randn(1 << 24, device="cuda")

    def step() -> tuple:
        """Everything that the call reads is wrong until the last kernels before it end."""
        lengths.fill_(3000)
        noise.sin_()
        q.copy_(query)
        if before == "kernel":
            lengths.copy_(wanted + noise[:3].isnan())
        else:
            lengths.zero_()
        with use(target):
            return flash_attn.flash_decode_func(
                q, k, v, lengths, return_softmax_lse=True, **options
            )

    results: list[tuple] = []
    graph = capture(lambda: results.append(step()))
    for new in ([2999, 1, 513], [5, 3000, 2049], [64, 0, 1000]):
        wanted.copy_(torch.tensor(new))
        query.normal_()
        torch.cuda.synchronize()
        seen = wanted.clone() if before == "kernel" else torch.zeros_like(wanted)
        with use(target):
            expected = flash_attn.flash_decode_func(
                query, k, v, seen, return_softmax_lse=True, **options
            )
        torch.cuda.synchronize()
        for out, lse in (step(), (graph.replay(), results[-1])[1]):
            torch.cuda.synchronize()
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@each_target(ATEN_CUDA, DECODE_CUDA, *PREFILL_TARGETS)
@pytest.mark.parametrize("page_size", [0, 16], ids=["dense", "paged"])
@pytest.mark.parametrize("new, capacity", [(1, 400), (40, 3000)])  # sm90 cuts the latter's keys
def test_graph_kvcache(new: int, capacity: int, page_size: int, target: Target, seed: int) -> None:
    """A captured step appends and attends at other lengths, in other pages, on replay."""
    case = CacheCase(
        new=new, seqlen_q=new, capacity=capacity, page_size=page_size, rotary="halves", d=64
    )
    problem = CacheProblem(case, seed, "cuda")
    skip_unless_served(problem, target)
    call = problem.op_arguments(target.backend)
    names = ("k_cache", "v_cache")
    start = {name: torch.nan_to_num(call[name]) for name in names}
    results: dict[str, tuple] = {}

    def step(name: str) -> None:
        results[name] = torch.ops.flash_attn.kvcache(**call)

    graph = capture(lambda: step("graph"))
    for lengths in ([capacity - 1, 0, 7], [capacity, 77, -3]):
        call["cache_seqlens"].copy_(torch.tensor(lengths))
        call["q"].normal_()
        call["k"].normal_()
        if page_size:
            call["block_table"].copy_(call["block_table"].flip(0))
        seen = []
        for run in (graph.replay, lambda: step("eager")):
            for name in names:
                call[name].copy_(start[name])
            run()
            seen.append([call[name].clone() for name in names])
        pairs = zip((*results["graph"], *seen[0]), (*results["eager"], *seen[1]), strict=True)
        assert all(torch.equal(a, e) for a, e in pairs)


@each_target(ATEN_CUDA, SM80)
def test_graph_dropout_differs_every_replay(target: Target) -> None:
    q = torch.randn(1, 33, 2, 32, device="cuda", dtype=torch.float16)
    results: dict[str, torch.Tensor] = {}

    def step() -> None:
        with use(target):
            results["out"] = flash_attn.flash_attn_func(q, q, q, dropout_p=0.5)

    graph = capture(step)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(results["out"].clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@each_target(ATEN_CUDA, SM80)
def test_side_stream(target: Target) -> None:
    """Work stands in the current stream: behind a slow writer, forward and backward."""
    inputs = leaves_of(target, 2, 130, 4, 64)
    dout = torch.randn_like(inputs[0])

    def attend() -> list[torch.Tensor]:
        with use(target):
            out = flash_attn.flash_attn_func(*inputs, causal=True, deterministic=True)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    values = [torch.randn_like(x) for x in inputs]
    with torch.no_grad():
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
    expected = attend()
    with torch.no_grad():
        for x in inputs:
            x.fill_(torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for x, value in zip(inputs, values, strict=True):
                x.copy_(value)
        actual = attend()
    stream.synchronize()
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@each_target(SM80)
def test_two_streams_do_not_share_a_workspace(target: Target) -> None:
    inputs = [leaves_of(target, 2, 500, 8, 64) for _ in range(2)]

    def attend(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        with use(target):
            out = flash_attn.flash_attn_func(*leaves, causal=True, deterministic=True)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    expected = [attend(leaves) for leaves in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        actual = []
        for stream, leaves in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                actual.append(attend(leaves))
        torch.cuda.synchronize()
        for one, other in zip(actual, expected, strict=True):
            assert all(torch.equal(a, e) for a, e in zip(one, other, strict=True))


@each_target(ATEN_CUDA, DECODE_CUDA, *PREFILL_TARGETS)
@pytest.mark.parametrize("lengths", ["tensor", "int"])
def test_kvcache_does_not_wait_for_the_device(lengths: str, target: Target, seed: int) -> None:
    case = CacheCase(new=2, seqlen_q=2, page_size=16, rotary="interleaved", d=64, lengths=lengths)
    problem = CacheProblem(case, seed, "cuda")
    skip_unless_served(problem, target)
    call = problem.op_arguments(target.backend)
    given = {name: call[name] for name in ("q", "k_cache", "v_cache", "k", "v")}
    given |= {name: call[name] for name in ("rotary_cos", "rotary_sin", "block_table")}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with use(target):
            at = 5 if lengths == "int" else call["cache_seqlens"]
            flash_attn.flash_attn_with_kvcache(**given, cache_seqlens=at, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_target(SM80, DECODE_CUDA)
def test_no_call_waits_for_the_device(target: Target) -> None:
    q, k, v = leaves_of(target, 2, 130, 4, 64)
    cu = torch.tensor([0, 100, 260], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([3, 130], dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with use(target):
            if target.backend == "sm80":
                flash_attn.flash_attn_func(q, k, v).sum().backward()
                flat = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
                flash_attn.flash_attn_varlen_func(*flat, cu, cu, 160, 160).sum().backward()
            else:
                flash_attn.flash_decode_func(q.detach()[:, :1], k.detach(), v.detach(), lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
