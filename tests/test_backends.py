"""Which backend serves a call: never another than the one that was named, and reasons in words."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading

import pytest
import torch
from cases import SM80, SM90, Case, Problem, Target, each_target, op_arguments, run

import flash_attn

BACKENDS = {"aten", "sm80", "sm90", "cuda"}
CUDA_ONLY = ["sm80", "sm90", "cuda"]


def tensors(
    device: str = "cpu", dtype: torch.dtype = torch.float16, d: int = 64
) -> list[torch.Tensor]:
    return [torch.randn(1, 9, 2, d, device=device).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("name", CUDA_ONLY)
def test_a_named_backend_serves_or_raises(name: str) -> None:
    with flash_attn.use_backend(name):
        with pytest.raises(
            RuntimeError, match=f"flash_attn: backend: .*{name} cannot serve this call"
        ):
            flash_attn.flash_attn_func(*tensors())
        with pytest.raises(
            RuntimeError, match=f"flash_attn: backend: .*{name} cannot serve this call"
        ):
            flash_attn.flash_decode_func(*tensors())
    assert flash_attn.flash_attn_func(*tensors()).isfinite().all()


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="flash_attn: name: expected one of .*aten.*got 'sm70'"):
        flash_attn.use_backend("sm70")
    arguments = op_arguments(Problem(Case(), 0, "cpu")) | dict(zip("qkv", tensors(), strict=True))
    with pytest.raises(RuntimeError, match="flash_attn: backend: expected one of .*got sm70"):
        torch.ops.flash_attn.fwd(
            **arguments | {"max_seqlen_q": 9, "max_seqlen_k": 9}, backend="sm70"
        )


def test_blocks_nest_and_end() -> None:
    def serves() -> str | None:
        return flash_attn.can_use(*tensors()).backend

    assert serves() == "aten"
    with flash_attn.use_backend("sm80"):
        assert serves() is None
        with flash_attn.use_backend("aten"):
            assert serves() == "aten"
        assert serves() is None
    assert serves() == "aten"
    with pytest.raises(KeyError), flash_attn.use_backend("sm80"):
        raise KeyError
    assert serves() == "aten"


def overlap() -> dict[str, object]:
    """Enters "aten" in one thread, then "sm80" in another, calls in both, leaves in that order."""
    barrier = threading.Barrier(2, timeout=60)
    results: dict[str, object] = {}

    def thread(name: str, turn: int) -> None:
        try:
            for step in range(2):
                if step == turn:
                    block = flash_attn.use_backend(name)
                    block.__enter__()
                barrier.wait()
            results[name] = served(*tensors())
            barrier.wait()
            for step in range(2):
                if step == turn:
                    block.__exit__(None, None, None)
                barrier.wait()
            results[f"after {name}"] = served(*tensors())
        except Exception as error:
            barrier.abort()
            results[name] = error

    threads = [threading.Thread(target=thread, args=x) for x in (("aten", 0), ("sm80", 1))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def served(*inputs: torch.Tensor) -> str:
    """Whether a call on the CPU runs, as it does on aten, or is refused, as by sm80."""
    try:
        flash_attn.flash_attn_func(*inputs)
    except RuntimeError as error:
        assert "sm80 cannot serve this call" in str(error)
        return "refused"
    return "served"


def test_blocks_of_two_threads_overlap() -> None:
    """Each thread has its own choice, and nothing stays behind."""
    inside = {"aten": "served", "sm80": "refused"}
    assert overlap() == inside | {"after aten": "served", "after sm80": "served"}
    assert flash_attn.can_use(*tensors()).backend == "aten"


def test_one_block_in_two_threads() -> None:
    """A use_backend object holds no state of the thread that entered it."""
    block = flash_attn.use_backend("sm80")
    with flash_attn.use_backend("aten"):
        block.__enter__()
        inside: list[str] = []
        thread = threading.Thread(
            target=lambda: [block.__enter__(), block.__exit__(), inside.append(served(*tensors()))]
        )
        thread.start()
        thread.join()
        assert inside == ["served"] and served(*tensors()) == "refused"
        block.__exit__()
        assert served(*tensors()) == "served"


def test_blocks_of_async_contexts_overlap() -> None:
    """Tasks that take turns inside their blocks; a task starts with the choice of its parent."""

    async def task(name: str | None) -> str:
        if name is None:
            return served(*tensors())
        with flash_attn.use_backend(name):
            await asyncio.sleep(0)
            before = served(*tensors())
            await asyncio.sleep(0)
            (child,) = await asyncio.gather(task(None))
            assert child == before == served(*tensors())
        return before

    async def main() -> list[str]:
        return await asyncio.gather(*map(task, ("aten", "sm80", None, "aten", "sm80")))

    assert asyncio.run(main()) == ["served", "refused", "served", "served", "refused"]
    assert served(*tensors()) == "served"


def test_backward_stays_with_its_forward() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float32))
    with flash_attn.use_backend("aten"):
        out = flash_attn.flash_attn_func(q, k, v)
    with flash_attn.use_backend("sm80"):
        out.sum().backward()
    assert q.grad.isfinite().all()


def test_every_reason_is_given() -> None:
    q, k, v = tensors(dtype=torch.float32, d=320)
    support = flash_attn.can_use(
        q,
        k,
        v,
        softcap=2.0,
        dropout_p=0.1,
        alibi_slopes=torch.ones(2),
        attn_bias=torch.zeros(9, 9),
        learnable_sink=torch.zeros(2),
    )
    assert support and support.backend == "aten"
    assert set(support.reasons) >= BACKENDS - {"aten"}
    why = " ".join(support.reasons["sm80"])
    for word in ("CUDA", "320"):
        assert word in why, f"{word} missing from: {why}"
    for name in support.reasons:
        assert name in str(support)


def test_asking_for_the_backward() -> None:
    q, k, v = tensors(d=192)
    refused = "softcap is not supported in the backward above head_dim 128"
    for op, softcap in (("bwd", 30.0), ("bwd", 0.0), ("fwd", 30.0)):
        support = flash_attn.can_use(q, k, v, op=op, softcap=softcap)
        assert (refused in support.reasons["sm90"]) == (op == "bwd" and softcap > 0), op
        assert refused not in support.reasons["sm80"]


def test_asking_for_decode() -> None:
    q, k, v = tensors()
    support = flash_attn.can_use(q[:, :1], k, v, op="decode")
    assert support.backend == "aten" and support.reasons["sm80"] and support.reasons["cuda"]
    eight = [x.to(torch.int8) for x in (k, v)]
    options = dict(cache_batch_idx=torch.zeros(1, dtype=torch.int32), batch_invariant=True)
    options |= dict(cache_leftpad=options["cache_batch_idx"], k_descale=torch.ones(2))
    assert flash_attn.can_use(q[:, :1], *eight, op="decode", **options).backend == "aten"
    with pytest.raises(RuntimeError, match="flash_attn: k_descale: expected with a cache of"):
        flash_attn.can_use(q[:, :1], k, v, op="decode", k_descale=torch.ones(2))
    with pytest.raises(ValueError, match="flash_attn: op: "):
        flash_attn.can_use(q, k, v, op="prefill")


def test_what_decode_cannot_count() -> None:
    """Beyond the kernels' 32 bits: a reason by name, so that a named backend refuses it."""
    one = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    for batch, rows, keys, word in (
        (1, 1 << 20, 9, "2^20 or more rows"),
        (1, 1, 1 << 30, "2^30 or more places"),
        (1 << 10, 1, 1 << 25, "2^35 or more places"),
    ):
        q, cache = one.expand(batch, rows, 1, 8), one.expand(batch, keys, 1, 8)
        support = flash_attn.can_use(q, cache, cache, op="decode")
        assert support.backend == "aten" and word in " ".join(support.reasons["cuda"])


def test_asking_changes_nothing() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    q, k, v = tensors()
    state = torch.get_rng_state()
    flash_attn.can_use(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_asking_with_bad_input_raises_what_the_call_would() -> None:
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match="flash_attn: v: "):
        flash_attn.can_use(q, k, v[:, :3])


@pytest.mark.gpu
def test_kernels_come_first_on_a_gpu() -> None:
    support = flash_attn.can_use(*tensors("cuda"))
    assert support.backend.startswith("sm") and support.reasons["aten"] == []
    assert flash_attn.can_use(*tensors("cuda"), op="decode").backend == "cuda"
    assert flash_attn.can_use(*tensors("cuda", torch.float32)).backend == "sm80"
    assert flash_attn.can_use(*tensors("cuda", torch.float32), op="decode").backend == "cuda"
    assert flash_attn.can_use(*tensors("cuda", torch.float32), dropout_p=0.1).backend == "sm80"
    assert flash_attn.can_use(*tensors("cuda", torch.float64)).backend == "aten"


CASES = [
    Case(dtype="fp16"),
    Case(dtype="bf16", causal=True, window=(3, 0)),
    Case(dtype="fp32"),
    Case(dtype="fp32", d=256),
    Case(dtype="fp32", d=264),
    Case(dtype="fp32", softcap=1.0),
    Case(dtype="fp32", d=136, softcap=1.0),
    Case(dtype="fp32", alibi="head"),
    Case(dtype="fp32", bias="full"),
    Case(dtype="fp32", dropout_p=0.1),
    Case(dtype="fp32", sink=True),
    Case(dtype="fp64"),
    Case(dtype="fp16", d=264),
    Case(dtype="fp16", d=64, d_v=257),
    Case(dtype="bf16", d=512, causal=True),
    Case(dtype="bf16", d=512, deterministic=True),
    Case(dtype="fp16", d=512, softcap=1.0, alibi="head"),
    Case(dtype="fp16", d=512, bias="full"),
    Case(dtype="fp16", d=320, d_v=512, dropout_p=0.1),
    Case(dtype="fp16", d=520),
    Case(dtype="fp16", softcap=1.0),
    Case(dtype="fp16", alibi="head"),
    Case(dtype="fp16", bias="bool"),
    Case(dtype="fp16", sink=True),
    Case(dtype="bf16", dropout_p=0.1),
    Case(dtype="bf16", d=59),
]


@each_target(SM80, SM90)
@pytest.mark.real_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tests_know_what_kernels_serve(case: Case, target: Target, seed: int) -> None:
    """Case.served_by, which picks the kernels' tests, says what the library says."""
    problem = Problem(case.with_(seqlen_q=9), seed, "cuda")
    if case.served_by(target.backend):
        run(problem, target.backend)
    else:
        with pytest.raises(RuntimeError, match="cannot serve this call"):
            run(problem, target.backend)


@each_target(SM80)
def test_a_kernel_really_runs(target) -> None:
    """The profiler sees our kernel's name and no matmul of torch's."""
    q, k, v = tensors("cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with flash_attn.use_backend(target.backend):
            flash_attn.flash_attn_func(q, k, v)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("flash_attn" in name and "sm80" in name for name in names), names
    assert not any("gemm" in name for name in names), names


@pytest.mark.gpu
def test_one_warning_when_aten_serves_a_gpu_call() -> None:
    """Once a reason, in a process of its own, and it says why."""
    script = """
import torch, warnings, flash_attn
q = torch.randn(1, 9, 2, 64, device="cuda", dtype=torch.float16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        flash_attn.flash_attn_func(q.double(), q.double(), q.double())
    with flash_attn.use_backend("aten"):
        flash_attn.flash_attn_func(q, q, q, return_attn_probs=True)
    flash_attn.flash_attn_func(q, q, q, dropout_p=0.5)
messages = [str(w.message) for w in caught if "flash_attn" in str(w.message)]
assert len(messages) == 1 and "dtype" in messages[0] and "aten" in messages[0], messages
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=280)


SMALL_SHARED_MEMORY = """
import sys
sys.path.insert(0, {tests!r})
from cases import SM80, Case, check
for d in (64, 96, 128, 192, 256):
    for dtype in ("fp16", "bf16"):
        for causal in (False, True):
            case = Case(dtype=dtype, seqlen_q=200, seqlen_k=170, d=d, causal=causal, batch=1)
            check(case, SM80, seed=d)
            check(case.with_(deterministic=True, d_v=64), SM80, seed=d)
for d in (64, 128):
    case = Case(dtype="fp32", seqlen_q=200, seqlen_k=170, d=d, causal=True, batch=1)
    check(case, SM80, seed=d)
    check(case.with_(deterministic=True, d_v=64), SM80, seed=d)
check(Case(dtype="fp32", seqlen_q=200, seqlen_k=170, d=256, causal=True), SM80, 0, backward=False)
if {limit} >= 163 * 1024:
    for dtype in ("fp16", "bf16"):
        case = Case(dtype=dtype, seqlen_q=200, seqlen_k=170, d=512, causal=True)
        check(case, SM80, 0, backward=False)
        check(case.with_(softcap=5.0, dropout_p=0.1), SM80, 0, backward=False)
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024])
def test_tiles_fit_smaller_gpus(limit: int) -> None:
    """99 KB is what a block gets on sm_86, sm_89 and sm_120, 163 KB on sm_80: forced, forward and
    backward run."""
    script = SMALL_SHARED_MEMORY.format(tests=os.path.dirname(__file__), limit=limit)
    environment = os.environ | {"FLASH_ATTN_SMEM_LIMIT": str(limit)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, timeout=280, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_threads() -> None:
    """Eight first calls at once give what one call gives."""
    q, k, v = tensors(dtype=torch.float32)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    results: list[torch.Tensor | None] = [None] * 8

    def call(i: int) -> None:
        results[i] = flash_attn.flash_attn_func(q, k, v, causal=True)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results)


CHUNK_ON_DECODE = {
    "softcap": dict(softcap=3.0),
    "alibi": dict(alibi_slopes=torch.ones(64)),
    "sink": dict(learnable_sink=torch.ones(64)),
    "splits": dict(num_splits=2),
    "batch_invariant": dict(batch_invariant=True),
}


@pytest.mark.gpu
def test_many_new_tokens_go_to_the_prefill_kernels() -> None:
    """Where they fill the device: 64 heads, and each tile as much as 16 of decode's."""
    q = torch.randn(3, 300, 64, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 3, 400, 16, 128, device="cuda", dtype=torch.bfloat16)
    prefill = flash_attn.can_use(q, k, v).backend
    assert prefill in ("sm80", "sm90")
    support = flash_attn.can_use(q, k, v, op="decode")
    assert support.backend == prefill and support.reasons["cuda"] == []
    with flash_attn.use_backend(prefill):
        expected = flash_attn.flash_decode_func(q, k, v)
    assert torch.equal(flash_attn.flash_decode_func(q, k, v), expected)
    with flash_attn.use_backend("cuda"):
        assert not torch.equal(flash_attn.flash_decode_func(q, k, v), expected)
    assert flash_attn.can_use(q[:, :16], k, v, op="decode").backend == "cuda"
    assert flash_attn.can_use(q[:1, :17], k[:1], v[:1], op="decode").backend == "cuda"
    pages = dict(block_table=torch.zeros(3, 1, dtype=torch.int32, device="cuda"))
    assert flash_attn.can_use(q, k, v, op="decode", **pages).backend == prefill
    for name, options in CHUNK_ON_DECODE.items():
        moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        assert flash_attn.can_use(q, k, v, op="decode", **moved).backend == "cuda", name
    eight = [x.to(torch.int8) for x in (k, v)]
    assert flash_attn.can_use(q, *eight, op="decode").backend == "cuda"


def test_reasons_of_the_prefill_kernels() -> None:
    q, k, v = tensors()
    eight = [x.to(torch.int8) for x in (k, v)]
    options = dict(num_splits=2, batch_invariant=True, softcap=1.0)
    why = " ".join(flash_attn.can_use(q, *eight, op="decode", **options).reasons["sm90"])
    for word in ("8 bits", "num_splits", "batch_invariant", "softcap"):
        assert word in why, f"{word} missing from: {why}"


def test_a_support_stays_as_it_is() -> None:
    q = torch.zeros(1, 3, 2, 8)
    support = flash_attn.can_use(q, q, q)
    with pytest.raises(dataclasses.FrozenInstanceError):
        support.backend = "sm90"
