"""Decode with softcap, ALiBi, a bias, a tree or rotary against caches of 16 bits: the second
instances of decode.cuh, in every class and every form."""

from __future__ import annotations

import pytest
import torch
from caches import CacheCase, CacheProblem, each_cache
from cases import ATEN_CPU, DECODE_CUDA, Target, each_target, use
from test_cache_forms import cache_cases
from test_cache_forms import check as check_cache
from test_decode import DecodeCase, check, decode_cases, each_decode

import flash_attn
from flash_attn.reference import max_logits_ref

TARGETS = (ATEN_CPU, DECODE_CUDA)
DTYPES = ["bf16", "fp16"]
TERMS = dict(softcap=[0.0, 4.0], alibi=[False, True], sink=[False, False, True])
DENSE = dict(
    seqlen_q=[1, 1, 2, 5],
    capacity=[200, 256, 130],
    lengths=[None, (0, 1, 200), (63, 64, 65), (199, 128, 2), (1000, -5, 77), (0, 0, 0)],
    heads=[(1, 1), (4, 2), (6, 1), (16, 1), (40, 2)],
    d=[40, 64, 96, 128, 136, 192, 200, 256],
    dtype=DTYPES,
    causal=[True, True, False],
    window=[(-1, -1), (-1, -1), (40, 0), (0, 0), (16, 9)],
    num_splits=[0, 1, 2, 7],
    page_size=[0, 0, 1, 16, 61],
    **TERMS,
)


def has_terms(case: DecodeCase | CacheCase) -> bool:
    options = ("softcap", "alibi", "rotary", "bias", "tree")
    return any(getattr(case, option, False) for option in options)


@each_decode([case for case in decode_cases(64, 21, **DENSE) if has_terms(case)], TARGETS)
def test_softcap_and_alibi(case: DecodeCase, target: Target, seed: int) -> None:
    check(case, target, seed)


FORMS = dict(
    seqlen_q=[1, 1, 2, 5],
    new=[0, 1, 1, 3, 7],
    capacity=[70, 33, 300],
    heads=[(4, 2), (6, 1), (16, 1), (40, 2)],
    d=[48, 64, 96, 128, 192, 256],
    d_v=[None, None, 40, 256],
    dtype=DTYPES,
    cache=[""],
    descale=[""],
    page_size=[0, 0, 1, 3, 16, 64],
    lengths=["tensor", "tensor", "int"],
    rows=[False, True],
    leftpad=[False, True],
    rotary=["", "interleaved", "halves"],
    rotary_dim=[32, 16, 48],
    causal=[True, True, False],
    window=[(-1, -1), (-1, -1), (20, 0), (16, 9)],
    num_splits=[0, 1, 3],
    batch_invariant=[False, False, True],
    garbage=[False, False, True],
    **TERMS,
)


@each_cache([case for case in cache_cases(96, 22, **FORMS) if has_terms(case)], TARGETS)
def test_forms(case: CacheCase, target: Target, seed: int) -> None:
    check_cache(case, target, seed)


# Long enough for the rings to go round, in one piece and in several.
@each_cache(
    [
        CacheCase(batch=1, capacity=1500, lengths="int" if form.get("new") else "none", **form)
        for d in (64, 128, 192, 256)
        for form in (
            dict(d=d, softcap=4.0, num_splits=1, heads_q=1, heads_kv=1),
            dict(d=d, rotary="halves", new=2, page_size=16, heads_q=16, heads_kv=1),
            dict(d=d, rotary="interleaved", rotary_dim=d, new=1, num_splits=2, alibi=True),
            dict(d=d, alibi=True, page_size=61, batch_invariant=True, heads_q=8),
        )
    ]
    + [CacheCase(batch=1, capacity=1500, lengths="none", d=256, softcap=50.0, heads_q=16)],
    TARGETS,
)
def test_long(case: CacheCase, target: Target, seed: int) -> None:
    check_cache(case, target, seed)


@each_target(*TARGETS)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("page_size", [0, 16])
def test_max_logits_of_rotated_queries(page_size: int, d: int, target: Target, seed: int) -> None:
    case = CacheCase(
        d=d, new=2, seqlen_q=2, rotary="halves", page_size=page_size, dtype="fp16", sink=True
    )
    problem = CacheProblem(case, seed, target.device)
    options = problem.options() | dict(return_max_logits=True)
    pools = [x.to(target.device) for x in (problem.k_pool, problem.v_pool)]
    tensors = dict(k=problem.k, v=problem.v, rotary_cos=problem.cos, rotary_sin=problem.sin)
    with use(target):
        out, lse, max_logits = flash_attn.flash_attn_with_kvcache(
            problem.q.to(target.device),
            *pools,
            cache_seqlens=problem.given_lengths(),
            rotary_interleaved=False,
            **{n: x.to(target.device) for n, x in tensors.items()},
            **options,
        )
    for pool, given in zip((problem.k_pool, problem.v_pool), pools, strict=True):
        pool.copy_(given)
    problem.compare(out, lse)
    lengths = torch.tensor([problem.used(b, 2) for b in range(case.batch)], dtype=torch.int32)
    expected = max_logits_ref(
        problem.rotate(problem.q, False).to(problem.dtype).double(),
        problem.keys(problem.k_pool, None),
        causal=True,
        seqused_k=lengths,
    )
    torch.testing.assert_close(max_logits.double().cpu(), expected, rtol=2.0**-9, atol=2.0**-9)


@each_target(DECODE_CUDA)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_a_far_cap_is_none(d: int, target: Target, seed: int) -> None:
    """Both instances, the same call but for a cap that no score feels."""
    torch.manual_seed(seed)
    q = torch.randn(2, 1, 4, d).half().to(target.device)
    k, v = torch.randn(2, 2, 150, 2, d).half().to(target.device)
    with use(target):
        plain, plain_lse = flash_attn.flash_decode_func(q, k, v, return_softmax_lse=True)
        capped, capped_lse = flash_attn.flash_decode_func(
            q, k, v, softcap=1e4, return_softmax_lse=True
        )
    torch.testing.assert_close(capped, plain, rtol=2.0**-9, atol=2.0**-9)
    torch.testing.assert_close(capped_lse, plain_lse, rtol=1e-4, atol=1e-4)
