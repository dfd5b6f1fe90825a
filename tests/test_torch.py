"""torch's own machinery: opcheck, compile, autograd, autocast, generators, graphs, streams,
devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    DECODE_TARGETS,
    SM80,
    Case,
    Problem,
    Target,
    each_case,
    each_target,
    op_arguments,
    use,
)
from torch.utils.checkpoint import checkpoint

import flash_attn

OP_CASES = [
    Case(dtype="fp16", seqlen_q=33, seqlen_k=50, causal=True, d=32, lse_grad=True),
    Case(dtype="fp32", seqlen_q=33, seqlen_k=50, bias="key", sink=True, d_v=24, d=32, softcap=2.0),
    Case(dtype="bf16", lengths_q=(20, 0, 9), lengths_k=(33, 5, 17), d=32, tail=2),
    Case(dtype="fp32", seqlen_q=17, seqlen_k=9, dropout_p=0.3, alibi="head", d=16),
]
TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def op_call(case: Case, target: Target, seed: int, **options) -> dict:
    problem = Problem(case, seed, target.device)
    tensors = problem.float_tensors()
    leaves = {
        name: x.detach().requires_grad_() if x.is_floating_point() and name != "alibi_slopes" else x
        for name, x in tensors.items()
    }
    return (
        op_arguments(problem)
        | leaves
        | problem.index_tensors()
        | {"backend": target.backend}
        | options
    )


@each_case(OP_CASES, ATTENTION_TARGETS)
@pytest.mark.slow
def test_opcheck_fwd(case: Case, target: Target, seed: int) -> None:
    torch.library.opcheck(
        torch.ops.flash_attn.fwd, (), op_call(case, target, seed), test_utils=TESTS
    )


@each_case(OP_CASES[:1], ATTENTION_TARGETS)
def test_opcheck_with_strides(case: Case, target: Target, seed: int) -> None:
    """The meta kernel's strides are the real ones for views too."""
    call = op_call(case, target, seed)
    for name in "qkv":
        call[name] = call[name].detach().transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(
        torch.ops.flash_attn.fwd, (), call, test_utils=("test_schema", "test_faketensor")
    )


@each_case(OP_CASES, ATTENTION_TARGETS)
def test_opcheck_bwd(case: Case, target: Target, seed: int) -> None:
    call = op_call(case, target, seed)
    out, lse, _ = torch.ops.flash_attn.fwd(**call)
    del call["return_probs"]
    call = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    mask = [True, True, False, call["attn_bias"] is not None, call["learnable_sink"] is not None]
    call |= dict(dout=torch.ones_like(out), dlse=torch.ones_like(lse), out=out.detach())
    call |= dict(softmax_lse=lse.detach(), grad_mask=mask)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flash_attn.bwd, (), call, test_utils=utils)


@each_target(*DECODE_TARGETS)
def test_opcheck_decode(target: Target) -> None:
    make = dict(device=target.device, dtype=torch.bfloat16)
    q, k, v = (
        torch.randn(2, 1, 4, 64, **make),
        torch.randn(2, 70, 2, 64, **make),
        torch.randn(2, 70, 2, 64, **make),
    )
    lengths = torch.tensor([70, 3], dtype=torch.int32, device=target.device)
    options = (None, True, -1, -1, 0.0, 0, False, target.backend)
    call = (q, k, v, lengths, *(None,) * 7, *options)
    torch.library.opcheck(torch.ops.flash_attn.decode, call, test_utils=TESTS)
    new = torch.randn(2, 3, 2, 64, **make), torch.randn(2, 3, 2, 64, **make)
    tables = torch.randn(70, 16, **make), torch.randn(70, 16, **make)
    torch.library.opcheck(
        torch.ops.flash_attn.kvcache, (*new, *tables, True, *call), test_utils=TESTS
    )


@each_target(ATEN_CPU, ATEN_CUDA)
def test_rng_state_op(target: Target) -> None:
    like = torch.zeros(1, device=target.device)
    torch.library.opcheck(
        torch.ops.flash_attn.rng_state, (like,), test_utils=("test_schema", "test_faketensor")
    )
    assert torch.Tag.nondeterministic_seeded in torch.ops.flash_attn.rng_state.default.tags
    torch.manual_seed(5)
    first, second = torch.ops.flash_attn.rng_state(like), torch.ops.flash_attn.rng_state(like)
    torch.manual_seed(5)
    again = torch.ops.flash_attn.rng_state(like)
    assert first.dtype == torch.int64 and first.shape == (2,) and first.device == like.device
    assert torch.equal(first, again) and not torch.equal(first, second)


def leaves_of(target: Target, *shape: int, dtype: torch.dtype = torch.bfloat16, count: int = 3):
    return [
        torch.randn(*shape, device=target.device, dtype=dtype, requires_grad=True)
        for _ in range(count)
    ]


def fwd_bwd(function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@each_target(*ATTENTION_TARGETS)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "varlen", "packed", "sdpa"])
def test_compile(form: str, target: Target, fresh_dynamo) -> None:
    """fullgraph, forward and backward: the eager bits."""
    cu = torch.tensor([0, 20, 33], dtype=torch.int32, device=target.device)
    forms = {
        "dense": (
            lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True),
            (2, 33, 4, 32),
            3,
        ),
        "varlen": (
            lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, causal=True),
            (33, 4, 32),
            3,
        ),
        "packed": (
            lambda qkv: flash_attn.flash_attn_qkvpacked_func(qkv * 1.0),
            (2, 33, 3, 4, 32),
            1,
        ),
        "sdpa": (
            lambda q, k, v: flash_attn.scaled_dot_product_attention(q, k, v, is_causal=True),
            (2, 4, 33, 32),
            3,
        ),
    }
    function, shape, count = forms[form]
    inputs = leaves_of(target, *shape, count=count)
    with use(target), deterministic():
        expected = fwd_bwd(function, inputs)
        actual = fwd_bwd(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


class deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *exception: object) -> None:
        torch.use_deterministic_algorithms(False)


@each_target(ATEN_CPU, SM80)
@pytest.mark.slow
def test_compile_with_inductor(target: Target, fresh_dynamo) -> None:
    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(torch.tanh(q), k * 2, v + 1, causal=True).relu()

    inputs = leaves_of(target, 2, 33, 4, 64, dtype=torch.float16)
    with use(target):
        expected = fwd_bwd(block, inputs)
        actual = fwd_bwd(torch.compile(block, fullgraph=True), inputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-2)


@each_target(*DECODE_TARGETS)
def test_compile_decode(target: Target, fresh_dynamo) -> None:
    q, k, v = (x.detach() for x in leaves_of(target, 2, 40, 4, 64))
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=target.device)

    def step(q: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_decode_func(q, k, v, lengths, num_splits=2)

    with use(target):
        expected = step(q[:, :1])
        assert torch.equal(
            torch.compile(step, fullgraph=True, backend="aot_eager")(q[:, :1]), expected
        )


@each_target(*ATTENTION_TARGETS)
def test_dynamic_lengths_compile_once(target: Target, fresh_dynamo) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, k, v, causal=True)

    with use(target), deterministic():
        compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
        for length in (33, 70, 64, 129):
            inputs = leaves_of(target, 2, length, 4, 32)
            for a, e in zip(fwd_bwd(compiled, inputs), fwd_bwd(attend, inputs), strict=True):
                assert torch.equal(a, e), length
    assert fresh_dynamo["stats"]["unique_graphs"] == 1


@each_target(ATEN_CPU, SM80)
def test_compile_follows_use_backend(target: Target, fresh_dynamo) -> None:
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
    x = leaves_of(target, 1, 9, 2, 32)[0].detach()
    impossible = "sm80" if target.device == "cpu" else "cuda"
    with use(target):
        compiled(x, x, x)
    with flash_attn.use_backend(impossible), pytest.raises(RuntimeError):
        compiled(x, x, x)


@each_target(ATEN_CPU, ATEN_CUDA)
def test_compiled_dropout_draws_every_time(target: Target, fresh_dynamo) -> None:
    compiled = torch.compile(
        lambda q: flash_attn.flash_attn_func(q, q, q, dropout_p=0.5),
        fullgraph=True,
        backend="aot_eager",
    )
    q = leaves_of(target, 1, 33, 2, 16)[0].detach()
    with use(target):
        assert not torch.equal(compiled(q), compiled(q))


@each_target(*ATTENTION_TARGETS)
def test_export(target: Target) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flash_attn.flash_attn_func(q, k, v, causal=True)

    inputs = tuple(x.detach() for x in leaves_of(target, 2, 33, 4, 32))
    with use(target):
        program = torch.export.export(Attend(), inputs, strict=True)
        expected = Attend()(*inputs)
    assert torch.equal(program.module()(*inputs), expected)


@each_target(*ATTENTION_TARGETS)
def test_differentiating_twice_raises(target: Target) -> None:
    q, k, v = leaves_of(target, 1, 9, 2, 32)
    with use(target):
        out = flash_attn.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.float().sum().backward()


@each_target(*ATTENTION_TARGETS)
def test_checkpoint_recomputes_the_same(target: Target) -> None:
    inputs = leaves_of(target, 2, 33, 4, 32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = 0.2 if target.backend == "aten" else 0.0
        return flash_attn.flash_attn_func(q, k, v, dropout_p=p, deterministic=True)

    with use(target):
        torch.manual_seed(2)
        expected = fwd_bwd(attend, inputs)
        torch.manual_seed(2)
        actual = fwd_bwd(lambda *x: checkpoint(attend, *x, use_reentrant=False), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, target: Target) -> None:
    """fp32 tensors are cast as SDPA casts them; their gradients are fp32."""
    inputs = leaves_of(target, 2, 33, 4, 32, dtype=torch.float32)
    with use(target), torch.autocast(target.device, dtype=dtype):
        out = flash_attn.flash_attn_func(*inputs, causal=True)
        mixed = flash_attn.flash_attn_func(inputs[0].to(dtype), inputs[1], inputs[2], causal=True)
        cache = [x.detach().to(dtype) for x in inputs]
        decoded_dtype = None
        if target.backend == "aten":
            decoded_dtype = flash_attn.flash_decode_func(
                inputs[0].detach()[:, :1], *cache[1:]
            ).dtype
    with use(target):
        expected = flash_attn.flash_attn_func(*(x.to(dtype) for x in inputs), causal=True)
    assert out.dtype == mixed.dtype == dtype and decoded_dtype in (dtype, None)
    assert torch.equal(out, expected) and torch.equal(mixed, expected)
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs)


@each_target(*ATTENTION_TARGETS)
def test_no_grad_and_inference_mode(target: Target) -> None:
    inputs = leaves_of(target, 1, 9, 2, 32)
    with use(target):
        with torch.no_grad():
            assert not flash_attn.flash_attn_func(*inputs).requires_grad
        with torch.inference_mode():
            out = flash_attn.flash_attn_func(*inputs)
            assert out.is_inference() and out.isfinite().all()
        assert flash_attn.flash_attn_func(*inputs).requires_grad


@each_target(*ATTENTION_TARGETS)
def test_saved_tensors_are_guarded(target: Target) -> None:
    """Changing an input in place before the backward is an error, as everywhere in torch."""
    q, k, v = leaves_of(target, 1, 9, 2, 32)
    with use(target):
        key = k * 1.0
        out = flash_attn.flash_attn_func(q, key, v)
    with torch.no_grad():
        key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_target(*ATTENTION_TARGETS)
def test_vmap_says_that_it_cannot(target: Target) -> None:
    q = leaves_of(target, 3, 1, 9, 2, 32)[0].detach()
    with use(target), pytest.raises((RuntimeError, NotImplementedError)):
        torch.vmap(lambda x: torch.ops.flash_attn.fwd(**op_call_of(x, target))[0])(q)


def op_call_of(x: torch.Tensor, target: Target) -> dict:
    problem = Problem(Case(batch=1, seqlen_q=9, heads_q=2, d=32, dtype="bf16"), 0, target.device)
    return op_arguments(problem) | {"q": x, "k": x, "v": x, "backend": target.backend}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_import() -> None:
    script = """
import os, torch, flash_attn
torch.set_num_threads(1)
q = torch.randn(1, 9, 2, 8)
child = os.fork()
if child == 0:
    os._exit(0 if flash_attn.flash_attn_func(q, q, q).isfinite().all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# ---- CUDA


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


@each_target(ATEN_CUDA, SM80)
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


@each_target(Target("cuda", "cuda"))
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


@each_target(ATEN_CUDA)
def test_graph_dropout_differs_every_replay(target: Target) -> None:
    q = torch.randn(1, 33, 2, 32, device="cuda")
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


@each_target(SM80, Target("cuda", "cuda"))
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
