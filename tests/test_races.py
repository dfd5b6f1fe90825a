"""What of the races can be wrong without a GPU: counts, shapes, adapters, and what is compared."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.usefixtures("benchmarks")


def test_pairs_and_operations_count_what_the_mask_leaves():
    from benchmarks.shapes import Case

    full = Case(2, 100, 4, 64)
    assert full.flops(backward=False) == 4 * 2 * 4 * 100**2 * 64
    assert full.flops(backward=True) == 2.5 * full.flops(backward=False)
    assert Case(2, 100, 4, 64, causal=True).flops(False) == full.flops(False) / 2
    i, j = torch.arange(50)[:, None], torch.arange(50)
    seen = ((j <= i) & (j >= i - 7)).sum().item()
    assert Case(1, 50, 1, 64, causal=True, window=7).pairs() == seen
    assert Case(1, 5, 1, 64, docs=(3, 5)).pairs() == 9 + 25


def test_the_races_have_the_shapes_of_the_bars():
    from benchmarks import cache_shapes, shapes

    dense = shapes.dense()
    assert len(dense) == len(set(dense)) == 36
    assert all(c.batch * c.seqlen == 16384 and c.heads * c.head_dim == 2048 for c in dense)
    assert len(cache_shapes.decode()) == 12
    short = cache_shapes.short_decode()
    assert len(short) == len(set(short))
    assert {(c.length, c.batch) for c in short if c.head_dim == 128} == {
        (length, batch) for length in (256, 512, 1024, 4096) for batch in (1, 4, 16, 64)
    }
    assert {c.head_dim for c in short} == {64, 128, 256}
    assert all(c.heads == 4 * c.heads_kv and c.heads * c.head_dim == 4096 for c in short)
    assert max(shapes.documents()) <= 16384 and len(shapes.documents()) == 64
    peaked = shapes.peaked()
    assert len(peaked) == len(set(peaked)) == 32 and {c.shape()["peak"] for c in peaked} == {3, 6}


def test_shared_pages_are_those_of_the_plain_call():
    from benchmarks import prefix

    case = prefix.PrefixCase(4, 2, batch=5, groups=2, shared=32, own=20)
    inputs = prefix.Inputs.make(case, torch.device("cpu"), torch.float32)
    assert inputs.table.shape == (5, 4) and len(inputs.table.unique()) == 2 * 2 + 5 * 2
    shared, plain = (prefix.calls(name, case, inputs) for name in ("shared", "plain"))
    assert len(shared) == len(plain) == 2
    for a, b in zip(shared, plain, strict=True):
        torch.testing.assert_close(a(), b())
    assert len(prefix.cases()) == len(set(prefix.cases()))


@pytest.mark.parametrize("name", ["aten", "naive", "flash", "math"])
def test_adapters_agree(name):
    from benchmarks import backends
    from benchmarks.shapes import Case

    case = Case(2, 33, 4, 16, causal=True)
    inputs = backends.make_inputs(case, torch.float32, torch.device("cpu"))
    expected = backends.forward("math", case, inputs)()
    torch.testing.assert_close(backends.forward(name, case, inputs)(), expected)
    for x, y in zip(
        backends.backward(name, case, inputs)(),
        backends.backward("math", case, inputs)(),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "extra",
    [
        {"window": 5},
        {"softcap": 2.0},
        {"alibi": True},
        {"bias": "grad"},
        {"sink": True},
        {"docs": (7, 26)},
        {"dropout": 0.5},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_ours_gets_every_feature(extra):
    """A feature that the adapter forgot would time a plain call."""
    from benchmarks import backends
    from benchmarks.shapes import Case

    sizes = dict(batch=1, seqlen=33, heads=2, head_dim=16, causal=True)
    case, cpu = Case(**sizes | extra), torch.device("cpu")
    inputs = backends.make_inputs(case, torch.float32, cpu)
    out = backends.forward("aten", case, inputs)()
    plain = Case(**sizes)
    same = backends.make_inputs(plain, torch.float32, cpu)
    assert (out.flatten() - backends.forward("aten", plain, same)().flatten()).abs().max() > 1e-3
    grads = backends.backward("aten", case, inputs)()
    assert len(grads) == 3 + ("bias" in extra) + ("sink" in extra)


@pytest.mark.parametrize("name", ["aten.paged16", "math"])
def test_chunk_adapters_agree(name):
    from benchmarks import cache_calls
    from benchmarks.cache_shapes import DecodeCase

    case = DecodeCase(4, 2, 2, 48, head_dim=16, tokens=20)
    q, caches = cache_calls.make_caches(case, 2, torch.device("cpu"), torch.float32)
    assert q.shape[1] == 20
    for cache, call in zip(caches, cache_calls.chunk(name, case, q, caches), strict=True):
        expected = cache_calls.chunk("aten", case, q, [cache])[0]()
        torch.testing.assert_close(call(), expected)
    seen = torch.ones(20, 48, dtype=torch.bool).tril(48 - 20).sum().item()
    assert case.flops() == 4 * 2 * 4 * 16 * seen


def test_pages_of_varlen_calls_hold_the_same_numbers():
    from benchmarks import cache_calls
    from benchmarks.cache_shapes import PagedCase

    sizes = dict(batch=2, tokens=5, length=48, capacity=80, heads=4, heads_kv=2, head_dim=16)
    sides, pages = (
        cache_calls.varlen_pages(
            PagedCase(**sizes, page_size=n), torch.device("cpu"), torch.float32
        )
        for n in (0, 16)
    )
    table = pages.keywords["block_table"]
    assert table[:, :3].flatten().sort().values.tolist() == list(range(6))
    assert table[:, :3].flatten().tolist() != list(range(6)) and (table[:, 3:] == -1).all()
    torch.testing.assert_close(pages(), sides())


@pytest.mark.parametrize("name", ["rows", "paged16", "e4m3", "paged16_e4m3", "paged64_int8"])
def test_forms_of_a_cache_hold_the_same_numbers(name):
    from benchmarks import cache_calls
    from benchmarks.cache_shapes import DecodeCase

    case = DecodeCase(8, 2, 2, 128, head_dim=32)
    q, caches = cache_calls.make_caches(case, 2, torch.device("cpu"), torch.bfloat16)
    expected = cache_calls.decode_form("plain", case, q, caches, "aten")
    got = cache_calls.decode_form(name, case, q, caches, "aten")
    for mine, plain in zip(got, expected, strict=True):
        error = ((mine().double() - plain().double()).norm() / plain().double().norm()).item()
        assert error < 0.1
        assert (error > 1e-3) == ("e4m3" in name or "int8" in name)  # 8 bits are stored, or 16


def test_masks_are_raced_with_what_they_leave(short_race, monkeypatch):
    """Each contestant of the race of masks computes the same, but for the call without a mask."""
    from benchmarks import race_masks

    cases = race_masks.cases()
    assert all(sum(c.lengths()) == c.seqlen and min(c.lengths()) > 0 for c in cases if c.documents)
    monkeypatch.setattr(race_masks, "HIDDEN", 64)
    small = [
        race_masks.MaskCase(256, 32, density=0.3),
        race_masks.MaskCase(256, 32, documents=3),
        race_masks.MaskCase(256, 32, prefix=64),
    ]
    monkeypatch.setattr(race_masks, "TOKENS", 256)
    monkeypatch.setattr(race_masks, "cases", lambda quick: small)
    names = {*race_masks.BLOCKS, *race_masks.DOCUMENTS, *race_masks.PREFIX} - {"flex"}
    records = race_masks.run(short_race, quick=True, names=tuple(names))
    assert not short_race.wrong and not short_race.reasons
    assert [r["kind"] for r in records] == ["masks.fwd", "masks.bwd"] * 3
    for record, case in zip(records[::2], small, strict=True):
        assert set(record["values"]) == set(case.names) - {"flex"}


def test_a_duel_gives_each_build_the_same_numbers(short_race, monkeypatch):
    """Whatever was drawn before: results are compared by their norms."""
    from benchmarks import cache_shapes, duel, race_caches, race_masks

    monkeypatch.setattr(race_caches, "graph_of", lambda calls: calls[0])
    mixed = cache_shapes.MixedCase(4, 2, 5, 48, 1, 9, 16, 2, 16)
    first, again = (duel.make_call("mixed", mixed, short_race)[0]() for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)

    monkeypatch.setattr(race_masks, "HIDDEN", 64)
    monkeypatch.setattr(race_masks, "TOKENS", 256)
    for left in (dict(density=0.3), dict(documents=3), dict(prefix=64)):
        case = race_masks.MaskCase(256, 32, **left)
        inputs = race_masks.Inputs(case, short_race)
        expected = race_masks.forward(case.names[0], case, inputs)()
        for kind in ("masks", "bwd_masks"):
            first, again = (duel.make_call(kind, case, short_race)[0]() for _ in range(2))
            torch.testing.assert_close(first, again, rtol=0, atol=0)
            if kind == "masks":
                torch.testing.assert_close(first, expected)


def test_calls_without_a_kernel_are_raced_with_the_same_numbers(short_race, monkeypatch):
    from benchmarks import race_aten
    from benchmarks.cache_shapes import DecodeCase
    from benchmarks.shapes import Case

    listed = race_aten.cases()
    assert len(listed) == len(set(listed))
    one = dict(batch=2, seqlen=33, heads=4, head_dim=16, causal=True)
    small = [
        race_aten.AtenCase(Case(**one, heads_kv=2, softcap=3.0), "float64"),
        race_aten.AtenCase(Case(**one, dropout=0.1), "float32", probs=True),
        race_aten.AtenCase(DecodeCase(4, 2, 2, 48, 16, tokens=3), "float64", form="paged16"),
        race_aten.AtenCase(DecodeCase(4, 2, 2, 64, 16), "float32", form="e4m3"),
    ]
    monkeypatch.setattr(race_aten, "cases", lambda quick: small)
    records = race_aten.run(short_race, quick=True, names=race_aten.NAMES)
    assert not short_race.wrong and not short_race.reasons
    directions = ["fwd", "bwd", "fwd", "bwd", "decode", "decode"]
    assert [r["kind"] for r in records] == [f"aten.{x}" for x in directions]
    assert all(r["shape"]["served"] == "aten" and "ours/naive" in r["ratio"] for r in records)


def test_packed_forms_are_the_same_call(short_race):
    from benchmarks import race_packed, shapes

    assert len(shapes.packed()) == len(set(shapes.packed()))
    one = dict(batch=2, seqlen=32, heads=4, head_dim=16, causal=True)
    cases = [shapes.Case(**one), shapes.Case(**one, heads_kv=2)]
    cases.append(shapes.Case(1, 40, 2, 16, True, docs=(24, 40)))
    records = race_packed.run(short_race, cases, race_packed.FORMS)
    assert not short_race.wrong
    assert set(short_race.reasons.values()) == {"no GQA"}
    served = [{n for n, x in r["values"].items() if x} for r in records if r["kind"] == "packed"]
    assert served == [set(race_packed.FORMS), {"separate", "kv"}, set(race_packed.FORMS)]


def test_a_ring_adds_the_same_parts(short_race):
    from benchmarks import race_ring

    case = race_ring.RingCase(4, 2, 16, ranks=4, rows=32)
    assert len(case.planned()) == case.ranks
    records = race_ring.run(short_race, [case], race_ring.FORMS)
    assert not short_race.wrong and not short_race.reasons
    assert [set(r["values"]) for r in records] == [set(race_ring.FORMS)]


def test_few_queries_are_the_same_call():
    from benchmarks import backends, cache_shapes, race_few

    assert len(cache_shapes.few_queries()) == len(set(cache_shapes.few_queries()))
    case = cache_shapes.DecodeCase(4, 2, 2, 32, 16, tokens=3)
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((3, 4), (32, 2), (32, 2)))
    expected = race_few.attention("ours", case, q, k, v)()
    for name in ("varlen", "paged16"):
        torch.testing.assert_close(race_few.attention(name, case, q, k, v)(), expected)
    with pytest.raises(backends.Unsupported):
        race_few.attention("fa2", case, q, k, v)


def test_latent_attention_is_the_same_call():
    from benchmarks import race_latent

    assert len(race_latent.cases()) == len(set(race_latent.cases()))
    case = race_latent.LatentCase(6, 2, 64)
    q, cache = torch.randn(2, 1, 6, 576), torch.randn(2, 64, 1, 576)
    (expected,) = (call() for call in race_latent.decode("naive", case, q, [cache]))
    assert expected.shape == (2, 1, 6, 512)
    for name in ("ours", "paged16", "paged64", "aten"):
        (call,) = race_latent.decode(name, case, q, [cache])
        torch.testing.assert_close(call(), expected)


def test_a_mixed_batch_is_the_same_call_in_pages():
    from benchmarks import cache_shapes, race_mixed

    assert len(cache_shapes.mixed()) == len(set(cache_shapes.mixed()))
    outs = []
    for page_size in (0, 16):
        torch.manual_seed(0)
        case = cache_shapes.MixedCase(4, 2, 5, 48, 1, 9, 16, 2, page_size)
        call = race_mixed.Call(case, torch.float32, torch.device("cpu"))
        outs.append(race_mixed.attention("ours", call)())
        assert outs[-1].shape == (5 * 2 + 9, 4, 16)
    torch.testing.assert_close(*outs)
    drafts = cache_shapes.MixedCase(4, 2, 5, 48, 0, 0, 16, 3)
    call = race_mixed.Call(drafts, torch.float32, torch.device("cpu"))
    assert race_mixed.attention("ours", call)().shape == (5 * 3, 4, 16)


def test_a_term_costs_what_its_plain_call_does_not(short_race):
    from benchmarks import race, shapes

    terms = shapes.score_terms()
    assert len(terms) == len(set(terms)) == 16
    short_race.only = "softcap|heads=2$"
    one = dict(batch=1, seqlen=32, heads=2, head_dim=16, causal=True)
    cases = [shapes.Case(**one), shapes.Case(**one, softcap=3.0), shapes.Case(**one, sink=True)]
    chosen = short_race.chosen(cases)
    assert chosen == cases[:2]
    records = race.terms_race(short_race, chosen, ("aten",))
    assert not short_race.wrong and not short_race.reasons
    cost = [r for r in records if r["kind"] == "fwd.terms.cost"]
    assert [r["shape"].get("softcap") for r in cost] == [3.0]
    rates = [r["values"]["aten"] for r in records if r["kind"] == "fwd.terms"]
    assert cost[0]["values"]["aten"] == pytest.approx(rates[0] / rates[1])


def test_switches_are_put_back(short_race):
    from benchmarks import race, shapes

    before = torch.backends.cuda.matmul.allow_tf32
    records = race.float32_race(short_race, [shapes.Case(1, 32, 2, 16)], ("aten", "math"))
    assert not short_race.wrong and torch.backends.cuda.matmul.allow_tf32 == before
    assert [r["shape"]["tf32"] for r in records] == [True, True, False, False]
    assert len(shapes.float32()) == 18 and len(shapes.wide()) == 18


def test_slopes_are_the_same_in_every_process(monkeypatch):
    """Those of a duel's calls, whose outputs are compared over processes."""
    import flash_attn
    from benchmarks import cache_calls
    from benchmarks.cache_shapes import DecodeCase

    case = DecodeCase(4, 2, 1, 16, 16)
    q, (cache,) = cache_calls.make_caches(case, 1, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(flash_attn, "flash_decode_func", lambda *_, alibi_slopes: alibi_slopes)
    slopes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        slopes.append(cache_calls.decode_term("alibi", case, q, cache)())
    assert torch.equal(*slopes)


def test_race_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "benchmarks.race", "--kinds", "fwd"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "need a CUDA GPU" in done.stderr


def small_transformer(*arguments):
    from benchmarks.small_models import Transformer

    return Transformer(*arguments, hidden=32, vocabulary=61)


def test_generation_is_raced_with_the_same_numbers(short_race, monkeypatch):
    """The last token sees the caches of those before it, as where all of them are one prompt."""
    from benchmarks import race_generate
    from benchmarks.small_models import MODELS, Heads

    assert len(race_generate.cases()) == len(set(race_generate.cases()))
    layers = (Heads(16, 4, 2, window=7), Heads(32, 4, 1))
    monkeypatch.setitem(MODELS, "gemma4", dataclasses.replace(MODELS["gemma4"], layers=layers))
    monkeypatch.setattr(race_generate, "Transformer", small_transformer)
    case = race_generate.GenerationCase("gemma4", batch=2, prompt=23)
    monkeypatch.setattr(race_generate, "cases", lambda quick: [case])
    records = race_generate.run(short_race, quick=True, names=("ours", "sdpa"))
    assert not short_race.wrong and not short_race.reasons
    assert [r["kind"] for r in records] == ["generate.prompt", "generate.step"]
    assert all("ours/sdpa" in r["ratio"] for r in records)

    generation = race_generate.Generation(case, torch.device("cpu"), torch.float32)
    whole = generation.call(generation.caches(), "sdpa", 0, 24)()
    for name in ("ours", "sdpa"):
        torch.testing.assert_close(generation.step(name)(), whole)


@pytest.fixture
def small_steps(monkeypatch):
    """Training steps of 64 tokens of two layers."""
    from benchmarks import small_models, train_step

    layers = (small_models.Heads(16, 4, 2, window=7), small_models.Heads(32, 4, 1))
    models = {"gemma4": small_models.Model(layers, normed=True, peers=("sdpa", "flex"))}
    monkeypatch.setattr(train_step, "MODELS", models)
    monkeypatch.setattr(train_step, "Transformer", small_transformer)
    monkeypatch.setattr(train_step, "VOCABULARY", 61)
    monkeypatch.setattr(train_step, "TOKENS", 64)
    monkeypatch.setattr(train_step, "ROUNDS", 1)
    return train_step


def test_a_peer_that_cannot_train_is_left_out(small_steps, short_race, monkeypatch, capsys):
    from benchmarks import backends

    def flex(case, inputs):
        raise RuntimeError("out of resource: shared memory\nhints")

    monkeypatch.setitem(backends._BUILDERS, "flex", flex)
    step, *of_layers, gain, loss = small_steps.compare("gemma4", 32, short_race.timer)
    assert "cannot: gemma4 flex: out of resource: shared memory\n" in capsys.readouterr().err
    assert step["values"]["flex"] is None and set(step["ratio"]) == {"ours/sdpa"}
    assert [r["shape"]["d"] for r in of_layers] == [16, 32]
    assert [r["shape"].get("window") for r in of_layers] == [6, None]
    assert loss["values"]["ours"] == pytest.approx(loss["values"]["sdpa"], rel=1e-2)
    times = [r["values"] for r in (step, *of_layers)]
    saved, *of_each = (t["sdpa"] - t["ours"] for t in times)
    assert gain["values"] == {"sdpa": pytest.approx(saved / sum(of_each))}
