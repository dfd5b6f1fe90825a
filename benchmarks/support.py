"""The tables of docs/support.md and README: which backend serves what on which GPU.

    python -m benchmarks.support [--check]

Asks the code that chooses the backend of every call, as a default build has it, about GPUs that
need not be here; so it wants a build with tests (python3 dev.py build) and no GPU. --check writes
nothing and fails where a table is another.
"""

import argparse
import ctypes
import re
import sys
from functools import cache
from pathlib import Path

from flash_attn.cli import support

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / "libflash_attn_choice_tests.so"
DEFAULT_BUILD = "80-real,90-real,80-virtual"  # FLASH_ATTN_CUDA_ARCHS in CMakeLists.txt
# (compute capability, multiprocessors) of GPUs that have a column in common; (0, 0): no GPU.
CHIPS = {
    "8.0 (A100)": ((80, 108),),
    "8.6, 8.9 (RTX 30, RTX 40, L4, L40)": ((86, 84), (89, 128), (89, 58)),
    "9.0 (H100, H200)": ((90, 132),),
    "10.x (B200)": ((100, 148), (103, 160)),
    "12.x (RTX 50)": ((120, 170), (121, 48)),
    "CPU": ((0, 0),),
}
SUMMARY = (
    ("forward, bf16", "fwd", "causal, windows, GQA, LSE", "bf16"),
    ("forward, fp32", "fwd", "causal, windows, GQA, LSE", "fp32"),
    ("backward, bf16", "bwd", "causal, windows, GQA, LSE", "bf16"),
    ("backward, fp32", "bwd", "causal, windows, GQA, LSE", "fp32"),
    ("decode, bf16", "decode", "one new token", "bf16"),
    ("decode, fp32", "decode", "one new token", "fp32"),
    ("decode, cache of fp8", "decode", "cache of fp8", "bf16"),
)


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.flash_attn_choose.restype = ctypes.c_char_p
    loaded.flash_attn_code_for.argtypes = (ctypes.c_char_p, ctypes.c_int)
    loaded.flash_attn_choose.argtypes = (
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p),
    )
    return loaded


def choose(
    chip: tuple[int, int],
    feature: support.Feature,
    dtype: str,
    head_dim: int,
    archs: str = DEFAULT_BUILD,
) -> tuple[str, str, str]:
    """Backend, plan, and the reasons of the fastest that was possible."""
    answer = (
        library()
        .flash_attn_choose(
            *(archs.encode(), *chip, list(support.OPS).index(feature.op)),
            *(dtype.encode(), (feature.cache or dtype).encode(), head_dim, feature.tokens),
            *(support.CAPACITY, 0, 0, 0, ",".join(feature.fields).encode()),
        )
        .decode()
    )
    served, reasons = answer.split(": ", 1)
    backend, plan = served.split("; ")
    return backend, plan, reasons


def ask_about(chip: tuple[int, int], archs: str = DEFAULT_BUILD) -> support.Ask:
    def ask(feature: support.Feature, dtype: str, head_dim: int) -> str | None:
        if support.is_no_call(feature, dtype):
            return None
        backend, plan, _ = choose(chip, feature, dtype, head_dim, archs)
        return support.named(backend, plan)

    return ask


def one_column(title: str) -> support.Ask:
    """Of all its chips, which must agree."""
    asks = [ask_about(chip) for chip in CHIPS[title]]

    def ask(feature: support.Feature, dtype: str, head_dim: int) -> str | None:
        answers = {one(feature, dtype, head_dim) for one in asks}
        if len(answers) > 1:
            raise SystemExit(f"{title}: {feature} in {dtype}, d = {head_dim}: {answers}")
        return answers.pop()

    return ask


def code_of(title: str) -> str:
    capability = CHIPS[title][0][0]
    code = library().flash_attn_code_for(DEFAULT_BUILD.encode(), capability)
    if code == 0:
        return "C++"
    kind = "machine code" if code // 10 == capability // 10 else "PTX"
    return f"{kind} of {code // 10}.{code % 10}"


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cells(found: tuple[tuple, ...]) -> tuple[str, ...]:
    return tuple(support.in_words(one, "`") for one in found)


def whole() -> str:
    asks = tuple(map(one_column, CHIPS))
    parts = []
    for op, title in support.OPS.items():
        rows = [(names, dtypes, *cells(found)) for names, dtypes, found in support.table(op, asks)]
        parts.append(f"### {title.capitalize()}\n\n{markdown(('', 'dtype', *CHIPS), rows)}")
    return "\n".join(parts)


def summary() -> str:
    features = {(feature.op, feature.name): feature for feature in support.FEATURES}
    asks = tuple(map(one_column, CHIPS))
    rows = [("what runs", *map(code_of, CHIPS))]
    for title, op, name, dtype in SUMMARY:
        found = tuple(support.ranges(ask, features[op, name], dtype) for ask in asks)
        rows.append((title, *cells(found)))
    return markdown(("", *CHIPS), rows)


def with_table(page: str, name: str, table: str) -> str:
    """The page with the table between its two comments."""
    marks = rf"(<!-- support: {name} -->\n).*?(<!-- end of support -->)"
    replaced, count = re.subn(
        marks, lambda found: f"{found[1]}\n{table}\n{found[2]}", page, flags=re.S
    )
    if count != 1:
        raise SystemExit(f"expected one place for the table {name!r}, found {count}")
    return replaced


PAGES = {ROOT / "docs" / "support.md": ("table", whole), ROOT / "README.md": ("summary", summary)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path, (name, table) in PAGES.items():
        page = path.read_text()
        wanted = with_table(page, name, table())
        if wanted != page:
            stale.append(path.name)
            if not check:
                path.write_text(wanted)
    if check and stale:
        print(f"not as the code says: {', '.join(stale)}; run python -m benchmarks.support")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
