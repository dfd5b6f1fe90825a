"""The tile layers of the kernels, one operation at a time: csrc/tests/, small kernels that see no
torch, each against the same computed on the host.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from flash_attn import _build_info

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "build" / "libflash_attn_tile_tests.so"
NOT_BUILT = "built without CUDA, or without the target flash_attn_tests"
MESSAGE_BYTES = 1000
# racecheck follows neither an order that one lane passes on for its warp nor bar.arrive.
UNSEEN_BY_RACECHECK = re.compile("one-lane|turns")


@cache
def library() -> ctypes.CDLL | None:
    if not (_build_info.CUDA and LIBRARY.is_file()):
        return None
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.flash_attn_tile_tests_name.restype = ctypes.c_char_p
    loaded.flash_attn_tile_tests_run.argtypes = (
        *(ctypes.c_int, ctypes.c_uint64),
        *(ctypes.c_char_p, ctypes.c_int),
    )
    return loaded


@cache
def names() -> list[str]:
    if library() is None:
        return []
    count = library().flash_attn_tile_tests_count()
    return [library().flash_attn_tile_tests_name(i).decode() for i in range(count)]


def each_name() -> list:
    if not names():
        return [pytest.param("", marks=pytest.mark.skip(NOT_BUILT))]
    return [
        pytest.param(n, marks=[] if UNSEEN_BY_RACECHECK.search(n) else [pytest.mark.sanitize])
        for n in names()
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", each_name())
def test_tiles(name: str, seed: int) -> None:
    if name.startswith("sm90/") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    arguments = names().index(name), seed, message, MESSAGE_BYTES
    assert library().flash_attn_tile_tests_run(*arguments) == 0, message.value.decode()


@pytest.mark.skipif(library() is None, reason=NOT_BUILT)
def test_names_are_of_one_test_each() -> None:
    assert len(set(names())) == len(names()) > 0


@pytest.mark.skipif(library() is None, reason=NOT_BUILT)
@pytest.mark.parametrize("form", ["gemm_ss", "gemm_rs"])
def test_every_shape_of_wgmma_is_tested(form: str) -> None:
    header = (ROOT / "csrc/sm90/ptx/wgmma.cuh").read_text()
    compiled = {int(n) for n in re.findall(r"^FLASH_ATTN_WGMMA_BOTH\((\d+),", header, re.MULTILINE)}
    assert len(compiled) > 1
    for dtype in ("fp16", "bf16"):
        tested = {int(n) for n in re.findall(rf"sm90/{form}-(\d+)-{dtype}", " ".join(names()))}
        assert tested == compiled
