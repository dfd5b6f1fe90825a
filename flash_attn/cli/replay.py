"""Runs the calls that FLASH_ATTN_LOG=1 printed once more, with random numbers."""

import argparse
import json
import sys
from collections.abc import Iterator

import torch

from .common import CliError, add_device_arguments, check_backend_name, pick_device, table

HELP = "run the calls that a program printed with FLASH_ATTN_LOG=1 again, on random numbers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        nargs="?",
        type=argparse.FileType(),
        default=sys.stdin,
        help="what the program wrote to stderr; other lines are skipped (default: stdin)",
    )
    add_device_arguments(parser)


def calls(lines: Iterator[str]) -> Iterator[dict]:
    """The logged calls among other lines."""
    from flash_attn._log import PREFIX

    for number, line in enumerate(lines, 1):
        _, found, text = line.partition(PREFIX)
        if not found:
            continue
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:
            raise CliError(
                f"log: line {number} is not what FLASH_ATTN_LOG wrote: {error}"
            ) from None


def random_like(described: dict, device: torch.device) -> torch.Tensor:
    """A tensor of the logged shape, strides and dtype; one of integers is as it was."""
    dtype = getattr(torch, described["dtype"])
    if "values" in described:
        return torch.tensor(described["values"], dtype=dtype, device=device)
    shape, stride = described["shape"], described["stride"]
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    numbers = torch.randn(reach + 1 if 0 not in shape else 0, device=device)
    if dtype == torch.bool:
        numbers = numbers > -1
    elif dtype == torch.int8:
        numbers = (numbers * 40).clamp(-127, 127)
    elif dtype == torch.uint8:
        numbers = (numbers * 40 + 128).clamp(0, 255)
    return numbers.to(dtype).as_strided(shape, stride)


def rebuilt(call: dict, device: torch.device, backend: str | None) -> list[object]:
    """The arguments of a logged call, for the op."""
    from flash_attn._log import argument_names

    # An older log lacks the arguments that came since.
    given = call["arguments"] | {"backend": backend}
    logged = [given.get(name) for name in argument_names(call["op"])]
    return [random_like(x, device) if isinstance(x, dict) else x for x in logged]


def run(args: argparse.Namespace) -> int:
    """Exit code 1 where an output is not finite."""
    from flash_attn._log import explained

    device = pick_device(args.device)
    check_backend_name(args.backend)
    rows, failed = [], 0
    for call in calls(args.log):
        arguments = rebuilt(call, device, args.backend)
        out = getattr(torch.ops.flash_attn, call["op"])(*arguments)[0]
        finite = bool(out.isfinite().all())
        failed += not finite
        shapes = (call["arguments"].get(name) for name in ("q", "k_cache", "k"))
        described = " ".join(str(tuple(x["shape"])) for x in shapes if x)
        here = explained(call["op"], arguments)["backend"]
        verdict = "ok" if finite else "NOT FINITE"
        rows.append([call["op"], described, call["backend"], here, verdict])
    if not rows:
        raise CliError("log: there is no line of FLASH_ATTN_LOG in it")
    print(table(["op", "q, k", "logged", f"here, on {device}", "output"], rows))
    return 1 if failed else 0
