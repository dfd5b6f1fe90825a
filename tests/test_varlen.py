"""Sequences of different lengths side by side: empty ones, tails, seqused, leftpad, garbage in the
index tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    BITWISE_TARGETS,
    OP_TARGETS,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    check,
    compare,
    each_case,
    each_target,
    expect,
    op_arguments,
    pads,
    run,
    sample,
    use,
)
from test_forward import HEADS, cases_of
from test_varlen_pages import paged_problem

import flash_attn

LENGTHS = {
    "ragged": ((76, 34, 146, 1), (76, 40, 130, 9)),
    "one": ((1,), (1,)),
    "decode": ((1, 1, 1), (65, 130, 2)),
    "zeros-first": ((0, 0, 40), (3, 0, 70)),
    "zeros-middle": ((30, 0, 40), (64, 33, 0)),
    "zeros-last": ((30, 17, 0), (31, 129, 5)),
    "no-keys": ((5, 70), (0, 0)),
    "no-queries": ((0, 0), (33, 64)),
    "nothing": ((0, 0), (0, 0)),
    "fewer-rows-than-sequences": ((0, 1, 0, 0), (9, 20, 0, 65)),
    "one-row-each-or-none": ((0, 1, 0, 1), (0, 1, 0, 1)),
    "tiles": ((64, 128, 65, 63), (128, 64, 63, 65)),
    "no-sequence": ((), ()),
}


@each_case(
    [
        Case(lengths_q=q, lengths_k=k, dtype=dtype, causal=causal, tail=tail, d=64, heads_q=6)
        for q, k in LENGTHS.values()
        for dtype, causal, tail in (("bf16", True, 0), ("fp16", False, 5))
    ]
)
def test_lengths(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


VARLEN_CHOICES = dict(
    lengths=list(LENGTHS.values())[:10],
    heads=HEADS,
    d=[32, 40, 64, 72, 80, 128, 256, 320],
    dtype=["fp16", "bf16"],
    causal=[False, True],
    top_left=[False, True],
    window=[(-1, -1), (-1, -1), (17, 9), (64, 0)],
    lse_grad=[False, True],
    tail=[0, 3],
    deterministic=[False, True],
)
TERMS = dict(
    softcap=[0.0, 4.0],
    alibi=["", "head", "batch"],
    bias=["", "full", "head", "key", "row", "bool", "padding", "inf"],
    sink=[False, True],
    dropout_p=[0.0, 0.2],
)


def varlen_cases(count: int, seed: int, **choices) -> list[Case]:
    points = sample(count, seed, **choices)
    for point in points:
        point["lengths_q"], point["lengths_k"] = point.pop("lengths")
    return cases_of(points)


@each_case(varlen_cases(36, 1, **VARLEN_CHOICES))
def test_masks(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(
    varlen_cases(
        40, 2, **VARLEN_CHOICES | TERMS | {"dtype": ["fp32", "fp64", "bf16"], "d": [16, 40]}
    )
)
def test_score_terms(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(
    [
        Case(lengths_q=(1, 2, 2), lengths_k=(2, 1, 2), bias=bias, dtype=dtype, d=16)
        for bias in ("full", "key", "row", "bool")
        for dtype in ("bf16", "fp32")
    ]
)
def test_a_bias_of_two_by_two(case: Case, target: Target, seed: int) -> None:
    """A sequence of one row or key takes its part of it."""
    check(case, target, seed)


USED = [
    Case(lengths_q=(40, 33, 70), lengths_k=(65, 33, 130), seqused_k=(64, 0, 100), dtype="bf16"),
    Case(lengths_q=(40, 33, 70), lengths_k=(65, 33, 130), seqused_q=(0, 20, 70), dtype="fp16"),
    Case(
        lengths_q=(40, 33),
        lengths_k=(65, 33),
        seqused_q=(39, 1),
        seqused_k=(1, 30),
        dtype="fp16",
        causal=True,
    ),
    Case(lengths_q=(40, 33), lengths_k=(165, 133), leftpad_k=(64, 131), dtype="bf16", causal=True),
    Case(
        lengths_q=(40, 33),
        lengths_k=(165, 133),
        leftpad_k=(10, 3),
        seqused_k=(150, 2),
        dtype="bf16",
    ),
    Case(
        lengths_q=(9, 9), lengths_k=(70, 70), seqused_k=(1000, -7), leftpad_k=(-3, 5), dtype="fp16"
    ),
    Case(batch=2, seqlen_q=40, seqlen_k=90, seqused_q=(10, 40), seqused_k=(90, 33), dtype="bf16"),
    Case(batch=2, seqlen_q=40, seqlen_k=90, leftpad_k=(10, 90), dtype="fp16", window=(20, 3)),
    Case(
        lengths_q=(20, 30),
        lengths_k=(30, 60),
        seqused_k=(17, 60),
        sink=True,
        alibi="batch",
        softcap=3.0,
    ),
]


@each_case(USED)
def test_seqused_and_leftpad(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(USED)
def test_rows_that_do_not_count_may_hold_nan(case: Case, target: Target, seed: int) -> None:
    """Rows that the lengths leave out; on aten also those that only the mask leaves out."""
    problem = Problem(case, seed, target.device)
    counted = case if target.backend == "aten" else case.with_(causal=False, window=(-1, -1))
    expected = expect(Problem(counted, seed, target.device))
    clean = run(problem, target.backend, deterministic=True)
    unused_k = (expected.conditions["dv"] == 0).all(-1).all(-1)
    unused_q = (expected.values["lse"] == -math.inf).movedim(-2, -1).all(-1)
    problem.k[unused_k] = problem.v[unused_k] = math.nan
    problem.q[unused_q] = problem.dout[unused_q] = math.nan
    dirty = run(problem, target.backend, deterministic=True)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(dirty[name], clean[name]), name


@each_target(*ATTENTION_TARGETS)
def test_rows_outside_the_segments_may_hold_nan(target: Target, seed: int) -> None:
    case = Case(lengths_q=(40, 0, 33), lengths_k=(65, 7, 20), tail=11, dtype="bf16", causal=True)
    problem = Problem(case, seed, target.device)
    expected = expect(problem)
    for x in (problem.q, problem.k, problem.v, problem.dout):
        x[-11:] = math.nan
    results = run(problem, target.backend)
    for name in ("out", "dq", "dk", "dv"):
        assert not results[name][-11:].count_nonzero(), name
    assert results["lse"][:, -11:].isneginf().all()
    compare(problem, results, expected)


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("maximum", ["exact", "twice", "huge"])
def test_max_seqlen_is_a_hint(maximum: str, target: Target, seed: int) -> None:
    case = Case(lengths_q=(70, 3, 129), lengths_k=(70, 190, 1), dtype="fp16", causal=True)
    problem = Problem(case, seed, target.device)
    expected = run(problem, target.backend, deterministic=True)
    factor = {"exact": 1, "twice": 2, "huge": 1000}[maximum]
    options = {"max_seqlen_q": problem.max_q * factor, "max_seqlen_k": problem.max_k * factor}
    actual = run(problem, target.backend, deterministic=True, **options)
    if pads(target):  # the products' library chooses its algorithm by the padded shape
        compare(problem, actual, expect(problem))
    else:
        for name in expected:
            assert torch.equal(actual[name], expected[name]), name


@each_target(SM80)
@pytest.mark.real_gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_max_seqlen_too_small_stays_inside(backward: bool, target: Target, seed: int) -> None:
    """Rows that it does not cover are right or empty; no fault, no NaN."""
    case = Case(lengths_q=(70, 3, 129), lengths_k=(70, 190, 1), dtype="fp16")
    problem = Problem(case, seed, target.device)
    results = run(problem, target.backend, backward, max_seqlen_q=5, max_seqlen_k=5)
    for name, x in results.items():
        assert not x.isnan().any(), name


GARBAGE = [-(2**31), -1000, -1, 0, 1, 5, 63, 64, 150, 202, 203, 10**6, 2**31 - 1]
INDICES = ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k"]


def check_garbage(which: str, target: Target, seed: int) -> None:
    """Clamped as the reference clamps: no fault, nothing written outside, every row defined."""
    case = Case(lengths_q=(70, 3, 129), lengths_k=(70, 61, 71), dtype="fp16", heads_q=2, d=32)
    problem = Problem(case, seed, target.device)
    rng = random.Random(seed)
    starting = which.startswith("cu")
    values = [rng.choice(GARBAGE) for _ in range(4 if starting else 3)]
    garbage = torch.tensor(values, dtype=torch.int32, device=target.device)
    index = problem.index_tensors() | {which: garbage}
    problem.max_q = problem.max_k = 202  # what a segment can grow to
    problem.index_tensors = lambda: index
    results = run(problem, target.backend)
    clamped = garbage.clamp(0, 202)
    if not starting or (clamped.diff() >= 0).all():  # segments that overlap have no right result
        compare(problem, results, expect(problem))


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("which", INDICES)
@pytest.mark.parametrize("draw", range(3))
def test_garbage_in_the_index_tensors(draw: int, which: str, target: Target, seed: int) -> None:
    check_garbage(which, target, seed)


@each_target(*ATTENTION_TARGETS, SM90)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k", "both"])
@pytest.mark.parametrize(
    "starts", [(0, 430, 250, 600), (0, 600, 0, 600), (600, 400, 200, 0)], ids=str
)
def test_sequences_that_overlap_wait_for_nobody(
    starts: tuple[int, ...], which: str, deterministic: bool, target: Target, seed: int
) -> None:
    """An error of the caller without a right result: but no kernel waits for a tile that does not
    exist, and the next call is right: the same as the one before, where it is deterministic."""
    case = Case(
        lengths_q=(200, 200, 200),
        lengths_k=(200, 200, 200),
        dtype="fp16",
        heads_q=2,
        deterministic=deterministic,
        causal=True,
    )
    problem = Problem(case, seed, target.device)
    right = problem.index_tensors()
    wrong = torch.tensor(starts, dtype=torch.int32, device=target.device)
    names = ["cu_seqlens_q", "cu_seqlens_k"] if which == "both" else [which]
    expected, problem.max_q, problem.max_k = expect(problem), 600, 600
    before = run(problem, target.backend)
    problem.index_tensors = lambda: right | dict.fromkeys(names, wrong)
    run(problem, target.backend)
    problem.index_tensors = lambda: right
    after = run(problem, target.backend)
    if deterministic and target.backend != "aten":
        assert all(torch.equal(after[name], before[name]) for name in before)
    else:
        compare(problem, after, expected)


@each_target(*ATTENTION_TARGETS)
def test_index_tensors_of_any_stride(target: Target, seed: int) -> None:
    case = Case(lengths_q=(70, 3, 129), lengths_k=(70, 190, 1), dtype="bf16")
    problem = Problem(case, seed, target.device)
    expected = run(problem, target.backend, backward=False)
    index = {name: x.repeat_interleave(2)[::2] for name, x in problem.index_tensors().items()}
    arguments = op_arguments(problem) | problem.float_tensors() | index
    out, *_ = torch.ops.flash_attn.fwd(**arguments, backend=target.backend)
    assert not index["cu_seqlens_q"].is_contiguous()
    assert torch.equal(out, expected["out"])


@each_target(*BITWISE_TARGETS)
def test_varlen_is_dense_without_padding(target: Target, seed: int) -> None:
    dense = Problem(
        Case(batch=3, seqlen_q=70, seqlen_k=100, dtype="bf16", causal=True), seed, target.device
    )
    packed = Problem(
        Case(lengths_q=(70,) * 3, lengths_k=(100,) * 3, dtype="bf16", causal=True),
        seed,
        target.device,
    )
    for name in ("q", "k", "v", "dout"):
        setattr(packed, name, getattr(dense, name).flatten(0, 1))
    expected = run(dense, target.backend, deterministic=True)
    actual = run(packed, target.backend, deterministic=True)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(actual[name], expected[name].flatten(0, 1)), name
    assert torch.equal(actual["lse"], expected["lse"].movedim(0, 1).flatten(1))


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_max_seqlen_below_the_longest_is_refused(name: str) -> None:
    q, k, v, lengths, table = paged_problem(ATEN_CPU)
    packed = [x.flatten(0, 1)[:17] for x in (k, v)]
    wrong = lengths | {name: lengths[name] - 1}
    match = f"flash_attn: {name}: expected at least {lengths[name]} .*, got {lengths[name] - 1}"
    with pytest.raises(RuntimeError, match=match):
        flash_attn.flash_attn_varlen_func(q, *packed, **wrong)
    with pytest.raises(RuntimeError, match=match):
        flash_attn.flash_attn_varlen_func(q, k, v, **wrong, block_table=table)
    counts = torch.tensor([2, 2] if name[-1] == "q" else [9, 7], dtype=torch.int32)
    used = {f"seqused_{name[-1]}": counts}
    assert flash_attn.flash_attn_varlen_func(q, *packed, **wrong, **used).isfinite().all()


@each_target(SM80, SM90)
@pytest.mark.real_gpu
def test_a_max_seqlen_below_the_longest_is_no_matter_to_kernels(target: Target) -> None:
    """They read the lengths where they are: out, lse and gradients (sm80's are deterministic) are
    those of the true one."""
    q, k, v, lengths, _ = paged_problem(target, torch.float16)
    packed = [x.flatten(0, 1)[:17] for x in (k, v)]

    with_gradients = target == SM80

    def run(**changes: int) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_(with_gradients) for x in (q, *packed)]
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            *inputs,
            **lengths | changes,
            causal=True,
            deterministic=with_gradients,
            return_attn_probs=True,
        )
        return [out, lse, *(torch.autograd.grad(out.sum(), inputs) if with_gradients else [])]

    with use(target):
        expected = run()
        for changes in ({"max_seqlen_q": 2}, {"max_seqlen_k": 4}):
            for a, e in zip(run(**changes), expected, strict=True):
                assert torch.equal(a, e), changes


@each_target(ATEN_CUDA)
def test_a_max_seqlen_below_the_longest_gives_nan(target: Target) -> None:
    """What the host cannot refuse shows: never 0."""
    q, k, v, lengths, _ = paged_problem(target)
    packed = [x.flatten(0, 1)[:17] for x in (k, v)]
    with use(target):
        right = flash_attn.flash_attn_varlen_func(q, *packed, **lengths, causal=True)
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, *packed, **lengths | {"max_seqlen_q": 2}, return_attn_probs=True
        )
        assert out[2].isnan().all() and lse[:, 2].isnan().all()
        assert out[[0, 1, 3, 4]].isfinite().all() and lse[:, [0, 1, 3, 4]].isfinite().all()
        out = flash_attn.flash_attn_varlen_func(
            q, *packed, **lengths | {"max_seqlen_k": 9}, causal=True
        )
    assert out[:3].isnan().all()
    torch.testing.assert_close(out[3:], right[3:])


@each_target(ATEN_CUDA)
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_max_seqlen_below_the_longest_gives_no_gradient_of_zero(
    name: str, target: Target
) -> None:
    """The first sequence is too long: of its queries those that are lost, or with a lost key all;
    of its keys all that a lost query sees, or those that are lost."""
    q, k, v, lengths, _ = paged_problem(target)
    inputs = [x.requires_grad_() for x in (q, *(x.flatten(0, 1)[:17].detach() for x in (k, v)))]
    wrong = lengths | {name: lengths[name] - 1}
    with use(target):
        out = flash_attn.flash_attn_varlen_func(*inputs, **wrong)
        right = flash_attn.flash_attn_varlen_func(*inputs, **lengths)
        dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
        expected = torch.autograd.grad(right.sum(), inputs)
    lost_q, lost_k = ([2], range(10)) if name == "max_seqlen_q" else (range(3), [9])
    assert dq[list(lost_q)].isnan().all()
    assert dk[list(lost_k)].isnan().all() and dv[list(lost_k)].isnan().all()
    for a, e, rest in zip((dq, dk, dv), expected, (3, 10, 10), strict=True):
        torch.testing.assert_close(a[rest:], e[rest:])
