"""Wrong values for an argument, and what an exception has to say of one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import NoneType
from typing import get_args

import numpy as np
import pytest
import torch

MANY = 300  # rows of a tensor whose repr would fill a page
MOST_CHARACTERS = 300
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
)

FLOATS = {"float16", "bfloat16", "float32", "float64", "float8_e4m3fn"}
INTEGERS = {"bool", "int8", "int32", "int64"}
NUMBERS = {"integer", "2^63"}
ANYTHING = {"string", "list", "array", "nested", *NUMBERS, *FLOATS, *INTEGERS, "complex64"}
ANYTHING |= {"rank + 1", "rank - 1", "0-dim", "meta", "sparse", "None"}
# Python's truth of the value counts; that of an array or a nested tensor is refused.
TRUTH = {"string", "list", "None", *NUMBERS}


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def wrong_values(right: object) -> Iterator[tuple[str, object]]:
    """(kind, value); some of them are right for some arguments."""
    yield "None", None
    yield "string", "x" * MANY
    yield "list", [1.0] * MANY
    yield "array", np.ones(MANY)
    yield "2^63", 2**63
    yield "integer", 7
    yield "nested", torch.nested.nested_tensor([torch.ones(2, 4, 8), torch.ones(3, 4, 8)])
    if not isinstance(right, torch.Tensor):
        return
    for dtype in DTYPES:
        if dtype != right.dtype:
            positive = right if right.dtype == torch.bool else right.abs()
            yield f"{dtype}".removeprefix("torch."), positive.to(dtype)
    yield "rank + 1", right.unsqueeze(0)
    yield "rank - 1", right[0]
    yield "0-dim", right.flatten()[0]
    yield "meta", right.to("meta")
    if right.dtype != torch.float8_e4m3fn:  # which torch has no sparse tensors of
        yield "sparse", right.to_sparse()


def is_optional(function: Callable, argument: str) -> bool:
    parameter = inspect.signature(function).parameters[argument]
    return parameter.default is None or NoneType in get_args(parameter.annotation)


def each_argument(calls: dict[Callable, list[Callable[[], dict]]]) -> pytest.MarkDecorator:
    """A test's function, make and argument: each argument in each right call of the function."""
    return pytest.mark.parametrize(
        "function, make, argument",
        [
            pytest.param(function, make, name, id=f"{function.__name__}-{make.__name__}-{name}")
            for function, makes in calls.items()
            for make in makes
            for name in inspect.signature(function).parameters
        ],
    )


def check_wrong_values(
    function: Callable,
    make: Callable[[], dict],
    argument: str,
    right: set[str],
    also: str | None = None,
    undecided: frozenset[str] = frozenset(),
) -> None:
    """Each wrong value is refused in one short line that names the argument, or `also`, which does
    not fit it then. right: the kinds that are not wrong; undecided: those that another library
    serves or refuses."""
    names = "|".join(filter(None, (argument, also)))
    torch.manual_seed(0)
    function(**make())
    for kind, value in wrong_values(make().get(argument)):
        if kind in undecided:
            continue
        try:
            function(**make() | {argument: value})
        except Exception as error:
            words = str(error)
            assert words.startswith("flash_attn: ") and len(words) <= MOST_CHARACTERS, (kind, words)
            # None is right for what is optional; then it is another argument that does not fit.
            named = re.search(rf"\b({names})\b", words) or (kind == "None" and kind in right)
            assert named, (kind, words)
        else:
            assert kind in right, f"{kind} is taken"
