"""What every race has: its contestants are compared, then timed, one case after another."""

import gc
import re
import sys
from collections.abc import Callable, Iterable

import torch

from benchmarks.timing import Timer

# Contestants' outputs differ by the rounding of P, dS and the result to 16 bits; more is a wrong
# result.
AGREE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
AGREE_TF32 = 5e-3  # operands in 11 bits, in place of fp32
AGREE_8_BITS = 0.1  # K and V in e4m3, of few keys: 5e-2, and with queries in e4m3 as well, more


class Race:
    """Times the contestants of one case after another, and keeps what could not run.

    only: the pattern that the shapes of its cases have to match."""

    def __init__(self, timer: Timer, dtype: torch.dtype, only: str = ""):
        self.timer, self.dtype, self.device = timer, dtype, timer.device
        self.only = only
        self.reasons: dict[str, str] = {}
        self.wrong: list[str] = []

    def chosen(self, cases: Iterable) -> list:
        """Those that take part."""
        return [case for case in cases if matches(self.only, case.shape())]

    def seconds(
        self,
        names: Iterable[str],
        label: str,
        build: Callable,
        compare: bool = True,
        agree: dict[str, float] | None = None,
    ) -> dict[str, float | None]:
        """Seconds a call of build(name)() for each name; None where a contestant cannot. agree: how
        far the output of a name may be from the first one's, where AGREE does not say."""
        times, reference = {}, None
        for name in names:
            times[name] = None
            try:
                fn = build(name)
                result = fn()
                if compare:
                    limit = (agree or {}).get(name, AGREE[self.dtype])
                    reference = self._compare(name, label, result, reference, limit)
                times[name] = self.timer(fn)
            except Exception as error:  # of any kind: peers assert, and compile on the way
                lines = str(error).strip().splitlines() or [type(error).__name__]
                self.reasons.setdefault(f"{label} {name}", lines[0])
            fn = result = None
            gc.collect()
        return times

    def _compare(self, name: str, label: str, result, reference, limit: float):
        tensors = result if isinstance(result, tuple | list) else (result,)
        if reference is None:
            return name, [x.detach().clone() for x in tensors]
        first, expected = reference
        # Of the last input, a sink, a peer may have no gradient.
        for index, (x, y) in enumerate(zip(tensors, expected, strict=False)):
            error = ((x.double() - y.double()).norm() / y.double().norm()).item()
            if not error <= limit:
                self.wrong.append(
                    f"{label}: output {index} of {name} differs from {first} by {error:.2e}"
                )
        return reference


def matches(pattern: str, shape: dict) -> bool:
    """Whether the pattern is found in a shape as its records are printed: "d=64 causal=True"."""
    return re.search(pattern, " ".join(f"{k}={v}" for k, v in shape.items())) is not None


# What progress() was told, so that a race that is stopped has it.
SHOWN: list[dict] = []


def progress(record: dict) -> None:
    """One line a case on stderr, so that a long race shows where it is."""
    SHOWN.append(record)
    values = "  ".join(f"{n} {v:.4g}" if v else f"{n} -" for n, v in record["values"].items())
    print(
        f"{record['kind']} {record['shape']}: {values} {record['unit']}",
        file=sys.stderr,
        flush=True,
    )
