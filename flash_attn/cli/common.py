"""What the commands share: the one kind of error, the device, tables."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence

import torch


class CliError(Exception):
    """What the user can mend; the message is one line and names the argument."""


def positive_int(text: str) -> int:
    """An argparse type."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value


def add_device_arguments(parser: argparse.ArgumentParser, backend: bool = True) -> None:
    parser.add_argument(
        "--device", default=None, help="cpu or cuda (default: cuda if there is a GPU)"
    )
    if backend:
        parser.add_argument(
            "--backend",
            default=None,
            help="this backend or an error (default: chosen for each call)",
        )


def pick_device(name: str | None) -> torch.device:
    """``--device`` as a usable torch device."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise CliError(f"--device: expected cpu or cuda, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise CliError(
                f"--device: expected a CUDA GPU that torch can use, got {name!r}, and there is none"
            )
        if (device.index or 0) >= count:
            raise CliError(f"--device: expected cuda:0 to cuda:{count - 1}, got {name!r}")
    return device


def usual_dtype(device: torch.device) -> torch.dtype:
    """What training uses there: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_backend(name: str | None, device: torch.device, head_dim: int) -> None:
    """Fails before any work on a backend that does not exist or cannot train on this device."""
    if name is None:
        return
    import flash_attn

    check_backend_name(name)
    q = torch.empty(1, 8, 1, head_dim, device=device, dtype=usual_dtype(device))
    reasons: list[str] = []
    for op in ("fwd", "bwd"):
        reasons = reasons or flash_attn.can_use(q, q, q, op=op, causal=True).reasons.get(name, [])
    if reasons:
        raise CliError(f"--backend: {name} cannot serve this: {'; '.join(reasons)}")


def check_backend_name(name: str | None) -> None:
    import flash_attn

    try:
        if name is not None:
            flash_attn.use_backend(name)
    except ValueError as error:
        expected = str(error).removeprefix("flash_attn: backend: ")
        raise CliError(f"--backend: {expected}") from None


def optional_import(module: str, purpose: str):
    """A package that only some commands need."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CliError(
            f"{purpose} needs {module}: pip install {module.split('.')[0]} ({error})"
        ) from None


@contextlib.contextmanager
def forced_backend(name: str | None) -> Iterator[None]:
    """``use_backend(name)``; None leaves the choice to the library."""
    import flash_attn

    if name is None:
        yield
        return
    with flash_attn.use_backend(name):
        yield


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An aligned text table, the first column to the left; None shows as '-'."""
    cells = [list(header)] + [["-" if c is None else str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        return "  ".join([first, *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


def human_bytes(count: float | None) -> str:
    """MiB with one digit; '-' where it could not be measured."""
    return "-" if count is None else f"{count / 2**20:,.1f} MiB"
