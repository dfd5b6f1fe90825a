"""FLASH_ATTN_LOG=1: a line on stderr for each new call, which `python -m flash_attn replay` runs.

A line is the prefix and a JSON object: the op, its arguments by name (a tensor is an object with
shape, stride, dtype and device; one of integers also with values, but for a mask's rows), the
backend that serves it, how, and every other backend's reasons why it cannot. Calls are new where
any of that differs but values. Reading values waits for the device. Calls inside compiled graphs,
transforms and CUDA graph capture are not logged, nor are backward passes, which start in C++.
"""

import json
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn._library import C

ENABLED = os.environ.get("FLASH_ATTN_LOG", "0") not in ("", "0")
PREFIX = "flash_attn: call "
_INTEGERS = (torch.uint8, torch.int32, torch.int64)
_LONG = ("mask_rows", "mask_labels")  # numbers for each query or key
_seen: set[str] = set()


def is_readable() -> bool:
    """Whether the values of tensors can be read here."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def argument_names(op: str) -> list[str]:
    """Of an op of ours, in order."""
    schema = getattr(torch.ops.flash_attn, op).default._schema
    return [argument.name for argument in schema.arguments]


def _described(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return {
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": value.device.type,
    }


def explained(op: str, arguments: Sequence) -> dict:
    """The backend of a call, how it serves it, and the others' reasons why they cannot."""
    explain = C.explain_fwd if op == "fwd" else C.explain_decode
    backend, reasons, plans = explain(*(arguments[5:] if op == "kvcache" else arguments))
    return {"backend": backend, "plan": plans.get(backend), "reasons": reasons}


def call(op: str, arguments: Sequence) -> None:
    """Logs a call of an op that is about to run."""
    if not is_readable():
        return
    names = argument_names(op)
    described = {n: _described(x) for n, x in zip(names, arguments, strict=True)}
    key = json.dumps([op, described])
    if key in _seen:
        return
    _seen.add(key)
    for name, x in zip(names, arguments, strict=True):
        if isinstance(x, Tensor) and x.dtype in _INTEGERS and name not in _LONG:
            described[name]["values"] = x.tolist()
    line = {"op": op, "arguments": described} | explained(op, arguments)
    sys.stderr.write(PREFIX + json.dumps(line, ensure_ascii=False) + "\n")
