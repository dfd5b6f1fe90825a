"""torch.compile and export: one graph, the eager bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
from caches import CacheCase, CacheProblem, skip_unless_served
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    DECODE_TARGETS,
    SM80,
    SM90,
    SPLIT_TARGETS,
    Target,
    each_target,
    fwd_bwd,
    leaves_of,
    use,
)

import flash_attn


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


@each_target(*SPLIT_TARGETS)
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
    with use(target):
        compiled(x, x, x)
    with flash_attn.use_backend("cuda"), pytest.raises(RuntimeError):
        compiled(x, x, x)


def in_threads(function: Callable, x: torch.Tensor, names: Sequence[str]) -> dict[str, list]:
    """Results or error messages of five calls in a thread for each backend, which wait for one
    another before each call."""
    barrier = threading.Barrier(len(names), timeout=120)
    got: dict[str, list] = {name: [] for name in names}

    def call(name: str) -> None:
        with flash_attn.use_backend(name):
            for _ in range(5):
                barrier.wait()
                try:
                    got[name].append(function(x, x, x))
                except RuntimeError as error:
                    got[name].append(str(error))

    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    # Where there is no GPU, torch 2.11 traces with a device guard of the tracing thread, and looks
    # at it in the next trace, when the thread may have ended.
    with patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(len(results) == 5 for results in got.values())
    return got


def test_two_threads_share_compiled_code(fresh_dynamo) -> None:
    """Under different backends: each gets its own, however the calls interleave."""
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 9, 2, 32)
    expected = flash_attn.flash_attn_func(x, x, x)
    got = in_threads(compiled, x, ["aten", "sm80"])
    assert all(torch.equal(out, expected) for out in got["aten"])
    assert all("sm80 cannot serve this call" in words for words in got["sm80"])


@each_target(SM80, SM90)
def test_two_threads_share_compiled_code_of_kernels(target: Target, fresh_dynamo) -> None:
    """Both backends serve the call, and their bits tell which of them did."""
    names = ["aten", target.backend]
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 70, 2, 64, device=target.device, dtype=torch.bfloat16)
    expected = {}
    for name in names:
        with flash_attn.use_backend(name):
            expected[name] = flash_attn.flash_attn_func(x, x, x)
    assert not torch.equal(*expected.values())
    for name, results in in_threads(compiled, x, names).items():
        assert all(torch.equal(out, expected[name]) for out in results), name


def test_a_block_inside_compiled_code(fresh_dynamo) -> None:
    """It counts inside, and the caller's own block afterwards."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        with flash_attn.use_backend("aten"):
            return flash_attn.flash_attn_func(x, x, x)

    x = torch.randn(1, 9, 2, 32)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with flash_attn.use_backend("sm80"):
        for _ in range(2):
            assert torch.equal(compiled(x), attend(x))
            assert flash_attn.can_use(x, x, x).backend is None
    assert flash_attn.can_use(x, x, x).backend == "aten"


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


def serving_step(problem: CacheProblem):
    """A step that appends, attends, and reads the cache afterwards."""
    options = problem.options()
    tables = [x.to(problem.device) for x in (problem.cos, problem.sin)]

    def step(q, k_cache, v_cache, k, v, lengths):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q + 1, k_cache, v_cache, k, v, *tables, lengths, **options
        )
        return out * 2, lse, k_cache.float().abs().amax(), v_cache[0]

    return step


@each_target(*DECODE_TARGETS)
@pytest.mark.parametrize("form", ["dense", "paged", "rows", "int", "int8"])
def test_compile_kvcache(form: str, target: Target, seed: int, fresh_dynamo) -> None:
    """One graph for all lengths, the eager bits, and the cache is written."""
    forms = {
        "dense": dict(),
        "paged": dict(page_size=16),
        "rows": dict(rows=True, leftpad=True),
        "int": dict(lengths="int"),
        "int8": dict(cache="int8", page_size=16),
    }
    case = CacheCase(new=2, rotary="halves", **forms[form])
    problem = CacheProblem(case, seed, target.device)
    skip_unless_served(problem, target)
    pools = [torch.nan_to_num(x).to(target.device) for x in (problem.k_pool, problem.v_pool)]
    make = dict(device=target.device, dtype=problem.dtype)
    with use(target):
        step = serving_step(problem)
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        for new in (7, 11, 13):  # no size twice: torch takes equal ones for one
            lengths = problem.given_lengths()
            lengths = lengths + new if isinstance(lengths, int) else lengths
            q = torch.randn(3, new, 4, 32, **make)
            k, v = torch.randn(2, 3, new, 2, 32, **make)
            written = [[x.clone() for x in pools] for _ in range(2)]
            actual = compiled(q, *written[0], k, v, lengths)
            expected = step(q, *written[1], k, v, lengths)
            for a, e in zip([*actual, *written[0]], [*expected, *written[1]], strict=True):
                assert torch.equal(a, e), new
            assert not torch.equal(written[0][0], pools[0])
    assert fresh_dynamo["stats"]["unique_graphs"] == 1


@each_target(ATEN_CPU)
@pytest.mark.slow
def test_compile_kvcache_with_inductor(target: Target, seed: int, fresh_dynamo) -> None:
    problem = CacheProblem(CacheCase(new=1, rotary="halves", dtype="fp32"), seed, target.device)
    pools = [torch.nan_to_num(x) for x in (problem.k_pool, problem.v_pool)]
    step = serving_step(problem)
    written = [[x.clone() for x in pools] for _ in range(2)]
    call = problem.k, problem.v, problem.lengths
    actual = torch.compile(step, fullgraph=True)(problem.q, *written[0], *call)
    expected = step(problem.q, *written[1], *call)
    for a, e in zip([*actual, *written[0]], [*expected, *written[1]], strict=True):
        torch.testing.assert_close(a, e)


@each_target(ATEN_CPU)
def test_export_kvcache(target: Target) -> None:
    """A module whose buffers are the caches: the exported program writes its own."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("k_cache", "v_cache"):
                self.register_buffer(name, torch.zeros(2, 9, 2, 16))

        def forward(self, q, k, v, lengths) -> torch.Tensor:
            caches = self.k_cache, self.v_cache
            return flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)

    q, k, v = torch.randn(3, 2, 1, 2, 16)
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    layer = Layer()
    with use(target):
        program = torch.export.export(layer, (q, k, v, lengths), strict=True).module()
        assert torch.equal(program(q, k, v, lengths), layer(q, k, v, lengths))
    for name, cache in layer.named_buffers():
        assert torch.equal(dict(program.named_buffers())[name], cache) and cache.any()
