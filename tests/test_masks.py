"""flash_attn.masks: every form means what its bool tensor means, on every backend, and what a mask
hides is neither computed nor read."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    OP_TARGETS,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    compare,
    each_target,
    expect,
    op_arguments,
    param,
    use,
)
from numerics import assert_rounded_otherwise
from poison import dirty_allocator

import flash_attn
from flash_attn import _call, _log, masks
from flash_attn.masks import Mask
from flash_attn.masks.tiles import Tiled


def random_bool(problem: Problem, *shape: int, share: float = 0.5) -> torch.Tensor:
    return problem.place(torch.rand(shape, generator=problem.generator) < share)


def random_ids(problem: Problem, length: int, count: int) -> torch.Tensor:
    ids = torch.randint(count, (problem.batch, length), generator=problem.generator)
    return problem.place(ids)


def documents_in_order(problem: Problem) -> Mask:
    ids = [random_ids(problem, n, 4).sort(1).values for n in (problem.max_q, problem.max_k)]
    return masks.documents(*ids)


def bounds_of_documents(problem: Problem) -> torch.Tensor:
    """Of each sequence, with one without rows, and rows before the first and behind the last."""
    bounds = torch.tensor([3, 40, 40, 41, problem.max_q - 5], dtype=torch.int32)
    shift = torch.arange(problem.batch, dtype=torch.int32)[:, None]
    return problem.place(bounds + shift)


def prepared_documents(problem: Problem, ids: torch.Tensor) -> Mask:
    return masks.documents(ids).prepared(problem.max_q, problem.max_k)


def some_blocks(problem: Problem, size: int, share: float = 0.4) -> Mask:
    blocks = [-(-length // size) for length in (problem.max_q, problem.max_k)]
    shape = (problem.batch, problem.case.heads_q, *blocks)
    return masks.block_sparse(random_bool(problem, *shape, share=share), size)


def prefix_lengths(problem: Problem) -> torch.Tensor:
    return problem.place(torch.tensor([problem.max_k // 3, 0, problem.max_k + 9])[: problem.batch])


MASKS: dict[str, Callable[[Problem], Mask]] = {
    "causal": lambda p: masks.causal(),
    "windows": lambda p: masks.window(40, None) & masks.window(90, 3),
    "prefix": lambda p: masks.prefix(prefix_lengths(p)),
    "prefix-lm": lambda p: masks.prefix_lm(prefix_lengths(p).int()),
    "first-and-last": lambda p: masks.window(20, 0) | masks.prefix(4),
    "far": lambda p: ~masks.window(70, 10),
    "documents": documents_in_order,
    "causal-documents": lambda p: masks.causal() & documents_in_order(p),
    "shuffled-documents": lambda p: masks.documents(
        random_ids(p, p.max_q, 3), random_ids(p, p.max_k, 3).int()
    ),
    "documents-without-window": lambda p: documents_in_order(p) & ~masks.window(9, 9),
    "blocks": lambda p: some_blocks(p, 128),
    "causal-blocks": lambda p: some_blocks(p, 64) & masks.causal(),
    "blocks-of-documents": lambda p: some_blocks(p, 64, 0.8) & documents_in_order(p),
    "blocks-or-window": lambda p: masks.window(30, 30) | some_blocks(p, 64),
    "not-blocks": lambda p: ~some_blocks(p, 64),
    "narrow-blocks": lambda p: some_blocks(p, 48),
    "bool": lambda p: masks.from_bool(
        random_bool(p, p.batch, p.case.heads_q, p.max_q, p.max_k) & (p.max_k > 4)
    ),
    "bool-of-keys": lambda p: masks.from_bool(random_bool(p, p.batch, 1, 1, p.max_k)),
    "bool-of-queries": lambda p: ~masks.from_bool(random_bool(p, p.max_q, 1)),
    "nothing": lambda p: masks.from_bool(random_bool(p, p.max_q, p.max_k, share=0.0)),
    "everything": lambda p: masks.window(None, None) | masks.causal(),
}
MORE_MASKS: dict[str, Callable[[Problem], Mask]] = {
    "few-blocks": lambda p: some_blocks(p, 64, 0.02),
    "few-causal-blocks": lambda p: some_blocks(p, 64, 0.02) & masks.causal(),
    "few-heads": lambda p: (
        some_blocks(p, 64)
        & masks.from_bool(
            random_bool(p, p.batch, p.case.heads_q, p.max_q, 1)[:, :, :1].expand(
                -1, -1, p.max_q, -1
            )
        )
    ),
}
PACKED: dict[str, Callable[[Problem], Mask]] = {
    "packed": lambda p: masks.packed_documents(bounds_of_documents(p)),
    "causal-packed": lambda p: masks.packed_documents(bounds_of_documents(p)) & masks.causal(),
    "packed-window": lambda p: masks.window(6, 2) & masks.packed_documents(bounds_of_documents(p)),
    "one-packed": lambda p: masks.packed_documents(bounds_of_documents(p)[0]),
    "prepared": lambda p: prepared_documents(p, random_ids(p, p.max_q, 4).sort(1).values),
    "causal-prepared": lambda p: (
        masks.causal() & prepared_documents(p, random_ids(p, p.max_q, 9).int().sort(1).values)
    ),
    "descending-prepared": lambda p: prepared_documents(p, -random_ids(p, p.max_q, 5).sort(1)[0]),
    "shuffled-prepared": lambda p: prepared_documents(p, random_ids(p, p.max_q, 3)),
    "one-prepared": lambda p: prepared_documents(p, random_ids(p, p.max_q, 3)[0].sort().values),
    "packed-prefix": lambda p: masks.packed_documents(bounds_of_documents(p)) & masks.prefix(80),
}

SQUARE = Case(seqlen_q=200, dtype="bf16", d=64)
LONG = Case(batch=1, seqlen_q=330, seqlen_k=517, heads_q=2, heads_kv=1, dtype="bf16", d=128)
CASES = [
    SQUARE,
    LONG,
    Case(seqlen_q=517, seqlen_k=130, dtype="fp16", d=128, d_v=64, causal=True),
    Case(seqlen_q=1, seqlen_k=300, dtype="bf16", d=32),
    Case(seqlen_q=70, seqlen_k=190, dtype="fp16", d=192, d_v=256, window=(100, 20)),
    Case(
        seqlen_q=129, dtype="bf16", d=80, sink=True, lse_grad=True, top_left=True, window=(90, -1)
    ),
    Case(seqlen_q=100, seqlen_k=150, dtype="fp32", d=64),
]


def seen_by(problem: Problem, mask: Mask) -> torch.Tensor:
    alignment = "top-left" if problem.case.top_left else "bottom-right"
    return mask.to_bool(
        problem.max_q, problem.max_k, device=problem.device, causal_alignment=alignment
    )


def attend(problem: Problem, attn_bias: object, **options: object) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of the public function."""
    c = problem.case
    given = {"q": problem.q, "k": problem.k, "v": problem.v}
    if c.sink:
        given["learnable_sink"] = problem.learnable_sink
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    with dirty_allocator(problem.device, "nan"):
        out, lse, _ = flash_attn.flash_attn_func(
            **leaves,
            attn_bias=attn_bias,
            causal=c.causal,
            window_size=c.window,
            softcap=c.softcap,
            causal_alignment="top-left" if c.top_left else "bottom-right",
            return_attn_probs=True,
            **options,
        )
        outputs, incoming = [out], [problem.dout]
        if problem.dlse is not None:
            outputs, incoming = [out, lse], [problem.dout, problem.dlse]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming)
    names = ["dq", "dk", "dv", "dsink"]
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(names, gradients, strict=False))


def lowered(problem: Problem, mask: Mask) -> Tiled:
    arguments = _call.fwd_arguments(problem.q, problem.k, problem.v, attn_bias=mask)
    return Tiled(*arguments[13:16])


def is_served(case: Case, target: Target) -> bool:
    """Kernels that skip tiles read no bias; where sm90 has none, the mask is one."""
    has_terms = case.softcap or case.deterministic
    call = case.with_(bias="bool") if has_terms or target != SM90 else case
    return call.served_by(target.backend) and call.gradients_served_by(target.backend)


def check_mask(case: Case, name: str, target: Target, seed: int = 5, **options: object) -> None:
    """A call with the mask agrees with the float64 reference given its bool tensor."""
    problem = Problem(case, seed, target.device)
    mask = (MASKS | PACKED | MORE_MASKS)[name](problem)
    with use(target):
        results = attend(problem, mask, **options)
    problem.attn_bias = seen_by(problem, mask)
    problem.case = case.with_(bias="bool")  # whose errors have no known distribution
    compare(problem, results, expect(problem))


def each_mask(names: dict, cases: list[Case], targets: tuple[Target, ...] = OP_TARGETS):
    triples = [
        pytest.param(
            case,
            name,
            *param(case, target).values[1:],
            id=f"{name}-{target}-{case}",
            marks=param(case, target).marks,
        )
        for name in names
        for case in cases
        for target in targets
        if is_served(case, target)
    ]
    return pytest.mark.parametrize("case, name, target", triples)


@each_mask(MASKS, CASES)
def test_forms(case: Case, name: str, target: Target) -> None:
    check_mask(case, name, target)


@each_mask(PACKED, [SQUARE, Case(batch=3, seqlen_q=300, dtype="fp16", d=128, sink=True)])
def test_packed_documents(case: Case, name: str, target: Target) -> None:
    check_mask(case, name, target)


@each_mask(["prefix-lm", "blocks", "bool"], [SQUARE], ATTENTION_TARGETS)
@pytest.mark.parametrize("option", ["softcap", "deterministic"])
def test_where_tiles_are_not_skipped(case: Case, name: str, target: Target, option: str) -> None:
    """The same masks as bool tensors, in calls that the kernels with skipped tiles do not serve."""
    case = case.with_(softcap=3.0) if option == "softcap" else case
    check_mask(case, name, target, deterministic=option == "deterministic")


@each_target(ATEN_CPU, ATEN_CUDA, SM80)
def test_varlen(target: Target) -> None:
    """Positions and diagonals are those of each sequence."""
    case = Case(lengths_q=(30, 70, 5), lengths_k=(64, 50, 90), dtype="bf16", seqused_k=(60, 50, 90))
    problem = Problem(case, 3, target.device)
    indices = problem.index_tensors()
    lengths = (problem.max_q, problem.max_k)
    mask = masks.prefix_lm(problem.place(torch.tensor([20, 3, 0])))
    with use(target):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            problem.q,
            problem.k,
            problem.v,
            indices["cu_seqlens_q"],
            indices["cu_seqlens_k"],
            *lengths,
            seqused_k=indices["seqused_k"],
            attn_bias=masks.window(40, None) & mask,
            return_attn_probs=True,
        )
    seen = [
        mask.to_bool(q, k)[b % mask.lengths.size(0)]
        for b, (q, k) in enumerate(zip(case.lengths_q, case.seqused_k, strict=True))
    ]
    problem.attn_bias = torch.zeros(3, 1, *lengths, dtype=torch.bool, device=target.device)
    for b, of_sequence in enumerate(seen):
        problem.attn_bias[b, :, : of_sequence.size(1), : of_sequence.size(2)] = of_sequence
    problem.case = case.with_(bias="bool", window=(40, -1))
    compare(problem, {"out": out, "lse": lse}, expect(problem, backward=False))


# Of each dtype and class.
SMALL = [
    Case(d=d, dtype=dtype, seqlen_q=140, seqlen_k=200)
    for dtype in ("fp16", "bf16")
    for d in (64, 128, 192, 256)
]


@pytest.mark.sanitize
@each_mask(["causal-documents", "shuffled-documents", "blocks", "bool"], SMALL, (SM80, SM90))
def test_kernels_of_masks(case: Case, name: str, target: Target) -> None:
    """Each way in which a kernel reads a mask: rows as positions, labels, none, and bits."""
    check_mask(case, name, target)


def backward_arguments(problem: Problem, name: str, target: Target) -> dict[str, object]:
    """Of the op bwd, behind the op fwd."""
    arguments = op_arguments(problem) | dict(q=problem.q, k=problem.k, v=problem.v)
    tiled = lowered(problem, MASKS[name](problem))
    arguments |= {f"mask_{part}": x for part, x in tiled._asdict().items()}
    arguments["backend"] = target.backend
    out, lse, *_ = torch.ops.flash_attn.fwd(**arguments)
    arguments |= dict(dout=problem.dout, dlse=None, out=out, softmax_lse=lse)
    arguments |= dict(grad_mask=[True, True, True, False, False])
    del arguments["return_probs"]
    return arguments


@each_mask(["blocks", "shuffled-documents"], SMALL, (SM90,))
def test_backward_of_another_backend(case: Case, name: str, target: Target) -> None:
    """The backward chooses again: sm80's takes what sm90's forward left."""
    problem = Problem(case, 5, target.device)
    arguments = backward_arguments(problem, name, target) | dict(backend=SM80.backend)
    gradients = torch.ops.flash_attn.bwd(**arguments)[:3]
    results = {"out": arguments["out"], "lse": arguments["softmax_lse"]}
    problem.attn_bias = seen_by(problem, MASKS[name](Problem(case, 5, target.device)))
    problem.case = case.with_(bias="bool")
    compare(
        problem,
        results | dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        expect(problem),
    )


@each_mask(["blocks", "bool", "shuffled-documents"], SMALL)
def test_wide_gradients(case: Case, name: str, target: Target) -> None:
    """The op's dq, dk and dv in fp32 are what is rounded otherwise."""
    problem = Problem(case, 5, target.device)
    arguments = backward_arguments(problem, name, target)
    with dirty_allocator(problem.device, "nan"):
        narrow = torch.ops.flash_attn.bwd(**arguments)[:3]
        wide = torch.ops.flash_attn.bwd(
            **arguments, wide_query_gradient=True, wide_key_gradients=True
        )[:3]
    assert_rounded_otherwise(narrow, wide)


def backward_has_room() -> bool:
    """Whether a block of sm80's backward has the shared memory to skip tiles."""
    room = int(os.environ.get("FLASH_ATTN_SMEM_LIMIT", 1 << 30))
    if torch.cuda.is_available():
        room = min(room, torch.cuda.get_device_properties().shared_memory_per_block_optin)
    return room >= 160 << 10


@pytest.mark.parametrize("d", [128, 256])
@each_target(ATEN_CPU, SM80, SM90)
def test_hidden_tiles_are_not_read(target: Target, d: int) -> None:
    """NaN in keys of hidden tiles reaches neither the results nor the gradients."""
    problem = Problem(LONG.with_(seqlen_q=256, seqlen_k=512, d=d), 2, target.device)
    blocks = problem.place(torch.tensor([[True, False, False, True]]).expand(2, 4))
    if target == SM80 and not backward_has_room():
        pytest.skip("with so little shared memory the backward reads hidden tiles")
    problem.k[:, 128:384] = torch.nan
    problem.v[:, 128:384] = torch.nan
    with use(target):
        results = attend(problem, masks.block_sparse(blocks))
    for name, x in results.items():
        rows = x[:, 128:384] if name in ("dk", "dv") else x
        assert rows.isfinite().all(), name
        assert name not in ("dk", "dv") or (rows == 0).all(), name


def test_old_logs() -> None:
    """`replay` runs what was logged before calls had masks."""
    from flash_attn.cli.replay import rebuilt

    problem = Problem(SQUARE, 0, "cpu")
    arguments = op_arguments(problem) | dict(q=problem.q, k=problem.k, v=problem.v, backend=None)
    logged = {name: _log._described(x) for name, x in arguments.items() if "mask" not in name}
    call = {"op": "fwd", "arguments": logged}
    out, *_ = torch.ops.flash_attn.fwd(*rebuilt(call, torch.device("cpu"), "aten"))
    assert out.shape == problem.q.shape


@pytest.mark.gpu
def test_kernels_that_skip() -> None:
    """What serves a call with a mask, as the docstring of flash_attn.masks has it."""
    mask = masks.prefix_lm(5)
    q, k, v = torch.zeros(3, 1, 64, 2, 64, dtype=torch.bfloat16, device="cuda").unbind(0)
    wide = torch.zeros(3, 1, 64, 2, 136, dtype=torch.bfloat16, device="cuda").unbind(0)
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    skipped = "the mask's hidden tiles skipped"
    for op in ("fwd", "bwd"):
        for qkv in ((q, k, v), wide):
            plan = flash_attn.can_use(*qkv, op=op, attn_bias=mask)
            assert plan.backend == ("sm90" if is_hopper else "sm80")
            skips = op == "fwd" or plan.backend == "sm90" or backward_has_room()
            assert (skipped in plan.plan) == skips
        for option in ({"softcap": 2.0}, {"dropout_p": 0.5}):
            other = flash_attn.can_use(q, k, v, op=op, attn_bias=mask, **option)
            assert other.backend != "aten"
            assert skipped not in other.plan
    assert (
        skipped
        not in flash_attn.can_use(q, k, v, op="bwd", attn_bias=mask, deterministic=True).plan
    )


@pytest.mark.gpu
def test_documents_packed_in_place() -> None:
    """A varlen call serves prepared documents where rows need no copy, and else tiles."""
    mask = masks.documents(torch.arange(200, device="cuda") // 70).prepared(200, 200)
    rows_first = torch.zeros(2, 200, 4, 64, dtype=torch.bfloat16, device="cuda")
    heads_first = torch.zeros(2, 4, 200, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    for x, is_packed in ((rows_first, True), (heads_first, False), (heads_first[:1], True)):
        plan = flash_attn.can_use(x, x, x, attn_bias=mask).plan
        assert ("the mask's hidden tiles skipped" not in plan) == is_packed, plan


@pytest.mark.gpu
@pytest.mark.parametrize("is_ready", [False, True], ids=["new", "prepared"])
def test_graph(is_ready: bool) -> None:
    """Captured without a synchronisation; a mask follows its tensors, if it was not prepared."""
    problem = Problem(SQUARE, 6, "cuda")
    ids = random_ids(problem, 200, 3).sort(1).values
    blocks = random_bool(problem, 4, 4)
    mask = masks.causal() & masks.documents(ids) & masks.block_sparse(blocks, 64)
    if is_ready:
        mask = mask.prepared(200, 200)
    results = {}

    def step() -> None:
        results.update(attend(problem, mask))

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = dict(results)
    if not is_ready:
        ids.copy_(random_ids(problem, 200, 5).sort(1).values)
        blocks.logical_not_()
    graph.replay()
    torch.cuda.synchronize()
    step()
    for name in ("out", "lse", "dk", "dv"):
        assert torch.equal(captured[name], results[name]), name


@each_target(ATEN_CPU, SM80, SM90)
def test_scaled_dot_product_attention(target: Target) -> None:
    """attn_mask takes a mask, aligned top-left."""
    problem = Problem(Case(seqlen_q=100, seqlen_k=180, dtype="bf16"), 7, target.device)
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    mask = masks.prefix_lm(prefix_lengths(problem))
    seen = mask.to_bool(100, 180, device=target.device, causal_alignment="top-left")
    with use(target):
        results = [
            flash_attn.scaled_dot_product_attention(q, k, v, attn_mask=x, enable_gqa=True)
            for x in (mask, seen)
        ]
    torch.testing.assert_close(*results, rtol=0.02, atol=0.005)


def test_compiled() -> None:
    """Masks made inside and outside of a compiled function, without a graph break."""
    problem = Problem(SQUARE, 9, "cpu")
    q, k, v, ids = problem.q, problem.k, problem.v, random_ids(problem, 200, 3)
    outside = masks.prefix_lm(7) | masks.documents(ids)
    bounds = bounds_of_documents(problem)

    def function(q, k, v, ids, bounds):
        inside = masks.documents(ids) & masks.prefix_lm(7) & masks.window(90, None)
        packed = masks.causal() & masks.packed_documents(bounds)
        return [flash_attn.flash_attn_func(q, k, v, attn_bias=x) for x in (inside, packed, outside)]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(
        compiled(q, k, v, ids, bounds), function(q, k, v, ids, bounds), strict=True
    ):
        assert torch.equal(actual, expected)
