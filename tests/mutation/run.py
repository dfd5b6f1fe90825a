#!/usr/bin/env python3
"""Small faults put into the library one at a time: do the tests see each?

    python tests/mutation/run.py --out DIR [--count 160] [--seed 0] [--jobs 1] [--only PART]
                                 [--thin 1 | --again]

In the Python of a built checkout, on a CPU. Each mutant is one change (an operator, a constant, two
arguments swapped, an option left out) to one line of flash_attn/*.py, csrc/aten or csrc/bindings.
It lives in a copy of the package, so the checkout is never touched; of C++ one object is compiled
and the library linked again. First run the tests of its file, then the others (with --thin N every
Nth of them, with 0 none). --again: none is drawn, those that survived a run with --thin 0 meet the
others.

DIR/results.jsonl gets a line a mutant; run again, what stands there is not repeated. Which mutants
are drawn depends on the seed and on the sources alone. survivors.md, beside this file, explains
those that no test sees.

mutmut and cosmic-ray know Python only, and most of what computes here is C++.
"""

import argparse
import ast
import dataclasses
import hashlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workplace import HOST_READS, ROOT, Workplace, padded_host_reads

# The tests of a file: pytest's arguments, one run after the other until one fails.
PYTHON = {
    "flash_attn/_call.py": [
        *(
            "test_wrong_arguments.py",
            "test_api_options.py",
            "test_masks.py",
            "test_mask_forms.py",
            "test_mask_refusals.py",
            "test_kept_masks.py",
        ),
    ],
    "flash_attn/_cache_call.py": ["test_wrong_arguments.py", "test_decode_bias.py"],
    "flash_attn/_masked_call.py": ["test_masks.py", "test_mask_refusals.py", "test_kept_masks.py"],
    "flash_attn/_pages.py": ["test_varlen_pages.py", "test_wrong_arguments.py -k varlen"],
    "flash_attn/_errors.py": ["test_wrong_arguments.py"],
    "flash_attn/backends.py": ["test_backends.py", "test_wrong_arguments.py -k can_use"],
    "flash_attn/bert_padding.py": ["test_padding.py", "test_wrong_arguments.py -k pad"],
    "flash_attn/attention.py": ["test_api.py test_api_options.py", "test_wrong_arguments.py"],
    "flash_attn/packed.py": [
        "test_api.py test_api_options.py",
        "test_wrong_arguments.py -k packed",
    ],
    "flash_attn/kvcache.py": [
        "test_api.py",
        "test_kvcache.py --part=0/4",
        "test_errors.py test_kvcache.py -k test_errors",
        "test_cache_forms.py --part=0/4",
    ],
    "flash_attn/sdpa.py": ["test_sdpa.py", "test_wrong_arguments.py -k scaled"],
    "flash_attn/_positional.py": ["test_positional.py", "test_upstream.py test_api_options.py"],
    "flash_attn/_upstream.py": ["test_positional.py", "test_upstream.py test_api_options.py"],
    "flash_attn/layers/rotary.py": ["test_padding.py test_wrong_arguments.py -k rotary"],
}
ATTENTION = [
    "test_score_range.py",
    "test_forward.py test_extreme_values.py --part=0/8",
    "test_backward.py --part=0/8",
]
CACHE = [
    "test_decode.py --part=0/6",
    "test_kvcache.py --part=0/4",
    "test_cache_forms.py --part=0/4",
]
CPP = {
    "csrc/aten/score.cpp": ATTENTION,
    "csrc/aten/slice.cpp": ATTENTION,
    "csrc/aten/fwd.cpp": [*ATTENTION, "test_dropout.py"],
    "csrc/aten/bwd.cpp": ["test_score_range.py", "test_backward.py --part=0/8"],
    "csrc/aten/online_softmax.cpp": ["test_score_range.py", *CACHE[:1]],
    "csrc/aten/tile.cpp": ATTENTION,
    "csrc/aten/sequences.cpp": ["test_varlen.py --part=0/6"],
    "csrc/aten/dropout.cpp": ["test_dropout.py"],
    "csrc/aten/parallel.cpp": ["test_threads.py", "test_invariants.py"],
    "csrc/aten/decode.cpp": CACHE,
    "csrc/aten/cache.cpp": CACHE,
    "csrc/aten/append.cpp": ["test_kvcache.py --part=0/4", "test_cache_forms.py --part=0/4"],
    "csrc/bindings/checks.cpp": ["test_errors.py", "test_wrong_arguments.py"],
    "csrc/bindings/argument_checks.cpp": ["test_errors.py", "test_wrong_arguments.py"],
    "csrc/bindings/cache_checks.cpp": [
        "test_errors.py",
        "test_wrong_arguments.py",
        "test_decode_bias.py -k refusals",
    ],
    "csrc/bindings/autograd.cpp": [
        "test_torch.py",
        "test_api_options.py",
        "test_opcheck.py",
        "test_kvcache.py -k view",
    ],
    "csrc/bindings/graph.cpp": [
        *("test_torch.py", "test_short_way.py"),
        *("test_torch_tools.py -k compiled_autograd", "test_sdpa.py", "test_api_options.py"),
    ],
    "csrc/bindings/unpack.cpp": ["test_packed.py"],
    "csrc/bindings/meta.cpp": ["test_opcheck.py", "test_errors.py -k tracing"],
    "csrc/bindings/overlap.cpp": ["test_kvcache.py", "test_errors.py"],
    "csrc/bindings/rng_state.cpp": ["test_dropout.py", "test_torch.py -k vmap"],
}
OTHERS = (
    *(
        "api",
        "api_options",
        "sdpa",
        "errors",
        "wrong_arguments",
        "score_range",
        "upstream",
        "threads",
    ),
    *("opcheck", "varlen", "varlen_pages", "layouts", "dropout", "torch", "compile", "masks"),
    *("kvcache", "cache_forms", "decode", "forward", "extreme_values", "backward"),
    *("invariants", "gradcheck"),
    *("fa3", "fa3_cache", "graphs", "max_logits", "padding", "positional", "short_way", "sizes"),
    *("torch_sdpa", "context_parallel", "parallel", "serving", "backends", "library"),
)

# What of the others runs on a library whose host reads no lengths: of csrc/aten alone.
PADDED = (
    "padded test_score_range.py --part=0/8",
    "padded test_varlen.py test_forward.py test_extreme_values.py test_backward.py"
    " -k not(hint)and(not(without_padding)) --part=3/80",
    "padded test_decode.py test_kvcache.py test_cache_forms.py --part=5/80",
)

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "*"}
CPP_SWAPS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ",
    " && ": " || ", " || ": " && ", " + ": " - ", " - ": " + ", " * ": " + ",
    "true": "false", "false": "true", "std::min": "std::max", "std::max": "std::min",
    ".first": ".last", ".last": ".first", "!": "", ".sub_(": ".add_(", ".add_(": ".sub_(",
    ".mul_(": ".add_(", "clamp_min": "clamp_max", "at::minimum": "at::maximum", ".lt(": ".le(",
    ".ge(": ".gt(", "logical_or": "logical_and", "logical_and": "logical_or", "size(0)": "size(1)",
    "size(1)": "size(0)", "size(-1)": "size(-2)",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    start: int  # in the file's text
    end: int
    text: str  # what stands there instead

    def applied_to(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def key(self, source: str) -> str:
        """The same for the same change to the same line of a file that has changed elsewhere."""
        begin = source.rfind("\n", 0, self.start) + 1
        line = source[begin : source.find("\n", self.start)]
        same = source.count(f"\n{line}\n", 0, begin)  # lines like it, before it
        what = f"{self.file}|{line}|{self.start - begin}|{self.text}" + (f"|{same}" if same else "")
        return hashlib.sha256(what.encode()).hexdigest()[:12]

    def shown(self, source: str) -> str:
        line = source.count("\n", 0, self.start) + 1
        old = " ".join(source[self.start : self.end].split())
        return f"{self.file}:{line}: {old!r} -> {' '.join(self.text.split())!r}"


def python_mutants(file: str, source: str) -> Iterator[Mutant]:
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    data = source.encode()

    def place(node: ast.AST) -> tuple[int, int]:
        bounds = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        return tuple(len(data[: lines[row - 1] + col].decode()) for row, col in bounds)

    def between(left: ast.AST, right: ast.AST, new: str) -> Mutant:
        start, end = place(left)[1], place(right)[0]
        inner = source[start:end]  # with the brackets round the operands, if any
        old = re.search(r"is not|not in|[^\s()]+", inner)
        return Mutant(file, start + old.start(), start + old.end(), new)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        # Neither words nor what only helps to say them.
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.ExceptHandler, ast.Import)):
            return
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                yield between(left, right, COMPARISONS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield between(left, right, new)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            yield between(node.left, node.right, ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(file, place(node)[0], place(node.operand)[0], "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            yield Mutant(file, *place(node), repr(new))
        elif isinstance(node, ast.Call):
            for left, right in zip(node.args, node.args[1:], strict=False):
                (a, b), (c, d) = place(left), place(right)
                yield Mutant(file, a, d, source[c:d] + source[b:c] + source[a:b])
            for keyword in node.keywords:
                if keyword.arg and not isinstance(keyword.value, ast.Constant):
                    yield Mutant(file, *place(keyword.value), "None")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    yield from visit(ast.parse(source))


def without_messages(source: str) -> str:
    """What TORCH_CHECK only says becomes ~: from its first string to its end."""
    for check in re.finditer(r"\bTORCH_CHECK\w*\(", source):
        depth, begin, in_string = 1, None, False
        for i in range(check.end(), len(source)):
            if source[i] == '"' and source[i - 1] != "\\":
                in_string, begin = not in_string, i if begin is None else begin
            elif not in_string:
                depth += {"(": 1, ")": -1}.get(source[i], 0)
            if depth == 0:
                break
        if begin is not None:
            said = re.sub(r"[^\n]", "~", source[begin:i])
            source = source[:begin] + said + source[i:]
    return source


def cpp_mutants(file: str, source: str) -> Iterator[Mutant]:
    # Comments, strings and directives keep their length and lose their text.
    quiet = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^#[^\n]*|template <[^\n]*', re.MULTILINE)
    code = quiet.sub(lambda m: "~" * len(m[0]), without_messages(source))
    for old, new in CPP_SWAPS.items():
        word = re.escape(old) if not old.isalpha() else rf"\b{old}\b"
        if old == "!":
            word = r"!(?!=)"
        for match in re.finditer(word, code):
            yield Mutant(file, *match.span(), new)
    for match in re.finditer(r"(?<=[ (,-])[0-9]+(?=[;,)\s])", code):
        yield Mutant(file, *match.span(), str(int(match[0]) + 1))


def try_mutant(
    place: Workplace, mutant: Mutant, source: str, tests: list[str], passing: set[str]
) -> dict | None:
    """passing: pytest's arguments that pass where nothing is changed; grows."""
    started = time.monotonic()
    caught_by = None
    texts = {mutant.file: mutant.applied_to(source)}

    def fails(arguments: str, texts: dict[str, str]) -> bool:
        padded = arguments.startswith("padded ")
        if padded:
            place.install(padded_host_reads() | texts)
        failed = place.failure(arguments.removeprefix("padded ")) is not None
        if padded:
            place.restore(HOST_READS)
        return failed

    try:
        if not place.install(texts):
            return None
        caught_by = next((arguments for arguments in tests if fails(arguments, texts)), None)
    finally:
        place.restore(mutant.file)
    if caught_by is not None and caught_by not in passing:
        if fails(caught_by, {}):
            sys.exit(f"without any mutant, too, these fail: {caught_by}")
        passing.add(caught_by)
    seconds = round(time.monotonic() - started)
    words = {"mutant": mutant.shown(source), "caught_by": caught_by, "seconds": seconds}
    return {"key": mutant.key(source)} | words


def others(file: str, thin: int) -> list[str]:
    if thin == 0:
        return []
    part = "" if thin == 1 else f" --part={thin - 1}/{thin}"
    tests = [f"test_{name}.py{part}" for name in OTHERS]
    return [*tests, *PADDED] if file.startswith("csrc/aten/") else tests


def draw(seed: int, only: str) -> list[tuple[Mutant, str]]:
    """All mutants in the order in which they are tried: of each file in turn one."""
    piles = []
    for file in [*PYTHON, *CPP]:
        if only not in file:
            continue
        source = (ROOT / file).read_text()
        make = cpp_mutants if file.endswith(".cpp") else python_mutants
        pile = [(mutant, source) for mutant in make(file, source)]
        random.Random(f"{seed}{file}").shuffle(pile)
        piles.append(pile)
    rounds = max(map(len, piles), default=0)
    return [pile[i] for i in range(rounds) for pile in piles if i < len(pile)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--count", type=int, default=160, help="mutants in all (160)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--thin", type=int, default=1, help="every Nth other test (1); 0: none")
    parser.add_argument("--only", default="", metavar="PART", help="files with this in their path")
    parser.add_argument("--again", action="store_true", help="what survived meets the other tests")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "results.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    done = {result["key"]: result for result in map(json.loads, lines)}
    queue, passing = iter(draw(args.seed, args.only)), set()

    def tests_of(file: str) -> list[str]:
        return others(file, 1) if args.again else [*(PYTHON | CPP)[file], *others(file, args.thin)]

    def is_to_be_tried(key: str) -> bool:
        if not args.again:
            return key not in done
        survived = key in done and "mutant" in done[key] and done[key]["caught_by"] is None
        return survived and not done[key].get("again")

    def work(place: Workplace) -> None:
        while args.again or sum("mutant" in r for r in done.values()) < args.count:
            mutant, source = next(queue, (None, ""))
            if mutant is None:
                return
            key = mutant.key(source)
            if not is_to_be_tried(key):
                continue
            # One that does not compile is remembered, and not counted.
            result = try_mutant(place, mutant, source, tests_of(mutant.file), passing)
            done[key] = (result or {"key": key}) | ({"again": True} if args.again else {})
            with log.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
            if "mutant" in done[key]:
                print(done[key]["caught_by"] or "SURVIVED", "|", done[key]["mutant"], flush=True)

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        places = [Workplace(Path(scratch) / str(i)) for i in range(args.jobs)]
        list(pool.map(work, places))
    tried = [r for r in done.values() if "mutant" in r]
    survivors = [r["mutant"] for r in tried if r["caught_by"] is None]
    print(f"{len(tried) - len(survivors)} of {len(tried)} caught; survivors:", *survivors, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
