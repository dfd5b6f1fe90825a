"""The command line: ``python -m flash_attn demo|info|check|race|replay``.

Each command is a module with ``HELP``, ``add_arguments(parser)`` and ``run(args) -> exit code``.
What the user got wrong is a :class:`~flash_attn.cli.common.CliError`: one line on stderr, exit code
2.
"""

import argparse
import importlib
import os
import sys

from .common import CliError

COMMANDS = ("demo", "info", "check", "race", "replay")


class _Parser(argparse.ArgumentParser):
    """argparse without the usage text: bad input gets one line."""

    def error(self, message):
        raise CliError(f"{message} (python -m flash_attn {self.command} --help)".replace("  ", " "))

    command = ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m flash_attn", description="Exact attention for PyTorch.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        sub = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        sub.command = name
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command. Exit code: 0, 1 (a comparison failed), 2 (bad input), 130 (interrupted)."""
    try:
        args = _parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except CliError as error:
        print(f"flash_attn: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("flash_attn: interrupted", file=sys.stderr)
        return 130
