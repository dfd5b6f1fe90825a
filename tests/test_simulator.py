"""The simulated GPU (csrc/simulator) sees what it is there to see: kernels that are right give what
they ought to, and the same with one fault do not.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parent.parent / "build" / "simulator" / "libflash_attn_simulator_tests.so"

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(not LIBRARY.is_file(), reason="built by dev.py test --simulator"),
]

# A kernel, the same with a fault, and what is said of it.
FAULTS = {
    "copy": ("copy, not waited for", "wrong: 4096"),
    "exchange": ("exchange without a barrier", "wrong: "),
    "product": ("product, not waited for", "wrong: "),
    "barrier": ("barrier at which a warp is missing", "all threads wait for what will not happen"),
    "arrival": ("arrival, and a phase too many", "all threads wait for what will not happen"),
    "registers": (
        "registers that nobody gives back",
        "all threads wait for what will not happen",
    ),
    "warp": ("warp in two places", "lanes of a warp meet at __shfl_sync and at __ballot_sync"),
    "store": ("store behind the memory", "a block wrote behind its dynamic shared memory"),
    "alignment": ("address of half a row", "ldmatrix: expected a multiple of 16 as address"),
}


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.flash_attn_simulate.restype = ctypes.c_char_p
    return loaded


def simulate(name: str) -> str:
    return library().flash_attn_simulate(name.encode()).decode()


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_fault_is_seen(kernel: str) -> None:
    faulty, said = FAULTS[kernel]
    assert simulate(kernel) == "right"
    assert said in simulate(faulty)
