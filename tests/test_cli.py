"""The command line: each command works on a CPU; bad input gets one line and a non-zero exit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import flash_attn
from flash_attn.cli import check, demo, generate, main, model, peers, text

PROSE = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 60


@pytest.fixture
def prose(tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text(PROSE)
    return file


@pytest.fixture
def small_model(monkeypatch):
    size = model.Size(layers=2, heads=2, head_dim=16, context=64, batch=2)
    monkeypatch.setitem(demo.SIZES, "cpu", size)


def test_demo_trains_and_generates(prose, small_model, capfd):
    assert main(["demo", "--text", str(prose), "--steps", "3", "--device", "cpu"]) == 0
    out = capfd.readouterr().out
    assert "loss: ours 5." in out and "naive" in out
    assert f"{demo.GENERATED} of {demo.GENERATED} bytes alike" in out


def test_demo_fails_when_the_losses_differ(prose, small_model, capfd, monkeypatch):
    """An attention with the wrong scale is found out."""
    honest = peers.ours
    monkeypatch.setattr(
        peers, "ours", lambda *a, **k: lambda q, key, v: honest(*a, **k)(2.0 * q, key, v)
    )
    monkeypatch.setattr(demo, "GENERATED", 1)
    assert main(["demo", "--text", str(prose), "--steps", "20", "--device", "cpu"]) == 1
    assert "larger than rounding explains" in capfd.readouterr().err


def test_generation_notices_a_wrong_cache(monkeypatch):
    size = model.Size(layers=1, heads=2, head_dim=16, context=32, batch=1)
    gpt = model.ByteGPT(size, peers.ours(None, causal=True), seed=0)
    for block in gpt.blocks:  # at its first step a GPT hardly attends
        torch.nn.init.normal_(block.attention.qkv.weight)
        torch.nn.init.normal_(block.attention.out.weight)
    prompt = torch.arange(20, dtype=torch.uint8)
    right = generate.generate(gpt, prompt, 8, torch.float32, seed=0)
    assert right.agreed == 8 and right.difference < 1e-5
    assert len(right.text) == 8 and right.prompt == bytes(range(20))

    honest = flash_attn.flash_decode_func
    monkeypatch.setattr(
        flash_attn, "flash_decode_func", lambda q, k, v, n: honest(q, k, v, (n - 1).clamp(min=1))
    )
    assert generate.generate(gpt, prompt, 8, torch.float32, seed=0).difference > 1e-3


def test_the_models_are_the_same_but_for_the_attention():
    size = model.Size(layers=2, heads=2, head_dim=16, context=24, batch=2)
    tokens = torch.randint(256, (2, 25))
    losses, grads = [], []
    for attention in (peers.ours(None, causal=True), peers.naive(causal=True)):
        gpt = model.ByteGPT(size, attention, seed=3)
        loss = gpt.loss(tokens)
        loss.backward()
        losses.append(loss.detach())
        grads.append(torch.cat([p.grad.flatten() for p in gpt.parameters()]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_info(capsys):
    assert main(["info", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert flash_attn.__version__ in out and torch.__version__ in out
    lines = out.splitlines()
    assert any(line.split()[-2:] == ["128", "aten"] and "dropout" in line for line in lines)
    assert any("pages; bf16" in line and "aten" in line for line in lines)
    assert any("never sm80" in line for line in lines)
    assert "forward, fp16, bf16, fp32, fp64: aten\n    every feature" in out


def test_check_passes_here(capsys):
    assert main(["check", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    count = len(check.CASES) * len(check.DTYPES)
    assert f"{count} of {count} within the limits" in out
    assert "FAILED" not in out


def test_check_fails_on_a_wrong_backend(capsys, monkeypatch):
    honest = flash_attn.flash_attn_func
    monkeypatch.setattr(
        flash_attn, "flash_attn_func", lambda q, k, v, **options: honest(1.01 * q, k, v, **options)
    )
    assert main(["check", "--device", "cpu", "--backend", "aten"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_check_fails_on_nan():
    exact = torch.ones(3, dtype=torch.float64)
    error = check.relative_error(torch.tensor([1.0, float("nan"), 1.0]), exact)
    assert not error <= check.limit("out", torch.float16)


def test_race_prints_tables_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "race.png"
    arguments = ["race", "--device", "cpu", "--seqlens", "16,32", "--plot", str(plot)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for kind in ("forward, ms", "backward, ms", "memory, MiB"):
        assert kind in out
    assert "flash_attn" in out and "naive" in out and "torch flash" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_text_of_a_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "binary").write_bytes(b"\0\1")
    assert bytes(text.read_text(str(tmp_path), 1).tolist()) == b"one\ntwo"


def test_default_text_is_pythons_own_prose():
    assert len(text.read_text(None, 1)) > 400_000


BAD = {  # the arguments, and what the line must name
    "": "COMMAND",
    "nonsense": "COMMAND",
    "demo --text {tmp}/missing.txt": "--text",
    "demo --text {tmp}/short.txt": "--text",
    "demo --text {tmp}/empty": "--text",
    "demo --steps 0": "--steps",
    "demo --steps many": "--steps",
    "demo --backend nonsense --device cpu": "--backend",
    "demo --backend sm80 --device cpu": "--backend",
    "demo --device tpu": "--device",
    "demo --nonsense": "--nonsense",
    "info --device nonsense": "--device",
    "check --backend nonsense --device cpu": "--backend",
    "check --backend cuda --device cpu": "--backend",
    "race --seqlens 0 --device cpu": "--seqlens",
    "race --seqlens 16,x --device cpu": "--seqlens",
    "race --seqlens 16 --backend nonsense --device cpu": "--backend",
    "race --seqlens 16 --backend sm80 --device cpu": "--backend",
    "race --seqlens 16 --plot {tmp}/no/such/folder.png --device cpu": "--plot",
    "race --seqlens 16 --plot {tmp}/race.nonsense --device cpu": "--plot",
    "demo --device cuda:99": "--device",
    "info --device cuda:99": "--device",
    "check --device cuda:99": "--device",
    "race --device cuda:99": "--device",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_gets_one_line(arguments, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty").mkdir()
    assert main(arguments.replace("{tmp}", str(tmp_path)).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("flash_attn: ")
    assert BAD[arguments] in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["demo", "info", "check", "race"])
def test_a_gpu_that_is_not_there(command, capsys):
    assert main([command, "--device", "cuda"]) == 2
    assert "--device: expected a CUDA GPU" in capsys.readouterr().err


def test_the_module_exits_with_the_code():
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn", "demo", "--text", "missing.txt"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("flash_attn: --text: ")
    assert "Traceback" not in done.stderr
