"""The gradient formulas against finite differences, in float64: no oracle of ours takes part."""

from __future__ import annotations

import pytest
import torch
from cases import ATEN_CPU, ATEN_CUDA, Case, Problem, Target, each_case, op_arguments

BASE = Case(batch=1, seqlen_q=5, seqlen_k=6, heads_q=2, heads_kv=1, d=3, d_v=2, dtype="fp64")
FEATURES = [
    BASE,
    BASE.with_(causal=True),
    BASE.with_(causal=True, top_left=True),
    BASE.with_(seqlen_q=7, causal=True),
    BASE.with_(window=(2, 1)),
    BASE.with_(softcap=1.5),
    BASE.with_(alibi="batch", batch=2),
    BASE.with_(bias="full"),
    BASE.with_(bias="head", heads_kv=2),
    BASE.with_(bias="key"),
    BASE.with_(bias="row"),
    BASE.with_(bias="bool"),
    BASE.with_(sink=True),
    BASE.with_(dropout_p=0.4),
    BASE.with_(dropout_p=0.4, softcap=1.5, alibi="head", bias="head", sink=True, causal=True),
    BASE.with_(
        lengths_q=(3, 0, 4), lengths_k=(5, 2, 3), tail=1, causal=True, bias="key", sink=True
    ),
    BASE.with_(
        lengths_q=(3, 4), lengths_k=(5, 4), seqused_q=(2, 4), seqused_k=(5, 1), leftpad_k=(1, 0)
    ),
]


@each_case(FEATURES, [ATEN_CPU, ATEN_CUDA])
@pytest.mark.parametrize("through", ["out", "lse", "out and lse"])
def test_gradcheck(through: str, case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    tensors = problem.float_tensors()
    names = [n for n, x in tensors.items() if x.is_floating_point() and n != "alibi_slopes"]
    fixed = op_arguments(problem) | tensors | problem.index_tensors() | {"backend": target.backend}

    def attend(*leaves: torch.Tensor):
        out, lse, *_ = torch.ops.flash_attn.fwd(**fixed | dict(zip(names, leaves, strict=True)))
        # Rows without keys have LSE -inf, which has no finite difference.
        lse = torch.where(lse.isneginf(), 0.0, lse)
        return {"out": (out,), "lse": (lse,), "out and lse": (out, lse)}[through]

    leaves = [tensors[name].detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=False)
