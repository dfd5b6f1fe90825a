#!/usr/bin/env python3
"""Small faults in the CUDA kernels: all of them in one library, chosen at run time.

    python tests/mutation/kernels.py build --out DIR [--count 40] [--seed 0] [--jobs 2]
    python tests/mutation/kernels.py run --out DIR [--jobs 12] [--seconds N]
    python tests/mutation/kernels.py build|run --simulator --out DIR …

`build` wants a built checkout and no GPU. It copies csrc into DIR, puts the mutants there
(mutant.cuh says how one is chosen), compiles the kernels of INSTANCES again, and links them with
the checkout's other objects: DIR/libflash_attn.so. The checkout stays as it is.

`run` wants GPUs of compute capability 9.0, DIR/mutants.json and DIR/libflash_attn.so. A process a
mutant: the tests of its file until one fails. The same tests have to pass first, with none chosen.
Who dies has caught its mutant; who does not end is run once more in the end, alone on its GPU, as a
kernel that hangs holds up its neighbours, and has caught its mutant if it does not end there
either. DIR/results.jsonl gets a line a mutant; run again, what stands there is not repeated.
kernel_survivors.md, beside this file, explains those that no test sees.

Kernels of head dims up to 64 are compiled, so tests of these are run.

With --simulator both want no GPU: the library is that of a simulated one (csrc/simulator; built
before: `python3 dev.py test --simulator`), with mutants in all kernels.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workplace import ROOT, find_ninja

# The longest to compile come first.
INSTANCES = [
    "csrc/sm90/inst/bwd_d64.cu",
    "csrc/sm90/inst/bwd_some_terms_d64.cu",
    "csrc/sm90/inst/fwd_one_term_d64.cu",
    "csrc/sm90/inst/fwd_bias_d64.cu",
    "csrc/sm90/inst/bwd_split_d64.cu",
    "csrc/cuda/decode/inst/kvcache_d64.cu",
    "csrc/cuda/decode/inst/decode_d64.cu",
    "csrc/cuda/decode/inst/decode_terms_d64.cu",
    "csrc/sm90/inst/fwd_d64.cu",
    "csrc/sm90/inst/bwd_bias_d64.cu",
    "csrc/sm80/inst/bwd_scores_d64.cu",
    "csrc/sm80/inst/fwd_scores_d64.cu",
    "csrc/sm80/inst/bwd_d64.cu",
    "csrc/sm80/inst/fwd_d64.cu",
    "csrc/cuda/bwd_delta.cu",
    "csrc/cuda/bwd_convert_dq.cu",
    "csrc/cuda/cache/append.cu",
    "csrc/cuda/cache/gather.cu",
    "csrc/cuda/cache/rotate_queries.cu",
]
# Of kernels that are not among these; the simulator's library has them.
ELSEWHERE = {
    "csrc/cuda/attn/tile_mask.cuh",
    "csrc/sm90/bwd_masked_producer.cuh",
    "csrc/sm90/bwd_masked_scores.cuh",
    "csrc/sm90/fwd_masked_producer.cuh",
    "csrc/sm90/masked_scores.cuh",
}
# What pytest runs for a file, by what its path begins with: one case of each way through a kernel.
# 64 is what a cache's case has unless it says otherwise; 56 runs in the kernels for 64.
CASES = "test_kernels.py --device cuda -m sanitize -k 'not (96 or 128 or 192 or 256 or 512) and"
TESTS = {
    "csrc/cuda/attn/logit_record.cuh": ["test_max_logits.py --device cuda -k sm80"],
    "csrc/cuda/decode/": [f"{CASES} (test_decode or test_caches)'"],
    "csrc/cuda/cache/": [f"{CASES} (test_caches or test_chunks)'"],
    "csrc/sm90/": [f"{CASES} sm90 and (d64 or d56 or test_chunks)'"],
    "csrc/sm80/": [f"{CASES} sm80 and (d64 or d56 or test_chunks)'"],
    "csrc/cuda/": [f"{CASES} (d64 or d56 or test_decode or test_caches or test_chunks)'"],
}
# Who takes longer than these, and than some times what it takes with none chosen, hangs, or stands
# behind one that does.
STEP_SECONDS, STEP_TIMES = 30, 4
FIRST_SECONDS = 400  # with none chosen
HANGS = "does not end"
ENVIRONMENT = "FLASH_ATTN_MUTANT"

STAGED = ROOT / "build" / "simulator" / "csrc"  # what the simulator's kernels are compiled from

# nvcc's warnings of a call that has no meaning in a kernel.
HOST_ALONE = "20013,20014,20015"

# The named operator's sign, of the same precedence, and the pair in mutant.cuh.
OPERATORS = {
    "<": ("<", "Less"), "<=": ("<", "LessEqual"), ">": ("<", "Greater"),
    ">=": ("<", "GreaterEqual"), "==": ("==", "Equal"), "!=": ("==", "NotEqual"),
    "+": ("+", "Plus"), "-": ("+", "Minus"), "*": ("*", "Times"),
}  # fmt: skip
CLOSING = {"<": ">", "==": "==", "+": "+", "*": "*"}
OURS = "::flash_attn::mutant::"


@dataclasses.dataclass(frozen=True)
class Change:
    file: str
    start: int  # in the file's text
    end: int
    kind: str
    text: str  # what stands there instead, with @ for the number

    def numbered(self, number: int) -> str:
        return self.text.replace("@", str(number))

    def shown(self, source: str) -> str:
        line = source.count("\n", 0, self.start) + 1
        begin, end = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.start)
        before, old = source[begin : self.start], source[self.start : self.end]
        after = source[self.end : end]
        return f"{self.file}:{line}: {self.kind}: {before.lstrip()}«{old.strip()}»{after}"


def headers(file: str, seen: set[str]) -> None:
    """The file and all that it includes of csrc."""
    if file in seen:
        return
    seen.add(file)
    for name in re.findall(r'^#include "(.+)"', (ROOT / file).read_text(), re.MULTILINE):
        path = ((ROOT / file).parent / name).resolve()
        if path.is_file():
            headers(str(path.relative_to(ROOT)), seen)


def mutated_files(simulated: bool) -> list[str]:
    """The kernels and what they are made of: not the wrappers of single instructions."""
    seen: set[str] = set()
    for instance in [*INSTANCES, *(ELSEWHERE if simulated else ())]:
        headers(instance, seen)
    kernels = [f for f in seen if f.endswith((".cuh", ".cu"))]
    left_out = set() if simulated else ELSEWHERE
    return sorted(f for f in kernels if f not in left_out and not re.search("/(ptx|inst)/", f))


def on_the_device(code: str) -> list[bool]:
    """Of each character: does it lie in the body of a function that runs on the device?"""
    inside, stack, begin = [], [False], 0
    for i, character in enumerate(code):
        if character == "{":
            head = code[begin:i]
            stack.append(stack[-1] or "__device__" in head or "__global__" in head)
        inside.append(stack[-1])
        if character == "}":
            stack.pop()
        if character in "{};":
            begin = i + 1
    return inside


def changes(file: str) -> Iterator[Change]:
    source = (ROOT / file).read_text()
    # Comments, strings and directives keep their length and lose their text.
    quiet = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^#[^\n]*', re.MULTILINE)
    code = quiet.sub(lambda m: " " * len(m[0]), source)
    inside = on_the_device(code)
    # What is decided by the compiler, and loops that it has to unroll.
    fixed = re.compile(
        r"[^\n]*\b(constexpr|static_assert|using|template)\b[^\n]*|^ *for [^\n]*", re.MULTILINE
    )
    for match in re.finditer(r"\[[^\[\]\n]*\]", code):  # registers have no address
        inside[match.start() : match.end()] = [False] * len(match[0])
    for match in fixed.finditer(code):
        unrolled = "#pragma unroll\n" in source[max(0, match.start() - 20) : match.start()]
        if unrolled or not match[0].lstrip().startswith("for "):
            inside[match.start() : match.end()] = [False] * len(match[0])

    def found(pattern: str) -> Iterator[re.Match]:
        return (m for m in re.finditer(pattern, code, re.MULTILINE) if inside[m.start()])

    for match in found(r"(?<= )(<=|>=|==|!=|<|>|\+|-|\*)(?= )"):
        sign, name = OPERATORS[match[0]]
        text = f"{sign} {OURS}M<@, {OURS}{name}>{{}} {CLOSING[sign]}"
        yield Change(file, *match.span(), f"other operator for {match[0]}", text)
    for match in found(r"(?<= [+-] )[0-9]+(?=[;,) ])"):
        yield Change(file, *match.span(), "one more", f"{OURS}literal<@>({match[0]})")
    for match in found(r"(?<![\w:.])(min|max)(?=\()"):
        other = {"min": "max", "max": "min"}[match[0]]
        yield Change(file, *match.span(), f"{other} for {match[0]}", f"{OURS}{match[0]}imum<@>")
    for match in found(r"(?<=\bif )\(([^;=\n]|[=!<>]=)+\) (?=\{|\w)"):
        condition = match[0].strip()
        if condition.count("(") == condition.count(")"):
            text = f"({OURS}acts<@>() != static_cast<bool>{condition}) "
            yield Change(file, *match.span(), "if not", text)
    for match in found(r"(?<=[;{}]\n) +[a-z][\w:.]*(<[\w:, ]*>)?\([^;{}\n]*\);(?=\n)"):
        call = match[0].lstrip()
        if not call.startswith(("return", "static", "if")):
            start = match.end() - len(call)
            text = f"if (!{OURS}acts<@>()) {call}"
            yield Change(file, start, match.end(), "left out", text)


def draw(seed: int, simulated: bool) -> list[Change]:
    """All changes in the order in which they are taken: of each file in turn one."""
    piles = []
    for file in mutated_files(simulated):
        pile = list(changes(file))
        random.Random(f"{seed}{file}").shuffle(pile)
        piles.append(pile)
    random.Random(seed).shuffle(piles)
    rounds = max(map(len, piles))
    return [pile[i] for i in range(rounds) for pile in piles if i < len(pile)]


def write_mutants(mutants: list[Change], tree: Path, simulated: bool) -> None:
    """csrc with the mutants, numbered from 1 on."""
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(STAGED if simulated else ROOT / "csrc", tree)
    shutil.copy(Path(__file__).parent / "mutant.cuh", tree)
    texts = {change.file: (ROOT / change.file).read_text() for change in mutants}
    numbered = sorted(enumerate(mutants, 1), key=lambda pair: -pair[1].start)
    for number, change in numbered:
        text = texts[change.file]
        texts[change.file] = text[: change.start] + change.numbered(number) + text[change.end :]
    if not simulated:
        launch = "csrc/cuda/launch.h"
        text = (ROOT / launch).read_text()
        texts[launch], calls = re.subn(
            r"  allow_smem<kKernel>\(", "  mutant::select();\n  allow_smem<kKernel>(", text
        )
        if calls != 2:
            raise SystemExit(f"{launch}: expected two launches to put a choice before, got {calls}")
    for file, text in texts.items():
        include = '#include "mutant.cuh"\n'
        if "#pragma once" in text:
            text = text.replace("#pragma once\n", f"#pragma once\n{include}", 1)
        else:
            text = include + text
        (tree / Path(file).relative_to("csrc")).write_text(text)


def link(objects: dict[str, str], own: str, library: Path) -> None:
    """The library `own` of the checkout's build with other objects for some of its own."""
    build = ROOT / "build"
    listing = [find_ninja(), "-t", "commands", own]
    commands = subprocess.run(listing, cwd=build, capture_output=True, text=True, check=True)
    command = commands.stdout.splitlines()[-1]
    for was, now in objects.items():
        command = command.replace(f" {was} ", f" {now} ")
    command = command.replace(f"-o {own}", f"-o {library}")
    subprocess.run(command, cwd=build, shell=True, check=True)


def build(out: Path, count: int, seed: int, jobs: int, simulated: bool) -> int:
    mutants = draw(seed, simulated)[:count]
    tree = out / "csrc"
    write_mutants(mutants, tree, simulated)
    sources = STAGED if simulated else ROOT / "csrc"
    commands = json.loads((ROOT / "build" / "compile_commands.json").read_text())
    by_file = {
        "csrc/" + str(Path(entry["file"]).relative_to(sources)): shlex.split(entry["command"])
        for entry in commands
        if Path(entry["file"]).is_relative_to(sources)
        and (not simulated or "-DFLASH_ATTN_SIMULATE=90" in entry["command"])
    }
    instances = [f for f in by_file if f.endswith(".cu") and "/tests/" not in f]

    def compile_one(instance: str) -> tuple[str, str]:
        words = by_file[instance]
        words = [w for w in words if not w.startswith("-Werror") and "Xptxas" not in w]
        place = words.index("-o") + 1
        name = Path(instance).with_suffix(".o").relative_to("csrc")
        was, now = words[place], str(out / str(name).replace("/", "-"))
        words[place] = now
        words = [w.replace(str(sources), str(tree)) for w in words]
        more = [f"-I{tree}"] if simulated else [f"-I{tree}", f"-diag-error={HOST_ALONE}"]
        start = time.monotonic()
        done = subprocess.run(
            [*words, *more],
            cwd=ROOT / "build",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{instance} does not compile:\n{done.stdout[-6000:]}")
        print(f"{instance} in {time.monotonic() - start:.0f} s", flush=True)
        return was, now

    with ThreadPoolExecutor(jobs) as pool:
        objects = dict(pool.map(compile_one, instances if simulated else INSTANCES))
    library = "simulator/90/libflash_attn.so" if simulated else "libflash_attn.so"
    link(objects, library, out / "libflash_attn.so")
    texts = {change.file: (ROOT / change.file).read_text() for change in mutants}
    lines = [
        {"number": number, "file": change.file, "mutant": change.shown(texts[change.file])}
        for number, change in enumerate(mutants, 1)
    ]
    (out / "mutants.json").write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n")
    print(*(f"{line['number']:3} {line['mutant']}" for line in lines), sep="\n")
    return 0


def tests_of(file: str, simulated: bool) -> list[str]:
    tests = next(tests for path, tests in TESTS.items() if file.startswith(path))
    if not simulated:
        return tests
    # Every class of head dims is there; 80 heads take long.
    return [
        re.sub(r"not \(.*?\) and", "not h80 and", words).replace(" --device cuda", "")
        for words in tests
    ]


def visible_gpus(simulated: bool) -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, or all."""
    if simulated:
        return [""]
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))]


def failure(place: Path, arguments: str, number: int, gpu: str, limit: float) -> str | None:
    """How these tests of pytest end where mutant `number` acts; None: they pass."""
    words = [f"tests/{w}" if w.endswith(".py") else w for w in shlex.split(arguments)]
    # Without the checkout's own -q: a second one leaves out how many passed.
    quiet = ["-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-x", *quiet, *words]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": gpu,
        ENVIRONMENT: str(number),
    }
    if not gpu:
        environment["FLASH_ATTN_SIMULATED"] = "90"
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return HANGS
    if done.returncode == 0 and " passed" in done.stdout:
        return None
    return done.stdout[-600:]


def run(out: Path, jobs: int, seconds: float, simulated: bool) -> int:
    mutants = json.loads((out / "mutants.json").read_text())
    log = out / "results.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    done = {result["number"]: result for result in map(json.loads, lines)}
    passing: dict[str, str | None] = {}
    limits: dict[str, float] = {}
    start = time.monotonic()
    gpus = visible_gpus(simulated)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for part in ("flash_attn", "tests", "fa3"):
            shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pyc*"))
        for file in ("flash_attn_2_cuda.py", "pyproject.toml"):
            shutil.copy(ROOT / file, place)
        shutil.copy(out / "libflash_attn.so", place / "flash_attn" / "lib")

        def without_any(arguments: str, gpu: str) -> None:
            began = time.monotonic()
            passing[arguments] = failure(place, arguments, 0, gpu, FIRST_SECONDS)
            took = time.monotonic() - began
            limits[arguments] = max(STEP_SECONDS, STEP_TIMES * took)
            verdict = "fail" if passing[arguments] else "pass"
            print(f"none chosen: {verdict} in {took:.0f} s", "|", arguments, flush=True)

        def with_one(mutant: dict, gpu: str, alone: bool = False) -> None:
            if time.monotonic() - start > seconds:
                return
            began, how = time.monotonic(), None
            for arguments in tests_of(mutant["file"], simulated):
                how = how or failure(place, arguments, mutant["number"], gpu, limits[arguments])
            took = round(time.monotonic() - began)
            result = mutant | {"caught": how is not None, "how": how, "seconds": took}
            result["alone"] = alone
            done[mutant["number"]] = result
            with log.open("a") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
            if how == HANGS and not alone:
                print("again later", "|", mutant["mutant"], flush=True)
            else:
                print("caught" if how else "SURVIVED", "|", mutant["mutant"], flush=True)

        def undecided(mutant: dict) -> bool:
            result = done.get(mutant["number"])
            return result is not None and result["how"] == HANGS and not result["alone"]

        with ThreadPoolExecutor(jobs) as pool:
            files = {mutant["file"] for mutant in mutants}
            needed = dict.fromkeys(a for file in sorted(files) for a in tests_of(file, simulated))
            new = [mutant for mutant in mutants if mutant["number"] not in done]
            turns = itertools.cycle(gpus)
            waiting = [pool.submit(without_any, a, next(turns)) for a in needed]
            for task in waiting:
                task.result()
            # What fails without a mutant says nothing of one.
            new = [m for m in new if not any(passing[a] for a in tests_of(m["file"], simulated))]
            waiting = [pool.submit(with_one, mutant, next(turns)) for mutant in new]
            for task in waiting:
                task.result()
        again = [mutant for mutant in mutants if undecided(mutant)]
        with ThreadPoolExecutor(len(gpus)) as pool:
            waiting = [
                pool.submit(lambda part, gpu: [with_one(m, gpu, True) for m in part], part, gpu)
                for part, gpu in ((again[i :: len(gpus)], gpu) for i, gpu in enumerate(gpus))
            ]
            for task in waiting:
                task.result()
    for arguments, how in passing.items():
        if how is not None:
            print(f"without any mutant, too, these fail: {arguments}\n{how}")
    survivors = [r["mutant"] for r in done.values() if not r["caught"]]
    hanging = [m["mutant"] for m in mutants if undecided(m)]
    caught = len(done) - len(survivors) - len(hanging)
    print(f"{caught} of {len(done)} caught, {len(mutants)} built; undecided:", *hanging, sep="\n")
    print("survivors:", *survivors, sep="\n")
    return 1 if any(passing.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("build", "run"))
    parser.add_argument("--simulator", action="store_true", help="without a GPU")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--count", type=int, default=40, help="mutants in all (40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="processes at a time (build 2, run 12)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after so many")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.step == "build":
        return build(out, args.count, args.seed, args.jobs or 2, args.simulator)
    jobs = args.jobs or (2 if args.simulator else 12)
    return run(out, jobs, args.seconds, args.simulator)


if __name__ == "__main__":
    sys.exit(main())
