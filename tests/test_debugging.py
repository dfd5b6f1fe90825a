"""FLASH_ATTN_LOG and its replay, FLASH_ATTN_CHECK: what a user switches on to find a mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import flash_attn
from flash_attn import _checks, _log
from flash_attn.cli import main

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def int32(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log, "ENABLED", True)
    monkeypatch.setattr(_log, "_seen", set())


def various_calls(device: str) -> None:
    """Six new calls, one of them twice."""
    q = torch.randn(2, 9, 4, 16, device=device)
    flash_attn.flash_attn_func(q, q, q, causal=True)
    flash_attn.flash_attn_func(q + 1, q, q, causal=True)
    mask = torch.ones(9, 9, dtype=torch.bool, device=device)
    flash_attn.flash_attn_func(q, q[:, :, :1].expand_as(q), q, attn_bias=mask, dropout_p=0.1)
    flash_attn.scaled_dot_product_attention(
        *q.bfloat16().transpose(1, 2)[None].expand(3, *[-1] * 4)
    )
    rows, cu = q.flatten(0, 1), int32(device, 0, 5, 18)
    with flash_attn.use_backend("aten"):
        flash_attn.flash_attn_varlen_func(rows, rows, rows, cu, cu, 13, 13, window_size=(3, None))
    caches = torch.zeros(2, 6, 8, 4, 16, device=device).unbind(0)
    table = int32(device, 5, 0, 1, 3, 2, 4).view(2, 3)
    lengths = int32(device, 20, 3)
    flash_attn.flash_decode_func(q[:, :1], *caches, lengths, block_table=table)
    new = q[:, :2]
    flash_attn.flash_attn_with_kvcache(
        new, *caches, new, new, cache_seqlens=lengths, block_table=table, causal=True
    )


@each_device
def test_log_and_replay(device: str, logging: None, tmp_path, capfd) -> None:
    various_calls(device)
    lines = capfd.readouterr().err.splitlines()
    calls = [json.loads(x.removeprefix(_log.PREFIX)) for x in lines]
    assert [c["op"] for c in calls] == ["fwd"] * 4 + ["decode", "kvcache"]
    dense, _, _, varlen, decode, _ = calls
    assert dense["arguments"]["q"]["shape"] == [2, 9, 4, 16] and dense["arguments"]["causal"]
    assert varlen["arguments"]["cu_seqlens_q"]["values"] == [0, 5, 18]
    assert varlen["arguments"]["window_left"] == 3 and varlen["backend"] == "aten"
    assert decode["arguments"]["block_table"]["values"] == [[5, 0, 1], [3, 2, 4]]
    support = flash_attn.can_use(*torch.randn(3, 2, 9, 4, 16, device=device), causal=True)
    assert dense["backend"] == support.backend and dense["reasons"] == support.reasons
    file = tmp_path / "log.txt"
    file.write_text("another line\n" + "\n".join(lines))
    assert main(["replay", str(file), "--device", device]) == 0
    shown = capfd.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in shown] == [c["op"] for c in calls]
    assert all(line.endswith("ok") for line in shown)
    assert main(["replay", str(file), "--device", device, "--backend", "aten"]) == 0


def test_replay_reports(logging: None, tmp_path, capfd) -> None:
    """A result that is not finite, a log without calls, a line that was cut."""
    q = torch.randn(1, 3, 2, 8)
    flash_attn.flash_attn_func(q, q, q)
    (line,) = capfd.readouterr().err.splitlines()
    file = tmp_path / "log.txt"
    file.write_text(line.replace('"softmax_scale": null', '"softmax_scale": 3e38'))
    assert main(["replay", str(file), "--device", "cpu"]) == 1
    assert "NOT FINITE" in capfd.readouterr().out
    file.write_text("nothing\n")
    assert main(["replay", str(file)]) == 2
    assert "no line of FLASH_ATTN_LOG" in capfd.readouterr().err
    file.write_text(line[:-9])
    assert main(["replay", str(file)]) == 2
    assert "line 1 is not what FLASH_ATTN_LOG wrote" in capfd.readouterr().err


def test_the_variables_switch_on() -> None:
    code = """
import torch, flash_attn
q = torch.randn(3, 2, 8)
lengths = torch.tensor([0, 5], dtype=torch.int32)
flash_attn.flash_attn_varlen_func(q, q, q, lengths, lengths, 5, 5)
"""
    for variable, word in (("FLASH_ATTN_LOG", _log.PREFIX), ("FLASH_ATTN_CHECK", "cu_seqlens_q")):
        for value in ("1", "0"):
            result = subprocess.run(
                [sys.executable, "-c", code],
                env={variable: value},
                capture_output=True,
                text=True,
            )
            assert (word in result.stderr) == (value == "1"), result.stderr


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "ENABLED", True)


def varlen(device: str, **changes: object) -> None:
    """A right call: sequences of 5 and 13 queries, 7 and 3 keys in pages of 4 where paged."""
    call = dict(
        q=torch.randn(18, 2, 8, device=device),
        k=torch.randn(10, 2, 8, device=device),
        cu_seqlens_q=int32(device, 0, 5, 18),
        cu_seqlens_k=int32(device, 0, 7, 10),
        max_seqlen_q=13,
        max_seqlen_k=7,
    )
    call |= {n: int32(device, *x) if isinstance(x, list) else x for n, x in changes.items()}
    if "block_table" in changes:
        call["k"] = torch.randn(6, 4, 2, 8, device=device)
        call["block_table"] = call["block_table"].view(2, -1)
    flash_attn.flash_attn_varlen_func(v=call["k"], **call)


WRONG_VARLEN = {
    "cu_seqlens_q: expected 0 at its start, got 1": dict(cu_seqlens_q=[1, 5, 18]),
    "cu_seqlens_q: expected no value below the one before, got 4 at 2": dict(
        cu_seqlens_q=[0, 5, 4]
    ),
    r"cu_seqlens_k: expected at most 10 \(the rows\) at its end, got 12": dict(
        cu_seqlens_k=[0, 7, 12]
    ),
    "max_seqlen_k: expected at least 7, sequence 0's length, got 6": dict(max_seqlen_k=6),
    "seqused_k: expected 0 to 3 for sequence 1, got 4": dict(seqused_k=[7, 4]),
    "leftpad_k: expected 0 to 7 for sequence 0, got -1": dict(leftpad_k=[-1, 0]),
    "block_table: expected at least 2 columns for the 7 keys of sequence 0, got 1": dict(
        block_table=[0, 1]
    ),
    "block_table: expected a page from 0 to 5 for sequence 1 at column 0, got 6": dict(
        block_table=[0, 1, 6, -1]
    ),
}


@each_device
@pytest.mark.parametrize("message", WRONG_VARLEN)
def test_check_of_varlen(message: str, device: str, checking: None) -> None:
    varlen(device)
    varlen(device, block_table=[0, 1, 5, -1], seqused_k=[6, 3], leftpad_k=[2, 0])
    with pytest.raises(RuntimeError, match=f"flash_attn: {message}"):
        varlen(device, **WRONG_VARLEN[message])


def step(device: str, **changes: object) -> None:
    """A right call: 11 and 4 keys cached, one appended."""
    call = dict(cache_seqlens=[11, 4])
    call |= changes
    call = {n: int32(device, *x) if isinstance(x, list) else x for n, x in call.items()}
    shape = (2, 12, 2, 8)
    if "block_table" in call:
        shape = (6, 4, 2, 8)
        call["block_table"] = call["block_table"].view(2, -1)
    caches = [torch.zeros(shape, device=device) for _ in range(2)]
    q = torch.randn(2, 1, 2, 8, device=device)
    new = () if call.pop("reads", False) else (q, q)
    flash_attn.flash_attn_with_kvcache(q, *caches, *new, **call)


WRONG_STEPS = {
    "cache_seqlens: expected 0 to 11 for sequence 0, got 12": dict(cache_seqlens=[12, 4]),
    "cache_seqlens: expected 0 to 12 for sequence 1, got -1": dict(
        cache_seqlens=[12, -1], reads=True
    ),
    "cache_batch_idx: expected 0 to 1 for sequence 1, got 2": dict(cache_batch_idx=[0, 2]),
    r"cache_batch_idx: expected one row for each sequence, got \[1, 1\]": dict(
        cache_batch_idx=[1, 1]
    ),
    "cache_leftpad: expected 0 to 5 for sequence 1, got 6": dict(cache_leftpad=[0, 6]),
    "block_table: expected at least 3 columns for the 12 keys of sequence 0, got 2": dict(
        block_table=[0, 1, 2, 3]
    ),
    "block_table: expected a page from 0 to 5 for sequence 0 at column 2, got -1": dict(
        block_table=[0, 1, -1, 3, 4, -1]
    ),
}


@each_device
@pytest.mark.parametrize("message", WRONG_STEPS)
def test_check_of_a_step(message: str, device: str, checking: None) -> None:
    step(device)
    step(device, cache_seqlens=[12, 0], reads=True, cache_batch_idx=[1, 1])
    step(device, block_table=[0, 1, 5, 3, 4, -1], cache_leftpad=[3, 0])
    with pytest.raises(RuntimeError, match=f"flash_attn: {message}"):
        step(device, **WRONG_STEPS[message])


def test_compiled_calls_are_not_read(checking: None, logging: None, capfd) -> None:
    q = torch.randn(2, 9, 4, 16)
    attend = torch.compile(flash_attn.flash_attn_func, backend="eager", fullgraph=True)
    assert torch.equal(attend(q, q, q), flash_attn.flash_attn_func(q, q, q))
    assert capfd.readouterr().err.count(_log.PREFIX) == 1
    torch.compiler.reset()
