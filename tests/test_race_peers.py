"""What the races compare with, without a GPU: peers compute the same, refuse, or are left out."""

from __future__ import annotations

import sys

import pytest
import torch

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.parametrize("name", ["flashinfer", "xqa", "xqa_e4m3"])
def test_flashinfer_is_used_only_where_it_is_installed(name, monkeypatch):
    from benchmarks import backends, cache_calls
    from benchmarks.cache_shapes import DecodeCase

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    case = DecodeCase(8, 2, 2, 128, head_dim=32)
    q, caches = cache_calls.make_caches(case, 2, torch.device("cpu"), torch.bfloat16)
    with pytest.raises(backends.Unsupported, match="flashinfer is not installed"):
        cache_calls.decode_form(name, case, q, caches)


def test_a_peer_refuses_what_it_cannot():
    from benchmarks import backends
    from benchmarks.shapes import Case

    case = Case(1, 8, 2, 16, causal=True, softcap=3.0)
    inputs = backends.make_inputs(case, torch.float32, torch.device("cpu"))
    for name in ("flash", "cudnn", "naive"):
        with pytest.raises(backends.Unsupported, match="softcap"):
            backends.forward(name, case, inputs)


@pytest.mark.parametrize("queries, window", [(1, None), (9, None), (9, 3)])
def test_sdpa_shares_heads_of_keys_where_its_kernels_do_not(queries, window, monkeypatch):
    """Each of its own calls has as many heads of keys as of queries, or such a head dim and no mask
    that kernels share them."""
    from benchmarks import backends
    from benchmarks.shapes import Case

    shared, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, mask, *others, enable_gqa):
        shared.append(enable_gqa and (mask is not None or q.size(3) > 256))
        return sdpa(q, k, v, mask, *others, enable_gqa=enable_gqa)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for d in (32, 264):
        q, k, v = (torch.randn(2, n, h, d) for n, h in ((queries, 6), (9, 2), (9, 2)))
        case = Case(2, 9, 6, d, queries > 1, heads_kv=2, window=window)
        out = backends.windowed_sdpa(case, q.device)(q, k, v)
        hidden = None
        if queries > 1:
            distance = torch.arange(9)[:, None] - torch.arange(9)
            hidden = (distance < 0) | (distance > (9 if window is None else window))
        expected = backends.peers.naive_attention(
            q, *(x.repeat_interleave(3, 2) for x in (k, v)), hidden
        )
        torch.testing.assert_close(out, expected)
    assert shared == [False, False]


@pytest.fixture
def calls_of_flex(monkeypatch):
    """The options of FlexAttention's calls, which run as they stand, not compiled, and without a
    gradient: it has none on a CPU."""
    from torch.nn.attention import flex_attention

    calls, call = [], flex_attention.flex_attention

    def noted(*qkv, kernel_options, **options):
        calls.append(kernel_options)
        return call(*(x.detach() for x in qkv), **options)

    monkeypatch.setattr(flex_attention, "flex_attention", noted)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return calls


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"causal": False},
        {"heads_kv": 2, "window": 40},
        {"docs": (100, 150)},
        {"softcap": 2.0},
        {"alibi": True},
        {"bias": "fixed"},
        {"head_dim": 320},
    ],
    ids=lambda extra: next(iter(extra), "causal"),
)
def test_flex_computes_the_same(extra, calls_of_flex):
    from benchmarks import backends, flex
    from benchmarks.shapes import Case

    case = Case(**dict(batch=1, seqlen=150, heads=4, head_dim=16, causal=True) | extra)
    inputs = backends.make_inputs(case, torch.float32, torch.device("cpu"))
    expected = backends.forward("aten", case, inputs)()
    torch.testing.assert_close(backends.forward("flex", case, inputs)(), expected)
    if case.head_dim <= 256:
        assert calls_of_flex == [None]
        with pytest.raises(backends.Unsupported, match="the same tiles"):
            backends.forward("flex_narrow", case, inputs)
    else:
        torch.testing.assert_close(backends.forward("flex_narrow", case, inputs)(), expected)
        assert calls_of_flex == [flex.TILES["wide"], flex.TILES["narrow"]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("what", [dict(density=0.3), dict(documents=3), dict(prefix=64)], ids=str)
def test_flex_has_the_masks(what, short_race, calls_of_flex, monkeypatch):
    from benchmarks import race_masks

    monkeypatch.setattr(race_masks, "HIDDEN", 64)
    case = race_masks.MaskCase(256, 32, **what)
    inputs = race_masks.Inputs(case, short_race)
    out, expected = (
        race_masks.attention(name, case, inputs)(*inputs.leaves) for name in ("flex", case.names[0])
    )
    torch.testing.assert_close(out, expected.detach())


def test_a_mask_of_flex_is_made_as_it_stands_where_that_is_small(monkeypatch):
    """And compiled where it is not; both are the same."""
    from benchmarks import flex

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    made = []
    for limit in (4 * 256**2, 4 * 256**2 - 1):
        monkeypatch.setattr(flex, "EAGER_PAIRS", limit)
        made.append(
            flex.block_mask(lambda b, h, i, j: j <= i - 64 * h, 4, 256, torch.device("cpu"))
        )
        assert len(compiled) == len(made) - 1
    assert torch.equal(*(mask.to_dense() for mask in made))


def test_a_race_goes_on_where_a_peer_cannot(short_race, monkeypatch):
    """Whatever a compiler of kernels raises."""
    from benchmarks import backends, race, shapes

    def flex(case, inputs):
        raise TypeError("out of resource: shared memory\nhints")

    monkeypatch.setitem(backends._BUILDERS, "flex", flex)
    records = race.both_directions(
        short_race, [shapes.Case(1, 32, 2, 16, True)], ("aten", "flex", "math"), ".wide"
    )
    assert [r["kind"] for r in records] == ["fwd.wide", "bwd.wide"]
    assert all(r["values"]["flex"] is None and set(r["ratio"]) == {"aten/math"} for r in records)
    assert set(short_race.reasons.values()) == {"out of resource: shared memory"}
