"""What the functions of this package take, and the words of a wrong argument."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from flash_attn._errors import check_floats, check_types, check_wide, expect, shown

_F = TypeVar("_F", bound=Callable)
_INTEGERS = torch.int32, torch.int64


def checked(*checks: Callable[..., None]) -> Callable[[_F], _F]:
    """A decorator: an argument of another type than the signature says is refused, and then what
    one of `checks` refuses, which gets the arguments that its own signature names."""

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        annotated = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }

        @functools.wraps(function)
        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            check_types(annotated, given)
            for check in checks:
                named = inspect.signature(check).parameters
                check(**{name: given[name] for name in named if name in given})
            return function(*args, **kwargs)

        return call

    return decorate


def check_rows(x: Tensor) -> None:
    """Scores, of which each row has a softmax."""
    check_wide("x", x, range(1, 65), "(…, n)")
    expect(x.size(-1) > 0, "x", "rows of at least one element", shown(x))


def check_head(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One head: q (n, d), k (m, d) and v (m, d_v) of at least one key."""
    for name, x, shape in (("q", q, "(n, d)"), ("k", k, "(m, d)"), ("v", v, "(m, d_v)")):
        check_wide(name, x, (2,), shape)
        same = x.dtype == q.dtype and x.device == q.device
        expect(same, name, f"{q.dtype} on {q.device} as q has", f"{x.dtype} on {x.device}")
    keys = f"shape (m, {q.size(1)}) as q's head dim asks for, m at least 1"
    expect(k.size(1) == q.size(1) and k.size(0) > 0, "k", keys, shown(k))
    expect(v.size(0) == k.size(0), "v", f"{k.size(0)} rows as k has", shown(v))


def check_blocks(block_q: int, block_k: int) -> None:
    """Rows of a tile and of its keys."""
    expect(block_q >= 1, "block_q", "at least 1", block_q)
    expect(block_k >= 1, "block_k", "at least 1", block_k)


def check_splits(num_splits: int) -> None:
    """Pieces of the keys, of which some may be empty."""
    expect(num_splits >= 1, "num_splits", "at least 1", num_splits)


def check_words(counter: Sequence, key: Sequence | Tensor | int, rounds: int) -> None:
    """What Philox mixes: words of 32 bits as int64."""
    for name, words in (("counter", counter), ("key", key if isinstance(key, Sequence) else [key])):
        for word in words:
            is_word = type(word) is int or (
                isinstance(word, Tensor) and word.dtype == torch.int64 and not word.is_meta
            )
            expect(is_word, name, "ints and int64 tensors", shown(word))
    expect(rounds >= 0, "rounds", "at least 0", rounds)


def check_probability(dropout_p: float) -> None:
    """Of being dropped."""
    expect(0 <= dropout_p <= 1, "dropout_p", "a probability in [0, 1]", shown(dropout_p))


def check_rng_state(rng_state: Tensor | Sequence[int] | None) -> None:
    """Where the random numbers begin."""
    if isinstance(rng_state, Tensor):
        shape, dtype = tuple(rng_state.shape), rng_state.dtype
        is_pair = shape == (2,) and dtype == torch.int64 and not rng_state.is_meta
    else:
        is_pair = rng_state is not None and len(rng_state) == 2
    expect(is_pair, "rng_state", "(seed, offset), two ints or int64 (2)", shown(rng_state))


def check_places(batch: int | range, heads: int, seqlen_q: int, seqlen_k: int) -> None:
    """The places of a matrix of weights."""
    counts = dict(batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    for name, count in counts.items():
        least = min(count, default=0) if isinstance(count, range) else count
        expect(least >= 0, name, "at least 0", count)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of flash_attn_func and flash_attn_varlen_func by name, and what only the reference
    takes."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int | None] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    attn_bias: Tensor | None = None
    learnable_sink: Tensor | None = None
    causal_alignment: str = "bottom-right"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    rng_state: Tensor | Sequence[int] | None = None  # (seed, offset)
    max_lse: float | None = None  # None: that of q's dtype

    def __post_init__(self) -> None:
        check_types(inspect.signature(type(self)).parameters, vars(self))
        check_probability(self.dropout_p)
        if self.dropout_p > 0:
            check_rng_state(self.rng_state)
        expect(self.softcap >= 0, "softcap", "at least 0", self.softcap)
        window = self.window_size
        expect(len(window) == 2, "window_size", "(left, right)", shown(window))
        aligned = self.causal_alignment in ("bottom-right", "top-left")
        words = "'bottom-right' or 'top-left'"
        expect(aligned, "causal_alignment", words, shown(self.causal_alignment))
        together = (self.cu_seqlens_q is None) == (self.cu_seqlens_k is None)
        expect(together, "cu_seqlens_k", "cu_seqlens_q and cu_seqlens_k together", "one of them")

    @property
    def is_varlen(self) -> bool:
        return self.cu_seqlens_q is not None


def check_call(
    q: Tensor, k: Tensor, options: Mapping[str, object], v: Tensor | None = None
) -> None:
    """That the tensors of a call fit together."""
    o = Options(**options)
    v = k if v is None else v
    form = "(total, heads, d)" if o.is_varlen else "(batch, seqlen, heads, d)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_wide(name, x, (3,) if o.is_varlen else (4,), form)
        expect(x.device == q.device, name, f"{q.device} as q has", f"a tensor on {x.device}")
    heads_q, heads_kv = q.size(-2), k.size(-2)
    divides = heads_kv > 0 and heads_q % heads_kv == 0
    expect(divides, "k", f"heads that divide q's {heads_q}", heads_kv)
    fits = k.size(-1) == q.size(-1) and (o.is_varlen or k.size(0) == q.size(0))
    expect(fits, "k", f"batch and head dim of q's {tuple(q.shape)}", shown(k))
    expect(v.shape[:-1] == k.shape[:-1], "v", f"k's {tuple(k.shape)} but for d", shown(v))

    batch = q.size(0)
    if o.is_varlen:
        _check_integers("cu_seqlens_q", o.cu_seqlens_q, None, q.device)
        batch = o.cu_seqlens_q.size(0) - 1
        _check_integers("cu_seqlens_k", o.cu_seqlens_k, batch + 1, q.device)
    for name in ("seqused_q", "seqused_k", "leftpad_k"):
        if getattr(o, name) is not None:
            _check_integers(name, getattr(o, name), batch, q.device)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        expect((getattr(o, name) or 0) >= 0, name, "at least 0", getattr(o, name))
    if o.learnable_sink is not None:
        check_floats("learnable_sink", o.learnable_sink, (heads_q,), q.device, "q")
    if o.alibi_slopes is not None:
        shape = (heads_q,) if o.alibi_slopes.dim() == 1 else (batch, heads_q)
        check_floats("alibi_slopes", o.alibi_slopes, shape, q.device, "q")
    if o.attn_bias is not None:
        _check_bias(o.attn_bias, batch, heads_q, q.device)


def check_gradients(
    dout: Tensor, q: Tensor, v: Tensor, dlse: Tensor | None, options: Mapping[str, object]
) -> None:
    """What flows into the results of a call that check_call has passed."""
    check_floats("dout", dout, (*q.shape[:-1], v.size(-1)), q.device, "q")
    if dlse is not None:
        *rows, length, heads, _ = q.shape
        check_floats("dlse", dlse, (*rows, heads, length), q.device, "q")


def _check_integers(name: str, x: Tensor, count: int | None, device: torch.device) -> None:
    """That x is one row of integers; of any number but none with a count of None."""
    fits = x.dim() == 1 and (x.numel() > 0 if count is None else x.numel() == count)
    shape = "(batch + 1)" if count is None else f"({count})"
    expect(
        fits and x.dtype in _INTEGERS and x.device == device,
        name,
        f"int32 or int64 and shape {shape} on {device} as q has",
        f"{shown(x)} on {x.device}",
    )


def check_longest(options: Options, longest_q: int, longest_k: int) -> None:
    """That there is room for the longest sequences, which cu_seqlens and the others have told."""
    for name, longest in (("max_seqlen_q", longest_q), ("max_seqlen_k", longest_k)):
        room = getattr(options, name) or longest
        expect(room >= longest, name, f"at least {longest}, the longest sequence's length", room)
    if options.attn_bias is not None:
        rows, keys = (1, 1, *options.attn_bias.shape)[-2:]
        fits = (rows == 1 or rows >= longest_q) and (keys == 1 or keys >= longest_k)
        shape = f"a shape that broadcasts to (…, {longest_q}, {longest_k})"
        expect(fits, "attn_bias", shape, shown(options.attn_bias))


def _check_bias(bias: Tensor, batch: int, heads: int, device: torch.device) -> None:
    """That it broadcasts to (batch, heads, …)."""
    is_read = bias.is_floating_point() or bias.dtype == torch.bool
    sizes = (1,) * (4 - bias.dim()) + bias.shape
    fits = len(sizes) == 4 and sizes[0] in (1, batch) and sizes[1] in (1, heads)
    expect(
        is_read and fits and bias.device == device,
        "attn_bias",
        f"a floating or bool dtype that broadcasts to ({batch}, {heads}, …) on {device} as q has",
        f"{shown(bias)} on {bias.device}",
    )
