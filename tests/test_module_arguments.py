"""Every argument of the functions and modules under upstream's names beside the attention calls,
given each kind of wrong value: one line that names it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from wrong_values import (
    ANYTHING,
    FLOATS,
    INTEGERS,
    MANY,
    NUMBERS,
    TRUTH,
    check_wrong_values,
    is_optional,
    normal,
    numbers,
)

from flash_attn.losses import cross_entropy as losses
from flash_attn.ops import rms_norm
from flash_attn.ops.triton import cross_entropy, layer_norm, rotary

WALKED = (rms_norm, cross_entropy, layer_norm, rotary, losses)


def made(module: type[nn.Module], **inputs: torch.Tensor) -> Callable[..., object]:
    """The module's constructor, and a call of what it makes."""

    @functools.wraps(module, updated=())
    def call(**arguments: object) -> object:
        return module(**arguments)(**inputs)

    return call


def size() -> dict:
    return dict(hidden_size=4)


def normed() -> dict:
    tensors = dict(x=normal(2, 3, 4), residual=normal(2, 3, 4), x1=normal(2, 3, 4))
    columns = dict(weight=normal(4), bias=normal(4), weight1=normal(4), bias1=normal(4))
    return tensors | columns | dict(out=normal(2, 3, 4), residual_out=normal(2, 3, 4), prenorm=True)


def normed_with_scales() -> dict:
    call = normed() | dict(rowscale=normal(2, 3))
    del call["x1"]
    return call


def x_and_weight() -> dict:
    return dict(x=normal(2, 3, 4), weight=normal(4), epsilon=1e-5)


def dropped() -> dict:
    rows = dict(x0=normal(2, 3, 4), residual=normal(2, 3, 4), rowscale=normal(2, 3))
    columns = dict(weight=normal(4), bias=normal(4), layerscale=normal(4))
    return rows | columns | dict(dropout_p=0.0, epsilon=1e-5)


def of_norm() -> dict:
    return dict(x=normal(2, 3, 4), residual=normal(2, 3, 4))


def x_alone() -> dict:
    return dict(x=normal(2, 3, 4))


def of_dropped_norm() -> dict:
    return dict(x0=normal(2, 3, 4), residual=normal(2, 3, 4))


def scores() -> dict:
    return dict(logits=normal(3, 5), labels=torch.tensor([0, 4, 2]))


def of_loss() -> dict:
    return dict(input=normal(3, 5), target=torch.tensor([0, 4, 2]))


def rotated() -> dict:
    tables = dict(cos=normal(MANY, 4), sin=normal(MANY, 4))
    return dict(x=normal(2, 4, 4, 8), seqlen_offsets=numbers(0, 3)) | tables


def rotated_varlen() -> dict:
    return rotated() | dict(x=normal(7, 4, 8), cu_seqlens=numbers(0, 3, 7))


CONSTRUCTORS: dict[Callable, list[Callable[[], dict]]] = {
    made(layer_norm.RMSNorm, **of_norm()): [size],
    made(rms_norm.RMSNorm, **x_alone()): [size],
    made(rms_norm.DropoutAddRMSNorm, **of_dropped_norm()): [size],
    made(losses.CrossEntropyLoss, **of_loss()): [dict],
}
CALLS: dict[Callable, list[Callable[[], dict]]] = {
    layer_norm.layer_norm_fn: [normed, normed_with_scales],
    layer_norm.rms_norm_fn: [normed, normed_with_scales],
    layer_norm.RMSNorm(4).forward: [of_norm],
    rms_norm.rms_norm: [x_and_weight],
    rms_norm.dropout_add_rms_norm: [dropped],
    rms_norm.RMSNorm(4).forward: [x_alone],
    rms_norm.DropoutAddRMSNorm(4).forward: [of_dropped_norm],
    cross_entropy.cross_entropy_loss: [scores],
    losses.CrossEntropyLoss().forward: [of_loss],
    rotary.apply_rotary: [rotated, rotated_varlen],
} | CONSTRUCTORS
WIDE = FLOATS - {"float8_e4m3fn"}
# What is right for an argument, of the values; None besides where the signature says so.
TAKEN: dict[str, set[str]] = {
    **dict.fromkeys(["prenorm", "residual_in_fp32", "zero_centered_weight", "is_rms_norm"], TRUTH),
    **dict.fromkeys(["return_dropout_mask", "return_z_loss"], TRUTH),
    **dict.fromkeys(["interleaved", "inplace", "conjugate"], TRUTH),
    **dict.fromkeys(["eps", "epsilon", "logit_scale", "lse_square_scale"], NUMBERS),
    **dict.fromkeys(["hidden_size", "ignore_index"], {"integer"}),
    **dict.fromkeys(["x", "x0", "logits", "input"], WIDE),
    **dict.fromkeys(["x1", "residual", "out", "residual_out", "rowscale", "layerscale"], FLOATS),
    **dict.fromkeys(["weight", "bias", "weight1", "bias1", "cos", "sin"], FLOATS),
    **dict.fromkeys(["labels", "target"], {"int32"}),
    "seqlen_offsets": {"integer", *INTEGERS},
    "cu_seqlens": {"int8", "int64"},
    **dict.fromkeys(["precomputed_lse", "inplace_backward", "max_seqlen"], ANYTHING),  # not read
}
ROWS = {"rank + 1", "rank - 1"}  # of one argument alone, any number of dimensions
MORE: dict[Callable[[], dict], dict[str, set[str]]] = dict.fromkeys(
    [x_and_weight, x_alone], {"x": WIDE | ROWS}
)
# A constructor's argument may first not fit when the module is called.
BESIDE = {"hidden_size": "weight"}


def title(function: Callable) -> str:
    return f"{function.__module__.removeprefix('flash_attn.')}.{function.__qualname__}"


@pytest.mark.parametrize(
    "function, make, argument",
    [
        pytest.param(function, make, argument, id=f"{title(function)}-{make.__name__}-{argument}")
        for function, makes in CALLS.items()
        for make in makes
        for argument in inspect.signature(function).parameters
    ],
)
def test_wrong_value(function: Callable, make: Callable[[], dict], argument: str) -> None:
    right = MORE.get(make, {}).get(argument, TAKEN.get(argument, set()))
    if is_optional(function, argument):
        right = right | {"None"}
    check_wrong_values(function, make, argument, right, BESIDE.get(argument))


@pytest.mark.parametrize("module", WALKED, ids=lambda module: module.__name__)
def test_every_public_function_is_here(module: ModuleType) -> None:
    """What the module defines under a public name; of a class, its constructor and forward."""
    own = {x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__}
    names = {x.__qualname__ for x in own if not x.__qualname__.startswith("_")}
    names |= {f"{x.__qualname__}.forward" for x in own if inspect.isclass(x)}
    assert names <= {x.__qualname__ for x in CALLS if x.__module__ == module.__name__}
