"""Adapters: each contestant as closures without arguments, so that only its own work is timed.
Calls against caches and pages are in cache_calls.py.

Layout is ours, (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) for varlen; peers
that want heads first get transposed views. A contestant that cannot serve a case raises
:class:`Unsupported`, or its own RuntimeError.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import flex
from benchmarks.shapes import Case
from flash_attn.cli import peers
from flash_attn.cli.common import forced_backend

# Any other name is a backend of ours; "ours" lets the library choose.
PEERS = (*peers.SDPA, "sdpa", "flex", "flex_narrow", "fa4", "naive")

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Unsupported(RuntimeError):
    """The contestant has no such feature."""


@dataclass
class Inputs:
    """N(0, std²) tensors of a case; ``leaves`` are what the backward differentiates. q is larger by
    the case's peak."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None

    def leaves(self) -> list[torch.Tensor]:
        tensors = (self.q, self.k, self.v, self.bias, self.sink)
        return [x for x in tensors if x is not None and x.requires_grad]


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """A geometric series, as in ALiBi's paper."""
    number = torch.arange(1, heads + 1, device=device, dtype=torch.float32)
    return 2.0 ** (-8.0 * number / heads)


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device, std: float = 1.0, seed: int = 0
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, grad: bool = True, factor: float = 1.0) -> torch.Tensor:
        x = torch.randn(shape, dtype=dtype, device=device, generator=generator) * (std * factor)
        return x.requires_grad_(grad)

    lead = (case.tokens,) if case.docs else (case.batch, case.seqlen)
    inputs = Inputs(
        q=normal(*lead, case.heads, case.head_dim, factor=case.peak or 1.0),
        k=normal(*lead, case.kv_heads, case.head_dim),
        v=normal(*lead, case.kv_heads, case.dim_v),
        dout=torch.randn(
            *lead, case.heads, case.dim_v, dtype=dtype, device=device, generator=generator
        ),
    )
    if case.docs:
        ends = torch.tensor((0, *case.docs), device=device).cumsum(0)
        inputs.cu_seqlens = ends.to(torch.int32)
    if case.alibi:
        inputs.slopes = alibi_slopes(case.heads, device)
    if case.bias:
        inputs.bias = normal(1, case.heads, case.seqlen, case.seqlen, grad=case.bias == "grad")
    if case.sink:
        inputs.sink = normal(case.heads)
    return inputs


def _ours(backend: str | None, case: Case, inputs: Inputs) -> Attend:
    import flash_attn

    options: dict[str, object] = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = (case.window, 0)
    if inputs.slopes is not None:
        options["alibi_slopes"] = inputs.slopes
    if inputs.bias is not None:
        options["attn_bias"] = inputs.bias
    if inputs.sink is not None:
        options["learnable_sink"] = inputs.sink
    options |= {
        "softcap": case.softcap,
        "dropout_p": case.dropout,
        "deterministic": case.deterministic,
    }
    call = flash_attn.flash_attn_func
    if case.docs:
        cu, longest = inputs.cu_seqlens, max(case.docs)
        call = functools.partial(
            flash_attn.flash_attn_varlen_func,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with forced_backend(backend):
            return call(q, k, v, **options)

    return attend


def has_backward(name: str, inputs: Inputs) -> bool:
    """Whether a contestant computes gradients: a backend of ours may be a forward alone."""
    if name in PEERS:
        return True
    import flash_attn

    with forced_backend(name):
        return bool(flash_attn.can_use(inputs.q, inputs.k, inputs.v, op="bwd"))


def _sdpa(name: str, case: Case, inputs: Inputs) -> Attend:
    refuse(case, "window", "softcap", "alibi", "sink", "docs", "deterministic")
    return peers.sdpa(name, case.causal, inputs.bias, case.dropout)


def free_sdpa(causal: bool, bias: torch.Tensor | None = None, dropout_p: float = 0.0) -> Attend:
    """torch's scaled_dot_product_attention by its own choice of backend.

    None of its kernels knows shared heads of keys beside a bias or a mask, or above a head dim of
    256. There the query heads of one query stand as queries at their head of keys, and keys of more
    queries are repeated, as transformers does."""
    attend = peers.sdpa(None, causal, bias, dropout_p)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.size(2) // k.size(2)
        if group == 1 or (bias is None and max(q.size(3), v.size(3)) <= 256):
            return attend(q, k, v)
        if q.size(1) == 1 and bias is None and not causal:
            out = attend(q.squeeze(1).unflatten(1, (-1, group)).transpose(1, 2), k, v)
            return out.transpose(1, 2).flatten(1, 2).unsqueeze(1)
        return attend(q, *(x.repeat_interleave(group, 2) for x in (k, v)))

    return call


@functools.lru_cache(maxsize=2)
def window_mask(seqlen: int, left: int, device: torch.device) -> torch.Tensor:
    """True where a query sees a key: its own and this many before it."""
    rows = torch.arange(seqlen, device=device, dtype=torch.int32)
    distance = rows[:, None] - rows
    return (distance >= 0) & (distance <= left)


def windowed_sdpa(case: Case, device: torch.device) -> Attend:
    """free_sdpa with the case's mask; a window is a bool tensor."""
    if case.window is None:
        return free_sdpa(case.causal, None, case.dropout)
    return free_sdpa(False, window_mask(case.seqlen, case.window, device), case.dropout)


def _free_sdpa(case: Case, inputs: Inputs) -> Attend:
    refuse(case, "softcap", "alibi", "sink", "docs", "deterministic")
    if inputs.bias is None:
        return windowed_sdpa(case, inputs.q.device)
    refuse(case, "window")
    return free_sdpa(case.causal, inputs.bias, case.dropout)


def _fa2(case: Case, inputs: Inputs) -> Attend:
    """torch's FA2: varlen and windows through varlen_attn, which has no dense form."""
    if not case.docs and case.window is None:
        return _sdpa("fa2", case, inputs)
    refuse(case, "softcap", "alibi", "sink", "bias", "dropout", "deterministic")
    from torch.nn.attention.varlen import varlen_attn

    lengths = case.docs or (case.seqlen,) * case.batch
    cu = torch.tensor((0, *lengths), device=inputs.q.device).cumsum(0).to(torch.int32)
    left = -1 if case.window is None else case.window
    window = (left, 0 if case.causal else -1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
        out = varlen_attn(*flat, cu, cu, max(lengths), max(lengths), window_size=window)
        return out.view(*q.shape[:-1], v.shape[-1])

    return attend


def _fa4(case: Case, inputs: Inputs) -> Attend:
    """FlashAttention-4 (``pip install flash-attn-4``); each kernel compiles at its first call."""
    refuse(case, "alibi", "bias", "dropout")
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise Unsupported(f"flash_attn.cute.interface cannot be imported: {error}") from None
    call = interface.flash_attn_func
    if case.docs:
        cu, longest = inputs.cu_seqlens, max(case.docs)
        call = functools.partial(
            interface.flash_attn_varlen_func,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
    options = {"causal": case.causal, "softcap": case.softcap, "deterministic": case.deterministic}
    if case.window is not None:
        options |= {"causal": False, "window_size": (case.window, 0)}
    return lambda q, k, v: call(q, k, v, learnable_sink=inputs.sink, **options)[0]


def _flex(case: Case, inputs: Inputs, tiles: str = "wide") -> Attend:
    """Mask and score terms as closures over our tensors."""
    refuse(case, "sink", "dropout", "deterministic")
    device = inputs.q.device
    window = case.window if case.window is not None else case.seqlen
    docs = None
    if case.docs:
        docs = torch.repeat_interleave(torch.tensor(case.docs, device=device))

    def mask(b, h, i, j):
        keep = (j <= i) & (i - j <= window) if case.causal else j >= 0
        return keep if docs is None else keep & (docs[i] == docs[j])

    def score(s, b, h, i, j):
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        if inputs.slopes is not None:
            s = s - inputs.slopes[h] * (i - j).abs()
        return s if inputs.bias is None else s + inputs.bias[0, h, i, j]

    attend = flex.attention(
        case.tokens if case.docs else case.seqlen,
        max(case.head_dim, case.dim_v),
        device,
        sees=mask if case.causal or case.docs else None,
        score=score if case.softcap or case.alibi or case.bias else None,
        tiles=tiles,
    )
    if case.docs:
        return lambda *qkv: attend(*(x[None] for x in qkv))[0]
    return attend


def _narrow_flex(case: Case, inputs: Inputs) -> Attend:
    if max(case.head_dim, case.dim_v) <= 256:
        raise Unsupported("the same tiles as flex up to a head dim of 256")
    return _flex(case, inputs, "narrow")


def _naive(case: Case, inputs: Inputs) -> Attend:
    refuse(case, "window", "softcap", "alibi", "bias", "sink", "dropout", "docs")
    if case.kv_heads != case.heads:
        raise Unsupported("no GQA")
    return peers.naive(case.causal)


def refuse(case: Case, *features: str) -> None:
    """Raises for the first of these features that the case asks for."""
    for feature in features:
        value = getattr(case, feature)
        if value is not None and value is not False and value != 0 and value != ():
            raise Unsupported(f"no {feature}")


_BUILDERS = {
    "fa2": _fa2,
    "fa4": _fa4,
    "flex": _flex,
    "flex_narrow": _narrow_flex,
    "naive": _naive,
    "sdpa": _free_sdpa,
}


def attention(name: str, case: Case, inputs: Inputs) -> Attend:
    """The contestant as a function of q, k, v."""
    if name in _BUILDERS:
        return _BUILDERS[name](case, inputs)
    if name in PEERS:
        return _sdpa(name, case, inputs)
    return _ours(None if name == "ours" else name, case, inputs)


def forward(name: str, case: Case, inputs: Inputs) -> Callable[[], torch.Tensor]:
    attend = attention(name, case, inputs)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return attend(inputs.q, inputs.k, inputs.v)

    return call


def backward(name: str, case: Case, inputs: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Runs the forward once; each call of the result runs the backward on its graph."""
    out = attention(name, case, inputs)(inputs.q, inputs.k, inputs.v)
    leaves = inputs.leaves()
    if name == "fa4" and inputs.sink is not None:  # may be a constant to it: then without that one
        found = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True, allow_unused=True)
        leaves = [x for x, gradient in zip(leaves, found, strict=True) if gradient is not None]
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
