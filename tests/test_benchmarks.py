"""What of the benchmarks can be wrong without a GPU: formats, parsers, simulations, pictures. The
races are in test_races.py."""

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

pytestmark = pytest.mark.usefixtures("benchmarks")


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
        "10\t3010\t1\tCMakeFiles/k.dir/Unity/unity_bwd_0_cu.cu.o\tghi\n"
        "10\t2010\t1\tCMakeFiles/k_sm90.dir/Unity/unity_bwd_0_cu.cu.o\tjkl\n"
        "10\t20\t1\tlibflash_attn.so\tmno\n"
    )
    assert build_time.file_times(log) == {
        "csrc/sm80/fwd.cu": 4.0,
        "k/Unity/unity_bwd_0_cu.cu": 3.0,
        "k_sm90/Unity/unity_bwd_0_cu.cu": 2.0,
        "csrc/aten/fwd.cpp": 1.0,
        "libflash_attn.so": 0.01,
    }
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

    taken = dominant.RULES[dominant.TAKEN]
    for p, parts in (11.9, (0, 0, 0)), (12.3, (1 / 32, 0.5, 0)), (2.0**21, (1 / 32, 0.5, 0.5)):
        scores, v = np.zeros((32, 64), np.float32), np.eye(64, dtype=np.float32)  # O is P
        scores[31, 40] = np.log2(p)
        for rule, expected in (taken, parts), (None, (0, 0, 0)):
            out, found = dominant.attend(scores, v, 32, rule, "bf16")
            error = abs(out[31] * (63 + p) / np.exp2(scores[31]) - 1)
            assert tuple(found) == expected and error.max() < 2**-8
            assert (error[40] < 1e-6) == (p != 11.9 or rule is None)
    source = (ROOT / "csrc/sm90/fwd_traits.cuh").read_text()
    assert f"kOfWhole = {taken.whole}f, kOfFirst = {taken.first}f;" in source
    assert taken.most == taken.first
    for rows, warps, again, *ratios in dominant.compare(64, 2, 3.0, 2, "fp16", rows=32).values():
        assert 0 <= again <= warps <= 1 and rows <= warps and min(ratios) > 0.5


def test_a_p_of_less_than_twice_an_exact_one_need_not_be_exact():
    """16 is exact since the second of three blocks. The third one's key lies in a lane that has
    summed 16, of which three quarters may pass in any case."""
    from benchmarks import dominant

    for name, of_exact in (dominant.TAKEN, 2), ("1/8 of the whole, at least 1.5 firsts", 0):
        rule = dominant.RULES[name]
        assert rule.of_exact == of_exact
        for last, fires in (11.9, False), (31.5, of_exact == 0), (32.5, True):
            scores, v = np.zeros((16, 96), np.float32), np.eye(96, dtype=np.float32)
            scores[0, 32], scores[0, 66] = np.log2(16), np.log2(last)
            _, (_, warps, _) = dominant.attend(scores, v, 32, rule, "bf16")
            assert warps == (1 if fires else 0.5)
    softmax = (ROOT / "csrc/cuda/attn/online_softmax.cuh").read_text()
    assert f"kOfExact = {dominant.RULES[dominant.TAKEN].of_exact:.0f}.f;" in softmax


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
