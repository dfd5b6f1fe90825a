"""Gradients against float64: q, k, v, bias, sink, through the output and through the LSE."""

from __future__ import annotations

import itertools

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
    check,
    compare,
    each_case,
    each_target,
    expect,
    op_arguments,
    run,
    sample,
)
from numerics import assert_close, assert_rounded_otherwise
from test_forward import (
    HEAD_DIM_CASES,
    KERNEL_CHOICES,
    SCORE_CHOICES,
    TERM_CHOICES,
    VALUE_DIM_CASES,
    cases_of,
)

import flash_attn

KERNEL_BACKWARD = KERNEL_CHOICES | {
    "lse_grad": [False, False, True],
    "deterministic": [False, True],
}
SCORE_BACKWARD = KERNEL_BACKWARD | SCORE_CHOICES
TERM_BACKWARD = TERM_CHOICES | {"lse_grad": [False, True]}


@each_case(cases_of(sample(80, seed=3, **KERNEL_BACKWARD)))
def test_lengths_and_masks(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(cases_of(sample(80, seed=5, **SCORE_BACKWARD)))
def test_softcap_alibi_sinks(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(cases_of(sample(90, seed=4, **TERM_BACKWARD)))
def test_score_terms(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(HEAD_DIM_CASES + VALUE_DIM_CASES)
def test_head_dims(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


@each_case(
    [
        Case(
            heads_q=2 * group, heads_kv=2, dtype="bf16", seqlen_q=17, seqlen_k=65, causal=True, d=32
        )
        for group in (1, 3, 5, 7, 8, 71)
    ]
)
def test_query_heads_of_one_kv_head(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


# Few blocks of keys and many queries: on a large GPU several thread blocks share a block of keys.
FEW_KEYS = [
    Case(batch=1, dtype=dtype, heads_q=heads_q, heads_kv=1, seqlen_q=n_q, seqlen_k=n_k, d=d, **rest)
    for dtype, heads_q, n_q, n_k, d, rest in [
        ("bf16", 1, 2500, 70, 64, {}),
        ("bf16", 2, 1400, 260, 128, {"causal": True}),
        ("fp16", 16, 257, 300, 128, {"causal": True, "lse_grad": True}),
        ("fp16", 5, 700, 130, 40, {"window": (300, 0)}),
        ("bf16", 3, 900, 129, 96, {"sink": True}),
    ]
] + [Case(dtype="bf16", heads_q=8, heads_kv=1, lengths_q=(600, 0, 513), lengths_k=(200, 9, 77))]


@each_case(FEW_KEYS)
def test_few_keys(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


# For the widest heads, a kernel of its own computes dq on sm90 where queries see few keys in the
# mean (csrc/sm90/bwd.cu, computes_dq_apart). There a GPU has as many multiprocessors as tiles, the
# simulated one eight, or the tiles are four rounds of them.
DQ_APART = [
    Case(**dict(d=256, batch=1, heads_q=1, heads_kv=1) | more)
    for more in (
        dict(dtype="bf16", seqlen_q=150, seqlen_k=130, heads_q=2),
        dict(dtype="fp16", seqlen_q=200, seqlen_k=350, causal=True),
        # The first queries see nothing; the last keys are seen by nobody.
        dict(dtype="bf16", seqlen_q=321, seqlen_k=65, heads_q=2, causal=True, sink=True),
        dict(dtype="fp16", seqlen_q=129, seqlen_k=300, causal=True, top_left=True, lse_grad=True),
        dict(dtype="fp16", seqlen_q=256, seqlen_k=300, window=(65, 0), softmax_scale=0.4),
        dict(dtype="bf16", seqlen_q=300, seqlen_k=320, spread="wide"),
        dict(dtype="bf16", seqlen_q=140, causal=True, d=200),
        dict(dtype="fp16", seqlen_q=140, causal=True, d=144, d_v=248),
        dict(dtype="bf16", seqlen_q=140, d_v=24),
        # In rounds: dense, with a window; varlen.
        dict(dtype="bf16", seqlen_q=500, seqlen_k=450, heads_q=4, heads_kv=4, window=(100, 20)),
        dict(dtype="bf16", lengths_q=(300, 0, 129), lengths_k=(190, 7, 130), tail=3, causal=True)
        | dict(heads_q=4, heads_kv=4, lse_grad=True),
        dict(dtype="fp16", lengths_q=(129, 140), lengths_k=(160, 129), leftpad_k=(5, 0))
        | dict(heads_q=8, heads_kv=4, seqused_q=(63, 140), seqused_k=(130, 128)),
        # Up to more keys where the bits shall be the same every time.
        dict(dtype="bf16", seqlen_q=130, seqlen_k=1000, heads_q=2, heads_kv=2, deterministic=True),
    )
]
# The pair of thread blocks serves these: too many keys, or few queries.
DQ_IN_MEMORY = [
    Case(**dict(d=256, batch=1, heads_q=1, heads_kv=1) | more)
    for more in (
        dict(dtype="bf16", seqlen_q=130, seqlen_k=1000),
        dict(dtype="fp16", seqlen_q=140, seqlen_k=900, heads_q=2, causal=True),
        dict(dtype="fp16", seqlen_q=140, seqlen_k=1300, heads_q=2, deterministic=True),
        dict(dtype="bf16", lengths_q=(140, 130), lengths_k=(800, 9), causal=True, lse_grad=True),
        dict(dtype="bf16", seqlen_q=90, seqlen_k=150, heads_q=6, heads_kv=6),
    )
]


@each_case(DQ_APART + DQ_IN_MEMORY)
def test_where_wide_heads_have_dq(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


# More tiles than Hopper's largest has clusters of two thread blocks, or than it has thread blocks
# for tiles of 64 keys. In each sequence the last thread block of a pair has no keys, or few.
MANY_TILES = [
    Case(dtype=dtype, batch=batch, heads_q=h_q, heads_kv=h_kv, d=d, d_v=d_v, **lengths, **mask)
    for dtype, batch, h_q, h_kv, d, d_v, lengths, mask in [
        ("bf16", 4, 40, 40, 192, None, dict(seqlen_q=130, seqlen_k=190), {}),
        ("fp16", 3, 48, 24, 192, 128, dict(seqlen_q=70, seqlen_k=190), {"causal": True}),
        ("bf16", 2, 80, 80, 136, 72, dict(seqlen_q=20, seqlen_k=140), {"deterministic": True}),
        ("fp16", 2, 40, 20, 256, None, dict(seqlen_q=600, seqlen_k=700), {"deterministic": True}),
        ("bf16", 1, 40, 40, 256, 40, dict(seqlen_q=700, seqlen_k=660), {"window": (600, 300)}),
        ("fp16", 4, 80, 40, 256, None, dict(seqlen_q=130, seqlen_k=200), {"causal": True}),
        (
            *("bf16", 2, 24, 3, 192, None, dict(seqlen_q=1536, seqlen_k=1540)),
            {"causal": True, "deterministic": True},
        ),
        (
            *("bf16", 5, 48, 24, 192, None),
            dict(lengths_q=(130, 0, 65, 1, 200), lengths_k=(64, 60, 190, 0, 129)),
            {"causal": True, "deterministic": True},
        ),
        (
            *("fp16", 4, 48, 24, 256, None),
            dict(lengths_q=(130, 7, 64, 190), lengths_k=(130, 1, 60, 128)),
            {"seqused_q": (130, 0, 9, 190), "seqused_k": (1, 1, 0, 128)},
        ),
    ]
]


@each_case(MANY_TILES, [SM80, SM90], marks=[pytest.mark.real_gpu])
def test_many_tiles_of_wide_heads(case: Case, target: Target, seed: int) -> None:
    """What a tile leaves in shared memory does not reach the next one."""
    check(case, target, seed)


@each_case(
    [
        Case(dtype=dtype, heads_q=4, heads_kv=2, seqlen_q=n, seqlen_k=140, d=d, causal=True, **more)
        for dtype, n, d, more in [
            ("bf16", 1030, 64, {}),
            ("fp16", 1500, 128, {}),
            ("fp16", 300, 60, dict(d_v=100)),
            ("bf16", 90, 192, {}),
            ("fp16", 150, 256, {}),
            ("bf16", 250, 128, dict(deterministic=True)),
            ("fp32", 70, 64, {}),
        ]
    ]
)
def test_wide_gradients(case: Case, target: Target, seed: int) -> None:
    """dq, dk and dv in fp32 are what is rounded otherwise, each where it alone is asked for."""
    problem = Problem(case, seed, target.device)
    tensors = problem.float_tensors()
    arguments = op_arguments(problem) | {n: tensors[n] for n in ("q", "k", "v")}
    arguments["backend"] = target.backend
    out, lse, *_ = torch.ops.flash_attn.fwd(**arguments)
    del arguments["return_probs"]

    def gradients(**options: bool) -> tuple[torch.Tensor, ...]:
        dq, dk, dv, _, _ = torch.ops.flash_attn.bwd(
            dout=problem.dout,
            dlse=None,
            out=out,
            softmax_lse=lse,
            grad_mask=[True, True, True, False, False],
            **arguments,
            **options,
        )
        return dq, dk, dv

    def is_rounded(wide: torch.Tensor) -> bool:
        return torch.equal(wide.to(narrow[0].dtype).float(), wide)

    narrow = gradients()
    of_query = gradients(wide_query_gradient=True)
    of_keys = gradients(wide_key_gradients=True)
    assert [x.dtype for x in of_query] == [torch.float32, *(x.dtype for x in narrow[1:])]
    assert [x.dtype for x in of_keys] == [narrow[0].dtype, torch.float32, torch.float32]
    assert_rounded_otherwise(narrow, (of_query[0], *of_keys[1:]))
    if case.dtype == "fp32":
        return
    # Other kernels round first.
    has_sums = target.backend == "sm90" or (target.backend == "sm80" and not case.deterministic)
    has_wide_keys = target.backend == "sm90" and case.d <= 128 and not case.deterministic
    assert is_rounded(of_query[0]) != has_sums
    assert all(is_rounded(x) != has_wide_keys for x in of_keys[1:])


@each_case(
    [
        Case(batch=1, dtype=dtype, seqlen_q=n_q, seqlen_k=n_k, d=d, spread=spread, causal=causal)
        for dtype, n_q, n_k, d, causal in [
            ("fp16", 512, 1024, 64, True),
            ("bf16", 512, 513, 128, True),
            ("bf16", 640, 512, 64, False),
            ("fp32", 513, 700, 64, True),
        ]
        for spread in ("normal", "wide")
    ]
)
def test_long_rows(case: Case, target: Target, seed: int) -> None:
    check(case, target, seed)


BIAS_FORMS = ["full", "head", "batch", "key", "row", "matrix", "scalar", "inf"]
BIAS_DTYPES = [(True, "bf16", False), (False, "bf16", True), (False, "fp32", True)]


@each_case(
    [
        Case(
            bias=form,
            bias_fp32=bias_fp32,
            dtype=dtype,
            seqlen_q=33,
            seqlen_k=70,
            causal=causal,
            heads_q=6,
        )
        for form, (bias_fp32, dtype, causal) in itertools.product(BIAS_FORMS, BIAS_DTYPES)
    ]
)
def test_bias_gradient(case: Case, target: Target, seed: int) -> None:
    """Summed over what the bias broadcasts, in the bias's shape and dtype."""
    if not case.gradients_served_by(target.backend):
        pytest.skip("another backend computes the gradient of a bias")
    problem = Problem(case, seed, target.device)
    results = run(problem, target.backend)
    assert results["dbias"].shape == problem.attn_bias.shape
    assert results["dbias"].dtype == problem.attn_bias.dtype
    compare(problem, results, expect(problem))


SINK_CASES = [
    Case(sink=True, dtype=dtype, seqlen_q=40, seqlen_k=50, lse_grad=lse_grad, causal=True)
    for dtype in ("fp16", "fp32", "fp64")
    for lse_grad in (False, True)
] + [
    # Rows that see only the sink; more rows than the reduction has threads; rows of no sequence.
    Case(sink=True, dtype="bf16", seqlen_q=90, seqlen_k=30, causal=True, lse_grad=True, d=128),
    Case(sink=True, dtype="bf16", seqlen_q=2100, seqlen_k=33, heads_q=6, lse_grad=True, d=32),
    Case(
        sink=True,
        dtype="fp16",
        lengths_q=(65, 0, 9),
        lengths_k=(33, 7, 130),
        tail=3,
        seqused_q=(60, 0, 9),
        leftpad_k=(5, 0, 0),
        lse_grad=True,
        d=256,
    ),
    Case(sink=True, dtype="bf16", seqlen_q=40, seqlen_k=50, deterministic=True, d=96),
]


@each_case(SINK_CASES)
def test_sink_gradient(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    results = run(problem, target.backend)
    assert results["dsink"].abs().min() > 0
    assert results["dsink"].dtype == problem.learnable_sink.dtype
    compare(problem, results, expect(problem))


@each_target(*OP_TARGETS)
def test_sink_gradient_without_keys(target: Target, seed: int) -> None:
    """LSE is the sink then, whose gradient is that of LSE."""
    problem = Problem(
        Case(sink=True, dtype="bf16", seqlen_q=9, seqlen_k=0, lse_grad=True), seed, target.device
    )
    results = run(problem, target.backend)
    assert not results["out"].count_nonzero()
    expected = problem.dlse.double().sum((0, 2))
    assert_close("dsink", results["dsink"], expected, expected.abs(), torch.bfloat16)


@each_case(
    [
        Case(dtype="fp16", seqlen_q=65, seqlen_k=90, causal=True, lse_grad=True),
        Case(dtype="fp32", seqlen_q=65, seqlen_k=90, causal=True, lse_grad=True),
        DQ_APART[0].with_(lse_grad=True),
        DQ_IN_MEMORY[-1].with_(lse_grad=True),
        *(
            Case(dtype=dtype, seqlen_q=65, seqlen_k=90, causal=d < 128, d=d, d_v=d_v, lse_grad=True)
            for dtype, d, d_v in [
                ("bf16", 64, None),
                ("bf16", 80, None),
                ("fp16", 96, None),
                ("bf16", 128, None),
                ("fp16", 192, None),
                ("bf16", 192, 128),
            ]
        ),
    ]
)
def test_gradient_through_the_lse_alone(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    problem.dout = torch.zeros_like(problem.dout)
    expected = expect(problem)
    q, k, v = (x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
    _, lse, *_ = torch.ops.flash_attn.fwd(
        q=q, k=k, v=v, **op_arguments(problem), backend=target.backend
    )
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), problem.dlse, materialize_grads=True)
    assert not dv.count_nonzero(), "v has no part in the LSE"
    for name, actual in (("dq", dq), ("dk", dk)):
        assert_close(name, actual, expected.values[name], expected.conditions[name], q.dtype)


def _norm_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtype, d",
    [("bf16", d) for d in (64, 80, 128, 256)] + [("fp16", d) for d in (64, 128, 192, 256)],
)
def test_dq_and_dk_lose_no_more_than_what_dS_is_rounded(
    dtype: str, d: int, causal: bool, target: Target, seed: int
) -> None:
    """In the norm, the error is that of a float64 backward whose dS, out and results are rounded:
    with P rounded, too, before dS comes from it, it is a fifth larger.
    """
    rounded = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(1, 4, 384, d, generator=generator).to(rounded).double().to(target.device)
        for _ in range(4)
    )
    scale = d**-0.5
    S = scale * q @ k.transpose(2, 3)
    if causal:
        S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), float("-inf"))
    P = S.softmax(-1)
    out = P @ v

    def gradients(out: torch.Tensor, round_to: torch.dtype) -> list[torch.Tensor]:
        delta = (dout * out.to(round_to).double()).sum(-1, keepdim=True)
        dS = (P * (dout @ v.transpose(2, 3) - delta)).to(round_to).double()
        found = scale * dS @ k, scale * dS.transpose(2, 3) @ q
        return [x.to(round_to) for x in found]

    leaves = [x.transpose(1, 2).to(rounded).detach().requires_grad_() for x in (q, k, v)]
    with flash_attn.use_backend(target.backend):
        result = flash_attn.flash_attn_func(*leaves, causal=causal)
        actual = torch.autograd.grad(result, leaves[:2], dout.transpose(1, 2).to(rounded))
    for name, of_kernel, of_rounding, exact in zip(
        ("dq", "dk"), actual, gradients(out, rounded), gradients(out, torch.float64), strict=True
    ):
        limit = 1.1 * _norm_error(of_rounding, exact)
        assert _norm_error(of_kernel.transpose(1, 2), exact) <= limit, name


SUBSETS = [
    s
    for n in range(1, 6)
    for s in itertools.combinations(["q", "k", "v", "attn_bias", "learnable_sink"], n)
]


@each_target(ATEN_CPU, ATEN_CUDA, SM80)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_requires_grad_on_a_subset(subset: tuple[str, ...], target: Target, seed: int) -> None:
    """Each gradient is the one of the full call, bit for bit; inputs that need none get none."""
    case = Case(seqlen_q=20, seqlen_k=30, dtype="bf16", bias="head", sink=True, d=32)
    problem = Problem(case, seed, target.device)
    full = run(problem, target.backend, deterministic=True)
    tensors = {name: x.detach().clone() for name, x in problem.float_tensors().items()}
    for name in subset:
        tensors[name].requires_grad_()
    arguments = op_arguments(problem) | tensors | {"backend": target.backend, "deterministic": True}
    torch.ops.flash_attn.fwd(**arguments)[0].backward(problem.dout)
    gradients = {"q": "dq", "k": "dk", "v": "dv", "attn_bias": "dbias", "learnable_sink": "dsink"}
    for name, tensor in tensors.items():
        if name in subset:
            assert torch.equal(tensor.grad, full[gradients[name]]), name
        else:
            assert tensor.grad is None


@each_case(
    [
        Case(dtype="bf16", seqlen_q=300, seqlen_k=200, d=d, heads_q=6, causal=causal, batch=3)
        for d, causal in [(64, True), (128, False), (256, True)]
    ]
    + [
        Case(dtype="fp16", lengths_q=(150, 0, 70), lengths_k=(70, 9, 190), d=96, lse_grad=True),
        *(case for case in DQ_APART + DQ_IN_MEMORY if case.deterministic),
        *(case for case in DQ_APART if case.seqused_q),
        Case(dtype="fp32", seqlen_q=100, bias="key", dropout_p=0.2, sink=True, softcap=4.0),
    ]
)
@pytest.mark.parametrize("asked_by", ["argument", "torch"])
def test_deterministic(asked_by: str, case: Case, target: Target, seed: int) -> None:
    """The same bits of every gradient, asked for by argument or by use_deterministic_algorithms."""
    problem = Problem(case, seed, target.device)

    def gradients() -> dict[str, torch.Tensor]:
        if asked_by == "argument":
            return run(problem, target.backend, deterministic=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return run(problem, target.backend)
        finally:
            torch.use_deterministic_algorithms(False)

    first = gradients()
    compare(problem, first, expect(problem))
    for _ in range(4):
        again = gradients()
        for name in first:
            assert torch.equal(again[name], first[name]), name


@each_case([Case(dtype="bf16", seqlen_q=256, seqlen_k=300, batch=3, d=128, causal=True)])
def test_only_dq_may_vary_without_it(case: Case, target: Target, seed: int) -> None:
    problem = Problem(case, seed, target.device)
    first, again = run(problem, target.backend), run(problem, target.backend)
    assert torch.equal(first["dk"], again["dk"]) and torch.equal(first["dv"], again["dv"])
    condition = expect(problem).conditions["dq"]
    assert_close("dq", again["dq"], first["dq"].double(), condition, problem.q.dtype)


@each_target(*ATTENTION_TARGETS)
def test_differentiating_twice_raises(target: Target, seed: int) -> None:
    problem = Problem(Case(dtype="bf16", seqlen_q=9), seed, target.device)
    q = problem.q.clone().requires_grad_()
    out, *_ = torch.ops.flash_attn.fwd(
        q=q, k=problem.k, v=problem.v, **op_arguments(problem), backend=target.backend
    )
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attn|not implemented|differentiat"):
        torch.autograd.grad(dq.float().sum(), q)
