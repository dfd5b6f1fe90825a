"""q, k and v, or k and v, side by side in one tensor: the backward leaves their gradients so, and
nobody copies them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    OP_TARGETS,
    SM80,
    SM90,
    Case,
    Problem,
    Target,
    compare,
    each_case,
    each_target,
    expect,
    use,
)
from poison import dirty_allocator
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn._call import unpack
from flash_attn.modules.attention import FlashCrossAttention, FlashSelfAttention

SAME = dict(heads_q=2, heads_kv=2)
VARLEN = dict(lengths_q=(20, 0, 45), tail=7)
CASES = [
    Case(dtype="bf16", d=64, **SAME),
    Case(dtype="bf16", d=64, causal=True, **VARLEN, **SAME),
    Case(dtype="fp16", d=20, seqlen_q=33, **SAME),  # kernels pad it
    Case(dtype="fp16", d=20, **VARLEN, **SAME),
    Case(dtype="fp32", d=32, **SAME),
    Case(dtype="fp64", d=20, causal=True, **VARLEN, **SAME),
    Case(dtype="bf16", batch=1, seqlen_q=1, d=8, heads_q=1, heads_kv=1),
    Case(dtype="bf16", d=64, softcap=3.0, **SAME),
    # Grouped queries, and lengths of the keys' own.
    Case(dtype="bf16", d=64, seqlen_q=50, seqlen_k=70, causal=True),
    Case(dtype="bf16", d=40, lengths_q=(20, 13), lengths_k=(0, 70), tail=3, heads_kv=1),
    Case(dtype="fp16", d=20, seqlen_k=70, heads_kv=1),
    Case(dtype="fp64", d=24, seqlen_k=70),
]
# What the kernels have for them, each with stores of its own.
SHAPES = ((96, 150, True), (128, 300, False), (192, 150, True), (256, 130, False))
KERNEL_CASES = [Case(dtype="bf16", d=d, seqlen_q=n, causal=c, **SAME) for d, n, c in SHAPES]
KERNEL_CASES += [
    Case(dtype="fp16", d=64, seqlen_q=600, window=(64, 0), **SAME),
    Case(dtype="fp16", d=64, batch=1, seqlen_q=1500, seqlen_k=130, heads_q=2, heads_kv=1),
    Case(dtype="bf16", d=256, batch=1, seqlen_q=130, seqlen_k=1100, **SAME),
    Case(dtype="bf16", d=512, seqlen_q=70, **SAME),
    Case(dtype="fp32", d=128, **VARLEN, **SAME),
]


def shares_all(case: Case) -> bool:
    """Whether q, k and v have one shape."""
    return case.heads_q == case.heads_kv and case.lengths_k is None and case.seqlen_k is None


def attend(problem: Problem, inputs: list[torch.Tensor], **options: object) -> torch.Tensor:
    """The packed function for (qkv,) or (q, kv), or the plain one for (q, k, v)."""
    case = problem.case
    name = {1: "_qkvpacked", 2: "_kvpacked", 3: ""}[len(inputs)]
    lengths: list[object] = []
    if case.is_varlen:
        indices = problem.index_tensors()
        lengths = [indices["cu_seqlens_q"], problem.max_q]
        if name != "_qkvpacked":
            cu, longest = (indices["cu_seqlens_q"], indices["cu_seqlens_k"]), problem.max_k
            lengths = [*cu, problem.max_q, longest]
    function = getattr(flash_attn, f"flash_attn{'_varlen' * case.is_varlen}{name}_func")
    options = dict(causal=case.causal, window_size=case.window, softcap=case.softcap) | options
    return function(*inputs, *lengths, **options)


def gradients_and_places(
    out: torch.Tensor, inputs: list[torch.Tensor], dout: torch.Tensor
) -> tuple[list[torch.Tensor], list[int | None]]:
    """Of the inputs; and where the backward's own node has left dq, dk and dv."""
    places: list[int | None] = []

    def note(left: tuple, _: tuple) -> None:
        places.extend(None if x is None else x.data_ptr() for x in left[:3])

    handle = out.grad_fn.register_hook(note)
    gradients = torch.autograd.grad(out, inputs, dout)
    handle.remove()
    return list(gradients), places


def leaf(*parts: torch.Tensor) -> torch.Tensor:
    """The parts side by side; one part is a leaf as it is."""
    return (parts[0].detach() if len(parts) == 1 else torch.stack(parts, -3)).requires_grad_()


def addresses(packed: torch.Tensor) -> list[int]:
    return [part.data_ptr() for part in packed.unbind(-3)]


def check_packed(case: Case, target: Target, seed: int, kv: bool) -> None:
    if not case.with_(deterministic=True).gradients_served_by(target.backend):
        return
    problem = Problem(case, seed, target.device)
    tensors = problem.q, problem.k, problem.v
    plain = [leaf(x) for x in tensors]
    inputs = [leaf(tensors[0]), leaf(*tensors[1:])] if kv else [leaf(*tensors)]
    with use(target), dirty_allocator(target.device):
        expected_out = attend(problem, plain, deterministic=True)
        expected = torch.autograd.grad(expected_out, plain, problem.dout)
        out = attend(problem, inputs, deterministic=True)
        gradients, places = gradients_and_places(out, inputs, problem.dout)
    packed = gradients[-1]
    assert torch.equal(out, expected_out)
    parts = (*gradients[:-1], *packed.unbind(-3))
    for name, a, e in zip(("dq", "dk", "dv"), parts, expected, strict=True):
        assert torch.equal(a, e), name
    assert packed.is_contiguous()
    assert packed.untyped_storage().nbytes() == packed.numel() * packed.element_size()
    assert addresses(packed) == places[-packed.size(-3) :]
    if kv:
        assert gradients[0].is_contiguous() and gradients[0].data_ptr() == places[0]


@each_case([c for c in CASES + KERNEL_CASES[:1] if shares_all(c)])
def test_qkv(case: Case, target: Target, seed: int) -> None:
    check_packed(case, target, seed, kv=False)


@each_case(CASES)
def test_kv(case: Case, target: Target, seed: int) -> None:
    check_packed(case, target, seed, kv=True)


@each_case(KERNEL_CASES, [SM80, SM90])
def test_stores_of_kernels(case: Case, target: Target, seed: int) -> None:
    check_packed(case, target, seed, kv=not shares_all(case))


@each_case([c for c in CASES if shares_all(c)] + KERNEL_CASES[-4:])
def test_in_any_order_of_sums(case: Case, target: Target, seed: int) -> None:
    """Against float64: deterministic calls do not run every kernel."""
    problem = Problem(case, seed, target.device)
    kv = not shares_all(case)
    tensors = problem.q, problem.k, problem.v
    inputs = [leaf(tensors[0]), leaf(*tensors[1:])] if kv else [leaf(*tensors)]
    with use(target), dirty_allocator(target.device):
        out = attend(problem, inputs)
        gradients, places = gradients_and_places(out, inputs, problem.dout)
    assert addresses(gradients[-1]) == places[int(kv) :]
    dq, dk, dv = (*gradients[:-1], *gradients[-1].unbind(-3))
    results = {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    with torch.no_grad(), use(target):
        _, lse, probs = attend(problem, list(tensors), return_attn_probs=True)
    compare(problem, results | {"lse": lse, "probs": probs}, expect(problem))


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 64), (2, 0, 3, 2, 64)])
def test_nothing_at_all(shape: tuple[int, ...], target: Target) -> None:
    qkv = torch.zeros(shape, device=target.device, dtype=torch.bfloat16, requires_grad=True)
    with use(target):
        flash_attn.flash_attn_qkvpacked_func(qkv).sum().backward()
    assert qkv.grad.shape == qkv.shape


@each_target(*OP_TARGETS)
def test_only_one_of_q_and_kv_needs_a_gradient(target: Target, seed: int) -> None:
    case = Case(dtype="bf16", seqlen_q=50, seqlen_k=70)
    problem = Problem(case, seed, target.device)
    q, kv = leaf(problem.q), leaf(problem.k, problem.v)
    with use(target):
        call = functools.partial(attend, problem, deterministic=True)
        expected = torch.autograd.grad(call([q, kv]), [q, kv], problem.dout)
        (dq,) = torch.autograd.grad(call([q, kv.detach()]), [q], problem.dout)
        out = call([q.detach(), kv])
        (dkv,), places = gradients_and_places(out, [kv], problem.dout)
        (alone,) = torch.autograd.grad(call([q, kv]), [kv], problem.dout)
    assert torch.equal(dq, expected[0])
    assert torch.equal(dkv, expected[1]) and torch.equal(alone, expected[1])
    assert places == [None, *addresses(dkv)]


def packed_of(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 9, count, 2, 8, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


plain = flash_attn.flash_attn_func

MIXED: dict[str, tuple[int, Callable]] = {
    "another order": (3, lambda q, k, v: plain(q, v, k)),
    "one for all": (3, lambda q, k, v: plain(q, q, q)),
    "keys detached": (3, lambda q, k, v: plain(q, k.detach(), v)),
    "values detached": (3, lambda q, k, v: plain(q, k, v.detach())),
    "queries detached": (3, lambda q, k, v: plain(q.detach(), k, v)),
    "queries scaled": (3, lambda q, k, v: plain(2 * q, k, v)),
    "queries of more heads": (3, lambda q, k, v: plain(torch.cat([q, q], 2), k, v)[:, :, :2]),
    "another user": (3, lambda q, k, v: plain(q, k, v) + k.sin()),
    "another user, first": (3, lambda q, k, v: k.sin() + plain(q, k, v)),
    "two calls": (3, lambda q, k, v: plain(q, k, v) * plain(q, k, v, causal=True)),
    "none of them": (3, lambda q, k, v: plain(q.detach(), k.cos(), v.cos())),
    "four": (4, lambda a, q, k, v: plain(q, k, v)),
    "the last of four": (4, lambda a, q, k, v: plain(a, k, v)),
    "two, swapped": (2, lambda k, v: plain(k.detach(), v, k)),
    "queries of two": (2, lambda q, k: plain(q, k, k)),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_comes_otherwise_is_stacked(name: str, seed: int) -> None:
    """Whatever becomes of the parts, their gradient is that of torch's own unbind."""
    count, function = MIXED[name]
    packed = packed_of(count, seed)
    gradients = []
    for take_apart in (unpack, lambda x: x.unbind(-3)):
        out = function(*take_apart(packed))
        gradients += torch.autograd.grad(out.square().sum(), packed)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_another_user_of_the_packed_tensor(seed: int) -> None:
    """Their gradients add up, in each order, and a second backward adds to the first one's."""
    packed, own = packed_of(3, seed), packed_of(3, seed)
    (attended,) = torch.autograd.grad(
        flash_attn.flash_attn_func(*own.unbind(2)).square().sum(), own
    )
    expected = attended + 2 * own.detach()
    for first in (True, False):
        packed.grad = None
        terms = [lambda: flash_attn.flash_attn_qkvpacked_func(packed), lambda: packed]
        losses = [term().square().sum() for term in (terms if first else terms[::-1])]
        sum(losses).backward(retain_graph=True)
        torch.testing.assert_close(packed.grad, expected, rtol=1e-12, atol=1e-12)
        once = packed.grad
        sum(losses).backward()
        assert packed.grad is once
        torch.testing.assert_close(packed.grad, 2 * expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [lambda left: left[1], lambda left: left[2].data])
def test_who_keeps_a_part_keeps_his_own(keep: Callable, seed: int) -> None:
    """A gradient is added to in place, which must not change what a hook has kept of it."""
    qkv = packed_of(3, seed)
    out = flash_attn.flash_attn_qkvpacked_func(qkv)
    kept: list[torch.Tensor] = []
    out.grad_fn.register_hook(lambda left, _: kept.append(keep(left)))
    out.sum().backward()
    before = kept[0].clone()
    qkv.grad.zero_()
    assert torch.equal(kept[0], before)


REPLACEMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple]] = {
    "as they lie": lambda whole, _: whole.unbind(2),
    "in another order": lambda whole, _: (whole[:, :, 1], whole[:, :, 0], whole[:, :, 2]),
    "three of four": lambda whole, _: torch.cat([whole, whole[:, :, :1]], 2).unbind(2)[:3],
    "some missing": lambda whole, _: (whole[:, :, 0], None, whole[:, :, 2]),
    "of two": lambda whole, kept: (kept[:, :, 0], kept[:, :, 1], whole[:, :, 2]),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_gradients_that_a_hook_replaces(name: str, seed: int) -> None:
    """The packed gradient is what the hook gives, wherever that lies."""
    qkv = packed_of(3, seed)
    kept = torch.randn(2, 9, 3, 2, 8, dtype=torch.float64)
    given = REPLACEMENTS[name](torch.randn_like(kept), kept)
    handed = [tuple(x if x is None else x.data for x in given)]  # a view would keep the whole
    del given
    zeros = torch.zeros(2, 9, 2, 8, dtype=torch.float64)
    expected = torch.stack([zeros if x is None else x for x in handed[0]], 2)
    place = handed[0][0].data_ptr()
    out = flash_attn.flash_attn_qkvpacked_func(qkv)
    out.grad_fn.next_functions[0][0].register_prehook(lambda _: handed.pop())
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert torch.equal(gradient, expected)
    assert (gradient.data_ptr() == place) == (name == "as they lie")


def test_writes_are_noticed(seed: int) -> None:
    """To a part, as to one of several views; to the whole, which the backward needs as it was. In
    the words of torch's own unbind."""
    messages = []
    for take_apart in (unpack, lambda x: x.unbind(2)):
        packed = packed_of(3, seed) * 1
        parts = take_apart(packed)
        node = parts[0].grad_fn.name()
        with pytest.raises(
            RuntimeError, match="is a view and is being modified inplace"
        ) as refused:
            parts[1].mul_(2)
        out = flash_attn.flash_attn_func(*parts)
        with torch.no_grad():
            packed.mul_(2)
        with pytest.raises(RuntimeError, match="has been modified inplace") as noticed:
            out.sum().backward()
        messages.append([str(error.value).replace(node, "") for error in (refused, noticed)])
    assert messages[0] == messages[1]


def test_parts_are_views(seed: int) -> None:
    packed = packed_of(3, seed)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            parts, expected = unpack(packed), packed.unbind(-3)
        assert [x.data_ptr() for x in parts] == [x.data_ptr() for x in expected]
        assert [x.stride() for x in parts] == [x.stride() for x in expected]
        for part, e in zip(parts, expected, strict=True):
            assert part.requires_grad == e.requires_grad and part.is_leaf == e.is_leaf
            assert part.is_inference() == e.is_inference() and part._base is e._base
    assert not unpack(packed.detach())[0].requires_grad


def test_differentiating_twice_raises(seed: int) -> None:
    qkv = packed_of(3, seed)
    out = flash_attn.flash_attn_qkvpacked_func(qkv)
    (gradient,) = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match="flash_attn::bwd"):
        gradient.sum().backward()


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.heard.append(str(function))
        return function(*args, **kwargs or {})


def test_who_listens_hears_the_op(seed: int) -> None:
    """Whose results share no memory, so that they are stacked behind it."""
    qkv = packed_of(3, seed)
    out = flash_attn.flash_attn_qkvpacked_func(qkv)
    (expected,) = torch.autograd.grad(out.sum(), qkv, retain_graph=True)
    with Listener() as listener:
        (gradient,) = torch.autograd.grad(out.sum(), qkv, retain_graph=True)
    assert "flash_attn.bwd.default" in listener.heard and torch.equal(gradient, expected)
    with torch.profiler.profile() as profile:
        (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert "flash_attn::bwd" in {event.key for event in profile.key_averages()}
    assert torch.equal(gradient, expected)


class Wrapped(torch.Tensor):
    """Around another tensor; notes the operations that it hears of."""

    heard: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.heard.append(str(function))
        args = [x.inner if isinstance(x, cls) else x for x in args]
        return function(*args, **kwargs or {})


def test_incoming_gradients_that_are_not_ordinary(seed: int) -> None:
    """A subclass hears of the op as of any other."""
    qkv = packed_of(3, seed)
    out = flash_attn.flash_attn_qkvpacked_func(qkv)
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    (gradient,) = torch.autograd.grad(out, qkv, Wrapped(dout))
    assert torch.equal(gradient, expected) and "flash_attn.bwd.default" in Wrapped.heard


@each_target(ATEN_CPU, ATEN_CUDA, SM80)
def test_a_negated_gradient(target: Target, seed: int) -> None:
    """Whose sign kernels do not see."""
    problem = Problem(Case(dtype="fp32", d=32, **SAME), seed, target.device)
    qkv = leaf(problem.q, problem.k, problem.v)
    negative = torch.complex(torch.zeros_like(problem.dout), problem.dout).conj().imag
    with use(target):
        out = attend(problem, [qkv], deterministic=True)
        gradients = [
            torch.autograd.grad(out, qkv, x, retain_graph=True)[0]
            for x in (negative, -problem.dout)
        ]
    assert negative.is_neg() and torch.equal(*gradients)


def test_a_subclass_keeps_its_unbind(seed: int) -> None:
    class Counted(torch.Tensor):
        unbound = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            Counted.unbound += function is torch.Tensor.unbind
            return super().__torch_function__(function, types, args, kwargs)

    qkv = packed_of(3, seed)
    expected = flash_attn.flash_attn_qkvpacked_func(qkv)
    assert torch.equal(
        flash_attn.flash_attn_qkvpacked_func(qkv.detach().as_subclass(Counted)), expected
    )
    assert Counted.unbound == 1
    parameter = torch.nn.Parameter(qkv.detach())
    out = flash_attn.flash_attn_qkvpacked_func(parameter)
    (gradient,), places = gradients_and_places(out, [parameter], torch.ones_like(out))
    assert addresses(gradient) == places


def test_other_tensors_take_torchs_unbind(seed: int) -> None:
    """Negated views, fake tensors and those with a tangent."""
    qkv = packed_of(3, seed)
    negative = torch.complex(torch.zeros_like(qkv), qkv).conj().imag  # negated on reading
    fake = torch._subclasses.FakeTensorMode().from_tensor(qkv)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(qkv, torch.ones_like(qkv))
        for packed in (negative, fake, dual):
            assert unpack(packed)[0].grad_fn.name() == "UnbindBackward0"
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            flash_attn.flash_attn_qkvpacked_func(dual)
    (expected,) = torch.autograd.grad(flash_attn.flash_attn_qkvpacked_func(-1 * qkv).sum(), qkv)
    (gradient,) = torch.autograd.grad(flash_attn.flash_attn_qkvpacked_func(negative).sum(), qkv)
    torch.testing.assert_close(gradient, expected)


def test_transforms(seed: int) -> None:
    qkv = packed_of(3, seed)

    def loss(packed: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_qkvpacked_func(packed).square().sum()

    (expected,) = torch.autograd.grad(loss(qkv), qkv)
    torch.testing.assert_close(torch.func.grad(loss)(qkv.detach()), expected)
    each = torch.func.vmap(torch.func.grad(loss))(qkv.detach().unsqueeze(1))
    torch.testing.assert_close(each.squeeze(1), expected)


def test_autocast(seed: int) -> None:
    """Which casts each part: the gradients come back to the dtype of qkv."""
    qkv = packed_of(3, seed).detach().float().requires_grad_()
    gradients = []
    for take_apart in (unpack, lambda x: x.unbind(2)):
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attn.flash_attn_func(*take_apart(qkv))
        assert out.dtype == torch.bfloat16
        gradients += torch.autograd.grad(out.sum(), qkv)
    assert torch.equal(*gradients) and gradients[0].dtype == torch.float32


@pytest.mark.parametrize("kv", [False, True])
def test_compiled_autograd(kv: bool, seed: int) -> None:
    """torch compiles the backward of an eager forward; parts without a gradient count as zeros."""
    for length in (6, 9):
        packed = torch.randn(2, length, 3, 2, 8, requires_grad=True)

        def loss(x: torch.Tensor = packed) -> torch.Tensor:
            parts = unpack(x)
            if kv:
                return flash_attn.flash_attn_func(parts[1].detach(), *parts[1:]).square().sum()
            return flash_attn.flash_attn_qkvpacked_func(x).square().sum()

        (expected,) = torch.autograd.grad(loss(), packed)
        with compiled_autograd._enable(functools.partial(torch.compile, backend="eager")):
            loss().backward()
        torch.testing.assert_close(packed.grad, expected)


@each_target(ATEN_CPU, SM80, SM90)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_modules(varlen: bool, target: Target) -> None:
    rows = (33,) if varlen else (2, 33)
    make = dict(device=target.device, dtype=torch.bfloat16, requires_grad=True)
    qkv, kv = torch.randn(*rows, 3, 2, 64, **make), torch.randn(*rows, 2, 2, 64, **make)
    cu = torch.tensor([0, 20, 33], dtype=torch.int32, device=target.device)
    of_self = dict(cu_seqlens=cu, max_seqlen=20) if varlen else {}
    of_keys = dict(cu_seqlens_k=cu, max_seqlen_k=20) if varlen else {}
    with use(target):
        out = FlashSelfAttention()(qkv, **of_self)
        (gradient,), places = gradients_and_places(out, [qkv], torch.ones_like(out))
        assert addresses(gradient) == places
        q = qkv.detach().select(-3, 0)
        out = FlashCrossAttention()(q, kv, **of_self, **of_keys)
        (gradient,), places = gradients_and_places(out, [kv], torch.ones_like(out))
        assert addresses(gradient) == places[1:]
