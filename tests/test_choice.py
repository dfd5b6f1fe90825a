"""The choice of a backend on GPUs that are not here, and by builds for other architectures."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parent.parent / "build" / "libflash_attn_choice_tests.so"
OPS = {"fwd": 0, "bwd": 1, "decode": 2}
DEFAULT = "80-real,90-real,80-virtual"
A100, RTX4090, H100, B200 = 80, 89, 90, 100
APART = "the largest logits in a call of their own"

pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file(), reason="built without the target flash_attn_tests"
)


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.flash_attn_code_for.argtypes = (ctypes.c_char_p, ctypes.c_int)
    loaded.flash_attn_choose.restype = ctypes.c_char_p
    loaded.flash_attn_choose.argtypes = (
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p),
    )
    return loaded


def choose(archs, gpu, op, *options, **more) -> list[str]:
    """The backend, and the reasons of the fastest one that was possible."""
    served, reasons = explain(archs, gpu, op, *options, **more).split(": ", 1)
    return [served.split("; ")[0], reasons]


def explain(
    archs,
    gpu,
    op,
    cache="fp16",
    tokens=1,
    dtype="fp16",
    head_dim=128,
    capacity=8192,
    batch=8,
    heads=(32, 8),
    **features,
) -> str:
    """features: True for those fields of CallShape that are set."""
    names = ",".join(name for name, asked in features.items() if asked)
    call = (dtype.encode(), cache.encode(), head_dim, tokens, capacity, batch, *heads)
    return (
        library()
        .flash_attn_choose(archs.encode(), gpu, 132, OPS[op], *call, names.encode())
        .decode()
    )


@pytest.mark.parametrize(
    ("archs", "gpu", "code"),
    [
        (DEFAULT, A100, 80),
        (DEFAULT, 86, 80),
        (DEFAULT, H100, 90),
        (DEFAULT, B200, 80),  # by PTX
        ("90-real", A100, 0),
        ("90-real", B200, 0),
        ("90a-real", H100, 90),
        ("90a-virtual", B200, 0),
        ("80", RTX4090, 80),
        ("86-real,80-virtual", A100, 80),
        ("80-real,90-virtual", B200, 90),
        ("80-real,89-virtual", 86, 80),
        ("", H100, 0),
    ],
)
def test_code_that_a_gpu_runs(archs: str, gpu: int, code: int) -> None:
    assert library().flash_attn_code_for(archs.encode(), gpu) == code


@pytest.mark.parametrize(
    ("gpu", "op", "backend"),
    [
        (A100, "fwd", "sm80"),
        (H100, "fwd", "sm90"),
        (B200, "fwd", "sm80"),
        (75, "fwd", "aten"),
        (H100, "bwd", "sm90"),
        (A100, "bwd", "sm80"),
        (H100, "decode", "cuda"),
    ],
)
def test_the_default_build(gpu: int, op: str, backend: str) -> None:
    assert choose(DEFAULT, gpu, op)[0] == backend


@pytest.mark.parametrize(
    ("gpu", "op", "head_dim", "softcap", "backend"),
    [
        (A100, "fwd", 256, False, "sm80"),
        (RTX4090, "fwd", 256, False, "sm80"),
        (RTX4090, "bwd", 128, True, "sm80"),
        (H100, "bwd", 256, False, "sm80"),
        (A100, "bwd", 256, False, "aten"),  # too little shared memory
        (H100, "fwd", 264, False, "aten"),
        (H100, "fwd", 256, True, "sm80"),
        (H100, "bwd", 256, True, "sm80"),
        (H100, "decode", 64, False, "cuda"),
        (H100, "decode", 256, True, "cuda"),
        (RTX4090, "decode", 256, False, "cuda"),
        (H100, "decode", 264, False, "aten"),
    ],
)
def test_float32(gpu: int, op: str, head_dim: int, softcap: bool, backend: str) -> None:
    options = dict(dtype="fp32", cache="fp32", head_dim=head_dim, softcap=softcap)
    assert choose(DEFAULT, gpu, op, **options)[0] == backend


@pytest.mark.parametrize(
    ("gpu", "op", "head_dim", "backend"),
    [
        (H100, "fwd", 264, "sm80"),
        (H100, "bwd", 512, "sm80"),
        (B200, "bwd", 512, "sm80"),
        (A100, "fwd", 512, "sm80"),
        (A100, "bwd", 512, "aten"),  # too little shared memory
        (RTX4090, "fwd", 264, "aten"),
        (H100, "fwd", 520, "aten"),
        (H100, "decode", 512, "cuda"),
        (A100, "decode", 512, "cuda"),
        (RTX4090, "decode", 512, "aten"),
        (H100, "decode", 576, "cuda"),
        (H100, "decode", 584, "aten"),
        (A100, "decode", 576, "aten"),
    ],
)
def test_large_head_dims(gpu: int, op: str, head_dim: int, backend: str) -> None:
    assert choose(DEFAULT, gpu, op, head_dim=head_dim)[0] == backend


@pytest.mark.parametrize(
    ("gpu", "op", "head_dim", "reason"),
    [
        (A100, "bwd", 512, "the backward above head_dim 256 needs a GPU with 227 KB"),
        (RTX4090, "fwd", 512, "the forward above head_dim 256 needs a GPU with 163 KB"),
        (RTX4090, "decode", 264, "a head_dim of 264 needs a GPU with 163 KB"),
        (A100, "decode", 576, "a head_dim of 576 needs a GPU with 227 KB"),
    ],
)
def test_why_a_gpu_lacks_large_head_dims(gpu: int, op: str, head_dim: int, reason: str) -> None:
    assert reason in choose(DEFAULT, gpu, op, head_dim=head_dim)[1]


@pytest.mark.parametrize(("cache", "widest"), [("bf16", 576), ("int8", 512), ("fp8", 512)])
def test_the_widest_head_dim_of_a_cache(cache: str, widest: int) -> None:
    assert choose(DEFAULT, H100, "decode", cache=cache, head_dim=widest)[0] == "cuda"
    backend, reasons = choose(DEFAULT, H100, "decode", cache=cache, head_dim=widest + 16)
    assert backend == "aten" and f"head_dim {widest + 16} is above {widest}" in reasons


@pytest.mark.parametrize("op", list(OPS))
def test_a_build_without_code_for_the_gpu(op: str) -> None:
    backend, reasons = choose("90-real", A100, op)
    assert backend == "aten"
    assert "no code for compute capability 8.0" in reasons and "90-real" in reasons


@pytest.mark.parametrize(
    ("archs", "gpu", "backend"),
    [
        (DEFAULT, H100, "cuda"),
        ("80-real,80-virtual", H100, "aten"),  # its PTX cannot widen fp8
        (DEFAULT, A100, "aten"),
        (DEFAULT, B200, "aten"),
        ("89-real", RTX4090, "cuda"),
    ],
)
def test_fp8_needs_code_that_widens_it(archs: str, gpu: int, backend: str) -> None:
    chosen, reasons = choose(archs, gpu, "decode", "fp8")
    assert chosen == backend
    assert ("fp8" in reasons) == (backend == "aten")
    if archs != "89-real":
        assert choose(archs, gpu, "decode", "int8")[0] == "cuda"


def test_a_call_on_aten_hears_of_the_fastest_that_was_possible() -> None:
    for gpu in (H100, A100):
        backend, reasons = choose(DEFAULT, gpu, "fwd", softcap=True, return_probs=True)
        assert backend == "aten" and "return_attn_probs" in reasons and "softcap" not in reasons
    assert "9.0" not in reasons


def test_a_call_on_aten_hears_of_who_lacks_an_option_alone() -> None:
    """Not that another one, the fastest for 16 bits, serves no fp32 at all."""
    backend, reasons = choose(DEFAULT, H100, "fwd", return_probs=True, dtype="fp32", head_dim=192)
    assert backend == "aten" and "return_attn_probs" in reasons and "dtype" not in reasons
    backend, reasons = choose(DEFAULT, H100, "fwd", dtype="fp32", head_dim=300)
    assert backend == "aten" and "head_dim" in reasons


def test_float32_against_a_cache_of_8_bits() -> None:
    backend, reasons = choose(DEFAULT, H100, "decode", "int8", dtype="fp32")
    assert backend == "aten" and "a cache of 8 bits in float32" in reasons


def test_many_new_tokens_against_a_cache() -> None:
    assert choose(DEFAULT, H100, "decode", tokens=1024)[0] == "sm90"
    assert choose(DEFAULT, A100, "decode", tokens=1024)[0] == "sm80"
    assert choose(DEFAULT, H100, "decode", tokens=1024, softcap=True)[0] == "cuda"
    assert choose("80-real,80-virtual", H100, "decode", "int8", tokens=1024)[0] == "cuda"
    assert choose(DEFAULT, H100, "decode", "fp32", tokens=1024, dtype="fp32")[0] == "sm80"


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (dict(op="fwd"), "sm90; fwd:"),
        (dict(op="bwd"), "sm90; bwd:"),
        (dict(op="bwd", softcap=True), "sm90; bwd:"),
        (dict(op="decode", tokens=8), "cuda; decode:"),
        (dict(op="decode", tokens=4), "cuda; decode"),
        (dict(op="decode", tokens=9), "sm90; fwd, tiles shared by heads, each sequence in 2"),
        (dict(op="decode", tokens=64), "sm90; fwd, tiles shared by heads:"),
        (dict(op="decode", tokens=129), "sm90; fwd:"),
        (dict(op="decode", tokens=20, heads=(8, 8)), "cuda; decode:"),
        (dict(op="decode", appends=True, sink=True), "cuda; decode"),
        (dict(op="decode", appends=True, rotates=True), "cuda; decode"),
        (dict(op="decode", appends=True, rotates=True, head_dim=200), "cuda; decode"),
        (dict(op="decode", cache="int8", capacity=512), "cuda; decode:"),
        (dict(op="decode", cache="int8", rotates=True, capacity=512), "cuda; kvcache:"),
        (dict(op="decode", cache="int8", rotates=True, capacity=513), "cuda; kvcache, the keys of"),
        (dict(op="decode", softcap=True, capacity=256), "cuda; decode:"),
        (dict(op="decode", alibi=True, paged=True, head_dim=256), "cuda; decode"),
        (dict(op="decode", alibi=True, paged=True, head_dim=264), "cuda; kvcache, the keys of"),
        (
            dict(op="decode", alibi=True, paged=True, shares_prefix=True, capacity=9),
            "cuda; decode:",
        ),
        (dict(op="decode", cache="int8", softcap=True), "cuda; kvcache, the keys of all"),
        (dict(op="decode", dtype="fp32", cache="fp32", capacity=256), "cuda; kvcache:"),
        (dict(op="decode", dtype="fp32", cache="fp32"), "cuda; kvcache, the keys of all"),
        (dict(op="decode", softcap=True, head_dim=256), "cuda; decode"),
        (dict(op="decode", softcap=True, head_dim=264), "cuda; kvcache, the keys of all sequences"),
        (dict(op="decode", head_dim=576, heads=(16, 1)), "cuda; kvcache, the keys of all"),
        (dict(op="decode", cache="int8", head_dim=144), "cuda; kvcache, the keys of all sequences"),
        (dict(op="decode", cache="int8", capacity=8193), "cuda; decode"),
        (dict(op="decode", tokens=1024), "sm90; fwd:"),
        (dict(op="fwd", return_probs=True), "aten; ATen operations:"),
        (dict(op="fwd", max_logits=True, sink=True), "sm90; fwd:"),
        (dict(op="fwd", max_logits=True, softcap=True), f"sm90; fwd, {APART}:"),
        (dict(op="fwd", max_logits=True, alibi=True), f"sm90; fwd, {APART}:"),
        (dict(op="fwd", max_logits=True, dropout=True), f"sm90; fwd, {APART}:"),
        (dict(op="fwd", max_logits=True, dropout=True, head_dim=512), "sm80; fwd:"),
        (dict(op="fwd", max_logits=True, alibi=True, head_dim=512), f"sm80; fwd, {APART}:"),
        (dict(op="fwd", max_logits=True, bias=True), f"sm80; fwd, {APART}:"),
        (dict(op="fwd", max_logits=True, bias=True, bool_mask=True), "sm80; fwd:"),
        (
            dict(op="fwd", max_logits=True, bias=True, bool_mask=True, softcap=True),
            f"sm80; fwd, {APART}:",
        ),
        (
            dict(op="fwd", max_logits=True, bias=True, bool_mask=True, tile_mask=True),
            "sm80; fwd, the mask's hidden tiles skipped:",
        ),
        (dict(op="fwd", max_logits=True, softcap=True, return_probs=True), "aten; ATen"),
        (dict(op="decode", max_logits=True, capacity=256), "cuda; decode:"),
        (dict(op="decode", max_logits=True, softcap=True, capacity=256), f"cuda; decode, {APART}:"),
        (dict(op="decode", max_logits=True, bias=True, capacity=256), f"cuda; decode, {APART}:"),
        (
            dict(op="decode", max_logits=True, bias=True, bool_mask=True, capacity=256),
            "cuda; decode:",
        ),
    ],
)
def test_the_plan_says_which_kernel(options: dict, plan: str) -> None:
    assert explain(DEFAULT, H100, **options).startswith(plan)


@pytest.mark.parametrize(
    ("heads", "head_dim", "batch", "tokens", "capacity", "plan"),
    [
        ((32, 8), 128, 1, 1, 8192, "cuda; decode, each sequence in 8 pieces:"),
        # Row tiles of the same keys fill the device in pieces, as far as it has room for them.
        ((32, 8), 128, 1, 8, 8192, "cuda; decode, each sequence in 8 pieces:"),
        ((64, 8), 128, 4, 6, 2048, "cuda; decode, each sequence in 2 pieces:"),
        ((16, 16), 64, 1, 64, 8192, "cuda; decode, each sequence in 4 pieces:"),
        ((16, 16), 64, 1, 48, 32768, "cuda; decode, each sequence in 5 pieces:"),
        # Many rows that read the same keys: the forward, in whose tiles they lie together.
        ((32, 2), 128, 16, 8, 2048, "sm90; fwd, tiles shared by heads, each sequence in 4"),
        ((32, 8), 128, 1, 32, 8192, "sm90; fwd, tiles shared by heads, each sequence in 16"),
        ((32, 8), 128, 1, 64, 8192, "sm90; fwd, tiles shared by heads, each sequence in 8"),
        ((16, 2), 256, 4, 32, 8192, "sm90; fwd, tiles shared by heads, each sequence in 8"),
        ((64, 8), 128, 16, 4, 8192, "sm90; fwd, tiles shared by heads:"),
        # Or many of one head. Narrow tiles are two on an SM.
        ((16, 16), 64, 1, 100, 32768, "sm90; fwd, each sequence in 16 pieces:"),
        ((32, 32), 128, 1, 48, 8192, "sm90; fwd, each sequence in 4 pieces:"),
        # Where a merge takes longer than the keys, and where the device is full.
        ((16, 4), 256, 4, 128, 1024, "sm90; fwd:"),
        ((32, 8), 128, 4, 128, 8192, "sm90; fwd:"),
    ],
)
def test_few_queries_run_where_they_are_fastest(
    heads: tuple[int, int], head_dim: int, batch: int, tokens: int, capacity: int, plan: str
) -> None:
    """By times of an H200, and by what those predict: docs/kernels/decode.md."""
    shape = dict(heads=heads, head_dim=head_dim, batch=batch, tokens=tokens, capacity=capacity)
    assert explain(DEFAULT, H100, "decode", **shape).startswith(plan)


@pytest.mark.parametrize(
    "more",
    [
        dict(gpu=A100),
        dict(gpu=B200),
        dict(cache="int8"),
        dict(softcap=True),
        dict(bias=True),
        dict(ragged=True),
        dict(shares_prefix=True),
        dict(paged=True, odd_pages=True),
        dict(heads=(8, 8)),
    ],
    ids=str,
)
def test_who_has_no_tiles_that_heads_share(more: dict) -> None:
    call = dict(tokens=8, heads=(64, 8)) | more
    gpu = call.pop("gpu", H100)
    assert choose(DEFAULT, gpu, "decode", **call)[0] == "cuda"
    assert choose(DEFAULT, 0, "decode", tokens=8, heads=(64, 8))[0] == "aten"
    plain = dict(tokens=8, heads=(64, 8), paged=more.get("paged", False))
    assert "tiles shared by heads" in explain(DEFAULT, H100, "decode", **plain)


def test_a_varlen_call_pays_for_queries_side_by_side() -> None:
    """Decode's kernels need them so. A sink is no obstacle to the forward there, a leftpad is."""
    call = dict(tokens=8, heads=(64, 8), capacity=1024)
    assert choose(DEFAULT, H100, "decode", **call)[0] == "cuda"
    assert choose(DEFAULT, H100, "decode", **call, gathers=True)[0] == "sm90"
    call["capacity"] = 8192
    assert choose(DEFAULT, H100, "decode", **call, sink=True)[0] == "cuda"
    assert choose(DEFAULT, H100, "decode", **call, sink=True, gathers=True)[0] == "sm90"
    assert choose(DEFAULT, H100, "decode", **call, gathers=True, ragged=True)[0] == "cuda"


@pytest.mark.parametrize(
    ("heads", "tokens", "shared"),
    [((64, 8), 128, False), ((64, 8), 112, True), ((56, 8), 100, False), ((32, 8), 65, True)],
)
def test_tiles_are_shared_where_they_are_fewer(
    heads: tuple[int, int], tokens: int, shared: bool
) -> None:
    plan = explain(DEFAULT, H100, "decode", tokens=tokens, heads=heads)
    assert plan.startswith("sm90; fwd") and ("shared by heads" in plan) == shared


@pytest.mark.parametrize(
    ("gpu", "heads", "capacity", "features", "plan"),
    [
        (H100, 128, 8192, {}, "sm90; latent, the keys of all sequences dealt out evenly:"),
        (H100, 16, 8192, {}, "sm90; latent"),
        (H100, 16, 65536, dict(paged=True), "sm90; latent"),
        (H100, 16, 65536, dict(paged=True, odd_pages=True), "cuda; kvcache"),
        (H100, 128, 8192, dict(softcap=True), "cuda; kvcache"),
        (H100, 128, 8192, dict(values_in_keys=False), "cuda; kvcache"),
        (B200, 128, 8192, {}, "cuda; kvcache"),
    ],
)
def test_latent_attention(gpu: int, heads: int, capacity: int, features: dict, plan: str) -> None:
    call = dict(cache="bf16", dtype="bf16", head_dim=576, heads=(heads, 1), capacity=capacity)
    features = dict(values_in_keys=True) | features
    assert explain(DEFAULT, gpu, "decode", **call, **features).startswith(plan)


@pytest.mark.parametrize(
    ("heads", "head_dim", "tokens", "keys", "decode_time", "pieces"),
    [
        # Half of the device holds the tiles in one round, and a merge would come behind it.
        ((8, 1), 128, 1024, 2048, 20.0, 1),
        # Without decode they would have all of the device: then two pieces are best.
        ((8, 1), 128, 1024, 2048, 0.0, 2),
        # Few long tiles end late, unless decode ends later still.
        ((8, 1), 128, 512, 8192, 20.0, 6),
        ((8, 1), 128, 512, 8192, 500.0, 1),
        ((16, 16), 64, 1024, 32768, 220.0, 3),
        # Many rounds of tiles even out by themselves.
        ((64, 8), 128, 8192, 8192, 100.0, 1),
    ],
)
def test_how_a_forward_beside_decode_is_cut(
    heads: tuple[int, int], head_dim: int, tokens: int, keys: int, decode_time: float, pieces: int
) -> None:
    """By times of an H200: docs/kernels/decode.md."""
    count = library().flash_attn_pieces_beside_decode
    count.argtypes = (ctypes.c_char_p, *(ctypes.c_int,) * 5, ctypes.c_double)
    assert count(DEFAULT.encode(), *heads, head_dim, tokens, keys, decode_time) == pieces


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_sm90_is_before_sm80(head_dim: int, paged: bool) -> None:
    for tokens in (17, 40, 128, 1024):
        for capacity in (128, 1024, 8192):
            shape = dict(head_dim=head_dim, tokens=tokens, capacity=capacity, paged=paged)
            assert not explain(DEFAULT, H100, "decode", **shape).startswith("sm80"), shape


def test_kernels_divide_exactly() -> None:
    """By a product, whatever the divisor and the number below 2^31."""
    largest = 2**31 - 1
    rng = random.Random(0)
    divisors = [*range(1, 70), *(2**i + d for i in range(7, 31) for d in (-1, 0, 1)), largest]
    divisors += [rng.randint(1, largest) for _ in range(200)]
    for divisor in divisors:
        quotients = [1, largest // divisor, rng.randint(0, largest // divisor)]
        borders = [max(q * divisor + d, 0) for q in quotients for d in (-1, 0)]
        for n in (*borders, 0, largest, rng.randint(0, largest)):
            assert library().flash_attn_divide(n, divisor) == n // divisor, (n, divisor)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("gpu", [A100, H100])
def test_a_plan_asks_for_no_memory(op: str, gpu: int) -> None:
    """Every call is planned: words that say why a backend cannot serve one are put together where
    somebody reads them."""
    code = f"""
import ctypes
count = ctypes.CDLL({str(LIBRARY)!r}).flash_attn_allocations_of_plan
count.restype = ctypes.c_long
for tokens in (1, 300):
    print(count({DEFAULT.encode()!r}, {gpu}, {OPS[op]}, 128, tokens))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_PRELOAD": str(LIBRARY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "0"]
