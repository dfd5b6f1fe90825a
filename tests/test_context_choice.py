"""Which scheme a call of context_parallel takes by default: the rule, beside what
benchmarks/scaling.py predicts, and what calls ask it with. Groups are torch's fake ones, of any
size in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import Pool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import flash_attn
from flash_attn._call import draw_rng_state
from flash_attn.context_parallel import calls as calls_of_ranks
from flash_attn.context_parallel import choose_scheme, flash_attn_func, interface
from flash_attn.context_parallel.calls import Options, Queries, run_backward
from flash_attn.context_parallel.dropout import Dropout
from flash_attn.context_parallel.plan import Documents, Mask, calls

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def world(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def chosen(group=None, **changes) -> str:
    shape = dict(seqlen_q=1 << 17, heads_q=32, heads_kv=8, causal=True)
    return choose_scheme(group, **(shape | changes))


UNEVEN = dict(heads_q=12, heads_kv=3)  # over four ranks


def test_in_one_host() -> None:
    with world(2):
        assert chosen(seqlen_q=24_000) == "ulysses"
        assert chosen(seqlen_q=24_400) == "ring"
        assert chosen(seqlen_q=24_400, rounds_parts=True) == "ulysses"
    with world(4):  # whose results are added in fp32, too
        assert chosen(seqlen_q=96_000) == "ulysses"
        assert chosen(seqlen_q=97_600) == "ring"
        assert chosen(seqlen_q=97_600, rounds_parts=True) == "ulysses"
        assert chosen(heads_kv=2, seqlen_q=512) == "ulysses"
        assert chosen(**UNEVEN, seqlen_q=512) == "all-gather"
        assert chosen(**UNEVEN) == "ring"
        assert chosen(window_size=(1024, 0), seqlen_q=512) == "ring"
        assert chosen(heads_kv=2, alibi=True) == "ulysses"
        assert chosen(heads_q=2, heads_kv=2, alibi=True) == "all-gather"


def test_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(4):
        long = dict(heads_kv=32, seqlen_q=98_000)
        assert chosen(**long) == "ring"
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert chosen(**long) == "ulysses"  # bringing so many key heads takes longer
        assert chosen() == "ring"
        assert chosen(**UNEVEN, seqlen_q=1 << 14) == "ring"
        assert chosen(**UNEVEN, seqlen_q=1 << 11) == "all-gather"
        # What both passes bring takes longer than one launch, but each of them has one.
        assert chosen(**UNEVEN, seqlen_q=6 << 10) == "all-gather"


def test_two_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with world(16):
        mesh = (dist.new_group([0, 8]), dist.new_group(list(range(8))))
        assert chosen(mesh) == "ring"
        assert chosen(mesh, alibi=True) == "all-gather"
        assert chosen(mesh, window_size=(1024, 0), seqlen_q=1 << 12) == "ring"
        # A rank has one of the key heads; with all of them it would be the ring.
        assert chosen(mesh, seqlen_q=1 << 12) == "all-gather"
        assert chosen(mesh, seqlen_q=1 << 12, heads_q=256, heads_kv=64) == "ring"


def test_the_default_is_nearly_the_fastest_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 5 % of the best scheme over one dimension, in all that the simulation tells."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import scaling

    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(scaling.RANKS_OF_HOST))
    shape = dict(heads_q=scaling.HEADS_Q, heads_kv=scaling.HEADS_KV, head_dim=scaling.D)
    tables = {"scaling.two", "scaling.many"}
    records = [r for r in (*scaling.two_gpus(), *scaling.many_gpus()) if r["kind"] in tables]
    assert len(records) == 3 + 3 * 8
    slow = []
    for record in records:
        tokens, ranks = record["shape"]["tokens"], record["shape"]["ranks"]
        times = {
            name: value if record["unit"] == "ms" else 1 / value
            for name, value in record["values"].items()
            if name != "ring x ulysses"
        }
        with world(ranks):
            name = chosen(seqlen_q=tokens, **shape)
        longer = times[name] / min(times.values())
        if longer > 1.05:
            slow.append(f"{tokens} tokens, {ranks} ranks: {name} takes {longer:.2f} of the best")
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize("heads_q, heads_kv", [(32, 8), (8, 8), (12, 3), (96, 96)])
def test_short_steps_take_nearly_the_fastest_predicted(
    heads_q: int, heads_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of more ranks than deal heads evenly has 32 to 16k tokens. Where the ring is taken,
    all-gather may be 10 % faster, as it holds more."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import scaling

    ranks = 64
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(scaling.RANKS_OF_HOST))
    monkeypatch.setattr(scaling, "HEADS_Q", heads_q)
    monkeypatch.setattr(scaling, "HEADS_KV", heads_kv)
    taken = {}
    for tokens in (1 << n for n in range(11, 21)):
        times = {
            "ring": scaling.ring(tokens, ranks, True).both,
            "all-gather": scaling.all_gather(tokens, ranks, True).both,
        }
        with world(ranks):
            name = chosen(seqlen_q=tokens, heads_q=heads_q, heads_kv=heads_kv)
        taken[tokens] = name
        allowed = 1.05 if name == "all-gather" else 1.1
        assert times[name] <= allowed * min(times.values()), (tokens, name, times)
    assert set(taken.values()) == {"ring", "all-gather"}


def check_asked(device: str) -> None:
    asked, dtypes = [], []

    def choose(_group, **shape: object) -> str:
        asked.append(shape)
        return "all-gather"

    def rounds(call, q: torch.Tensor, v: torch.Tensor) -> bool:
        dtypes.append(q.dtype)
        return call.softcap > 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "choose_scheme", choose)
        patch.setattr(interface, "_rounds_parts", rounds)
        for softcap in (0.0, 3.0):
            q, k = (torch.randn(1, 8, heads, 16, device=device) for heads in (4, 2))
            with torch.autocast(device, torch.bfloat16, enabled=softcap > 0):
                flash_attn_func(q, k, k, causal=True, softcap=softcap)
    wholes = [shape["seqlen_q"] for shape in asked]
    assert wholes == [8 * dist.get_world_size()] * 2
    assert [shape["rounds_parts"] for shape in asked] == [False, True]
    assert dtypes == [torch.float32, torch.bfloat16]
    assert all(shape["heads_kv"] == 2 and shape["causal"] for shape in asked)


def test_calls_ask_for_a_scheme(pool: Pool) -> None:
    """The calls ask for a scheme with what decides it."""
    pool.run(check_asked, pool.device)


def whole_call(softcap=0.0, dropout_p=0.0, deterministic=False) -> SimpleNamespace:
    return SimpleNamespace(softcap=softcap, dropout_p=dropout_p, deterministic=deterministic)


HOPPER = (9, 0)


@pytest.mark.parametrize(
    "capability, backend, change, rounds",
    [
        (HOPPER, None, {}, False),
        (HOPPER, "sm90", {}, False),
        (HOPPER, "sm80", {}, True),
        (HOPPER, "aten", {}, True),
        (HOPPER, None, dict(softcap=3.0), True),
        (HOPPER, None, dict(dropout_p=0.1), True),
        (HOPPER, None, dict(deterministic=True), True),
        (HOPPER, None, dict(d=136), True),
        (HOPPER, None, dict(d_v=136), True),
        (HOPPER, None, dict(dtype=torch.float32, deterministic=True), False),
        ((8, 0), None, {}, True),
        ((10, 0), None, {}, True),
        ((8, 0), None, dict(dtype=torch.float32), False),
    ],
    ids=str,
)
def test_who_rounds_parts(
    capability: tuple[int, int],
    backend: str | None,
    change: dict,
    rounds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On each architecture, whichever there is here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    change = dict(change)
    d, d_v, dtype = (
        change.pop(name, default)
        for name, default in (("d", 128), ("d_v", 128), ("dtype", torch.bfloat16))
    )
    with FakeTensorMode():
        q, v = (torch.empty(1, 8, 2, n, dtype=dtype, device="cuda") for n in (d, d_v))
    with forced(backend):
        assert interface._rounds_parts(whole_call(**change), q, v) is rounds


def forced(backend: str | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if backend is None else flash_attn.use_backend(backend)


class Parts:
    """Takes what is added to a gradient."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def add(self, place: slice, part: torch.Tensor) -> None:
        self.parts.append(part)


class PartsOfQueries(Parts):
    """Of dq, where other calls contribute to the same rows and no kernel adds them up."""

    has_parts = True

    def add_keys(self, first_row: int, arguments: tuple) -> None:
        return None


@pytest.mark.parametrize(
    "backend, change",
    [
        (None, {}),
        ("sm80", {}),
        ("aten", {}),
        (None, dict(softcap=3.0)),
        (None, dict(dropout_p=0.1)),
        (None, dict(deterministic=True)),
        (None, dict(d=192)),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_said_of_parts_is_true(device: str, backend: str | None, change: dict) -> None:
    """That they are rounded, or not: parts of dk and dv as ranks add them up."""
    if device == "cpu" and backend == "sm80":
        pytest.skip("serves no CPU")
    change = dict(change)
    shape = (1, 64, 2, change.pop("d", 64))
    call = whole_call(**change)
    q, k, v, dout = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.2, return_attn_probs=True)
    dropout = Dropout(call.dropout_p, draw_rng_state(q), 2, 0) if call.dropout_p else None
    options = Options(0.2, call.softcap, None, call.deterministic, False, dropout)
    mask = Mask(dropout=dropout is not None)
    (planned,) = calls(mask, Documents((0, 64), (0, 64)), ((0, 64),), ((0, 64),))
    sums = (PartsOfQueries(), Parts(), Parts())
    with forced(backend):
        said = interface._rounds_parts(call, q, v)
        run_backward(planned, Queries(q, out, dout, lse, None), k, v, options, sums)
    of_query, *of_keys = (grad.parts for grad in sums)
    for (part,) in (of_query, *of_keys):
        assert part.dtype == torch.float32
    # Kernels whose dk and dv are rounded first may have sums of dq.
    if device == "cuda" and backend != "aten" and not call.deterministic:
        assert not torch.equal(of_query[0], of_query[0].bfloat16().float())
    for (part,) in of_keys:
        assert torch.equal(part, part.bfloat16().float()) == said


@pytest.mark.parametrize(
    "ranks, layout, change, summed",
    [
        (1, "zigzag", {}, False),
        (1, "zigzag", dict(causal=True, window_size=(40, 0)), False),
        (1, "contiguous", dict(alibi_slopes=torch.tensor([0.1, 0.3])), False),
        (2, "contiguous", dict(causal=True), False),  # of the first rank
        (2, "zigzag", dict(causal=True), True),
        (2, "contiguous", {}, True),
    ],
    ids=str,
)
def test_dq_is_wide_where_it_is_a_sum(
    ranks: int, layout: str, change: dict, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's ring asks for dq in fp32 if a row has keys in several of its calls, and else
    for what an ordinary call gives."""
    asked = []

    def bwd(*tensors: torch.Tensor, **options: object) -> list[torch.Tensor]:
        parts = calls_of_ranks_bwd(*tensors, **options)
        asked.append((options["wide_query_gradient"], parts[0].dtype))
        return parts

    calls_of_ranks_bwd = calls_of_ranks.bwd
    monkeypatch.setattr(calls_of_ranks, "bwd", bwd)
    monkeypatch.setattr(calls_of_ranks, "_widened", lambda x: x)  # as on a GPU
    q, k, v = (torch.randn(1, 64, 2, 32).bfloat16().requires_grad_() for _ in range(3))
    with world(ranks):
        out = flash_attn_func(q, k, v, scheme="ring", layout=layout, **change)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert set(asked) == {(summed, torch.float32 if summed else torch.bfloat16)}
    if ranks == 1:
        out = flash_attn.flash_attn_func(q, k, v, **change)
        for actual, expected in zip(grads, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
            assert torch.equal(actual, expected)
