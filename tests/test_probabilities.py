"""The probabilities that a forward returns on request, S_dmask, in upstream's form."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    Case,
    Problem,
    Target,
    each_case,
    each_target,
    expect,
    run,
)
from numerics import UNIT_ROUNDOFF

PROBS_CASES = [
    Case(seqlen_q=40, seqlen_k=70),
    Case(seqlen_q=70, seqlen_k=40, causal=True, softcap=5.0, alibi="batch"),
    Case(seqlen_q=40, seqlen_k=70, dtype="fp64", dropout_p=0.3, bias="head", sink=True),
    Case(seqlen_q=40, seqlen_k=70, dtype="bf16", dropout_p=0.3, window=(9, 0)),
    Case(lengths_q=(7, 0, 33), lengths_k=(20, 5, 18), dropout_p=0.3),
    # Blocks of rows on a GPU that don't see the last keys, or the first.
    Case(seqlen_q=300, batch=1, heads_q=2, d=16, dropout_p=0.3, causal=True),
    Case(seqlen_q=300, batch=1, heads_q=2, d=16, dropout_p=0.3, window=(20, 0)),
]


@each_case(PROBS_CASES, [ATEN_CPU, ATEN_CUDA])
def test_attention_probabilities(case: Case, target: Target, seed: int) -> None:
    """S_dmask is P divided by its row's largest, negative where dropout drops it."""
    problem = Problem(case, seed, target.device)
    probs = run(problem, target.backend, backward=False, return_probs=True)["probs"].cpu().double()
    reference = expect(problem, backward=False)
    largest = reference.probs.abs().amax(-1, keepdim=True)
    expected = reference.probs / largest.where(largest > 0, 1)
    assert probs.shape == expected.shape
    assert torch.equal(probs < 0, expected < 0)
    accumulator = UNIT_ROUNDOFF[torch.float64 if case.dtype == "fp64" else torch.float32]
    unit = UNIT_ROUNDOFF[problem.q.dtype] + 16 * accumulator * (1 + reference.largest_score)
    assert ((probs - expected).abs() <= unit * expected.abs()).all()


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("keys", [70, 4100])
def test_probabilities_below_a_sink(keys: int, target: Target, seed: int) -> None:
    """Each row is divided by its largest, not by a sink, below which they all would be 0."""
    case = Case(seqlen_q=3, seqlen_k=keys, d=16, dtype="fp16", dropout_p=0.3, sink=True)
    problem = Problem(case, seed, target.device)
    problem.learnable_sink.zero_()
    expected = expect(problem, backward=False).probs
    expected /= expected.abs().amax(-1, keepdim=True)
    problem.learnable_sink.fill_(1000)
    probs = run(problem, target.backend, backward=False, return_probs=True)["probs"].cpu().double()
    assert torch.equal(probs.abs().amax(-1), torch.ones_like(probs[..., 0]))
    torch.testing.assert_close(probs, expected, atol=1e-7, rtol=2e-3)


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("keys", [70, 4100])
def test_probabilities_of_scores_far_below_0(keys: int, target: Target, seed: int) -> None:
    """No gradient comes from an lse of -1e7, but such a row has weights, the same as its out."""
    case = Case(seqlen_q=3, seqlen_k=keys, d=16, bias="key", dropout_p=0.3)
    problem = Problem(case, seed, target.device)
    problem.attn_bias.fill_(-1e7)
    probs = run(problem, target.backend, backward=False, return_probs=True)["probs"]
    assert torch.equal(probs.abs().amax(-1), torch.ones_like(probs[..., 0]))


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("keys", [40, 4100])
def test_probabilities_of_a_nan(keys: int, target: Target, seed: int) -> None:
    """A row that sees a NaN has nothing but NaN where it sees keys, and others keep their bits."""
    case = Case(seqlen_q=40, seqlen_k=keys, d=16, batch=1, dropout_p=0.3, causal=True)
    problem = Problem(case, seed, target.device)
    clean = run(problem, target.backend, backward=False, return_probs=True)["probs"]
    problem.k[:, keys - 10] = math.nan
    probs = run(problem, target.backend, backward=False, return_probs=True)["probs"]
    assert torch.equal(probs[:, :, :30], clean[:, :, :30])
    seen = torch.ones(40, keys).tril(keys - 40).bool()[30:].to(probs.device)
    assert torch.equal(probs[:, :, 30:].isnan(), seen.expand(1, 4, 10, keys))
    assert not probs[:, :, 30:].masked_fill(seen, 0).count_nonzero()


@each_target(ATEN_CPU, ATEN_CUDA)
def test_probabilities_have_the_shape_that_was_asked_for(target: Target, seed: int) -> None:
    """Zeros beyond all rows and keys that there are."""
    case = Case(lengths_q=(3, 2), lengths_k=(4, 5), dropout_p=0.3)
    problem = Problem(case, seed, target.device)
    longer = {"max_seqlen_q": 11, "max_seqlen_k": 13}
    overrides = dict(backward=False, return_probs=True)
    few = run(problem, target.backend, **overrides)["probs"]
    many = run(problem, target.backend, **overrides, **longer)["probs"]
    torch.testing.assert_close(many[:, :, :3, :5], few)
    assert many.shape == (2, 4, 11, 13) and many.count_nonzero() == few.count_nonzero()


@each_target(*ATTENTION_TARGETS)
def test_probabilities_come_only_on_request(target: Target, seed: int) -> None:
    problem = Problem(Case(dtype="fp16"), seed, target.device)
    assert run(problem, target.backend, backward=False)["probs"].numel() == 0
