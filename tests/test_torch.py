"""torch's own machinery in eager mode: autograd, autocast, inference mode, checkpoints, fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    Target,
    each_target,
    fwd_bwd,
    leaves_of,
    use,
)
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash_attn


@each_target(*ATTENTION_TARGETS)
def test_differentiating_twice_raises(target: Target) -> None:
    q, k, v = leaves_of(target, 1, 9, 2, 32)
    with use(target):
        out = flash_attn.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.float().sum().backward()


@each_target(*ATTENTION_TARGETS)
def test_checkpoint_recomputes_the_same(target: Target) -> None:
    inputs = leaves_of(target, 2, 33, 4, 32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = 0.2 if target.backend == "aten" else 0.0
        return flash_attn.flash_attn_func(q, k, v, dropout_p=p, deterministic=True)

    with use(target):
        torch.manual_seed(2)
        expected = fwd_bwd(attend, inputs)
        torch.manual_seed(2)
        # On a GPU a thread of autograd's runs it again, where no block of this thread holds.
        options = dict(use_reentrant=False, context_fn=lambda: (use(target), use(target)))
        actual = fwd_bwd(lambda *x: checkpoint(attend, *x, **options), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, target: Target) -> None:
    """fp32 tensors are cast as SDPA casts them; their gradients are fp32."""
    inputs = leaves_of(target, 2, 33, 4, 32, dtype=torch.float32)
    with use(target), torch.autocast(target.device, dtype=dtype):
        out = flash_attn.flash_attn_func(*inputs, causal=True)
        mixed = flash_attn.flash_attn_func(inputs[0].to(dtype), inputs[1], inputs[2], causal=True)
        cache = [x.detach().to(dtype) for x in inputs]
        decoded_dtype = None
        if target.backend == "aten":
            decoded_dtype = flash_attn.flash_decode_func(
                inputs[0].detach()[:, :1], *cache[1:]
            ).dtype
    with use(target):
        expected = flash_attn.flash_attn_func(*(x.to(dtype) for x in inputs), causal=True)
    assert out.dtype == mixed.dtype == dtype and decoded_dtype in (dtype, None)
    assert torch.equal(out, expected) and torch.equal(mixed, expected)
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs)


@each_target(*ATTENTION_TARGETS)
def test_no_grad_and_inference_mode(target: Target) -> None:
    inputs = leaves_of(target, 1, 9, 2, 32)
    with use(target):
        with torch.no_grad():
            assert not flash_attn.flash_attn_func(*inputs).requires_grad
        with torch.inference_mode():
            out = flash_attn.flash_attn_func(*inputs)
            assert out.is_inference() and out.isfinite().all()
        assert flash_attn.flash_attn_func(*inputs).requires_grad


@each_target(*ATTENTION_TARGETS)
def test_saved_tensors_are_guarded(target: Target) -> None:
    """Changing an input in place before the backward is an error, as everywhere in torch."""
    q, k, v = leaves_of(target, 1, 9, 2, 32)
    with use(target):
        key = k * 1.0
        out = flash_attn.flash_attn_func(q, key, v)
    with torch.no_grad():
        key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_target(*ATTENTION_TARGETS)
def test_vmap(target: Target) -> None:
    q, k, v = (x.detach() for x in leaves_of(target, 3, 1, 9, 2, 32))
    with use(target):
        mapped = torch.vmap(flash_attn.flash_attn_func)(q, k, v)
        for i in range(3):
            assert torch.equal(mapped[i], flash_attn.flash_attn_func(q[i], k[i], v[i]))


@each_target(ATEN_CPU, ATEN_CUDA)
def test_vmap_follows_randomness_with_dropout(target: Target) -> None:
    q = leaves_of(target, 1, 33, 2, 32)[0].detach()
    same_input = q.expand(3, 1, 33, 2, 32)

    def drop(x: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(x, x, x, dropout_p=0.5)

    with use(target):
        same = torch.vmap(drop, randomness="same")(same_input)
        assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
        assert not torch.equal(torch.vmap(drop, randomness="same")(same_input), same)
        first, second, third = torch.vmap(drop, randomness="different")(same_input)
        assert not (torch.equal(first, second) or torch.equal(second, third))
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(drop, randomness="error")(same_input)
        without = torch.vmap(lambda x: flash_attn.flash_attn_func(x, x, x))(same_input)
    assert torch.equal(without[0], without[2])


INT32 = dict(dtype=torch.int32)


def lengths(target: Target, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=target.device, **INT32)


def differentiable_calls(target: Target) -> dict:
    """Every function with all its differentiable inputs by name."""
    dtype = torch.float32 if target.backend == "aten" else torch.float16

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=target.device, dtype=dtype)

    dense = dict(q=new(2, 3, 2, 8), k=new(2, 3, 2, 8), v=new(2, 3, 2, 8))
    packed = dict(q=new(2, 3, 2, 8), kv=new(2, 3, 2, 2, 8))
    varlen = dict(q=new(6, 2, 8), k=new(6, 2, 8), v=new(6, 2, 8))
    terms = {}
    if target.backend == "aten":
        terms = dict(attn_bias=new(3, 3), learnable_sink=new(2))
        terms["alibi_slopes"] = torch.rand(2, device=target.device)
    cu = lengths(target, 0, 3, 6)
    caches = dict(k_cache=new(2, 9, 2, 8), v_cache=new(2, 9, 2, 8))
    step = caches | dict(q=new(2, 1, 2, 8))
    step |= {name: x for name, x in terms.items() if name != "attn_bias"}
    of_8_bits = {name: torch.ones_like(x, dtype=torch.int8) for name, x in caches.items()}
    descales = {name: torch.rand(2, device=target.device) for name in ("k_descale", "v_descale")}
    append = step | dict(k=new(2, 1, 2, 8), v=new(2, 1, 2, 8))
    append |= dict(rotary_cos=new(9, 4), rotary_sin=new(9, 4))
    sdpa = dict(query=new(1, 2, 3, 8), key=new(1, 2, 3, 8), value=new(1, 2, 3, 8))
    fa = flash_attn
    return {
        "dense": (fa.flash_attn_func, dense | terms, {}),
        "qkvpacked": (fa.flash_attn_qkvpacked_func, dict(qkv=new(2, 3, 3, 2, 8)), {}),
        "kvpacked": (fa.flash_attn_kvpacked_func, packed, {}),
        "varlen": (
            fa.flash_attn_varlen_func,
            varlen | terms,
            dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3),
        ),
        "varlen_qkvpacked": (
            fa.flash_attn_varlen_qkvpacked_func,
            dict(qkv=new(6, 3, 2, 8)),
            dict(cu_seqlens=cu, max_seqlen=3),
        ),
        "varlen_kvpacked": (
            fa.flash_attn_varlen_kvpacked_func,
            dict(q=new(6, 2, 8), kv=new(6, 2, 2, 8)),
            dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3),
        ),
        "paged": (
            fa.flash_attn_varlen_func,
            dict(q=new(6, 2, 8), k=new(2, 3, 2, 8), v=new(2, 3, 2, 8)),
            dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3)
            | dict(block_table=lengths(target, 0, 1).view(2, 1)),
        ),
        "sdpa": (
            fa.scaled_dot_product_attention,
            sdpa | (dict(attn_mask=new(3, 3)) if terms else {}),
            {},
        ),
        "masked": (
            fa.flash_attn_func,
            {name: x for name, x in (dense | terms).items() if name != "attn_bias"},
            dict(attn_bias=fa.masks.prefix_lm(2)),
        ),
        "decode": (fa.flash_decode_func, step, {}),
        "decode_8_bits": (fa.flash_decode_func, dict(q=new(2, 1, 2, 8)) | descales, of_8_bits),
        "step": (fa.flash_attn_with_kvcache, step, dict(cache_seqlens=lengths(target, 3, 5))),
        "append": (fa.flash_attn_with_kvcache, append, dict(cache_seqlens=lengths(target, 3, 5))),
    }


FORMS = tuple(differentiable_calls(ATEN_CPU))


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_forward_mode_is_refused(form: str, target: Target) -> None:
    """In functorch and with dual tensors, for every input: never a tangent that is silently zero.
    Nothing is written."""
    function, inputs, options = differentiable_calls(target)[form]
    if target.backend != "aten" and form in ("decode", "decode_8_bits", "step", "append"):
        pytest.skip("sm80 serves no step of decoding")
    before = {name: x.clone() for name, x in inputs.items()}
    for name, x in inputs.items():

        def call(x: torch.Tensor, name: str = name) -> torch.Tensor:
            return function(**inputs | {name: x}, **options)

        with use(target):
            with pytest.raises(NotImplementedError):
                torch.func.jvp(call, (x,), (torch.ones_like(x),))
            with pytest.raises(NotImplementedError):
                torch.func.jacfwd(call)(x)
            for mode in (torch.enable_grad, torch.no_grad):
                with forward_ad.dual_level(), mode(), pytest.raises(NotImplementedError):
                    call(forward_ad.make_dual(x, torch.ones_like(x)))
    for name, x in inputs.items():
        assert torch.equal(x, before[name]), name


@each_target(*ATTENTION_TARGETS)
def test_forward_mode_over_other_inputs(target: Target) -> None:
    """What has no tangent is served inside a dual level, and a refusal names the input."""
    q, k, v = (x.detach() for x in leaves_of(target, 1, 9, 2, 32))
    with use(target), forward_ad.dual_level():
        dual = forward_ad.make_dual(v, torch.ones_like(v))
        out = flash_attn.flash_attn_func(q, k, v)
        assert forward_ad.unpack_dual(out).tangent is None
        with pytest.raises(NotImplementedError, match="flash_attn: v: forward-mode AD"):
            flash_attn.flash_attn_func(q, k, dual)


def appended(target: Target, **changes: object) -> torch.Tensor:
    """out of a step of one token; its tensors by name in `changes`."""
    shapes = dict(q=(2, 1, 4, 32), k=(2, 1, 2, 32), v=(2, 1, 2, 32))
    shapes |= dict(k_cache=(2, 9, 2, 32), v_cache=(2, 9, 2, 32))
    make = dict(device=target.device, dtype=torch.bfloat16)
    call = {name: torch.randn(*shape, **make) for name, shape in shapes.items()}
    with use(target):
        return flash_attn.flash_attn_with_kvcache(**call | changes, cache_seqlens=3)


@each_target(ATEN_CPU, ATEN_CUDA)
def test_kvcache_has_no_gradient(target: Target) -> None:
    cache = torch.randn(2, 9, 2, 32, device=target.device, dtype=torch.bfloat16)
    query = cache[:, :1].repeat(1, 1, 2, 1).requires_grad_()
    out = appended(target, q=query, k_cache=cache)
    assert not cache.requires_grad
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache has no gradient"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="flash_attn: v_cache: expected requires_grad=False"):
        appended(target, v_cache=cache.clone().requires_grad_())
    with torch.no_grad():
        assert not appended(target, k_cache=cache.clone().requires_grad_()).requires_grad
    with torch.inference_mode():
        assert appended(target).is_inference()


@each_target(ATEN_CPU, ATEN_CUDA)
def test_autograd_notices_the_append(target: Target) -> None:
    """A cache that someone saved for a backward pass has changed."""
    cache = torch.randn(2, 9, 2, 32, device=target.device, dtype=torch.bfloat16)
    factor = torch.ones((), device=target.device, dtype=torch.bfloat16, requires_grad=True)
    product = factor * cache
    appended(target, v_cache=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@each_target(ATEN_CPU, ATEN_CUDA)
@pytest.mark.parametrize("cache", [torch.float16, torch.int8])
def test_autocast_of_the_append(cache: torch.dtype, target: Target) -> None:
    """The new tensors follow the cache; where that has 8 bits, autocast."""
    caches = torch.zeros(2, 2, 9, 2, 32, device=target.device).to(cache)
    q, k, v = (torch.randn(2, 1, 2, 32, device=target.device) for _ in range(3))
    tables = torch.randn(2, 9, 8, device=target.device)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out = appended(
            target,
            q=q,
            k=k,
            v=v,
            k_cache=caches[0],
            v_cache=caches[1],
            rotary_cos=tables[0],
            rotary_sin=tables[1],
        )
    assert out.dtype == (torch.bfloat16 if cache == torch.int8 else cache)
    assert caches[0, :, 3].any() and caches[1, :, 3].any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_import() -> None:
    script = """
import os, torch, flash_attn
torch.set_num_threads(1)
q = torch.randn(1, 9, 2, 8)
child = os.fork()
if child == 0:
    os._exit(0 if flash_attn.flash_attn_func(q, q, q).isfinite().all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
