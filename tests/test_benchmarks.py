"""What of the benchmarks can be wrong without a GPU: counts, shapes, adapters, formats, parsers."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


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
    from benchmarks import shapes

    dense = shapes.dense()
    assert len(dense) == len(set(dense)) == 36
    assert all(c.batch * c.seqlen == 16384 and c.heads * c.head_dim == 2048 for c in dense)
    assert len(shapes.decode()) == 12
    short = shapes.short_decode()
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
    from benchmarks.shapes import DecodeCase

    case = DecodeCase(4, 2, 2, 48, head_dim=16, tokens=20)
    q, caches = cache_calls.make_caches(case, 2, torch.device("cpu"), torch.float32)
    assert q.shape[1] == 20
    for cache, call in zip(caches, cache_calls.chunk(name, case, q, caches), strict=True):
        expected = cache_calls.chunk("aten", case, q, [cache])[0]()
        torch.testing.assert_close(call(), expected)
    seen = torch.ones(20, 48, dtype=torch.bool).tril(48 - 20).sum().item()
    assert case.flops() == 4 * 2 * 4 * 16 * seen


@pytest.mark.parametrize("name", ["rows", "paged16", "e4m3", "paged16_e4m3", "paged64_int8"])
def test_forms_of_a_cache_hold_the_same_numbers(name):
    from benchmarks import cache_calls
    from benchmarks.shapes import DecodeCase

    case = DecodeCase(8, 2, 2, 128, head_dim=32)
    q, caches = cache_calls.make_caches(case, 2, torch.device("cpu"), torch.bfloat16)
    expected = cache_calls.decode_form("plain", case, q, caches, "aten")
    got = cache_calls.decode_form(name, case, q, caches, "aten")
    for mine, plain in zip(got, expected, strict=True):
        error = ((mine().double() - plain().double()).norm() / plain().double().norm()).item()
        assert error < 0.1
        assert (error > 1e-3) == ("e4m3" in name or "int8" in name)  # 8 bits are stored, or 16


@pytest.mark.parametrize("name", ["flashinfer", "xqa", "xqa_e4m3"])
def test_flashinfer_is_used_only_where_it_is_installed(name, monkeypatch):
    from benchmarks import backends, cache_calls
    from benchmarks.shapes import DecodeCase

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


def test_ratios_and_geometric_means():
    from benchmarks import results

    assert results.ratios({"a": 2.0, "b": 4.0}, "a", ["b"], "more") == {"a/b": 0.5}
    assert results.ratios({"a": 2.0, "b": 4.0}, "a", ["b"], "less") == {"a/b": 2.0}
    assert results.ratios({"a": 2.0, "b": None}, "a", ["b"], "more") is None
    records = [
        results.record("fwd", {"d": d, "seqlen": s}, "x", {}, {"a/b": r})
        for d, s, r in ((64, 1, 2.0), (64, 2, 8.0), (128, 1, 4.0))
    ]
    means = {
        tuple(r["shape"].items()): r["values"]["a/b"]
        for r in results.geometric_means(records, by=("d",))
    }
    assert means[("d", 64),] == pytest.approx(4.0) and means[("d", 128),] == pytest.approx(4.0)
    assert means[("all", True),] == pytest.approx(4.0)


def test_masks_are_raced_with_what_they_leave(monkeypatch):
    """Each contestant of the race of masks computes the same, but for the call without a mask."""
    from benchmarks import contest, race_masks, timing

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
    timer = timing.Timer(torch.device("cpu"), timing.Recipe(0.0, 0.001, 0.001))
    race = contest.Race(timer, torch.float32)
    names = {*race_masks.BLOCKS, *race_masks.DOCUMENTS, *race_masks.PREFIX} - {"flex"}
    records = race_masks.run(race, quick=True, names=tuple(names))
    assert not race.wrong and not race.reasons
    assert [r["kind"] for r in records] == ["masks.fwd", "masks.bwd"] * 3
    for record, case in zip(records[::2], small, strict=True):
        assert set(record["values"]) == set(case.names) - {"flex"}


@pytest.fixture
def short_race():
    from benchmarks import contest, timing

    timer = timing.Timer(torch.device("cpu"), timing.Recipe(0.0, 0.001, 0.001))
    return contest.Race(timer, torch.float32)


def test_calls_without_a_kernel_are_raced_with_the_same_numbers(short_race, monkeypatch):
    from benchmarks import race_aten
    from benchmarks.shapes import Case, DecodeCase

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


def test_few_queries_are_the_same_call():
    from benchmarks import backends, race_few, shapes

    assert len(shapes.few_queries()) == len(set(shapes.few_queries()))
    case = shapes.DecodeCase(4, 2, 2, 32, 16, tokens=3)
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((3, 4), (32, 2), (32, 2)))
    expected = race_few.attention("ours", case, q, k, v)()
    for name in ("varlen", "paged16"):
        torch.testing.assert_close(race_few.attention(name, case, q, k, v)(), expected)
    with pytest.raises(backends.Unsupported):
        race_few.attention("fa2", case, q, k, v)


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
    from benchmarks.shapes import DecodeCase

    case = DecodeCase(4, 2, 1, 16, 16)
    q, (cache,) = cache_calls.make_caches(case, 1, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(flash_attn, "flash_decode_func", lambda *_, alibi_slopes: alibi_slopes)
    slopes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        slopes.append(cache_calls.decode_term("alibi", case, q, cache)())
    assert torch.equal(*slopes)


def test_a_file_of_results_reads_back(tmp_path):
    from benchmarks import results

    records = [
        results.run_record(torch.device("cpu"), "method"),
        results.record("fwd", {"d": 64}, "ms", {"a": 1.5, "b": None}, {"a/b": 2.0}),
    ]
    results.write(tmp_path / "r.json", records)
    assert results.read(tmp_path / "r.json") == records
    assert {"date", "chip", "torch", "flash_attn", "commit"} <= records[0]["values"].keys()
    text = results.show(records)
    assert "fwd [ms]" in text and "1.5" in text and "a/b" in text


def test_ncu_bytes_are_summed_by_call():
    from benchmarks import io

    output = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","gemm","dram__bytes_read.sum","byte","1,000"
"0","gemm","dram__bytes_write.sum","byte","24"
"1","softmax","dram__bytes_read.sum","byte","3"
"1","softmax","gpu__time_duration.sum","ns","999"
"2","spin_kernel(long)","dram__bytes_read.sum","byte","7"
"2","spin_kernel(long)","dram__bytes_write.sum","byte","7"
"3","flash","dram__bytes_read.sum","byte","5"
"4","spin_kernel(long)","dram__bytes_read.sum","byte","7"
"""
    assert io.parse(output) == [1027, 5]
    assert io.parse("==ERROR== ERR_NVGPUCTRPERM") == []


def test_ninja_log(tmp_path):
    from benchmarks import build_time

    log = tmp_path / ".ninja_log"
    log.write_text(
        "# ninja log v7\n"
        "0\t1000\t1\tCMakeFiles/flash_attn.dir/csrc/aten/fwd.cpp.o\tabc\n"
        "10\t4010\t1\tCMakeFiles/k.dir/csrc/sm80/fwd.cu.o\tdef\n"
    )
    assert build_time.file_times(log) == {"csrc/sm80/fwd.cu": 4.0, "csrc/aten/fwd.cpp": 1.0}
    assert build_time.build_records(log, None)[0]["values"]["seconds"] == 4.01


LISTING = """
Fatbin elf code:
================
arch = sm_90a

\t\tFunction : {name}
        /*0000*/            LDC R1, c[0x0][{offset}] ;         /* 0x00000a00ff017b82 */
                                                               /* 0x000fe40000000800 */
        /*0010*/            UIADD3 UR20, UP0, UR56, {address}, URZ ; /* 0x000002f038147890 */
                                                               /* 0x000fe2000ff1e03f */
        /*0020*/        @P0 FADD R4, {register}, c[0x0][R2+{offset}] ; /* 0x0000000000007919 */
                                                               /* {issue} */
"""
RESOURCES = """
arch = sm_90a
Resource usage:
 Common:
  GLOBAL:0
 Function {name}:
  REG:{registers} STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1412 TEXTURE:0
"""
KERNEL = {
    "name": "_Z3fwdv",
    "offset": "0x210",
    "address": "0x2f0",
    "register": "R3",
    "issue": "0x000fc80003f05070",
    "registers": "168",
}


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({}, True),
        ({"name": "_Z4moved"}, True),
        ({"offset": "0x238"}, True),
        ({"address": "0x318"}, True),
        ({"address": "0x1"}, False),
        ({"register": "R5"}, False),
        ({"issue": "0x000fe40003f05070"}, False),
        ({"registers": "170"}, False),
    ],
)
def test_machine_code_is_equal_but_for_places_of_parameters(change, equal):
    from benchmarks import machine_code

    def kernels(facts: dict) -> list:
        code = machine_code.read_code(LISTING.format(**facts))
        resources = machine_code.read_resources(RESOURCES.format(**facts))
        assert {len(lines) for lines in code.values()} == {3}
        return [machine_code.Kernel("a.cu.o", n, (resources[a, n], *code[a, n])) for a, n in code]

    before, after = kernels(KERNEL), kernels(KERNEL | change)
    expected = ([], []) if equal else (before, after)
    assert machine_code.unmatched(before, after) == expected


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


def test_the_order_of_tiles_costs_more_than_turns():
    from benchmarks import turns

    causal, of_groups = (turns.compare(128, 8192, True, group, 1.2) for group in (1, 8))
    assert of_groups["last blocks first"] < of_groups["first blocks first"] < 1
    assert of_groups["last blocks first"] < causal["last blocks first"]
    short = turns.compare(64, 1024, True, 8, 1.2)
    assert short["first blocks first"] < short["last blocks first"]
    turn, none = (turns.compare(128, 8192, False, 1, n)["in sections"] for n in (1.2, 0.0))
    assert causal["last blocks first"] < turn < none == 1
    # Sections that do not divide the heads: the first one is the smaller.
    assert [head for head, _ in turns.in_sections(1, 6, 2, range(1))] == [1, 2, 3, 4, 5]
    assert list(turns.in_sections(0, 3, 2, range(2))) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (1, 1),
        (2, 1),
    ]


def test_the_rule_for_dominant_keys_fires_where_a_p_outweighs_its_sum():
    """A key of the second of two blocks in the last row, whose lanes have summed 8 of the first:
    1.5 times that may pass. Its P then has a rounding, and else none, as with true maxima."""
    from benchmarks import dominant

    *_, taken, _ = dominant.RULES.values()
    for p, parts in (11.9, (0, 0, 0)), (12.3, (1 / 32, 0.5, 0)), (300, (1 / 32, 0.5, 0.5)):
        scores, v = np.zeros((32, 64), np.float32), np.eye(64, dtype=np.float32)  # O is P
        scores[31, 40] = np.log2(p)
        for rule, expected in (taken, parts), (None, (0, 0, 0)):
            out, found = dominant.attend(scores, v, 32, rule, "bf16")
            error = abs(out[31] * (63 + p) / np.exp2(scores[31]) - 1)
            assert tuple(found) == expected and error.max() < 2**-8
            assert (error[40] < 1e-6) == (p != 11.9 or rule is None)
    source = (ROOT / "csrc/sm90/fwd_traits.cuh").read_text()
    assert f"kOfWhole = {taken[0]}f, kOfFirst = {taken[1]}f;" in source and taken[2] == taken[1]
    for rows, warps, again, *ratios in dominant.compare(64, 2, 3.0, 2, "fp16", rows=32).values():
        assert 0 <= again <= warps <= 1 and rows <= warps and min(ratios) > 0.5


def test_lengths_that_cannot_be_simulated_are_refused():
    done = run("-m", "benchmarks.turns", "--seqlens", "2048,100,32768")
    assert done.returncode == 2 and "[100, 32768]" in done.stderr
    done = run("-m", "benchmarks.turns", "--group", "3")
    assert done.returncode == 2 and "got 3" in done.stderr


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_each_contestant_of_a_step_begins_equally_often(names):
    from benchmarks.train_step import orders

    rounds = list(orders(list(names)))
    assert all(sorted(order) == list(names) for order in rounds)
    for place in range(len(names)):
        there = [order[place] for order in rounds]
        assert len({there.count(name) for name in names}) == 1


def test_a_duel_runs_the_builds_it_names(tmp_path):
    """Not the one beside the script: here a build that cannot be imported."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('another build')")
    done = run("-m", "benchmarks.duel", str(ROOT), str(tmp_path), "--kinds", "cpu", "--quick")
    assert done.returncode != 0
    assert "another build" in done.stderr and "a contestant ended" in done.stderr


def test_race_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("-m", "benchmarks.race", "--kinds", "fwd")
    assert done.returncode == 2 and "need a CUDA GPU" in done.stderr


def test_host_overhead_is_of_what_a_user_gets(monkeypatch, tmp_path):
    """No backend is forced: the record says which one served, beside both forms of SDPA."""
    import json

    from benchmarks import host_overhead

    monkeypatch.setattr(host_overhead, "CALLS", 2)
    monkeypatch.setattr(host_overhead, "BLOCKS", 3)
    out = tmp_path / "host.json"
    arguments = ["host_overhead", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert host_overhead.main() == 0
    _, *records = json.loads(out.read_text())
    assert [r["shape"]["forward"] for r in records] == ["aten"] * 3
    assert records[2]["shape"]["backward"] == "aten"
    for record in records:
        assert set(record["values"]) == {"ours", "ours as sdpa", "sdpa", "sdpa flash"}
        mine, peers = ("ours", "ours as sdpa"), ("sdpa", "sdpa flash")
        assert set(record["ratio"]) == {f"{m}/{p}" for m in mine for p in peers}


def test_scaling_counts_the_pairs_of_the_plan():
    """All ranks together see what one GPU sees, and every rank the same number of pairs."""
    from benchmarks import scaling
    from flash_attn.context_parallel.shards import Shards

    shards = Shards(1024, "zigzag", 4)
    held = [shards.ranges(rank) for rank in range(4)]
    pairs = [
        sum(scaling.seen_pairs(r) for k in held for r in scaling.planned(q, k, 1024)) for q in held
    ]
    assert sum(pairs) == 1024 * 1025 // 2
    assert len(set(pairs)) == 1


def test_scaling_predicts_more_from_longer_sequences():
    from benchmarks import scaling

    for name in ("ring", "all-gather", "ulysses"):
        speedups = [
            scaling.one_gpu(n).both / scaling.schemes(n, 2)[name].both for n in (1 << 15, 1 << 19)
        ]
        assert 1 < speedups[0] < speedups[1] < 2, name
    assert "ulysses" not in scaling.schemes(1 << 17, 64)  # more ranks than heads
    assert "ring x ulysses" not in scaling.schemes(1 << 17, 8)  # one host


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [1 << 12, 1 << 14, 1 << 17])
def test_scaling_counts_each_transfer_once(tokens, ranks, monkeypatch):
    """Where nothing else takes time, a scheme lasts as long as its bytes travel: those of one group
    of heads and those of many."""
    from benchmarks import scaling

    monkeypatch.setattr(scaling, "kernel_time", lambda *_: 0.0)
    nothing = dict(memory=math.inf, in_host_latency=0.0, launch=0.0)
    moves = dataclasses.replace(scaling.ASSUMED, **nothing)
    rows, away = tokens / ranks, ranks - 1
    queries, keys = rows * 32 * 128, 2 * rows * 8 * 128  # of one rank, and keys with values
    blocks = away * 2 * keys, away * (2 * keys + 4 * keys)  # gradients in fp32
    heads = away / ranks * 2 * (2 * queries + keys), away / ranks * 2 * (4 * queries + 2 * keys)
    schemes = ("ring", blocks), ("all_gather", blocks), ("ulysses", heads)
    for name, expected in schemes:
        cost = getattr(scaling, name)(tokens, ranks, False, a=moves)
        moved = [moves.in_host * seconds for seconds in (cost.forward, cost.backward)]
        assert moved == pytest.approx(expected), name
    groups = {scaling.head_groups(n / 2, 32, 8) for n in (1 << 12, 1 << 14, 1 << 17)}
    assert groups == {1, 2, 8}


def test_scaling_hides_transfers_behind_the_groups_beside_them():
    from benchmarks import scaling

    seconds = dict(in_host=1.0, in_host_latency=0.0, transfer_share=0.0, launch=0.0)
    a = dataclasses.replace(scaling.ASSUMED, **seconds)
    assert scaling.in_groups(1.5, 2.0, 1.0, 1, False, a) == 2 + 1.5 + 1
    # The first group is computed beside 2 s, the second beside 2 + 1 s, the third beside 1 s.
    assert scaling.in_groups(3 * 1.5, 6.0, 3.0, 3, False, a) == 2 + 2 + 3 + 1.5 + 1


def test_pictures_show_each_contestant(tmp_path):
    command = [sys.executable, "-m", "benchmarks.pictures", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    words = {x.stem: x.read_text() for x in tmp_path.iterdir()}
    assert set(words) == {"forward", "backward", "decode", "step"}
    for name, peer in dict(
        forward="FlashAttention-2", decode="cuDNN", step="FlexAttention"
    ).items():
        assert f"<!-- {peer} -->" in words[name] and "<!-- flash_attn (this) -->" in words[name]


def test_diagrams_are_those_of_docs(tmp_path):
    """Drawn anew they are the files in docs/, which parse, and the numbers of the softmax hold."""
    command = [sys.executable, "-m", "benchmarks.diagrams", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    for drawn in tmp_path.iterdir():
        ElementTree.parse(drawn)
        assert drawn.read_text() == (ROOT / "docs" / "pictures" / drawn.name).read_text()
        assert f"pictures/{drawn.name})" in page
    scores = torch.tensor([1.0, 3.0, 2.0, 0.0, 5.0, 1.0])
    out = scores.softmax(0) @ torch.tensor([1.0, 2.0, 4.0, 0.0, 3.0, 1.0])
    words = (tmp_path / "online-softmax.svg").read_text()
    assert f"{out:.3f}" in words and f"{scores.logsumexp(0):.3f}" in words
