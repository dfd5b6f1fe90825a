"""One sequence over 2 and 4 ranks against one process with the whole sequence."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from context_cases import Case, Whole
from ranks import INNER_OF_TWO, OUTER_OF_TWO, TWO_DIMENSIONS, Pool, place

from flash_attn import context_parallel
from flash_attn.context_parallel import attention, calls, exchange, heads, ulysses


def check_exact(case: Case, device: str) -> None:
    device, group = place(case.ranks, device)
    if group is None:
        return
    whole = Whole.draw(case, device)
    ranks, expected = whole.on_ranks(group), whole.on_one_process()
    for name, actual, wanted in whole.pairs(ranks, expected, group):
        torch.testing.assert_close(
            actual, wanted, rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


BASE = Case()
FEATURES = [
    BASE,
    BASE.with_(causal=False),
    BASE.with_(layout="contiguous", sink=True),
    BASE.with_(seqlen_q=53, seqlen_k=53),  # does not divide
    BASE.with_(seqlen_q=3, seqlen_k=3, ranks=4),  # ranks with nothing
    BASE.with_(seqlen_q=20, seqlen_k=70),  # cross-attention
    BASE.with_(seqlen_q=70, seqlen_k=21),  # rows without keys
    BASE.with_(seqlen_q=20, seqlen_k=70, causal_alignment="top-left"),
    BASE.with_(seqlen_q=70, seqlen_k=20, causal_alignment="top-left", sink=True),
    BASE.with_(window_size=(7, 0), layout="contiguous"),
    BASE.with_(window_size=(9, 4), causal=False, seqlen_q=51, seqlen_k=64),
    BASE.with_(window_size=(30, 2), causal=False, seqlen_q=64, seqlen_k=40, softcap=3.0),
    BASE.with_(alibi="heads", seqlen_q=50, seqlen_k=50),
    BASE.with_(alibi="sequences", causal=False, seqlen_q=33, seqlen_k=60, d_v=4),
    BASE.with_(alibi="heads", window_size=(12, 6), causal=False, seqlen_q=60, seqlen_k=33),
    BASE.with_(softcap=2.0, sink=True, deterministic=True),
    BASE.with_(heads_q=6, heads_kv=1, causal=False, sink=True),
    BASE.with_(heads_q=2, heads_kv=1),  # fewer heads than ranks
    BASE.with_(heads_q=1, heads_kv=1, sink=True),
    BASE.with_(seqlen_q=0, seqlen_k=0),
    BASE.with_(seqlen_q=6, seqlen_k=0, sink=True),
]
PACKED = ((0, 5, 5, 30, 48), (0, 5, 5, 30, 48))
PACKED_CROSS = ((0, 9, 20, 20, 50), (0, 3, 30, 33, 60))
VARLEN = [
    BASE.with_(documents=PACKED),
    BASE.with_(documents=PACKED, window_size=(6, 0), layout="contiguous", sink=True),
    BASE.with_(documents=PACKED, alibi="sequences"),
    BASE.with_(documents=PACKED, causal=False, heads_kv=4),
    BASE.with_(documents=PACKED_CROSS, seqlen_q=50, seqlen_k=60),
    BASE.with_(documents=PACKED_CROSS, seqlen_q=50, seqlen_k=60, causal_alignment="top-left"),
    BASE.with_(
        documents=PACKED_CROSS, seqlen_q=50, seqlen_k=60, alibi="heads", causal=False, softcap=4.0
    ),
]


@pytest.mark.parametrize("case", [*FEATURES, *VARLEN], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, TWO_DIMENSIONS], ids=["2", "4", "2x2"])
@pytest.mark.parametrize("scheme", ["ring", "all-gather", "ulysses"])
def test_exact(scheme: str, ranks: int, case: Case, pool: Pool) -> None:
    """float64, forward and backward: what one process finds, up to rounding."""
    if ranks == TWO_DIMENSIONS and scheme == "ulysses":
        scheme = None
    pool.need(ranks)
    pool.run(check_exact, case.with_(scheme=scheme, ranks=ranks), pool.device)


LONGER = BASE.with_(batch=1, seqlen_q=130, seqlen_k=130)
DROPOUT = [
    LONGER.with_(seqlen_q=256, seqlen_k=256, batch=2),  # all pieces begin with a block of the mask
    LONGER.with_(seqlen_q=256, seqlen_k=256, layout="contiguous", sink=True, softcap=3.0),
    LONGER.with_(batch=2),  # hardly any does
    LONGER.with_(causal=False, heads_q=2, heads_kv=1, deterministic=True),
    LONGER.with_(seqlen_q=70, causal_alignment="top-left"),
    LONGER.with_(seqlen_k=70),
    LONGER.with_(window_size=(40, 0), layout="contiguous"),
    # Bands that the corner of a block lies outside of.
    LONGER.with_(window_size=(3, 2), causal=False, seqlen_k=115),
    LONGER.with_(window_size=(-1, 5), causal=False, seqlen_q=77),
    LONGER.with_(window_size=(4, -1), causal=False, seqlen_k=75, causal_alignment="top-left"),
    LONGER.with_(alibi="sequences"),
    LONGER.with_(alibi="heads", window_size=(33, 9), causal=False, seqlen_k=101),
    LONGER.with_(documents=((0, 5, 5, 70, 130), (0, 5, 5, 70, 130))),
    LONGER.with_(documents=((0, 37, 60, 130), (0, 50, 51, 130)), alibi="sequences", sink=True),
]


@pytest.mark.parametrize("case", DROPOUT, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, TWO_DIMENSIONS], ids=["2", "4", "2x2"])
@pytest.mark.parametrize("scheme", ["ring", "all-gather", "ulysses"])
def test_dropout_is_that_of_one_process(scheme: str, ranks: int, case: Case, pool: Pool) -> None:
    """The mask is the one that the first rank's generator gives one process."""
    if ranks == TWO_DIMENSIONS and scheme == "ulysses":
        scheme = None
    pool.need(ranks)
    pool.run(check_exact, case.with_(scheme=scheme, ranks=ranks, dropout_p=0.3), pool.device)


@pytest.mark.parametrize(
    "case", [BASE, BASE.with_(heads_kv=1, seqlen_q=53, seqlen_k=53, sink=True), VARLEN[0]], ids=str
)
@pytest.mark.parametrize("ranks", [OUTER_OF_TWO, INNER_OF_TWO], ids=["2x1", "1x2"])
def test_two_ranks_in_two_dimensions(ranks: int, case: Case, pool: Pool) -> None:
    pool.run(check_exact, case.with_(scheme=None, ranks=ranks), pool.device)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    heads_kv = rng.randint(1, 5)
    seqlen_q = rng.choice([0, 1, 2, 5, rng.randint(3, 70)])
    case = Case(
        ranks=rng.choice([2, 4, TWO_DIMENSIONS]),
        layout=rng.choice(["zigzag", "contiguous"]),
        batch=rng.randint(1, 2),
        seqlen_q=seqlen_q,
        seqlen_k=rng.choice([seqlen_q, rng.randint(0, 70)]),
        heads_q=heads_kv * rng.randint(1, 3),
        heads_kv=heads_kv,
        d_v=rng.choice([4, 8]),
        causal=rng.random() < 0.5,
        causal_alignment=rng.choice(["bottom-right", "top-left"]),
        window_size=tuple(rng.choice([-1, 0, rng.randint(0, 20)]) for _ in range(2)),
        softcap=rng.choice([0.0, 3.0]),
        alibi=rng.choice(["", "heads", "sequences"]),
        sink=rng.random() < 0.3,
        dropout_p=rng.choice([0.0, 0.0, 0.4]),
    )
    schemes = ["ring", "all-gather", None]
    case = case.with_(scheme=rng.choice(schemes + ["ulysses"] * (case.ranks != TWO_DIMENSIONS)))
    if rng.random() < 0.5:
        return case
    count = rng.randint(1, 6)
    ends = [sorted(rng.choices(range(50), k=count)) for _ in range(2)]
    documents = tuple((0, *ends[i * rng.randint(0, 1)]) for i in range(2))
    return case.with_(documents=documents, seqlen_q=documents[0][-1], seqlen_k=documents[1][-1])


@pytest.mark.parametrize("seed", range(40))
def test_random_cases(seed: int, pool: Pool) -> None:
    case = random_case(seed)
    pool.need(case.ranks)
    pool.run(check_exact, case, pool.device)


def check_neighbours(device: str) -> None:
    device, group = place(4, device)
    whole = Whole.draw(Case(window_size=(12, 0), layout="contiguous"), device)
    rank, talked = dist.get_rank(group), []

    def listen(group, sent, destination, received, source):
        talked.extend([destination] * any(x.numel() for x in sent))
        talked.extend([source] * any(x.numel() for x in received))
        return exchange.exchange(group, sent, destination, received, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "exchange", listen)
        whole.on_ranks(group)
    # Keys twice, for the forward and the backward, and gradients once: from the rank before to the
    # one behind, or back.
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < 4]
    assert sorted(talked) == sorted(3 * neighbours)


def test_a_window_talks_to_neighbours_only(pool: Pool) -> None:
    pool.need(4)
    pool.run(check_neighbours, pool.device)


def check_in_head_groups(case: Case, device: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "ROWS_OF_A_GROUP", 1)
        check_exact(case, device)


@pytest.mark.parametrize("documents", [None, PACKED], ids=["dense", "varlen"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme", ["ring", "all-gather", "ulysses"])
def test_in_head_groups(scheme: str, ranks: int, documents, pool: Pool) -> None:
    """One key head at a time, as long sequences go; the ranks have unequal numbers of heads."""
    pool.need(ranks)
    case = Case(scheme=scheme, ranks=ranks, heads_q=14, heads_kv=7, alibi="sequences", sink=True)
    case = case.with_(dropout_p=0.2, documents=documents)
    pool.run(check_in_head_groups, case, pool.device)


def check_order_of_exchanges(scheme: str, device: str) -> None:
    device, group = place(2, device)
    if group is None:
        return
    case = Case(scheme=scheme, ranks=2, heads_q=12, heads_kv=6, layout="contiguous", causal=False)
    whole = Whole.draw(case, device)
    done: list[str] = []

    def note(owner, name: str, label: str) -> None:
        original = getattr(owner, name)

        def noted(*arguments, **options):
            done.append(label)
            return original(*arguments, **options)

        patch.setattr(owner, name, noted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "ROWS_OF_A_GROUP", 1)
        note(heads.ToHeads, "__init__", "in")
        note(attention.Gathering, "__init__", "in")
        note(heads.ToRows, "__init__", "out")
        for module in (ulysses, calls):
            note(module, "fwd", "run")
            note(module, "bwd", "run")
        whole.on_ranks(group)
    groups_of_three = "in in run out in run out run out"
    if scheme == "ulysses":  # and the LSE: out in the forward, its gradient in the backward
        expected = f"{groups_of_three} out in {groups_of_three}"
    else:
        of_six = "in in run" + " in run" * 4 + " run"
        expected = f"{of_six} {of_six.replace('run', 'run out')}"
    assert " ".join(done) == expected


@pytest.mark.parametrize("scheme", ["all-gather", "ulysses"])
def test_heads_travel_while_others_are_computed(scheme: str, pool: Pool) -> None:
    """The next group of heads is under way before a group is computed."""
    pool.run(check_order_of_exchanges, scheme, pool.device)


def check_order_of_ring(ranks: int, expected: dict[str, str], device: str) -> None:
    device, group = place(ranks, device)
    if group is None:
        return
    case = Case(ranks=ranks, heads_kv=2, layout="contiguous", causal=False)
    whole = Whole.draw(case, device)
    done: list[str] = []
    prepared: dict[int, str] = {}  # what each transfer brings

    def prepare(*arguments, **options):
        transfer = exchange.exchange(*arguments, **options)
        prepared[id(transfer)] = "keys" if len(transfer.received) == 1 else "grads"
        return transfer

    def start(*transfers) -> bool:
        under_way = exchange.start(*transfers)
        if under_way:
            done.append("+".join(prepared[id(transfer)] for transfer in transfers if transfer))
        return under_way

    def wait(transfer):
        done.append(prepared[id(transfer)].upper())
        return wait_for(transfer)

    def note(name: str) -> None:
        original = getattr(calls, name)

        def noted(*arguments, **options):
            done.append(name)
            return original(*arguments, **options)

        patch.setattr(calls, name, noted)

    wait_for = exchange.Transfer.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "ROWS_OF_A_GROUP", 1)
        patch.setattr(attention, "exchange", prepare)
        patch.setattr(attention, "start", start)
        patch.setattr(exchange.Transfer, "wait", wait)
        note("fwd")
        note("bwd")
        whole.on_ranks(group)
    found = " ".join(done)
    border = found.rindex("fwd") + len("fwd")
    assert found[:border] == expected["forward"]
    assert found[border:].strip() == expected["backward"]


# What is started, "keys" of a step or "grads" of the one before, what is computed, and in capitals
# what is waited for; of two groups of heads.
ORDER_OF_RING = {
    2: {
        "forward": "keys fwd KEYS fwd keys fwd KEYS fwd",
        "backward": "keys bwd KEYS bwd grads+keys bwd GRADS KEYS bwd grads GRADS",
    },
    4: {
        "forward": " ".join(["keys fwd KEYS"] * 3 + ["fwd"] + ["keys fwd KEYS"] * 3 + ["fwd"]),
        "backward": "keys bwd KEYS keys bwd KEYS grads+keys bwd KEYS GRADS grads bwd GRADS"
        " grads+keys bwd GRADS KEYS keys bwd KEYS grads+keys bwd KEYS GRADS grads bwd GRADS"
        " grads GRADS",
    },
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_keys_travel_while_a_step_is_computed(ranks: int, pool: Pool) -> None:
    """A ring's transfers are started before the step that they travel behind, and waited for after
    it; the gradients of a group's last step travel behind the next group's first one."""
    pool.need(ranks)
    pool.run(check_order_of_ring, ranks, ORDER_OF_RING[ranks], pool.device)


def check_kept(device: str) -> None:
    device, group = place(2, device)
    if group is None:
        return
    whole = Whole.draw(Case(scheme="ulysses", ranks=2), device)
    leaves = [
        whole.part(whole.leaves[name], group, name).clone().requires_grad_() for name in "qkv"
    ]
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = context_parallel.flash_attn_func(*leaves, group=group, scheme="ulysses")
    batch, rows, heads_q, _ = out.shape
    lse = batch * rows * heads_q * 8  # all rows of half the heads, fp64
    assert sum(kept.values()) == sum(x.nbytes for x in (*leaves, out)) + lse


def test_nothing_by_heads_is_kept(pool: Pool) -> None:
    """Ulysses keeps for the backward what the caller has, out and the LSE."""
    pool.run(check_kept, pool.device)


def check_split(length: int, layout: str, ranks: int, device: str) -> None:
    device, group = place(ranks, device)
    if group is None:
        return
    whole = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0)).to(device)
    whole.requires_grad_()
    part = context_parallel.split(whole, group, layout=layout)
    positions = context_parallel.position_ids(length, group, layout=layout, device=device)
    assert torch.equal(part, whole[:, positions])
    ids = torch.arange(length, device=device)
    assert torch.equal(positions, context_parallel.split(ids, group, 0, layout=layout))

    joined = context_parallel.join(part, group, length=length, layout=layout)
    assert torch.equal(joined, whole)
    assert torch.equal(
        ids, context_parallel.join(positions, group, 0, length=length, layout=layout)
    )
    # Every rank's loss is the sum over the whole, and a part's gradient that of all their losses.
    (grad,) = torch.autograd.grad(joined.sum(), whole)
    assert torch.equal(grad[:, positions], torch.full_like(part, 4 if ranks != 2 else 2))
    assert grad.sum() == grad[:, positions].sum()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [16, 37, 3, 0])
@pytest.mark.parametrize("ranks", [2, 4, TWO_DIMENSIONS], ids=["2", "4", "2x2"])
def test_split_and_join(ranks: int, length: int, layout: str, pool: Pool) -> None:
    pool.need(ranks)
    pool.run(check_split, length, layout, ranks, pool.device)


def check_mesh(device: str) -> None:
    whole = Whole.draw(Case(scheme=None, dtype=torch.float64), place(4, device)[0])
    expected = whole.on_one_process()
    mesh = dist.device_mesh.init_device_mesh(device, (2, 2), mesh_dim_names=("outer", "inner"))
    flat = dist.device_mesh.init_device_mesh(device, (4,))
    for group in (mesh, flat, None):
        ranks = whole.on_ranks(group)
        for name, x in ranks.items():
            torch.testing.assert_close(x, whole.part(expected[name], group, name))
    one = context_parallel.split(torch.arange(8), mesh["inner"], 0, layout="contiguous")
    assert one.tolist() == ([0, 1, 2, 3] if dist.get_rank() % 2 == 0 else [4, 5, 6, 7])


def test_device_mesh(pool: Pool) -> None:
    """A mesh of one or two dimensions, a dimension of one, and no group: the world."""
    pool.need(4)
    pool.run(check_mesh, pool.device)


def check_refusals(device: str) -> None:
    device, group = place(4, device)
    q = torch.zeros(1, 4, 2, 8, device=device)

    def refuses(error, message: str, call=context_parallel.flash_attn_func, x=q, **options) -> None:
        with pytest.raises(error, match=message):
            call(q, x, x, group=group, **options)

    refuses(RuntimeError, r"dropout_p: expected a number in \[0, 1\), got 1.0", dropout_p=1.0)
    refuses(ValueError, "scheme: expected one of", scheme="star")
    refuses(ValueError, "layout: expected one of", layout="striped")
    refuses(ValueError, "causal_alignment", causal_alignment="middle")
    refuses(RuntimeError, "q: expected 16 rows, which is what this rank holds of 64", seqlen_q=64)
    refuses(RuntimeError, "k: expected dtype torch.float32 as q has", x=q.double())
    refuses(
        RuntimeError, "k: expected a number of heads that divides 2, got 4", x=q.repeat(1, 1, 2, 1)
    )
    refuses(RuntimeError, "alibi_slopes: expected float32", alibi_slopes=torch.zeros(3))
    slopes = torch.zeros(2, device=device, requires_grad=True)
    refuses(NotImplementedError, "alibi_slopes: has no gradient", alibi_slopes=slopes)
    refuses(RuntimeError, "softmax_scale: expected a finite", softmax_scale=-1.0)
    refuses(RuntimeError, "softcap: expected a finite", softcap=-1.0)
    refuses(RuntimeError, "window_size: expected numbers of at least -1", window_size=(-2, 0))
    refuses(RuntimeError, "k: expected 4 dimensions, got 3", x=q[0])
    refuses(TypeError, "k: expected torch.Tensor, got NoneType", x=None)
    refuses(RuntimeError, "learnable_sink: expected", learnable_sink=torch.zeros(3))
    varlen = context_parallel.flash_attn_varlen_func
    flat = dict(call=lambda q, k, v, **o: varlen(q[0], k[0], v[0], **o))
    refuses(
        RuntimeError, "cu_seqlens_q: expected 0", cu_seqlens_q=[0, 9, 8], cu_seqlens_k=[0], **flat
    )
    refuses(
        RuntimeError, "cu_seqlens_k: exp", cu_seqlens_q=[0, 16], cu_seqlens_k=[0, 8, 16], **flat
    )


def test_refusals(pool: Pool) -> None:
    """Every rank refuses by itself, before it waits for the others."""
    pool.need(4)
    pool.run(check_refusals, pool.device)
