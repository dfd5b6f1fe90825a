"""The backward over keys that come in parts, whose dq kernels add up from call to call."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flash_attn._call import bwd, bwd_arguments
from flash_attn._library import C
from flash_attn.backends import use_backend
from flash_attn.context_parallel.calls import Options, Queries, SumOfQueries, run_backward
from flash_attn.context_parallel.merge import RunningSum
from flash_attn.context_parallel.plan import Documents, Mask, calls

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Case:
    """Two sequences. Own keys come first, then others that all rows see, then some of the last."""

    d: int = 64
    d_v: int | None = None
    rows: int = 320
    late: int = 160  # the first row that sees the last keys
    heads_kv: int = 2
    dtype: torch.dtype = torch.bfloat16
    backend: str | None = None
    deterministic: bool = False
    dlse: bool = False


@dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    exact: tuple[Tensor, Tensor, Tensor]  # dq, dk, dv in fp64
    parts: list[tuple[slice, slice, bool]]  # rows, keys, causal


def forced(backend: str | None) -> AbstractContextManager:
    return nullcontext() if backend is None else use_backend(backend)


def problem_of(case: Case, device: str) -> Problem:
    rows, keys = case.rows, 2 * case.rows + 100
    shape = (2, rows, 4, case.d)
    d_v = case.d_v or case.d
    q, k, v, dout = (
        torch.randn(size, device=device).to(case.dtype)
        for size in (
            shape,
            (2, keys, case.heads_kv, case.d),
            (2, keys, case.heads_kv, d_v),
            (*shape[:3], d_v),
        )
    )
    parts = [
        (slice(0, rows), slice(0, rows), True),
        (slice(0, rows), slice(rows, rows + 100), False),
        (slice(case.late, rows), slice(rows + 100, keys), False),
    ]
    seen = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    for of_rows, of_keys, causal in parts:
        block = torch.ones_like(seen[of_rows, of_keys])
        seen[of_rows, of_keys] = block.tril() if causal else block
    wide = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    group = 4 // case.heads_kv
    k_of_head, v_of_head = (x.repeat_interleave(group, 1) for x in wide[1:])
    scores = (wide[0] @ k_of_head.mT / math.sqrt(case.d)).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v_of_head
    dlse = torch.randn_like(lse) if case.dlse else None
    loss = (out * dout.double().transpose(1, 2)).sum()
    if dlse is not None:
        loss = loss + (lse * dlse).sum()
    exact = tuple(x.transpose(1, 2) for x in torch.autograd.grad(loss, wide))
    out = out.detach().transpose(1, 2).to(case.dtype).contiguous()
    dlse = None if dlse is None else dlse.float()
    return Problem(q, k, v, out, lse.detach().float(), dout, dlse, exact, parts)


def arguments_of(case: Case, problem: Problem, part: tuple[slice, slice, bool]) -> dict:
    rows, keys, causal = part
    tensors = dict(
        dout=problem.dout[:, rows],
        q=problem.q[:, rows],
        k=problem.k[:, keys],
        v=problem.v[:, keys],
        out=problem.out[:, rows],
        softmax_lse=problem.lse[..., rows],
    )
    return tensors | dict(
        dlse=None if problem.dlse is None else problem.dlse[..., rows],
        softmax_scale=case.d**-0.5,
        causal=causal,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=case.deterministic,
    )


def in_parts(case: Case, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv where all parts are added by kernels."""
    # The allocator has memory that is not zero for the results and the workspace.
    poison = [torch.full((1 << 22,), math.nan, device=problem.q.device) for _ in range(4)]
    del poison
    whole = C.BwdParts(problem.dout, problem.dlse, problem.out, problem.lse)
    dk, dv = (torch.full(x.shape, math.nan, device=x.device) for x in (problem.k, problem.v))
    with forced(case.backend):
        for part in problem.parts:
            added = whole.add(part[0].start, *bwd_arguments(**arguments_of(case, problem, part)))
            assert added is not None
            for gradient, of_part in zip((dk, dv), added, strict=True):
                gradient[:, part[1]] = of_part
    assert whole.has_sums
    dq = torch.full_like(problem.q, math.nan)
    whole.store(dq)
    return dq, dk, dv


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


CASES = [
    Case(),
    Case(d=128, heads_kv=4),
    Case(d=40, late=208, rows=336),
    Case(d=80, dtype=torch.float16),
    Case(d=96, rows=307, dlse=True),
    Case(d=192, d_v=128),
    Case(d=256, late=16),
    Case(d=60, d_v=36),  # copies that are padded
    Case(d=128, deterministic=True),
    Case(d=192, deterministic=True),
    Case(backend="sm80", dlse=True),
    Case(backend="sm80", d=128, rows=301, heads_kv=1),
    Case(dtype=torch.float32, backend="sm80"),
]


@pytest.mark.sanitize
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_add_up(case: Case) -> None:
    """The gradients are those over all keys, as exact as sums of parts that each call rounds to
    fp32; where the call is deterministic, with the same bits each time."""
    if torch.cuda.get_device_capability() < (9, 0) and case.deterministic:
        pytest.skip("sm80's deterministic kernels have no sums")
    problem = problem_of(case, "cuda")
    actual = in_parts(case, problem)
    apart = RunningSum(problem.q)
    with forced(case.backend):
        for part in problem.parts:
            arguments = arguments_of(case, problem, part)
            dq, _, _ = bwd(**arguments, wide_key_gradients=True, wide_query_gradient=True)
            apart.add(part[0], dq)
    expected = torch.empty_like(problem.q)
    apart.store(expected)
    assert error(actual[0], problem.exact[0]) <= 1.02 * error(expected, problem.exact[0]) + 1e-6
    bound = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
    for gradient, exact in zip(actual, problem.exact, strict=True):
        assert error(gradient, exact) < bound
    if case.deterministic:
        for gradient, again in zip(actual, in_parts(case, problem), strict=True):
            assert torch.equal(gradient, again)


@pytest.mark.parametrize("device", DEVICES)
def test_fp64_is_left(device: str) -> None:
    """No kernel serves it, and LSE is not fp32 then."""
    case = Case(dtype=torch.float64)
    problem = problem_of(case, device)
    whole = C.BwdParts(problem.dout, None, problem.out, problem.lse.double())
    arguments = arguments_of(case, problem, problem.parts[0])
    arguments["softmax_lse"] = arguments["softmax_lse"].double()
    with use_backend("aten"):
        assert whole.add(0, *bwd_arguments(**arguments)) is None
    assert not whole.has_sums


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_left(device: str) -> None:
    """A call whose rows begin within a block, or whose sums would be of another kind, adds nothing;
    nor does any on a CPU."""
    case = Case()
    problem = problem_of(case, device)
    whole = C.BwdParts(problem.dout, None, problem.out, problem.lse)

    def add(part: tuple, first_row: int | None = None, **change: object) -> object:
        arguments = arguments_of(case, problem, part) | change
        first_row = part[0].start if first_row is None else first_row
        return whole.add(first_row, *bwd_arguments(**arguments))

    own, _, late = problem.parts
    assert (add(own) is not None) == (device == "cuda")
    before = torch.empty_like(problem.q)
    whole.store(before)
    assert bool(before.any()) == (device == "cuda")
    assert add((slice(8, 168), late[1], False)) is None
    assert add(late, softmax_scale=0.5) is None or device == "cpu"
    with use_backend("aten"):
        assert add(late) is None
    after = torch.empty_like(problem.q)
    whole.store(after)
    assert torch.equal(before, after)
    with pytest.raises(RuntimeError, match="expected a dense part of 2 sequences of 320 queries"):
        add(late, first_row=176)


class Kernels:
    """Whose sums of dq are 2 everywhere."""

    has_sums = True

    def store(self, dq: Tensor) -> None:
        assert dq.dtype == torch.float32
        dq.fill_(2)


def test_both_kinds_of_parts_are_stored() -> None:
    """What kernels have summed and what came to add() are added in fp32, wherever the rows lie."""
    rows = [torch.zeros(1, 32, 2, 8).bfloat16() for _ in range(3)]
    planned = calls(Mask(), Documents((0, 32), (0, 32)), ((0, 32),), ((0, 16),))
    dq = SumOfQueries(Queries(*rows, torch.zeros(1, 2, 32), None), planned)
    dq._of_kernels = Kernels()
    dq.add(slice(16, 32), torch.full((1, 16, 2, 8), 0.004))
    dq.add(slice(16, 32), torch.full((1, 16, 2, 8), 0.005))
    target = torch.empty_like(rows[0])
    dq.store(target)
    assert target[:, :16].eq(2).all()
    assert torch.equal(target[:, 16:], torch.full_like(target[:, 16:], 2.009))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("device", DEVICES)
def test_rank_adds_up(device: str, layout: str, causal: bool) -> None:
    """What the last of four ranks of a ring adds up for its rows, rank after rank."""
    total, ranks = 1024, 4
    case = replace(Case(), rows=total)
    q, k, v, dout = (torch.randn(1, total, 4, case.d, device=device).bfloat16() for _ in range(4))
    wide = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].mT / math.sqrt(case.d)
    if causal:
        hidden = torch.ones(total, total, dtype=torch.bool, device=device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1) @ wide[2]
    (exact,) = torch.autograd.grad(out, wide[:1], dout.double().transpose(1, 2))
    out = out.detach().transpose(1, 2).bfloat16()

    def ranges(rank: int) -> tuple:
        size = total // ranks
        if layout == "contiguous":
            return ((rank * size, (rank + 1) * size),)
        half = size // 2
        ends = (rank * half, total - (rank + 1) * half)
        return tuple((end, end + half) for end in ends)

    def of_rank(x: Tensor, rank: int) -> Tensor:
        return torch.cat([x[:, a:b] for a, b in ranges(rank)], 1)

    last = ranks - 1
    mine = [of_rank(x, last) for x in (q, out, dout)]
    own_lse = of_rank(lse.detach().float().transpose(1, 2), last).transpose(1, 2)
    documents = Documents((0, total), (0, total))
    mask = Mask(right=0 if causal else -1)
    planned = [calls(mask, documents, ranges(last), ranges(rank)) for rank in range(ranks)]
    dq = SumOfQueries(Queries(*mine, own_lse, None), [call for of in planned for call in of])
    assert dq.has_parts
    options = Options(case.d**-0.5, 0.0, None, False, False, None)
    for rank, of_rank_calls in enumerate(planned):
        keys = [of_rank(x, rank) for x in (k, v)]
        sums = [RunningSum(x) for x in keys]
        for call in of_rank_calls:
            run_backward(call, Queries(*mine, own_lse, None), *keys, options, (dq, *sums))
    assert dq.is_empty() == (device == "cuda")
    target = torch.empty_like(mine[0])
    dq.store(target)
    assert error(target, of_rank(exact.transpose(1, 2), last)) < 1e-2
