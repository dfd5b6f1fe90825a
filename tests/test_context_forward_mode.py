"""Forward-mode AD over flash_attn.context_parallel, in a world of one rank: its ops are torch's
custom ops, which drop a tangent in silence. So it is refused before them, or right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from flash_attn import context_parallel
from flash_attn.context_parallel.schemes import SCHEMES

REFUSAL = "^flash_attn: {}: forward-mode AD is not implemented, expected a tensor without a tangent"
Call = tuple[Callable, dict[str, torch.Tensor], dict]  # function, inputs, other arguments
each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def calls(device: str) -> dict[str, Call]:
    """Each function, with every input that could have a tangent."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    terms = dict(alibi_slopes=normal(4).abs(), learnable_sink=normal(4))
    dense = dict(q=normal(2, 6, 4, 8), k=normal(2, 6, 2, 8), v=normal(2, 6, 2, 8)) | terms
    packed = dict(q=normal(7, 4, 8), k=normal(7, 2, 8), v=normal(7, 2, 8)) | terms
    lengths = dict(cu_seqlens_q=[0, 3, 7], cu_seqlens_k=[0, 3, 7])
    step = dict(q=normal(2, 1, 4, 8), k_cache=normal(2, 9, 2, 8), v_cache=normal(2, 9, 2, 8))
    places = dict(seqlens=numbers(4, 9), first_key=numbers(0, 0), cache_seqlens=numbers(4, 9))
    descales = dict(k_descale=normal(2).abs(), v_descale=normal(2).abs())
    eight_bits = normal(2, 9, 2, 8).to(torch.int8)
    of_8_bits = dict(k_cache=eight_bits, v_cache=eight_bits)
    attend, decode = context_parallel.flash_attn_func, context_parallel.flash_decode_func
    varlen = context_parallel.flash_attn_varlen_func
    return (
        {scheme: (attend, dense, dict(scheme=scheme, causal=True)) for scheme in SCHEMES}
        | {
            f"varlen-{scheme}": (varlen, packed, lengths | dict(scheme=scheme))
            for scheme in SCHEMES
        }
        | {
            "decode": (decode, step | terms, places),
            "decode-8-bits": (decode, dict(q=step["q"]) | descales, of_8_bits),
            "join": (context_parallel.join, dict(x=normal(2, 8, 4)), {}),
        }
    )


FORMS = tuple(calls("cpu"))


@each_device
@pytest.mark.parametrize("form", FORMS)
def test_a_tangent_is_refused(form: str, device: str) -> None:
    """In functorch and with dual tensors, for every input; without one the call is served."""
    function, inputs, options = calls(device)[form]
    function(**inputs, **options)
    for name, x in inputs.items():

        def call(x: torch.Tensor, name: str = name) -> torch.Tensor:
            return function(**inputs | {name: x}, **options)

        refused = pytest.raises(NotImplementedError, match=REFUSAL.format(name))
        with refused:
            torch.func.jvp(call, (x,), (torch.ones_like(x),))
        with refused:
            torch.func.jacfwd(call)(x)
        for mode in (torch.enable_grad, torch.no_grad):
            with forward_ad.dual_level(), mode(), refused:
                call(forward_ad.make_dual(x, torch.ones_like(x)))


@each_device
@pytest.mark.parametrize("form", FORMS)
def test_a_dual_level_alone_changes_nothing(form: str, device: str) -> None:
    function, inputs, options = calls(device)[form]
    expected = function(**inputs, **options)
    with forward_ad.dual_level():
        assert torch.equal(function(**inputs, **options), expected)


@each_device
@pytest.mark.parametrize("form", [*SCHEMES, "join"])
def test_compiled_code_drops_no_tangent(form: str, device: str) -> None:
    """It was traced without a dual level, and serves outside of one again."""
    function, inputs, options = calls(device)[form]
    name, x = next(iter(inputs.items()))

    @torch.compile(backend="aot_eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        return function(**inputs | {name: x}, **options)

    torch.compiler.reset()  # cases before count towards its limit of compilations
    expected = function(**inputs, **options)
    assert torch.equal(call(x), expected)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=REFUSAL.format(name)):
        call(forward_ad.make_dual(x, torch.ones_like(x)))
    assert torch.equal(call(x), expected)


@each_device
@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("decode")])
def test_a_tangent_of_the_gradient_is_refused(form: str, device: str) -> None:
    function, inputs, options = calls(device)[form]
    name, x = next(iter(inputs.items()))
    x = x.clone().requires_grad_()
    out = function(**inputs | {name: x}, **options)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    assert gradient.norm() > 0
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match=REFUSAL.format("dout")):
            torch.autograd.grad(out, x, dout)


def tangents_of(function: Callable, inputs: list[torch.Tensor], seed: int) -> None:
    """That of forward mode is what reverse mode says of it."""
    generator = torch.Generator().manual_seed(seed)
    ways = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in inputs]
    out, tangent = torch.func.jvp(function, tuple(inputs), tuple(ways))
    weight = torch.randn(out.shape, generator=generator, dtype=out.dtype).to(out.device)
    _, back = torch.func.vjp(function, *inputs)
    expected = sum((g * way).sum() for g, way in zip(back(weight), ways, strict=True))
    assert expected != 0
    torch.testing.assert_close((tangent * weight).sum(), expected)


@each_device
def test_split_and_merge_have_the_tangent(device: str, seed: int) -> None:
    """They are torch's own operations."""
    make = dict(device=device, dtype=torch.float64)
    outs, lses = torch.randn(2, 2, 5, 3, 8, **make), torch.randn(2, 2, 3, 5, **make)

    def merged(*parts: torch.Tensor) -> torch.Tensor:
        out, lse = context_parallel.merge_attention(parts[:2], parts[2:])
        return out.sum(-1).transpose(1, 2) + lse

    tangents_of(merged, [*outs, *lses], seed)
    tangents_of(context_parallel.split, [torch.randn(2, 9, 3, **make)], seed)
