"""What a wrong argument's exception says. It all runs after the failure: a right call pays nothing.

A public function whose arguments the op or torch refused in words of their own calls `explain`:

    try:
        ...
    except Exception as error:
        explain(error, this_function, locals())
        raise

or is `explained`, where one more Python call costs nothing.
"""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType

import torch
from torch import Tensor

_F = typing.TypeVar("_F", bound=Callable)
_MAX_CHARACTERS = 300
_MISFIT = "expected arguments that fit together"
_INT64 = range(-(2**63), 2**63)
_CONVERSIONS = {int: "__index__", float: "__float__", bool: "__bool__"}
_WORDS = {Tensor: "torch.Tensor", NoneType: "None", int: "int (of 64 bits)"}
# What torch and Python raise for arguments that do not fit. Not a subclass of them: running out of
# memory, say, is no wrong argument.
_ARGUMENT_ERRORS = (
    AssertionError,
    AttributeError,
    IndexError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)


def shown(value: object) -> str:
    """A value in a few words: a tensor's form, anything else's repr, cut."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # of whatever class it is
        text = "?"
    text = " ".join(text.split())
    short = text if len(text) <= 60 else text[:57] + "..."
    return short if isinstance(value, (str, int, float, NoneType)) else f"{_name(value)} {short}"


def expect(condition: bool, argument: str, requirement: str, got: object) -> None:
    """Raises unless the condition holds: which argument, what was expected, what came."""
    if not condition:
        raise RuntimeError(f"flash_attn: {argument}: expected {requirement}, got {got}")


def check_wide(name: str, x: Tensor, dims: Sequence[int], shape: str) -> None:
    """That x has a floating dtype of 16 bits or more, and one of these numbers of dimensions."""
    is_dense = x.layout in (torch.strided, torch.jagged)
    if not (is_dense and x.is_floating_point() and x.dtype.itemsize > 1 and x.dim() in dims):
        raise RuntimeError(
            f"flash_attn: {name}: expected a floating dtype of at least 16 bits and shape {shape},"
            f" got {shown(x)}"
        )


def check_floats(
    name: str, x: Tensor, shape: Sequence[int], device: torch.device, like: str = "x"
) -> None:
    """That x has a floating dtype, and this shape and device, which the argument `like` has."""
    is_dense = x.layout in (torch.strided, torch.jagged)
    if not (is_dense and x.is_floating_point() and x.shape == shape and x.device == device):
        raise RuntimeError(
            f"flash_attn: {name}: expected a floating dtype and shape {tuple(shape)} on {device} as"
            f" {like} has, got {shown(x)} on {x.device}"
        )


def _name(value: object) -> str:
    return type(value).__name__


def _choices(annotation: object) -> tuple:
    """The members of `Tensor | int | None`."""
    return typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def _is(value: object, choice: object) -> bool:
    """Whether the library takes `value` where a signature says `choice`."""
    if typing.get_origin(choice) is Sequence:
        members = _choices(typing.get_args(choice)[0])
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return listed and all(any(_is(x, member) for member in members) for x in value)
    if typing.get_origin(choice) is tuple:
        return isinstance(value, Sequence) and len(value) == len(typing.get_args(choice))
    if choice in _CONVERSIONS:  # NumPy's and torch's numbers, too
        in_range = choice is not int or not isinstance(value, int) or value in _INT64
        is_scalar = getattr(value, "ndim", 0) == 0
        return in_range and is_scalar and hasattr(value, _CONVERSIONS[choice])
    return not isinstance(choice, type) or isinstance(value, choice)


def flag(name: str, value: object) -> bool:
    """What a module keeps of an argument whose truth it asks for later."""
    if not _is(value, bool):
        raise TypeError(f"flash_attn: {name}: expected bool, got {shown(value)}")
    return bool(value)


def _words(choices: tuple) -> str:
    def word(choice: object) -> str:
        if typing.get_origin(choice) is Sequence:
            return f"a sequence of {_words(_choices(typing.get_args(choice)[0]))}"
        return _WORDS.get(choice, getattr(choice, "__name__", str(choice)))

    return " or ".join(word(choice) for choice in choices)


def _wrong_type(parameters: Mapping[str, inspect.Parameter], given: Mapping) -> Exception | None:
    for name, parameter in parameters.items():
        choices = _choices(parameter.annotation)
        value = given[name]
        if not any(_is(value, choice) for choice in choices):
            return TypeError(f"flash_attn: {name}: expected {_words(choices)}, got {shown(value)}")
    for name in parameters:
        value = given[name]
        if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
            layout = "nested" if value.is_nested else str(value.layout)
            return RuntimeError(
                f"flash_attn: {name}: expected a dense strided tensor, got a {layout} one"
            )
    return None


def check_types(parameters: Mapping[str, inspect.Parameter], given: Mapping) -> None:
    """That each argument is of a type that its annotation names, and each tensor is dense."""
    wrong = _wrong_type(parameters, given)
    if wrong is not None:
        raise wrong


def _renamed(error: Exception, names: Mapping[str, str]) -> Exception | None:
    """The same error with this function's names; None where they are the same, or it names none."""
    if str(error).count(": ") < 2:
        return None
    head, argument, rest = str(error).split(": ", 2)
    rest = re.sub(r"\bas (\w+) has\b", lambda m: f"as {names.get(m[1], m[1])} has", rest)
    words = f"{head}: {names.get(argument, argument)}: {rest}"
    return type(error)(words) if words != str(error) else None


def _with_forms(error: Exception, function: Callable, given: Mapping) -> Exception:
    """torch's own words, with what each argument was that is not its default."""

    def form(value: object) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
        return shown(value)[:24]

    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    chosen = (x for x in given.items() if x[1] is not None and x[1] is not defaults[x[0]])
    forms = (f"{name} {form(value)}" for name, value in chosen)
    if _MISFIT in str(error):  # said so of a function that this one calls
        error = error.__context__ or error
    text = f"flash_attn: {function.__qualname__}: {_MISFIT}, got "
    words = f"{text}{', '.join(forms)}: {' '.join(str(error).split())}"
    kind = RuntimeError if isinstance(error, (ArithmeticError, AttributeError)) else type(error)
    return kind(words[:_MAX_CHARACTERS])


def explain(
    error: Exception,
    function: Callable,
    variables: Mapping[str, object],
    names: Mapping[str, str] | None = None,
    *,
    of_torch: bool = False,
) -> None:
    """Raises what says better which argument of `function` is wrong; returns where nothing does.

    Arguments:
        variables: the function's, its parameters among them.
        names: this function's names of arguments that a function which it calls knows by others.
        of_torch: torch's operations checked the arguments: name all of them with torch's reason.
    """
    # No other error of the GPU's has anything to do with an argument.
    no_such_gpu = isinstance(error, torch.AcceleratorError) and "device ordinal" in str(error)
    if type(error) not in _ARGUMENT_ERRORS and not no_such_gpu:
        return
    signature = inspect.signature(function).parameters
    parameters = {name: p for name, p in signature.items() if p.annotation is not p.empty}
    given = {name: variables[name] for name in parameters}  # all but self
    better = _wrong_type(parameters, given)
    if str(error).startswith("flash_attn: ") and not (of_torch and _MISFIT in str(error)):
        # An argument of the wrong type may make another one look wrong.
        named = str(error).split(": ", 2)[1]
        if better is None or f"flash_attn: {named}: " in str(better):
            better = _renamed(error, names or {})
    elif better is None and of_torch:
        better = _with_forms(error, function, given)
    if better is not None:
        raise better from None


def explained(
    names: Mapping[str, str] | None = None, *, of_torch: bool = False
) -> Callable[[_F], _F]:
    """A decorator: the exceptions say which argument is wrong. Arguments: as in explain."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                try:
                    given = inspect.signature(function).bind(*args, **kwargs)
                except TypeError:  # too many or too few: Python's own words
                    raise error from None
                given.apply_defaults()
                explain(error, function, given.arguments, names, of_torch=of_torch)
                raise

        return call

    return decorate
