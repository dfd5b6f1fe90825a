"""The one result format of all benchmarks, and its tables.

A JSON list of records ``{kind, shape, unit, values: {name: value}, ratio: {"a/b": value} or
null}``. The first has kind "run": when, on which chip, with which versions and commit, and how it
was measured.
"""

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from flash_attn.cli.common import table

ROOT = Path(__file__).resolve().parent.parent


def record(kind: str, shape: dict, unit: str, values: dict, ratio: dict | None = None) -> dict:
    """One measured case; a value is None where a contestant cannot."""
    return {"kind": kind, "shape": shape, "unit": unit, "values": values, "ratio": ratio}


def ratios(values: dict, ours: str, peers: Iterable[str], faster_is: str) -> dict | None:
    """{"ours/peer": times faster}, of rates (faster_is "more") or of times (faster_is "less")."""
    result = {}
    for peer in peers:
        mine, other = values.get(ours), values.get(peer)
        if mine and other:
            result[f"{ours}/{peer}"] = mine / other if faster_is == "more" else other / mine
    return result or None


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def geometric_means(records: list[dict], by: tuple[str, ...]) -> list[dict]:
    """Records ``<kind>.geomean`` of the ratios: of each group of equal shape[by], then of all."""
    groups: dict[tuple, dict[str, list[float]]] = {}
    for r in records:
        group = tuple((key, r["shape"].get(key)) for key in by)
        for key in {(r["kind"], group), (r["kind"], ())}:
            for name, value in (r["ratio"] or {}).items():
                groups.setdefault(key, {}).setdefault(name, []).append(value)
    return [
        record(
            f"{kind}.geomean",
            dict(group) or {"all": True},
            "ratio",
            {n: geometric_mean(v) for n, v in means.items()},
        )
        for (kind, group), means in sorted(
            groups.items(), key=lambda item: (item[0][0], item[0][1] == (), str(item[0][1]))
        )
    ]


def run_record(device: torch.device, method: str, **more) -> dict:
    """The first record of a file."""
    import flash_attn

    cuda = device.type == "cuda"
    chip = torch.cuda.get_device_name(device) if cuda else _cpu_name()
    values = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "chip": chip,
        "flash_attn": flash_attn.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "threads": None if cuda else torch.get_num_threads(),
        "commit": commit(),
        "method": method,
        **more,
    }
    return record("run", {}, "", values)


def commit() -> str | None:
    """FLASH_ATTN_COMMIT, for a tree that was copied; else git's, "+" when the tree differs."""
    if given := os.environ.get("FLASH_ATTN_COMMIT"):
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write(path: str | Path | None, records: list[dict]) -> None:
    """Writes one record a line: a diff of two runs stays readable."""
    if path is None:
        return
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in records)
    Path(path).write_text(f"[\n{lines}\n]\n")


def read(path: str | Path) -> list[dict]:
    return json.loads(Path(path).read_text())


def show(records: list[dict]) -> str:
    """A table for each (kind, unit): shape, values, ratios."""
    blocks: dict[tuple, list[dict]] = {}
    for r in records:
        if r["kind"] != "run":
            blocks.setdefault((r["kind"], r["unit"]), []).append(r)
    return "\n\n".join(_block(kind, unit, group) for (kind, unit), group in blocks.items())


def _block(kind: str, unit: str, group: list[dict]) -> str:
    names = list(dict.fromkeys(n for r in group for n in r["values"]))
    pairs = list(dict.fromkeys(n for r in group for n in r["ratio"] or ()))
    rows = [
        [
            " ".join(f"{k}={v}" for k, v in r["shape"].items()),
            *(_number(r["values"].get(n)) for n in names),
            *(_number((r["ratio"] or {}).get(n)) for n in pairs),
        ]
        for r in group
    ]
    return table([f"{kind} [{unit}]", *names, *pairs], rows)


def _number(value: float | str | None) -> str | None:
    return f"{value:.4g}" if isinstance(value, int | float) else value
