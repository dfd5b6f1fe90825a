"""Score terms on the kernels, forward and backward: each term, and all at once, in each head-dim
class, dtype, layout and mask."""

from __future__ import annotations

from cases import ATEN_CPU, SM80, SM90, Case, Target, check, each_case
from test_kernels import SHAPES

TERMS = {
    "softcap": dict(softcap=5.0),
    "beyond the cap": dict(softcap=1.0),
    "far from the cap": dict(softcap=300.0, spread="wide"),
    "ALiBi": dict(alibi="head"),
    "ALiBi of each sequence": dict(alibi="batch"),
    "sink": dict(sink=True),
    "dropout": dict(dropout_p=0.1),
    "little kept": dict(dropout_p=0.83),
    "dropout and all": dict(dropout_p=0.3, softcap=9.0, alibi="head", sink=True, lse_grad=True),
    "all": dict(softcap=20.0, alibi="batch", sink=True, lse_grad=True, softmax_scale=0.3),
}
HEAD_DIMS = (64, 128, 256)


def term_cases() -> list[Case]:
    cases = []
    for t, term in enumerate(TERMS.values()):
        for i, d in enumerate(HEAD_DIMS):
            for j, shape in enumerate(SHAPES.values()):
                for k, dtype in enumerate(("fp16", "bf16")):
                    more = dict(deterministic=(t + i + j + k) % 2 == 1, heads_q=4, heads_kv=2)
                    cases.append(Case(d=d, dtype=dtype, **more | shape | term))
    return cases


def odd_cases() -> list[Case]:
    """Head dims between the classes, top-left diagonals, groups of one, three and eight query
    heads, more queries than keys, rows longer than any tile."""
    every = dict(softcap=8.0, alibi="head", sink=True)
    return [
        Case(d=96, dtype="bf16", seqlen_q=65, seqlen_k=129, causal=True, **every),
        Case(d=192, dtype="fp16", seqlen_q=129, seqlen_k=65, window=(17, 3), **every),
        Case(d=40, d_v=24, dtype="bf16", seqlen_q=33, seqlen_k=20, causal=True, **every),
        Case(d=80, d_v=200, dtype="fp16", seqlen_q=33, seqlen_k=40, deterministic=True, **every),
        Case(d=64, dtype="fp16", seqlen_q=200, seqlen_k=70, causal=True, top_left=True, **every),
        Case(d=128, dtype="bf16", seqlen_q=70, seqlen_k=200, top_left=True, **every),
        Case(d=64, dtype="bf16", heads_q=3, heads_kv=3, seqlen_q=90, seqlen_k=90, **every),
        Case(d=128, dtype="fp16", heads_q=6, heads_kv=2, seqlen_q=90, seqlen_k=90, **every),
        Case(d=64, dtype="fp16", heads_q=8, heads_kv=1, seqlen_q=260, seqlen_k=90, **every),
        Case(d=64, dtype="bf16", batch=1, seqlen_q=700, seqlen_k=900, causal=True, **every),
        Case(d=128, dtype="bf16", batch=1, seqlen_q=700, seqlen_k=900, causal=True, **every),
        Case(d=256, dtype="fp16", batch=1, seqlen_q=500, seqlen_k=600, window=(90, 0), **every),
    ]


@each_case(term_cases() + odd_cases(), [SM80, SM90])
def test_score_terms(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(
    [
        Case(d=d, dtype="bf16", seqlen_q=40, seqlen_k=50, softcap=softcap, softmax_scale=scale)
        for d in HEAD_DIMS
        for softcap, scale in ((1e-6, 0.1), (3.0, 20.0), (1e35, 0.1), (3.0, 1e-6))
    ],
    [ATEN_CPU, SM80, SM90],
)
def test_extreme_caps(case: Case, target: Target, seed: int) -> None:
    """Caps that all scores are at, where 1 - tanh² has no digits left for a gradient, and caps that
    none comes near."""
    check(case, target, seed, backward=case.softcap > 1e6 or case.softmax_scale < 1e-3)
