"""torch.library.opcheck of every op: schema, fake kernel, autograd, dynamic shapes."""

from __future__ import annotations

import pytest
import torch
from caches import CacheCase, CacheProblem, each_cache, skip_unless_served
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    Case,
    Problem,
    Target,
    each_case,
    each_target,
    op_arguments,
)

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


@each_case(OP_CASES[2:], [ATEN_CPU, ATEN_CUDA])
def test_opcheck_of_returned_probabilities(case: Case, target: Target, seed: int) -> None:
    call = op_call(case, target, seed, return_probs=True)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flash_attn.fwd, (), call, test_utils=utils)


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
@pytest.mark.parametrize("wide", [False, True])
def test_opcheck_bwd(wide: bool, case: Case, target: Target, seed: int) -> None:
    """wide: dq, dk and dv in fp32."""
    call = op_call(case, target, seed)
    out, lse, *_ = torch.ops.flash_attn.fwd(**call)
    del call["return_probs"]
    call = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    mask = [True, True, False, *(call[x] is not None for x in ("attn_bias", "learnable_sink"))]
    call |= dict(dout=torch.ones_like(out), dlse=torch.ones_like(lse), out=out.detach())
    call |= dict(softmax_lse=lse.detach(), grad_mask=mask)
    call |= dict(wide_key_gradients=wide, wide_query_gradient=wide)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flash_attn.bwd, (), call, test_utils=utils)


CACHE_CASES = [
    CacheCase(new=2, seqlen_q=2, d=64),
    CacheCase(new=2, seqlen_q=2, rows=True, leftpad=True, rotary="halves", rotary_dim=16),
    CacheCase(new=3, page_size=16, cache="int8", descale="sequence", alibi=True, sink=True, d_v=40),
    CacheCase(new=20, seqlen_q=20, page_size=16, rotary="halves"),
    CacheCase(new=2, seqlen_q=2, bias="same", bias_shape="hqk"),
    CacheCase(new=3, seqlen_q=3, page_size=16, tree="each"),
]


def cache_op_call(case: CacheCase, target: Target, seed: int) -> dict:
    problem = CacheProblem(case, seed, target.device)
    skip_unless_served(problem, target)
    call = problem.op_arguments(target.backend)
    for name in ("k_cache", "v_cache"):  # opcheck compares with ==: no poison
        call[name] = call[name].nan_to_num(1.0) if call[name].is_floating_point() else call[name]
    return call


@each_cache(CACHE_CASES)
def test_opcheck_kvcache(case: CacheCase, target: Target, seed: int) -> None:
    call = cache_op_call(case, target, seed)
    torch.library.opcheck(torch.ops.flash_attn.kvcache, (), call, test_utils=TESTS)


@each_cache(CACHE_CASES)
def test_opcheck_decode(case: CacheCase, target: Target, seed: int) -> None:
    call = cache_op_call(case, target, seed)
    for name in ("k", "v", "rotary_cos", "rotary_sin", "rotary_interleaved"):
        del call[name]
    torch.library.opcheck(torch.ops.flash_attn.decode, (), call, test_utils=TESTS)


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
