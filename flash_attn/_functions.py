"""Upstream's autograd classes and small helpers, for programs that import them.

The classes are callable as upstream's are, Class.apply(...) with its positional order; the gradient
is that of the public functions, in C++.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x with a last dimension of stride 1: itself, or a copy."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """The smallest multiple of m that is not below x."""
    return (x + m - 1) // m * m


def _get_block_size_n(
    device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """The keys in one tile, after each of which upstream's kernels know the largest score so far.

    Its tests scale S_dmask by it, tile by tile. Here that is done by the largest score of the whole
    row, so one tile holds all keys.
    """
    return 1 << 30


class _Applied:
    """Class.apply(*arguments of the public function, is_grad_enabled)."""

    function: Callable

    @classmethod
    def apply(cls, *arguments: object) -> object:
        parameters = inspect.signature(cls.function).parameters.values()
        positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        given, is_grad_enabled = arguments[:positional], arguments[positional:]
        with torch.set_grad_enabled(torch.is_grad_enabled() and all(is_grad_enabled)):
            return cls.function(*given)


def applied(name: str, function: Callable) -> type:
    """The class `name`, whose apply is `function` with is_grad_enabled after its last argument."""
    return type(
        name,
        (_Applied,),
        {
            "__doc__": f"{function.__name__} with autograd.Function's apply; see there.",
            "__module__": function.__module__,
            "function": staticmethod(function),
        },
    )
