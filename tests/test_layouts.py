"""Strides: whatever view the tensors are, the result is that of their contiguous copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    OP_TARGETS,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    each_target,
    op_arguments,
    run,
    use,
)

import flash_attn


def wider(x: torch.Tensor, extra: int) -> torch.Tensor:
    buffer = torch.full(
        (*x.shape[:-1], x.size(-1) + extra), torch.nan, dtype=x.dtype, device=x.device
    )
    buffer[..., : x.size(-1)] = x
    return buffer[..., : x.size(-1)]


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """Contiguous, but the data starts `elements` after an aligned address."""
    buffer = torch.full((x.numel() + elements,), torch.nan, dtype=x.dtype, device=x.device)
    view = buffer[elements:].view(x.shape)
    view.copy_(x)
    return view


def every_second_row(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1, 2)[:, ::2]


def every_second_column(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def memory_order(*order: int) -> Callable:
    inverse = sorted(range(4), key=order.__getitem__)
    return lambda x: x.permute(order).contiguous().permute(inverse)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads first": memory_order(0, 2, 1, 3),
    "rows first": memory_order(1, 0, 2, 3),
    "head dim first": memory_order(3, 0, 1, 2),
    "head dim before rows": memory_order(0, 2, 3, 1),
    "wider rows, aligned": lambda x: wider(x, 8),
    "wider rows, odd": lambda x: wider(x, 3),
    "one element off": lambda x: shifted(x, 1),
    "eight elements off": lambda x: shifted(x, 8),
    "every second row": every_second_row,
    "every second column": every_second_column,
    "sliced batch": lambda x: torch.cat([x, x])[: x.size(0)],
    "sliced heads": lambda x: torch.cat([x, x], 2)[:, :, x.size(2) :],
}


def attend(target: Target, tensors: tuple, dout: torch.Tensor, **options) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    with use(target):
        out = flash_attn.flash_attn_func(*leaves, causal=True, deterministic=True, **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def problem_of(target: Target, seed: int, **changes: object) -> Problem:
    case = Case(batch=2, seqlen_q=50, seqlen_k=70, dtype="bf16", d=64).with_(**changes)
    return Problem(case, seed, target.device)


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert torch.equal(a, e), name


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all"])
def test_views(which: str, layout: str, target: Target, seed: int) -> None:
    check_views(which, layout, problem_of(target, seed), target)


def check_views(which: str, layout: str, problem: Problem, target: Target) -> None:
    named = {name: getattr(problem, name) for name in ("q", "k", "v", "dout")}
    expected = attend(target, (named["q"], named["k"], named["v"]), named["dout"])
    views = {n: LAYOUTS[layout](x) if which in (n, "all") else x for n, x in named.items()}
    for name, view in views.items():
        assert torch.equal(view, named[name])
    assert_same(attend(target, (views["q"], views["k"], views["v"]), views["dout"]), expected)


# What sm90 has for them: pairs of thread blocks, and at d = 256 two kernels.
WIDE = {"d192": dict(d=192), "d192-dv128": dict(d=192, d_v=128), "d256": dict(d=256, seqlen_q=130)}


@each_target(SM80, SM90)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", WIDE)
def test_views_of_wide_heads(shape: str, layout: str, target: Target, seed: int) -> None:
    check_views("all", layout, problem_of(target, seed, **WIDE[shape]), target)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("dim", range(4))
def test_expanded_inputs(dim: int, target: Target, seed: int) -> None:
    """Stride 0 in any dimension, inputs and incoming gradient."""
    problem = problem_of(target, seed, seqlen_k=50, heads_q=2)
    tensors = [x.narrow(dim, 0, 1).expand_as(x) for x in (problem.q, problem.k, problem.v)]
    dout = problem.dout.narrow(dim, 0, 1).expand_as(problem.dout)
    expected = attend(target, tuple(x.contiguous() for x in tensors), dout.contiguous())
    assert_same(attend(target, tuple(tensors), dout), expected)


@each_target(*OP_TARGETS)
def test_gradient_of_a_sum(target: Target, seed: int) -> None:
    """out.sum() sends back one number with strides 0."""
    problem = problem_of(target, seed)
    tensors = problem.q, problem.k, problem.v
    expected = attend(target, tensors, torch.ones_like(problem.dout))
    assert_same(
        attend(
            target, tensors, torch.ones_like(problem.dout[:1, :1, :1, :1]).expand_as(problem.dout)
        ),
        expected,
    )


@each_target(*OP_TARGETS)
def test_interleaved_qkv(target: Target, seed: int) -> None:
    """Views of one (b, s, 3, h, d) and one (b, s, h, 3, d) tensor."""
    problem = problem_of(target, seed, seqlen_k=50, heads_q=2)
    tensors = problem.q, problem.k, problem.v
    expected = attend(target, tensors, problem.dout)
    for dim in (2, 3):
        assert_same(attend(target, torch.stack(tensors, dim).unbind(dim), problem.dout), expected)


@each_target(*OP_TARGETS)
def test_strides_of_dimensions_of_one(target: Target, seed: int) -> None:
    """A dimension of size 1 may have any stride, the last one too."""
    problem = problem_of(target, seed, batch=1, seqlen_q=1, seqlen_k=1, heads_q=1, heads_kv=1)
    tensors = problem.q, problem.k, problem.v
    expected = attend(target, tensors, problem.dout)
    odd = [x.as_strided(x.shape, (7, 13, 999_999_999, 1)) for x in tensors]
    assert_same(attend(target, tuple(odd), problem.dout), expected)

    single = problem_of(target, seed, d=1, heads_q=2)
    tensors = single.q, single.k, single.v
    expected = attend(target, tensors, single.dout)
    odd = [x.as_strided(x.shape, (*x.stride()[:3], 17)) for x in tensors]
    assert_same(attend(target, tuple(odd), single.dout), expected)


def odd_where_one(x: torch.Tensor) -> torch.Tensor:
    """x with another stride in each dimension of size 1."""
    odd = zip(x.shape, x.stride(), (7, 13, 999_999_999, 17), strict=True)
    return x.as_strided(x.shape, [other if size == 1 else stride for size, stride, other in odd])


@each_target(ATEN_CPU)
@pytest.mark.parametrize("rows", [dict(), dict(seqlen_q=1), dict(seqlen_k=1)])
@pytest.mark.parametrize("columns", [dict(d=1), dict(d_v=1), dict(d=1, d_v=1), dict()])
@pytest.mark.parametrize("matrices", [dict(), dict(batch=1, heads_q=1, heads_kv=1)])
def test_strides_of_dimensions_of_one_in_fp32(
    matrices: dict, columns: dict, rows: dict, target: Target, seed: int
) -> None:
    """No rounding to 16 bits hides there that a sum was taken in another order."""
    problem = problem_of(target, seed, dtype="fp32", **matrices, **columns, **rows)
    tensors = problem.q, problem.k, problem.v
    expected = attend(target, tensors, problem.dout)
    odd = tuple(odd_where_one(x) for x in tensors)
    assert_same(attend(target, odd, odd_where_one(problem.dout)), expected)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("layout", ["heads first", "wider rows, odd", "every second row"])
def test_result_layout_does_not_follow_the_inputs(layout: str, target: Target, seed: int) -> None:
    """out and the gradients are contiguous, as the meta kernels say."""
    problem = problem_of(target, seed)
    tensors = tuple(LAYOUTS[layout](x) for x in (problem.q, problem.k, problem.v))
    with use(target):
        out, lse, _ = flash_attn.flash_attn_func(*tensors, return_attn_probs=True)
    assert out.is_contiguous() and lse.is_contiguous()
    assert all(gradient.is_contiguous() for gradient in attend(target, tensors, problem.dout))


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("row_padding", [8, 3])
def test_nan_between_the_rows(row_padding: int, target: Target, seed: int) -> None:
    for case in (
        Case(dtype="fp16", seqlen_q=33, seqlen_k=65, d=72),
        Case(dtype="fp16", lengths_q=(20, 13), lengths_k=(9, 56), d=64),
    ):
        problem = Problem(case, seed, target.device)
        expected = run(problem, target.backend, deterministic=True)
        actual = run(problem, target.backend, row_padding=row_padding, deterministic=True)
        for name in expected:
            assert torch.equal(actual[name], expected[name]), name


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("form", ["expanded", "transposed", "sliced", "reversed heads"])
def test_bias_views(form: str, target: Target, seed: int) -> None:
    problem = problem_of(target, seed, bias="full", bias_fp32=True)
    bias = problem.attn_bias
    view = {
        "expanded": lambda: bias[:1, :1].expand_as(bias),
        "transposed": lambda: bias.mT.contiguous().mT,
        "sliced": lambda: torch.cat([bias, bias], -1)[..., : bias.size(-1)],
        "reversed heads": lambda: bias.transpose(0, 1).contiguous().transpose(0, 1),
    }[form]()

    def outcome(attn_bias: torch.Tensor) -> list[torch.Tensor]:
        tensors = {"q": problem.q, "k": problem.k, "v": problem.v, "attn_bias": attn_bias}
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        arguments = op_arguments(problem) | leaves | {"backend": target.backend}
        out = torch.ops.flash_attn.fwd(**arguments)[0]
        return [out, *torch.autograd.grad(out, list(leaves.values()), problem.dout)]

    for actual, expected in zip(outcome(view), outcome(view.contiguous()), strict=True):
        assert torch.equal(actual, expected)
