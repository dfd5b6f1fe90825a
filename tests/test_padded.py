"""On a GPU the host does not know the lengths, and aten pads: that way of it, run on a CPU.

csrc/aten/host_reads.cpp says whether the host may read a tensor. Here it is linked with another
answer, into a copy of the package whose tests then run.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

# pytest's arguments; of the long files every 80th test. Not those of the same bits, which padding
# changes.
RUNS = [
    "test_score_range.py --device=cpu --part=0/8",
    "test_varlen.py test_forward.py test_extreme_values.py test_backward.py --device=cpu"
    " -k not(hint)and(not(without_padding)) --part=3/80",
    "test_decode.py test_kvcache.py test_cache_forms.py --device=cpu --part=5/80",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    sys.path.insert(0, str(Path(__file__).parent / "mutation"))
    from workplace import HOST_READS, ROOT, Workplace, find_ninja, padded_host_reads

    commands = ROOT / "build" / "compile_commands.json"
    if not commands.is_file() or str(ROOT / HOST_READS) not in commands.read_text():
        pytest.skip("no build tree of this checkout")
    if shutil.which("c++") is None or find_ninja() is None:
        pytest.skip("no compiler, or no ninja")
    place = Workplace(tmp_path_factory.mktemp("padded") / "copy")
    assert place.install(padded_host_reads())
    return place


@pytest.mark.slow
@pytest.mark.parametrize("arguments", RUNS)
def test_the_way_of_a_device(arguments: str, place) -> None:
    assert place.failure(arguments) is None
