"""The tables of docs/support.md and README: they are what the choice of a backend says, about GPUs
that are not here and about the device that is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from cases import SIMULATED

from flash_attn import _build_info, can_use
from flash_attn.cli import info, support

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "build" / "libflash_attn_choice_tests.so"
FEATURES = pytest.mark.parametrize(
    "feature", support.FEATURES, ids=lambda feature: f"{feature.op}: {feature.name}"
)
BUILT = ",".join(_build_info.CUDA_ARCHS)
DTYPES = ("fp16", "bf16", "fp32", "fp64")

pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file(), reason="built without the target flash_attn_tests"
)


@pytest.fixture(scope="module")
def tables():
    return pytest.importorskip("benchmarks.support", reason="no source tree beside the tests")


def test_the_tables_are_those_of_the_code(tables) -> None:
    for path, (name, table) in tables.PAGES.items():
        page = path.read_text()
        assert tables.with_table(page, name, table()) == page, "run python -m benchmarks.support"


def test_another_table_is_noticed(tables) -> None:
    page = (ROOT / "README.md").read_text()
    changed = page.replace("`sm90` to 256", "`sm90` to 512", 1)
    assert changed != page
    assert tables.with_table(changed, "summary", tables.summary()) == page


@FEATURES
def test_answers_change_behind_the_named_head_dims_alone(tables, feature) -> None:
    """Decode's head dims are multiples of 16 here; others are not for every cache."""
    step = 16 if feature.op == "decode" else 1
    for chips in tables.CHIPS.values():
        for dtype in DTYPES:
            ask = tables.ask_about(chips[0])
            for head_dim in range(step, 577, step):
                above = next(d for d in support.HEAD_DIMS if d >= head_dim)
                expected = ask(feature, dtype, above)
                assert ask(feature, dtype, head_dim) == expected, (chips, dtype, head_dim)


@FEATURES
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ask_the_same(tables, feature, dtype: str) -> None:
    """The fields of csrc's CallShape and the tensors for can_use: without a GPU both give every
    reason against the most portable kernels."""
    if support.is_no_call(feature, dtype):
        pytest.skip("no such call")
    portable = "cuda" if feature.op == "decode" else "sm80"
    for head_dim in (128, 512, 1024):
        *_, reasons = tables.choose((0, 0), feature, dtype, head_dim, BUILT)
        *tensors, options = support.call_of(
            feature, support.DTYPES[dtype], head_dim, torch.device("cpu")
        )
        found = can_use(*tensors, op=feature.op, **options)
        assert found.backend == "aten"
        assert "; ".join(found.reasons[portable]) == reasons


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=[pytest.mark.simulated] if SIMULATED else []),
    ],
)
@pytest.mark.skipif("FLASH_ATTN_SMEM_LIMIT" in os.environ, reason="it plays another GPU")
def test_the_column_of_this_device(tables, device: str) -> None:
    """can_use says of the device that is here, or is simulated, what the page says."""
    chip = (int(SIMULATED or 0), 8)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        chip = (10 * properties.major + properties.minor, properties.multi_processor_count)
    here, there = support.ask_here(torch.device(device)), tables.ask_about(chip, BUILT)
    for op in support.OPS:
        assert support.table(op, (here,)) == support.table(op, (there,))


def test_words_of_a_cell() -> None:
    assert support.in_words((("aten", 1024),)) == "aten"
    assert support.in_words((("sm90", 256), ("sm80", 512), ("aten", 1024))) == (
        "sm90 to 256, sm80 to 512"
    )
    assert support.in_words((("cuda", 256), ("sm80", 1024))) == "cuda to 256, sm80"
    assert support.in_words(()) == "–"


def test_info_tells_every_feature() -> None:
    told = info.column(torch.device("cpu"))
    assert told.splitlines() == [
        *("forward, fp16, bf16, fp32, fp64: aten", "    every feature"),
        *("backward, fp16, bf16, fp32, fp64: aten", "    every feature"),
        *("decode, fp16, bf16, fp32, fp64: aten", "    every feature"),
    ]
