"""Upstream's ops, autograd classes and helpers give what the public functions give."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_interface

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS = ["dense", "varlen"]
# dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
OPTIONS = (0.0, 0.3, True, 4, 0, 0.0, None)
PUBLIC = dict(softmax_scale=0.3, causal=True, window_size=(4, 0))


def problem(form: str, device: str) -> tuple[list[torch.Tensor], tuple]:
    """q, k, v, dout and the lengths."""
    if form == "dense":
        return list(torch.randn(4, 2, 12, 2, 16, device=device)), ()
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    return list(torch.randn(4, 12, 2, 16, device=device)), (cu, cu, 7, 7)


def calls(form: str, device: str) -> list[tuple]:
    """(op, its arguments) forward and backward."""
    (q, k, v, dout), lengths = problem(form, device)
    infix = "_varlen" if lengths else ""
    forward = getattr(torch.ops.flash_attn, f"_flash_attn{infix}_forward").default
    backward = getattr(torch.ops.flash_attn, f"_flash_attn{infix}_backward").default
    given = (q, k, v, *lengths, *OPTIONS, False)
    out, lse, _, rng_state = forward(*given)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    return [
        (forward, given),
        (backward, (dout, q, k, v, out, lse, *gradients, *lengths, *OPTIONS, False, rng_state)),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_ops(form: str, device: str) -> None:
    (forward, given), (backward, arguments) = calls(form, device)
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    lengths = given[3:7] if form == "varlen" else ()
    function = flash_attn.flash_attn_varlen_func if lengths else flash_attn.flash_attn_func
    out, lse, _ = function(q, k, v, *lengths, **PUBLIC, return_attn_probs=True)
    actual = forward(*given)
    assert torch.equal(actual[0], out) and torch.equal(actual[1], lse)
    dout, gradients = arguments[0], arguments[6:9]
    softmax_d = backward(*arguments)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    for a, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, e)
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(-1, -2))


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_forward_reads_pages(device: str) -> None:
    """A table of pages, leftpad and seqused go with upstream's private function, too."""
    q = torch.randn(5, 2, 16, device=device)
    k, v = torch.randn(2, 6, 4, 2, 16, device=device)
    cu, lens, pads, table = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ([0, 2, 5], [7, 10], [1, 2], [[3, 0, 5], [1, 4, 2]])
    )
    pages = dict(block_table=table, leftpad_k=pads, seqused_k=lens)
    cu_k = torch.tensor([0, 12, 24], dtype=torch.int32, device=device)
    actual = flash_attn_interface._flash_attn_varlen_forward(
        q, k, v, cu, cu_k, 3, 12, 0.0, 0.3, True, **pages
    )[0]
    for b, (begin, end) in enumerate(((0, 2), (2, 5))):
        keys = slice(int(pads[b]), int(lens[b]))
        k_b, v_b = (x[table[b].long()].flatten(0, 1)[None, keys] for x in (k, v))
        expected = flash_attn.flash_attn_func(
            q[None, begin:end], k_b, v_b, softmax_scale=0.3, causal=True
        )
        torch.testing.assert_close(actual[begin:end], expected[0])


@pytest.mark.parametrize("form", FORMS)
def test_ops_follow_the_rules_of_torch(form: str) -> None:
    """Schema, what is written, fake tensors, AOT."""
    for op, arguments in calls(form, "cpu"):
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("form", FORMS)
def test_ops_take_what_the_functions_take(form: str) -> None:
    infix = "_varlen" if form == "varlen" else ""
    for direction in ("forward", "backward"):
        name = f"_flash_attn{infix}_{direction}"
        schema = getattr(torch.ops.flash_attn, name).default._schema
        parameters = inspect.signature(getattr(flash_attn_interface, name)).parameters.values()
        defaults = [None if p.default is p.empty else p.default for p in parameters]
        assert [a.name for a in schema.arguments] == [p.name for p in parameters]
        assert [a.default_value for a in schema.arguments] == defaults


CLASSES = ["", "KVPacked", "QKVPacked", "Varlen", "VarlenKVPacked", "VarlenQKVPacked"]


@pytest.mark.parametrize("infix", CLASSES)
def test_autograd_classes(infix: str) -> None:
    """apply takes the function's positional arguments, and whether there is a gradient."""
    snake = {"KVPacked": "_kvpacked", "QKVPacked": "_qkvpacked", "": ""}
    name = snake[infix.removeprefix("Varlen")]
    varlen = infix.startswith("Varlen")
    function = getattr(flash_attn, f"flash_attn{'_varlen' * varlen}{name}_func")
    cls = getattr(flash_attn_interface, f"FlashAttn{infix}Func")
    (q, k, v, _), lengths = problem("varlen" if varlen else "dense", "cpu")
    inputs = {
        "": [q, k, v],
        "_kvpacked": [q, torch.stack([k, v], -3)],
        "_qkvpacked": [torch.stack([q, k, v], -3)],
    }[name]
    lengths = (lengths[0], 7) if varlen and name == "_qkvpacked" else lengths
    options = (0.0, 0.3, True, (4, 0), 0.0, None, False, True)
    last = (None,) if infix == "Varlen" else ()
    inputs[0].requires_grad_()
    expected = function(*inputs, *lengths, **PUBLIC, return_attn_probs=True)
    actual = cls.apply(*inputs, *lengths, *options, *last, True)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    gradients = [torch.autograd.grad(out[0].sum(), inputs[0])[0] for out in (actual, expected)]
    assert torch.equal(*gradients)
    assert not cls.apply(*inputs, *lengths, *options, *last, False)[0].requires_grad


def test_helpers() -> None:
    x = torch.randn(3, 4)
    assert flash_attn_interface.maybe_contiguous(x) is x
    assert flash_attn_interface.maybe_contiguous(None) is None
    turned = flash_attn_interface.maybe_contiguous(x.T)
    assert turned.stride(-1) == 1 and torch.equal(turned, x.T)
    assert [flash_attn_interface.round_multiple(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert flash_attn_interface.USE_TRITON_ROCM is False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_upstream_finds_the_probabilities(causal: bool, device: str) -> None:
    """Its tests take S_dmask for exp(score - the largest score from a tile on to the right)."""
    q, k = torch.randn(2, 2, 40, 3, 16, device=device)
    *_, S_dmask = flash_attn.flash_attn_func(q, k, k, 0.3, causal=causal, return_attn_probs=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    if causal:
        scores.masked_fill_(torch.ones(40, 40, device=device).triu(1).bool(), -torch.inf)
    width = flash_attn_interface._get_block_size_n(device, 16, True, causal)
    largest = torch.stack([tile.amax(-1) for tile in scores.split(width, -1)], -1)
    largest = largest.flip(-1).cummax(-1).values.flip(-1)
    tiles = zip(S_dmask.abs().split(width, -1), largest.unbind(-1), strict=True)
    lse = scores.logsumexp(-1)
    found = torch.cat([tile * (m - lse).exp()[..., None] for tile, m in tiles], -1)
    torch.testing.assert_close(found, scores.softmax(-1))


# The package may be found by where tests run, which is not where these programs are.
WITH_OURS = {**os.environ, "PYTHONPATH": str(Path(flash_attn.__file__).parent.parent)}


def run_files(*arguments: object) -> subprocess.CompletedProcess:
    script = Path(__file__).with_name("upstream_tests.py")
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=WITH_OURS)


THEIRS = """
import pytest, sys, torch
from flash_attn.flash_attn_interface import _get_block_size_n

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("a,b", [(1, None), (2, "x")])
@pytest.mark.parametrize("i", range(5, 15))
def test_it(i, a, b, dtype):
    if i % 4 == 0: pytest.skip("no")
    assert i % 4 != 1, f"case {i}"

@pytest.mark.parametrize("i", range(3))
def test_others(i):
    if i == 0: raise NotImplementedError("flash_attn: qv: not supported")
    if i == 1 and "--cases" not in sys.argv: raise torch.OutOfMemoryError("beside others")

def test_alone(): pass
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    file = tmp_path / "test_theirs.py"
    file.write_text(THEIRS)
    return file


def failures(run: subprocess.CompletedProcess) -> list[str]:
    return [x for x in run.stdout.splitlines() if "test_it[" in x]


def test_whole_test_file(theirs: Path) -> None:
    """Every case has the name that pytest gives it, and each failure its reason."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, str(theirs)]
    command += ["-p", "no:cacheprovider"]
    listed = subprocess.run(command, capture_output=True, text=True, env=WITH_OURS)
    named = sorted(x.partition("::")[2] for x in listed.stdout.splitlines() if "FAILED" in x)
    whole = run_files(theirs)
    assert whole.returncode == 1
    counted = "seed 1: 22 passed, 12 failed, 8 skipped, 1 refused, 1 starved"
    assert whole.stdout.splitlines()[-1] == counted
    assert "test_theirs.py::test_it[9-2-x-dtype1]\n    failed: line 10: Asser" in whole.stdout
    assert "test_theirs.py::test_others[0]\n    refused: line 14: NotImpl" in whole.stdout
    assert "\n4 of test_it: failed: line 10: AssertionError: case 13" in whole.stdout
    ours = {x.partition("::")[2] for x in whole.stdout.splitlines() if "::" in x}
    assert ours == {x.partition(" - ")[0] for x in named}


def test_sample_of_a_test_file(theirs: Path) -> None:
    """The same cases for the same seed, in one process and in three."""
    runs = [run_files(theirs, "--count", 32, "--seed", seed) for seed in (7, 7, 8)]
    assert failures(runs[0]) == failures(runs[1]) != failures(runs[2])
    counts = [int(word) for word in runs[0].stdout.split("\n")[-2].split() if word.isdecimal()]
    assert sum(counts) == 32
    shared = run_files(theirs, "--count", 32, "--seed", 7, "--processes", 3)
    assert failures(shared) == failures(runs[0])


def test_sample_without_an_argument(theirs: Path) -> None:
    run = run_files(theirs, "--without", "b=x", "--without", "i=9")
    counted = "seed 1: 12 passed, 4 failed, 4 skipped, 1 refused, 1 starved"
    assert run.stdout.splitlines()[-1] == counted
    assert len(failures(run)) == 4 and not any("-2-x-" in x or "[9-" in x for x in failures(run))
    wrong = run_files(theirs, "--without", "b")
    assert wrong.returncode == 2 and "expected NAME=VALUE, got 'b'" in wrong.stderr


def test_who_starves_beside_others_is_run_alone(theirs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run = run_files(theirs, "--tests", "others|alone", "--processes", 2, "--out", out)
    assert run.returncode == 0
    assert run.stdout.splitlines()[-1] == "seed 1: 3 passed, 0 failed, 0 skipped, 1 refused"
    assert list(json.loads(out.read_text())["reasons"]) == ["test_theirs.py::test_others[0]"]
    late = run_files(theirs, "--tests", "alone", "--seconds", 0)
    assert late.stdout.splitlines()[-1] == "seed 1: 0 passed, 0 failed, 0 skipped, 1 not reached"


def test_files_without_cases(tmp_path: Path) -> None:
    empty = tmp_path / "test_empty.py"
    empty.write_text("")
    assert run_files(empty).returncode == 2
    missing = run_files(tmp_path / "test_none.py")
    assert missing.returncode == 2 and "expected a test file of upstream's" in missing.stderr
