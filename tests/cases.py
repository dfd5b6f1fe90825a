"""An attention call as data: what goes in (Case), the tensors (Problem), how it is run, what must
come out.

Every test that needs numbers goes through `check`: poisoned allocations, guarded inputs, one
backend named, float64 reference, the standard of numerics.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import pytest
import torch
from numerics import UNIT_ROUNDOFF, assert_close, assert_lse_close, underflow_of
from poison import Guarded, dirty_allocator
from targets import (  # noqa: F401  (what tests take from here)
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    BITWISE_TARGETS,
    DECODE_CUDA,
    DECODE_TARGETS,
    FEW_SMS,
    KERNEL_DEVICE,
    OP_TARGETS,
    PREFILL_TARGETS,
    SIMULATED,
    SM80,
    SM90,
    SPLIT_TARGETS,
    Target,
    each_target,
    leaves_of,
    pads,
    skip_copies_of_missing_pages,
    use,
)

from flash_attn.reference import attention_ref, attention_ref_grads, condition_tensors

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
SPREADS = ("normal", "wide")  # N(0, 1) and N(0, 9)
MANY_KEYS = {"normal": 64, "wide": 512}
BIAS_SHAPES = {
    "full": "b h q k",
    "head": "1 h q k",
    "batch": "b 1 q k",
    "key": "b 1 1 k",
    "row": "1 h q 1",
    "matrix": "q k",
    "scalar": "1 1 1 1",
    "bool": "b h q k",
    "padding": "b 1 1 k",
    "inf": "b 1 q k",
}
BOOL_BIASES = ("bool", "padding")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. What has its default is not part of the id."""

    batch: int = 2
    seqlen_q: int = 64
    seqlen_k: int | None = None  # None: seqlen_q
    heads_q: int = 4
    heads_kv: int = 2
    d: int = 64
    d_v: int | None = None  # None: d
    dtype: str = "fp32"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    top_left: bool = False
    softcap: float = 0.0
    alibi: str = ""  # "head": (heads,), "batch": (batch, heads)
    bias: str = ""  # a key of BIAS_SHAPES
    bias_fp32: bool = False  # else the dtype of q
    sink: bool = False
    dropout_p: float = 0.0
    lse_grad: bool = False
    spread: str = "normal"
    softmax_scale: float | None = None
    lengths_q: tuple[int, ...] | None = None  # varlen: the segments
    lengths_k: tuple[int, ...] | None = None
    tail: int = 0  # varlen: rows after the last segment
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    leftpad_k: tuple[int, ...] | None = None
    deterministic: bool = False

    def __str__(self) -> str:
        varlen = self.lengths_q is not None
        lengths = (
            f"q{_listed(self.lengths_q)}-k{_listed(self.segments_k)}"
            if varlen
            else f"b{self.batch}-q{self.seqlen_q}-k{self.keys}"
        )
        parts = [self.dtype, lengths, f"h{self.heads_q}:{self.heads_kv}", f"d{self.d}"]
        if self.d_v is not None:
            parts.append(f"dv{self.d_v}")
        named = [
            "dtype",
            "batch",
            "seqlen_q",
            "seqlen_k",
            "heads_q",
            "heads_kv",
            "d",
            "d_v",
            "lengths_q",
            "lengths_k",
        ]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in named or value == f.default:
                continue
            if isinstance(value, tuple) and len(value) > MOST_LISTED:
                value = _listed(value)
            parts.append(f.name if value is True else f"{f.name}={value}".replace(" ", ""))
        return "-".join(parts)

    @property
    def keys(self) -> int:
        return self.seqlen_q if self.seqlen_k is None else self.seqlen_k

    @property
    def segments_k(self) -> tuple[int, ...]:
        return self.lengths_q if self.lengths_k is None else self.lengths_k

    @property
    def is_varlen(self) -> bool:
        return self.lengths_q is not None

    @property
    def window_sides(self) -> tuple[int, int]:
        left, right = self.window
        return (left, 0) if self.causal else (left, right)

    @property
    def is_plain(self) -> bool:
        """Whether the distribution of the errors is known: normal inputs, no score terms, rows of
        many keys."""
        lengths = (
            [*self.lengths_q, *self.segments_k] if self.is_varlen else [self.seqlen_q, self.keys]
        )
        terms = (
            self.softcap or self.alibi or self.bias or self.sink or self.dropout_p or self.lse_grad
        )
        cut = self.window != (-1, -1) or self.seqused_k or self.leftpad_k
        return (
            self.spread in SPREADS
            and not (terms or cut)
            and min(lengths, default=0) >= MANY_KEYS[self.spread]
        )

    def served_by(self, backend: str) -> bool:
        """What core/backend.cpp says of the kernels; test_backends.py holds the two together."""
        if backend == "aten":
            return True
        head_dim = max(self.d, self.d_v or self.d)
        if self.dtype == "fp32" and backend == SM80.backend:
            return head_dim <= 256
        widest = 512 if backend == SM80.backend else 256
        return self.dtype in ("fp16", "bf16") and head_dim <= widest

    def gradients_served_by(self, backend: str) -> bool:
        """The same of the backward."""
        if backend != SM90.backend:
            return self.served_by(backend)
        bias_gradient = self.bias and self.bias not in BOOL_BIASES
        terms = self.softcap or self.alibi or self.bias or self.dropout_p
        narrow = max(self.d, self.d_v or self.d) <= 128
        unordered = self.deterministic and terms
        longest_q = max(self.lengths_q, default=0) if self.is_varlen else self.seqlen_q
        longest_k = max(self.segments_k, default=0) if self.is_varlen else self.keys
        queries, keys = BIAS_SHAPES.get(self.bias, "1 1").split()[-2:]
        of_keys = (queries == "1" or longest_q == 1) and keys != "1" and longest_k != 1
        of_dtype = not self.bias_fp32 and (self.bias not in BOOL_BIASES or of_keys)
        several = self.softcap or self.dropout_p or (self.bias and (self.is_varlen or not of_dtype))
        fp16_slopes = self.alibi and self.dtype == "fp16" and several
        refused = unordered or (bias_gradient and of_keys) or fp16_slopes or (terms and not narrow)
        return self.served_by(backend) and not refused

    def with_(self, **changes: object) -> Case:
        return dataclasses.replace(self, **changes)


MOST_LISTED = 64


def _listed(values: Sequence[int]) -> str:
    """Of many only how many there are, the least and the largest."""
    if len(values) > MOST_LISTED:
        return f"[{len(values)}x{min(values)}..{max(values)}]"
    return str(list(values)).replace(" ", "")


def param(case: object, target: Target, *marks: pytest.MarkDecorator):
    marks = (*marks, *target.marks)
    return pytest.param(case, target, id=f"{target}-{case}", marks=marks)


def each_case(
    cases: Iterable[Case], targets: Sequence[Target] = OP_TARGETS, marks: Sequence = ()
) -> pytest.MarkDecorator:
    """Parametrise (case, target) over the backends that serve each case."""
    unique = dict.fromkeys(cases)
    pairs = [param(c, t, *marks) for c in unique for t in targets if c.served_by(t.backend)]
    return pytest.mark.parametrize("case, target", pairs)


def sample(count: int, seed: int, **choices: Sequence) -> list[dict]:
    """`count` points of a cross product that cover as many pairs of values as a greedy search
    finds."""
    rng = random.Random(seed)
    names = list(choices)
    covered: set = set()

    def pairs(point: dict) -> set:
        items = [(name, repr(point[name])) for name in names]
        return set(itertools.combinations(items, 2))

    points = []
    for _ in range(count):
        candidates = [{n: rng.choice(choices[n]) for n in names} for _ in range(24)]
        best = max(candidates, key=lambda point: len(pairs(point) - covered))
        covered |= pairs(best)
        points.append(best)
    return points


def starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@dataclass
class Problem:
    case: Case
    seed: int
    device: str
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        c, self.generator = self.case, torch.Generator().manual_seed(self.seed)
        scale = {"wide": 3.0}.get(c.spread, 1.0)
        self.batch = len(c.lengths_q) if c.is_varlen else c.batch
        self.max_q = max(c.lengths_q, default=0) if c.is_varlen else c.seqlen_q
        self.max_k = max(c.segments_k, default=0) if c.is_varlen else c.keys
        d_v = c.d if c.d_v is None else c.d_v
        self.q = self.normal(*self.rows("q"), c.heads_q, c.d, scale=scale)
        self.k = self.normal(*self.rows("k"), c.heads_kv, c.d, scale=scale)
        self.v = self.normal(*self.rows("k"), c.heads_kv, d_v, scale=scale)
        self.dout = self.normal(*self.rows("q"), c.heads_q, d_v)
        self.attn_bias = self.make_bias()
        slopes_shape = {"": None, "head": (c.heads_q,), "batch": (self.batch, c.heads_q)}[c.alibi]
        # fp16 has no digits for what steeper slopes leave of P: many P below 2⁻¹⁴ in a sum.
        steepness = 0.05 if c.dtype == "fp16" else 0.3
        self.alibi_slopes = (
            self.place(self.random(slopes_shape).abs() * steepness) if slopes_shape else None
        )
        self.learnable_sink = self.normal(c.heads_q) if c.sink else None
        self.dlse = None
        if c.lse_grad:
            accumulate = torch.float64 if c.dtype == "fp64" else torch.float32
            self.dlse = self.place(self.random(self.lse_shape()).to(accumulate))
        self.rng = (0x1234_5678_9ABC_DEF0 + self.seed, 0x0F1E_2D3C_4B5A_6978 ^ self.seed)
        self.rng_state = self.place(torch.tensor(self.rng)) if c.dropout_p else None

    def random(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.generator)

    def place(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return self.place((self.random(shape) * scale).to(DTYPES[self.case.dtype]))

    def rows(self, side: str) -> tuple[int, ...]:
        c = self.case
        if c.is_varlen:
            return (sum(c.lengths_q if side == "q" else c.segments_k) + c.tail,)
        return (c.batch, c.seqlen_q if side == "q" else c.keys)

    def lse_shape(self) -> tuple[int, ...]:
        rows = self.rows("q")
        return (*rows[:-1], self.case.heads_q, rows[-1])

    def make_bias(self) -> torch.Tensor | None:
        c = self.case
        if not c.bias:
            return None
        sizes = {"b": self.batch, "h": c.heads_q, "q": self.max_q, "k": self.max_k, "1": 1}
        values = self.random([sizes[axis] for axis in BIAS_SHAPES[c.bias].split()])
        if c.bias in BOOL_BIASES:
            return self.place(values > -0.5)
        if c.bias == "inf":
            values = values.masked_fill(values < -0.7, float("-inf"))
        return self.place(values.to(torch.float32 if c.bias_fp32 else DTYPES[c.dtype]))

    def index_tensors(self) -> dict[str, torch.Tensor]:
        c = self.case
        named = {
            "cu_seqlens_q": starts(c.lengths_q) if c.is_varlen else None,
            "cu_seqlens_k": starts(c.segments_k) if c.is_varlen else None,
            "seqused_q": c.seqused_q,
            "seqused_k": c.seqused_k,
            "leftpad_k": c.leftpad_k,
        }
        return {
            name: self.place(torch.tensor(list(values), dtype=torch.int32))
            for name, values in named.items()
            if values is not None
        }

    def float_tensors(self) -> dict[str, torch.Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, "attn_bias": self.attn_bias}
        named |= {"learnable_sink": self.learnable_sink, "alibi_slopes": self.alibi_slopes}
        return {name: x for name, x in named.items() if x is not None}


def op_arguments(problem: Problem) -> dict:
    """Everything of torch.ops.flash_attn.fwd but the tensors that may be guarded copies."""
    c = problem.case
    optional = (
        "cu_seqlens_q cu_seqlens_k seqused_q seqused_k leftpad_k block_table attn_bias alibi_slopes"
    )
    masks = "mask_tiles mask_rows mask_labels"
    return dict.fromkeys(f"{optional} learnable_sink {masks}".split()) | dict(
        rng_state=problem.rng_state,
        max_seqlen_q=problem.max_q,
        max_seqlen_k=problem.max_k,
        dropout_p=c.dropout_p,
        softmax_scale=c.softmax_scale,
        causal=c.causal,
        window_left=c.window[0],
        window_right=c.window[1],
        top_left=c.top_left,
        softcap=c.softcap,
        deterministic=c.deterministic,
        return_probs=False,
    )


DIFFERENTIABLE = {"q": "dq", "k": "dk", "v": "dv", "attn_bias": "dbias", "learnable_sink": "dsink"}


def later_gradients(case: Case, arguments: dict, out, lse, dout, dlse) -> dict[str, torch.Tensor]:
    """The gradients of a backend that has a backward, given another one's forward."""
    of_forward = ("return_probs", "return_max_logits", "backend")
    given = {name: x for name, x in arguments.items() if name not in of_forward}
    dq, dk, dv, _, dsink = torch.ops.flash_attn.bwd(
        dout=dout,
        dlse=dlse,
        out=out,
        softmax_lse=lse,
        grad_mask=[True, True, True, False, case.sink],
        backend=SM80.backend,
        **{n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in given.items()},
    )
    return {"dq": dq, "dk": dk, "dv": dv} | ({"dsink": dsink} if case.sink else {})


def run(
    problem: Problem,
    backend: str,
    backward: bool = True,
    pattern: str = "nan",
    row_padding: int = 0,
    views: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType({}),
    **overrides: object,
) -> dict[str, torch.Tensor]:
    """out, lse, probs, the gradients of one poisoned, guarded call, and max_logits if it asks for
    them. views: what some tensors become views by."""
    given = problem.float_tensors() | problem.index_tensors()
    if problem.dlse is not None:
        given["dlse"] = problem.dlse
    padded = ("q", "k", "v", "dout")
    guards = {
        name: Guarded(x, pattern, row_padding if name in padded else 0)
        for name, x in (given | {"dout": problem.dout}).items()
    }
    tensors = {name: guard.tensor for name, guard in guards.items()}
    tensors |= {name: view(tensors[name]) for name, view in views.items()}
    dout, dlse = tensors.pop("dout"), tensors.pop("dlse", None)
    needed = [n for n in DIFFERENTIABLE if n in tensors and tensors[n].is_floating_point()]
    if backward:
        tensors |= {name: tensors[name].detach().requires_grad_() for name in needed}

    with dirty_allocator(problem.device, pattern):
        arguments = op_arguments(problem) | tensors | {"backend": backend} | overrides
        deterministic = arguments["deterministic"] or torch.are_deterministic_algorithms_enabled()
        case = problem.case.with_(deterministic=deterministic)
        one_backend = case.gradients_served_by(backend)
        with torch.set_grad_enabled(one_backend):
            out, lse, probs, max_logits = torch.ops.flash_attn.fwd(**arguments)
        results = {"out": out.detach(), "lse": lse.detach(), "probs": probs.detach()}
        if arguments.get("return_max_logits"):
            results["max_logits"] = max_logits
        if backward and not one_backend:
            results |= later_gradients(problem.case, arguments, out, lse, dout, dlse)
        elif backward:
            outputs, incoming = ([out, lse], [dout, dlse]) if dlse is not None else ([out], [dout])
            gradients = torch.autograd.grad(outputs, [tensors[n] for n in needed], incoming)
            results |= {DIFFERENTIABLE[n]: g for n, g in zip(needed, gradients, strict=True)}
    for name, guard in guards.items():
        guard.assert_untouched(name)
    return results


@dataclass
class Expected:
    values: dict[str, torch.Tensor]
    conditions: dict[str, torch.Tensor]
    probs: torch.Tensor  # (batch, heads_q, max_q, max_k), negative where dropped
    largest_score: float


def expect(problem: Problem, backward: bool = True, device: str = "cpu") -> Expected:
    """The float64 reference, computed on the device, as long rows want a GPU. What it gives lies on
    the CPU."""
    c = problem.case
    tensors = problem.float_tensors() | problem.index_tensors()
    given = {n: x.detach().to(device) for n, x in tensors.items()}
    options = given | dict(
        max_seqlen_q=problem.max_q,
        max_seqlen_k=problem.max_k,
        dropout_p=c.dropout_p,
        rng_state=problem.rng,
        softmax_scale=c.softmax_scale,
        causal=c.causal,
        window_size=c.window,
        causal_alignment="top-left" if c.top_left else "bottom-right",
        softcap=c.softcap,
    )
    dout = problem.dout.to(device)
    dlse = None if problem.dlse is None else problem.dlse.to(device)
    out, lse, probs = attention_ref(**options)
    values = {"out": out, "lse": lse}
    if backward:
        values |= vars(attention_ref_grads(dout, dlse=dlse, **options))
    conditions = vars(condition_tensors(dout, dlse=dlse, **options))
    largest_score = conditions.pop("largest_score")
    values, conditions = (
        {n: x if x is None else x.cpu() for n, x in found.items()} for found in (values, conditions)
    )
    return Expected(values, conditions, probs.cpu(), largest_score)


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return max(a, b, key=UNIT_ROUNDOFF.__getitem__)


def compare(
    problem: Problem,
    results: dict[str, torch.Tensor],
    expected: Expected,
    few_rows: bool = True,
) -> None:
    c = problem.case
    spread = c.spread if c.is_plain else None
    largest = expected.largest_score
    assert_lse_close(results["lse"], expected.values["lse"], largest)
    for name in ("out", *GRADIENTS):
        if name in results:
            dtype = coarser(DTYPES[c.dtype], results[name].dtype)
            assert_close(
                name,
                results[name],
                expected.values[name],
                expected.conditions[name],
                dtype,
                spread,
                largest,
                underflow_of(name, expected.conditions, dtype),
                few_rows,
            )


def check(case: Case, target: Target, seed: int, backward: bool = True, **options: object) -> None:
    """The call agrees with float64 by the standard."""
    problem = Problem(case, seed, target.device)
    compare(problem, run(problem, target.backend, backward, **options), expect(problem, backward))


def fwd_bwd(function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]
