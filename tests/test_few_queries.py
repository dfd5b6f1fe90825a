"""Forwards of few queries beside many keys, as in generation, which run on decode's kernels."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from cases import ATEN_CPU, DECODE_CUDA, SM90, Target, each_target

import flash_attn

KEYS = 700
# Decode is chosen where no backend is named.
DEVICES = (ATEN_CPU, DECODE_CUDA)


@dataclass
class Ragged:
    """Varlen sequences between rows that belong to none, all of which are NaN."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    d: int = 64
    d_v: int = 64
    dtype: torch.dtype = torch.float16
    heads: tuple[int, int] = (4, 2)
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    leftpad: tuple[int, ...] | None = None
    page_size: int = 0
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        def rows(lengths, heads, d):
            x = torch.full((sum(lengths) + 5, heads, d), math.nan, dtype=self.dtype)
            x[2 : 2 + sum(lengths)].normal_()
            return x

        self.q = rows(self.lengths_q, self.heads[0], self.d)
        self.k = rows(self.lengths_k, self.heads[1], self.d)
        self.v = rows(self.lengths_k, self.heads[1], self.d_v)

    def starts(self, lengths) -> list[int]:
        return torch.tensor([2, *lengths]).cumsum(0).tolist()

    def pages(self, x: torch.Tensor) -> torch.Tensor:
        """Each sequence's keys in pages of its own; what they have no keys for is NaN."""
        most = -(-max(self.lengths_k) // self.page_size)
        pool = torch.full((len(self.lengths_k) * most, self.page_size, *x.shape[1:]), math.nan)
        pool = pool.to(x.dtype)
        starts = self.starts(self.lengths_k)
        for b, length in enumerate(self.lengths_k):
            own = pool[b * most : (b + 1) * most].flatten(0, 1)
            own[:length] = x[starts[b] : starts[b + 1]]
        return pool

    def arguments(self, device: str):
        def ints(x):
            return None if x is None else torch.tensor(x, dtype=torch.int32, device=device)

        options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in self.options.items()}
        k, v = self.k, self.v
        if self.page_size:
            k, v = self.pages(k), self.pages(v)
            table = torch.arange(len(k), dtype=torch.int32, device=device)
            options["block_table"] = table.view(len(self.lengths_k), -1)
        return [x.to(device) for x in (self.q, k, v)], options | dict(
            cu_seqlens_q=ints(self.starts(self.lengths_q)),
            cu_seqlens_k=ints(self.starts(self.lengths_k)),
            max_seqlen_q=max(self.lengths_q),
            max_seqlen_k=max(self.lengths_k),
            seqused_q=ints(self.used_q),
            seqused_k=ints(self.used_k),
            leftpad_k=ints(self.leftpad),
        )

    def call(self, device: str):
        tensors, options = self.arguments(device)
        out, lse, _ = flash_attn.flash_attn_varlen_func(*tensors, **options, return_attn_probs=True)
        return out.cpu().double(), lse.cpu().double()

    def served_by(self, device: str) -> str:
        tensors, options = self.arguments(device)
        return flash_attn.can_use(*tensors, **options).backend

    def expected(self):
        """By the CPU in float64, sequence by sequence; rows that do not count are 0, lse -inf."""
        out = torch.zeros(len(self.q), self.heads[0], self.d_v, dtype=torch.float64)
        lse = torch.full((self.heads[0], len(self.q)), -math.inf, dtype=torch.float64)
        for b in range(len(self.lengths_q)):
            queries = self.lengths_q[b] if self.used_q is None else self.used_q[b]
            keys = self.lengths_k[b] if self.used_k is None else self.used_k[b]
            skipped = 0 if self.leftpad is None else self.leftpad[b]
            first_q, first_k = self.starts(self.lengths_q)[b], self.starts(self.lengths_k)[b]
            if queries == 0:
                continue
            options = dict(self.options)
            if (slopes := options.get("alibi_slopes")) is not None and slopes.dim() > 1:
                options["alibi_slopes"] = slopes[b]
            q = self.q[first_q : first_q + queries].double()[None]
            k, v = (x[first_k + skipped : first_k + keys].double()[None] for x in (self.k, self.v))
            o, s, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
            out[first_q : first_q + queries], lse[:, first_q : first_q + queries] = o[0], s[0]
        return out, lse


SLOPES = torch.tensor([0.1, 0.02, 0.3, 0.0])
LENGTHS = {"lengths_q": (1, 0, 3, 1, 5), "lengths_k": (KEYS, 33, 5, 0, 300)}
RAGGED: dict[str, Ragged] = {
    name: Ragged(**(LENGTHS | changes))
    for name, changes in {
        "plain": {},
        "one query each": {"lengths_q": (1, 1, 1), "lengths_k": (KEYS, 1, 530)},
        "causal": {"options": {"causal": True}},
        "window": {"options": {"window_size": (100, 3)}},
        "used": {"used_q": (1, 0, 2, 0, 5), "used_k": (600, 0, 5, 0, 299)},
        "leftpad": {"leftpad": (100, 3, 0, 0, 7), "options": {"causal": True}},
        "sink": {"options": {"causal": True, "learnable_sink": torch.linspace(-1, 2, 4)}},
        "softcap": {"options": {"causal": True, "softcap": 4.0}},
        "alibi": {"options": {"causal": True, "alibi_slopes": SLOPES}},
        "narrow v": {"d": 192, "d_v": 128, "dtype": torch.bfloat16},
        "wide": {"d": 256, "d_v": 256, "heads": (8, 1)},
        "wider": {"d": 512, "d_v": 512},
        "fp32": {"dtype": torch.float32, "options": {"causal": True}},
        "odd d": {"d": 36, "d_v": 36},
    }.items()
}

# Some sequences have many queries, and decode has no room for these.
MIXED_LENGTHS = {
    "lengths_q": (1, 90, 3, 0, 1, 2, 1, 1),
    "lengths_k": (KEYS, 600, 33, 5, 300, 40, 0, 530),
}
MIXED: dict[str, Ragged] = {
    name: Ragged(**(MIXED_LENGTHS | changes))
    for name, changes in {
        "plain": {},
        "causal": {"options": {"causal": True}},
        "window": {"options": {"window_size": (100, 3)}},
        "used": {
            "used_q": (1, 80, 2, 0, 1, 0, 1, 1),
            "used_k": (600, 500, 5, 0, 299, 40, 0, 530),
            "options": {"causal": True},
        },
        "leftpad": {"leftpad": (100, 30, 0, 0, 7, 0, 0, 1), "options": {"causal": True}},
        # More tiles of the long ones than a GPU has multiprocessors.
        "many tiles": {
            "lengths_q": (1, 600, 1, 1, 600, 2, 1, 1, 1, 1),
            "lengths_k": (2000, 700, 9, 1100, 900, 40, 300, 5, 0, 33),
            "used_q": (1, 590, 1, 1, 600, 2, 0, 1, 1, 1),
            "heads": (16, 4),
            "d": 128,
            "d_v": 128,
            "dtype": torch.bfloat16,
            "options": {"causal": True},
        },
        # Of a class of head dims that kernels with cut keys lack, and few sequences beside rows.
        "d = 80": {
            "lengths_q": (1, 300, 1, 2, 1, 0, 1, 1),
            "lengths_k": (KEYS, 1300, 33, 5, 300, 40, 0, 530),
            "d": 80,
            "d_v": 80,
            "options": {"causal": True},
        },
        "sink": {"options": {"causal": True, "learnable_sink": torch.linspace(-1, 2, 4)}},
        "softcap": {"options": {"causal": True, "softcap": 4.0}},
        "alibi": {"options": {"causal": True, "alibi_slopes": SLOPES}},
        "alibi of sequences": {
            "options": {"causal": True, "alibi_slopes": SLOPES * torch.arange(8)[:, None]}
        },
        "narrow v": {"d": 192, "d_v": 128, "dtype": torch.bfloat16},
        "wide": {"d": 256, "d_v": 256, "heads": (8, 1)},
        "wider": {"d": 512, "d_v": 512},
        "fp32": {"dtype": torch.float32, "options": {"causal": True}},
        "odd d": {"d": 36, "d_v": 36},
    }.items()
}

LONG = 3000
# Few tiles of queries beside long keys, which sm90's kernels cut into pieces.
CUT = {
    name: Ragged(**({"lengths_q": (40, 0, 130, 20), "lengths_k": (LONG, 5, 700, 0)} | changes))
    for name, changes in {
        "plain": {},
        "causal": {"options": {"causal": True}},
        "window": {"options": {"causal": True, "window_size": (1500, 0)}},
        "used": {
            "used_q": (33, 0, 128, 20),
            "used_k": (LONG - 7, 0, 600, 0),
            "options": {"causal": True},
        },
        "leftpad": {"leftpad": (100, 0, 30, 0), "options": {"causal": True}},
        "d = 128": {"d": 128, "d_v": 128, "dtype": torch.bfloat16, "options": {"causal": True}},
        "wide": {"d": 256, "d_v": 256, "heads": (4, 1), "options": {"causal": True}},
        "odd d": {"d": 36, "d_v": 36},
        "beside short ones": {
            "lengths_q": (1, 1, 1, 1, 130, 1, 2, 0),
            "lengths_k": (LONG, 40, 1, 0, LONG, 900, 33, 5),
            "options": {"causal": True},
        },
    }.items()
}


def assert_close(actual, expected, dtype: torch.dtype) -> None:
    error = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}[dtype]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=error, atol=error)


@each_target(*DEVICES)
@pytest.mark.parametrize("page_size", [0, 12, 16])
@pytest.mark.parametrize("name", RAGGED)
def test_varlen(name: str, page_size: int, target: Target) -> None:
    """Queries and keys in float64, whatever lies between the sequences."""
    problem = dataclasses.replace(RAGGED[name], page_size=page_size)
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)
    if target.backend == "cuda":
        served = problem.served_by(target.device)
        assert served == "cuda" or name == "odd d", served


@each_target(*DEVICES)
@pytest.mark.parametrize("page_size", [0, 12, 16])
@pytest.mark.parametrize("kind, name", [("mixed", n) for n in MIXED] + [("cut", n) for n in CUT])
def test_where_the_forward_takes_part(kind: str, name: str, page_size: int, target: Target) -> None:
    """Short sequences beside a long one, which decode and the forward share out; cut keys."""
    problem = dataclasses.replace((MIXED if kind == "mixed" else CUT)[name], page_size=page_size)
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_decode_takes_the_short_ones(page_size: int, target: Target) -> None:
    """Both kernels run; a named backend has the whole call, and so has the forward where sequences
    attend to themselves."""

    def kernels(problem: Ragged) -> str:
        tensors, options = problem.arguments(target.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flash_attn.flash_attn_varlen_func(*tensors, **options)
            torch.cuda.synchronize()
        return " ".join(event.key for event in profile.key_averages())

    problem = dataclasses.replace(MIXED["causal"], page_size=page_size)
    ran = kernels(problem)
    assert "gather_queries" in ran and "decode" in ran and "fwd" in ran, ran
    with flash_attn.use_backend("sm80"):
        assert "decode" not in kernels(problem)
    alike = (1,) * 7 + (600,)
    assert "decode" not in kernels(Ragged(lengths_q=alike, lengths_k=alike))


@each_target(DECODE_CUDA)
def test_says_who_takes_the_short_ones(target: Target) -> None:
    tensors, options = MIXED["causal"].arguments(target.device)
    plan = flash_attn.can_use(*tensors, **options).plan
    assert plan.startswith("fwd") and "(queries: up to 2) by cuda: decode" in plan, plan
    tensors, options = RAGGED["causal"].arguments(target.device)
    assert "up to" not in flash_attn.can_use(*tensors, **options).plan


@each_target(DECODE_CUDA)
def test_missing_pages_of_mixed_sequences(target: Target) -> None:
    """Short and long ones lack pages, or keys at the end."""
    problem = dataclasses.replace(MIXED["causal"], page_size=16)
    tensors, options = problem.arguments(target.device)
    table = options["block_table"]
    lacking = table.clone()
    lacking[0, 3], lacking[1, 30], lacking[4, 0] = -1, 2**31 - 1, len(table.flatten())
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *tensors, **(options | {"block_table": lacking}), return_attn_probs=True
    )
    q, k, v = (x.cpu() for x in tensors)
    cpu = {n: x.cpu() if torch.is_tensor(x) else x for n, x in options.items()}
    expected = flash_attn.flash_attn_varlen_func(
        q, k, v, **(cpu | {"block_table": lacking.cpu()}), return_attn_probs=True
    )
    assert_close((out.cpu(), lse.cpu()), expected[:2], problem.dtype)


@each_target(SM90)
@pytest.mark.real_gpu
def test_what_has_its_keys_cut(target: Target) -> None:
    """Few tiles, beside long keys; no term that the merge does not know."""

    def plan(problem: Ragged) -> str:
        tensors, options = problem.arguments(target.device)
        return flash_attn.can_use(*tensors, **options).plan

    assert "pieces" in plan(CUT["causal"]) and "pieces" in plan(CUT["beside short ones"])
    sink = {"learnable_sink": torch.zeros(4)}
    assert "pieces" not in plan(dataclasses.replace(CUT["causal"], options=sink))
    assert "pieces" not in plan(dataclasses.replace(CUT["causal"], options={"softcap": 4.0}))
    assert "pieces" not in plan(Ragged(lengths_q=(9000, 1), lengths_k=(LONG, LONG)))


@each_target(*DEVICES)
@pytest.mark.parametrize("queries", [1, 7, 40])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_dense(d: int, queries: int, target: Target) -> None:
    """Out, lse and gradients in float64."""
    batch = 3
    inputs = [
        torch.randn(batch, n, h, d, dtype=torch.float64).to(torch.float16)
        for n, h in ((queries, 4), (KEYS, 2), (KEYS, 2))
    ]
    dout = torch.randn(batch, queries, 4, d, dtype=torch.float64).to(torch.float16)

    def run(device: str, dtype: torch.dtype):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in inputs)
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        gradients = torch.autograd.grad(out, (q, k, v), dout.to(device, dtype))
        return [x.detach().cpu().double() for x in (out, lse, *gradients)]

    assert_close(run(target.device, torch.float16), run("cpu", torch.float64), torch.float16)


@each_target(*DEVICES)
@pytest.mark.parametrize("queries", [1, 16, 40])
@pytest.mark.parametrize("shape", ["b11k", "1hqk", "bhqk", "k"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_bias(kind: str, shape: str, queries: int, target: Target) -> None:
    """A bias or a mask, broadcast in several ways, with its gradient."""
    batch = 2
    sizes = {"b": batch, "h": 4, "q": queries, "k": KEYS, "1": 1}
    q, k, v = (torch.randn(batch, n, h, 64).half() for n, h in ((queries, 4), (KEYS, 2), (KEYS, 2)))
    bias = torch.randn([sizes[x] for x in shape]).half()
    if kind == "bool":
        bias = bias > -0.5

    def run(device: str, dtype: torch.dtype):
        given = bias.to(device) if kind == "bool" else bias.to(device, dtype).requires_grad_()
        x = [y.to(device, dtype) for y in (q, k, v)]
        out, lse, _ = flash_attn.flash_attn_func(
            *x, causal=True, attn_bias=given, return_attn_probs=True
        )
        gradients = () if kind == "bool" else torch.autograd.grad(out.sum(), given)
        return [y.detach().cpu().double() for y in (out, lse, *gradients)]

    actual, expected = run(target.device, torch.float16), run("cpu", torch.float64)
    assert_close(actual[:2], expected[:2], torch.float16)
    for a, e in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2 * e.abs().max().item())


def tensors(device: str, batch: int, queries: int, heads: tuple[int, int] = (4, 2)):
    make = {"device": device, "dtype": torch.float16}
    q = torch.randn(batch, queries, heads[0], 64, **make)
    k, v = torch.randn(2, batch, KEYS, heads[1], 64, **make)
    return q, k, v


@each_target(DECODE_CUDA)
@pytest.mark.parametrize("queries", [1, 16])
def test_has_the_bits_of_decode(queries: int, target: Target) -> None:
    """Dense, and varlen with as many queries of each sequence: the same kernels, cut alike."""
    q, k, v = tensors(target.device, 2, queries)
    expected = flash_attn.flash_decode_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True), expected)
    assert flash_attn.can_use(q, k, v, causal=True).backend == "cuda"
    starts = torch.arange(3, dtype=torch.int32, device=target.device)
    actual = flash_attn.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)),
        starts * queries,
        starts * KEYS,
        queries,
        KEYS,
        causal=True,
    )
    assert torch.equal(actual.view_as(expected), expected)


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.sanitize
def test_wrong_lengths(target: Target) -> None:
    """More queries than max_seqlen_q says: the last ones are right, those before are NaN. Starts
    that lie anywhere leave memory alone, also where decode takes some of the sequences."""
    q, k, v = (x.flatten(0, 1) for x in tensors(target.device, 2, 8))
    make = {"dtype": torch.int32, "device": target.device}
    starts_q = torch.tensor([0, 3, 16], **make)
    starts_k = torch.tensor([0, KEYS, 2 * KEYS], **make)
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 4, KEYS, causal=True)
    whole = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 13, KEYS, causal=True)
    torch.testing.assert_close(out[:3], whole[:3], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(out[12:], whole[12:], rtol=2e-3, atol=2e-3)
    assert out[3:12].isnan().all()
    for anywhere in ([0, 2**31 - 1, -5], [9, 3, 1], [-(2**31), 16, 2**30]):
        wrong = torch.tensor(anywhere, **make)
        for starts in ((wrong, starts_k), (starts_q, wrong), (wrong, wrong)):
            for most in (8, 300):
                flash_attn.flash_attn_varlen_func(q, k, v, *starts, most, KEYS)
    again = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 13, KEYS, causal=True)
    assert torch.equal(again, whole)


@each_target(DECODE_CUDA)
def test_what_decode_does_not_know(target: Target) -> None:
    """Dropout, a diagonal from the top left and a backend that was named go elsewhere."""
    q, k, v = tensors(target.device, 2, 1)
    expected = flash_attn.flash_decode_func(q, k, v)
    out = flash_attn.flash_attn_func(q, k, v, causal=True, causal_alignment="top-left")
    first = v[:, :1].repeat_interleave(2, 2)  # the only key that is seen
    torch.testing.assert_close(out, first, rtol=2e-3, atol=2e-3)
    dropped = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    assert (dropped - expected).norm() > 0.1 * expected.norm()
    for name in ("sm80", "cuda"):
        with flash_attn.use_backend(name):
            assert flash_attn.can_use(q, k, v, softcap=9.0).backend == name
            out = flash_attn.flash_attn_func(q, k, v)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@each_target(DECODE_CUDA)
def test_one_query_of_sdpa(target: Target) -> None:
    """Its diagonal is from the top left, and one query has none; its masks are of the keys."""
    q, k, v = tensors(target.device, 3, 1)
    seen = torch.arange(KEYS, device=target.device) < torch.tensor([[KEYS], [40], [1]]).to(q.device)
    for mask in (None, seen[:, None, None]):
        out = flash_attn.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), mask, enable_gqa=True
        )
        expected = flash_attn.flash_decode_func(q, k, v, attn_bias=mask)
        assert torch.equal(out.transpose(1, 2), expected)


@each_target(DECODE_CUDA)
def test_many_rows_that_do_not_count(target: Target) -> None:
    """Sequences that use one of many queries, and rows behind all of them, as graphs pad them."""
    q, k, v = (x.flatten(0, 1) for x in tensors(target.device, 2, 300))
    make = {"dtype": torch.int32, "device": target.device}
    starts_q, starts_k = torch.tensor([0, 1, 2], **make), torch.tensor([0, KEYS, 2 * KEYS], **make)
    bounds = (starts_q, starts_k, 1, KEYS)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *bounds, return_attn_probs=True)
    alone = flash_attn.flash_attn_varlen_func(q[:2], k, v, *bounds, return_attn_probs=True)
    assert torch.equal(out[:2], alone[0]) and torch.equal(lse[:, :2], alone[1])
    assert not out[2:].any() and (lse[:, 2:] == -math.inf).all()


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
@pytest.mark.parametrize(
    "captured, replayed",
    [((1, 1, 1), (1, 0, 1)), ((1, 90, 1, 2), (2, 1, 60, 30)), ((90, 2, 1, 1), (1, 2, 1, 1))],
    ids=["short", "another is long", "none is long"],
)
def test_a_graph_reads_the_lengths_of_its_replay(
    captured: tuple[int, ...], replayed: tuple[int, ...], target: Target
) -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors(target.device, len(captured), max(captured)))
    q = q[: sum(captured)]
    starts_q, starts_k = (
        torch.tensor([0, *x], device=target.device).cumsum(0, dtype=torch.int32)
        for x in (captured, [KEYS] * len(captured))
    )

    def attend():
        return flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, max(captured), KEYS)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    starts_q[1:].copy_(torch.tensor(replayed).cumsum(0))
    starts_k[1:3].copy_(torch.tensor([80, 900]))
    graph.replay()
    assert torch.equal(out, attend())
    used = sum(replayed)
    assert out[:used].any(-1).all() and not out[used:].any()


@each_target(DECODE_CUDA)
@pytest.mark.real_gpu
def test_threads_beside_a_capture(target: Target) -> None:
    """The two kernels of a call run on two streams. While one thread captures a graph, calls of
    others get none of its streams."""
    tensors, options = MIXED["many tiles"].arguments(target.device)

    def attend() -> torch.Tensor:
        return flash_attn.flash_attn_varlen_func(*tensors, **options)

    def of_a_thread(_: int) -> torch.Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            out = attend()
        stream.synchronize()
        return out

    expected = attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(4) as pool:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = [attend(), attend()]
            others = list(pool.map(of_a_thread, range(8)))
        for out in captured:
            out.fill_(math.nan)
        graph.replay()
        others += pool.map(of_a_thread, range(8))
    torch.cuda.synchronize()
    for out in captured + others:
        assert torch.equal(out, expected)


@each_target(DECODE_CUDA)
@pytest.mark.sanitize
@pytest.mark.parametrize("problem", [RAGGED["used"], RAGGED["leftpad"], MIXED["used"], CUT["used"]])
def test_under_a_sanitizer(problem: Ragged, target: Target) -> None:
    assert_close(problem.call(target.device), problem.expected(), problem.dtype)
