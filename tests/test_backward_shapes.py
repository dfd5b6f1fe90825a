"""Gradients of shapes that blocks do not fit: every length of a last block, few keys or queries
beside many, one head of keys for many of queries, sequences unlike each other; and what repeats.

The reference takes a part of the queries at a time, on the device of the call.
"""

from __future__ import annotations

import pytest
import repeats
import torch
from cases import (
    ATEN_CPU,
    SM80,
    SM90,
    Case,
    Expected,
    Problem,
    Target,
    compare,
    each_case,
    each_target,
    expect,
    run,
    starts,
)

from flash_attn.reference import attention_ref, attention_ref_grads, condition_tensors

KERNELS = (SM80, SM90)
# Scores that the reference has at a time: each of its matrices takes 64 MiB.
SCORES = 2**23
SHAPE = ["dtype", "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "d", "d_v"]
SHAPE += ["lengths_q", "lengths_k", "causal", "softmax_scale", "deterministic"]
CLASSES = [(64, None), (80, None), (96, None), (128, None), (192, None), (192, 128), (256, None)]
each_class = pytest.mark.parametrize(
    "d, d_v", CLASSES, ids=[f"d{d}" + (f"-dv{d_v}" if d_v else "") for d, d_v in CLASSES]
)


def expect_in_parts(problem: Problem, scores: int = SCORES) -> Expected:
    """expect() of a call that has no more than a causal mask. What it gives stays on the device."""
    c = problem.case
    shape = {name: getattr(c, name) for name in SHAPE}
    assert c == Case(**shape), "something that this reference does not know"
    rows_q = c.lengths_q if c.is_varlen else (c.seqlen_q,) * c.batch
    rows_k = c.segments_k if c.is_varlen else (c.keys,) * c.batch
    flat = {
        name: getattr(problem, name).reshape(-1, *getattr(problem, name).shape[-2:])
        for name in ("q", "k", "v", "dout")
    }

    def zeros(like: str) -> torch.Tensor:
        return torch.zeros_like(flat[like], dtype=torch.float64)

    shapes = {"out": "dout", "dq": "q", "dk": "k", "dv": "v"}
    values = {name: zeros(like) for name, like in shapes.items()}
    conditions = {name: zeros(like) for name, like in shapes.items()}
    squares = ("dk_of_subnormals", "dv_of_subnormals")  # chance adds their squares up
    for name in (*squares, "dk_of_flushed", "dv_of_flushed"):
        conditions[name] = zeros(name[1])
    lse = torch.zeros(flat["q"].shape[:2], device=problem.device, dtype=torch.float64)
    largest = 0.0

    for q_begin, k_begin, n_q, n_k in zip(
        starts(rows_q), starts(rows_k), rows_q, rows_k, strict=False
    ):
        step = max(1, scores // (c.heads_q * max(n_k, 1)))
        for begin in range(0, n_q, step):
            end = min(begin + step, n_q)
            seen = min(max(n_k - n_q + end, 0), n_k) if c.causal else n_k
            queries = slice(q_begin + begin, q_begin + end)
            keys = slice(k_begin, k_begin + seen)
            given = {"q": flat["q"][None, queries]} | {n: flat[n][None, keys] for n in ("k", "v")}
            given |= dict(causal=c.causal, softmax_scale=c.softmax_scale)
            dout = flat["dout"][None, queries]
            out, part_lse, _ = attention_ref(**given)
            found = {"out": out} | vars(attention_ref_grads(dout, **given))
            sizes = vars(condition_tensors(dout, **given))
            largest = max(largest, sizes["largest_score"])
            lse[queries] = part_lse[0].T
            for total, part in ((values, found), (conditions, sizes)):
                for name in total:
                    if name in ("out", "dq"):
                        total[name][queries] = part[name][0]
                    elif name in squares:
                        total[name][keys] += part[name][0].square()
                    else:
                        total[name][keys] += part[name][0]
    for name in squares:
        conditions[name].sqrt_()

    def shaped(name: str, x: torch.Tensor) -> torch.Tensor:
        like = getattr(problem, {"out": "dout", "dq": "q"}.get(name, name[1]))
        return x.view(like.shape)

    values, conditions = (
        {name: shaped(name, x) for name, x in found.items()} for found in (values, conditions)
    )
    rows = problem.q.shape[:-2]
    values["lse"] = lse.view(*rows, c.heads_q).movedim(-1, -2)
    return Expected(values, conditions, torch.empty(0), largest)


def check(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    expected = expect_in_parts(problem)
    compare(problem, run(problem, target.backend), expected, few_rows=False)


@each_case(
    [
        Case(dtype="bf16", batch=2, seqlen_q=70, seqlen_k=50, causal=True),
        Case(dtype="fp16", lengths_q=(40, 0, 33), lengths_k=(65, 7, 20), d=80),
    ],
    [ATEN_CPU, *KERNELS],
)
def test_a_reference_in_parts_is_the_reference(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    whole, parts = expect(problem), expect_in_parts(problem, scores=4000)
    if case.causal:  # scores that nobody sees count in one of them alone
        assert 0 < parts.largest_score <= whole.largest_score + 1e-9
    else:
        assert parts.largest_score == pytest.approx(whole.largest_score)
    for a, e in ((parts.values, whole.values), (parts.conditions, whole.conditions)):
        for name in a:
            torch.testing.assert_close(a[name].cpu(), e[name], rtol=1e-9, atol=1e-12)
    compare(problem, run(problem, target.backend), parts)


def other_length(n: int) -> int:
    """Another order of the 128 lengths from 128 on."""
    return 128 + (37 * n + 11) % 128


LAST_BLOCKS = range(128, 256)


@each_target(*KERNELS)
@pytest.mark.real_gpu
@pytest.mark.parametrize("causal", [False, True])
@each_class
def test_every_length_of_a_last_block(
    d: int, d_v: int | None, causal: bool, target: Target, seed: int
) -> None:
    """Of queries and of keys; what lies behind the last row is nobody's. A quarter of the lengths,
    which one depends on the class; side by side each class has all of them."""
    wrong = []
    quarter = (CLASSES.index((d, d_v)) + 2 * causal) % 4
    for n in LAST_BLOCKS:
        if (n + n // 4) % 4 != quarter:
            continue
        n_k = n if causal else other_length(n)
        shape = dict(batch=1, heads_q=1, heads_kv=1, seqlen_q=n, seqlen_k=n_k, d=d, d_v=d_v)
        try:
            check(Case(dtype=("bf16", "fp16")[n // 16 % 2], causal=causal, **shape), target, seed)
        except AssertionError as error:
            wrong.append(f"{n} queries, {n_k} keys: {error}")
    assert not wrong, "\n".join(wrong)


@each_target(*KERNELS)
@pytest.mark.real_gpu
@each_class
def test_every_length_of_a_last_block_side_by_side(
    d: int, d_v: int | None, target: Target, seed: int
) -> None:
    """What lies behind the last row is the next sequence's."""
    lengths = dict(lengths_q=tuple(LAST_BLOCKS), lengths_k=tuple(map(other_length, LAST_BLOCKS)))
    check(Case(dtype="bf16", heads_q=2, heads_kv=1, d=d, d_v=d_v, **lengths), target, seed)


# Of 16 thousand keys that a query sees, fp16 has no digits for most of P: hence bf16.
UNLIKE_SIDES = [
    Case(dtype="bf16", batch=1, heads_q=4, heads_kv=2, d=d, d_v=d_v, **lengths)
    for d, d_v in CLASSES
    for lengths in (
        dict(seqlen_q=128, seqlen_k=16384, causal=d % 64 > 0 or d_v is not None),
        dict(seqlen_q=16384, seqlen_k=128),
    )
]
# On a large GPU a tile's queries are split where sums need no order, up to d = 128.
FEW_KEY_HEADS = [
    Case(batch=1, seqlen_q=4096, heads_q=32, heads_kv=heads_kv, d=d, d_v=d_v, dtype="bf16", **more)
    for heads_kv, d, d_v, more in [
        (2, 64, None, {}),
        (1, 64, None, {"causal": True}),
        (2, 96, None, {"causal": True}),
        (2, 128, None, {"causal": True}),
        (1, 128, None, {}),
        (1, 192, None, {"causal": True}),
        (2, 192, 128, {}),
        (1, 256, None, {}),
        (1, 64, None, {"deterministic": True}),
        (2, 128, None, {"causal": True, "deterministic": True}),
        (1, 192, 128, {"causal": True, "deterministic": True}),
        (2, 256, None, {"causal": True, "deterministic": True}),
    ]
]
MANY_SHORT = [
    Case(batch=64, seqlen_q=512, heads_q=2, heads_kv=2, d=d, d_v=d_v, dtype=dtype, **more)
    for d, d_v, dtype, more in [
        (128, None, "bf16", {}),
        (192, None, "bf16", {}),
        (192, 128, "fp16", {"causal": True}),
        (192, None, "bf16", {"causal": True, "deterministic": True}),
        (256, None, "fp16", {}),
        (256, None, "bf16", {"causal": True}),
        (256, None, "bf16", {"deterministic": True}),
    ]
]
# With a causal mask the first blocks of keys come first in such a group where sums come in order
# (csrc/sm90/bwd_config.h, group_first_first). At d = 256 queries see enough keys for a pair.
GROUPS = [
    Case(batch=1, heads_q=heads_q, heads_kv=2, seqlen_q=n, d=d, d_v=d_v, causal=True, **more)
    for heads_q, n, d, d_v, dtype in [
        (16, 1601, 64, None, "bf16"),
        (8, 1600, 80, None, "bf16"),
        (8, 1600, 96, None, "fp16"),
        (8, 1601, 128, None, "bf16"),
        (16, 1600, 192, None, "bf16"),
        (16, 1537, 192, 128, "fp16"),
        (8, 2300, 256, None, "bf16"),
    ]
    for more in (dict(dtype=dtype), dict(dtype=dtype, deterministic=True))
]


@each_case(UNLIKE_SIDES + FEW_KEY_HEADS + MANY_SHORT + GROUPS, KERNELS, [pytest.mark.real_gpu])
def test_shapes(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_target(*KERNELS)
@pytest.mark.real_gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_one_long_sequence_among_short_ones(
    d: int, deterministic: bool, target: Target, seed: int
) -> None:
    lengths = (512,) * 31 + (32768,) + (512,) * 32
    shape = dict(lengths_q=lengths, heads_q=1, heads_kv=1, d=d)
    case = Case(dtype="bf16", causal=True, deterministic=deterministic, **shape)
    check(case, target, seed)


FORMS = {
    "full": dict(batch=2, heads_q=4, heads_kv=4, seqlen_q=900),
    "causal": dict(batch=2, heads_q=4, heads_kv=4, seqlen_q=1500, seqlen_k=1600, causal=True),
    "group": dict(batch=2, heads_q=8, heads_kv=1, seqlen_q=1600, causal=True),
    "varlen": dict(lengths_q=(700, 0, 129, 1300), lengths_k=(650, 9, 190, 1300), causal=True),
    "short": dict(batch=8, heads_q=4, heads_kv=4, seqlen_q=300),
}
REPEATS = 20


@each_target(*KERNELS)
@pytest.mark.real_gpu
@pytest.mark.parametrize("form", FORMS)
@each_class
def test_bits_of_many_repeats(
    d: int, d_v: int | None, form: str, target: Target, seed: int
) -> None:
    """tests/repeats.py has a thousand of each, some of them beside another kernel."""
    case = Case(dtype="bf16", d=d, d_v=d_v, deterministic=True, **FORMS[form])
    problem = Problem(case, seed, target.device)
    first = run(problem, target.backend)
    for _ in range(REPEATS - 1):
        again = run(problem, target.backend)
        for name in first:
            assert torch.equal(again[name], first[name]), name


@pytest.mark.parametrize("form", ["full", "gqa", "varlen"])
def test_a_repeat_of_other_bits_is_counted(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = repeats.Form(seqlen=20, heads=4, heads_kv=2, lengths=(9, 0, 5) * (form == "varlen"))
    monkeypatch.setitem(repeats.FORMS, form, small)
    assert repeats.report_of(form, "192,128", "cpu", 4, 0)["differing"] == 0
    step, calls = repeats.step_of(small, 64, "cpu"), iter(range(5))

    def now_and_then_other() -> list[torch.Tensor]:
        out, dq, dk, dv = step()
        return [out, dq, dk, torch.nextafter(dv, dv + 1) if next(calls) % 2 else dv]

    assert int(repeats.differing(now_and_then_other, step(), 5)) == 2
