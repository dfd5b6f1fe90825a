"""Each option of the public functions reaches the op; the forms of what comes back."""

from __future__ import annotations

import inspect

import pytest
import torch
from cases import Case, Problem, op_arguments

import flash_attn
from flash_attn import flash_attn_interface, packed

CASE = Case(seqlen_q=20, seqlen_k=33, dtype="fp32", d=16)
OPTIONS = {
    "dropout_p": (0.25, dict(dropout_p=0.25)),
    "softmax_scale": (0.5, dict(softmax_scale=0.5)),
    "causal": (True, dict(causal=True)),
    "window_size": ((4, 7), dict(window=(4, 7))),
    "softcap": (3.0, dict(softcap=3.0)),
    "alibi_slopes": ("alibi_slopes", dict(alibi="head")),
    "attn_bias": ("attn_bias", dict(bias="head")),
    "learnable_sink": ("learnable_sink", dict(sink=True)),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", ["dense", "varlen"])
def test_each_option_reaches_the_op(form: str, option: str, seed: int) -> None:
    value, changes = OPTIONS[option]
    if form == "varlen":
        changes = changes | dict(lengths_q=(20, 9), lengths_k=(33, 12))
    problem = Problem(CASE.with_(**changes), seed, "cpu")
    value = getattr(problem, value) if isinstance(value, str) else value
    torch.manual_seed(1)
    arguments = op_arguments(problem) | problem.float_tensors() | problem.index_tensors()
    if problem.case.dropout_p:
        arguments["rng_state"] = torch.ops.flash_attn.rng_state(problem.q)
        arguments["return_probs"] = True
    out, lse, probs, _ = torch.ops.flash_attn.fwd(**arguments, backend="aten")
    torch.manual_seed(1)
    call = [problem.q, problem.k, problem.v]
    function = flash_attn.flash_attn_func
    if form == "varlen":
        index = problem.index_tensors()
        call += [index["cu_seqlens_q"], index["cu_seqlens_k"], 20, 33]
        function = flash_attn.flash_attn_varlen_func
    if probs.numel():
        probs = probs / probs.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    actual = function(*call, **{option: value}, return_attn_probs=True)
    for a, e in zip(actual, (out, lse, probs), strict=True):
        assert torch.equal(a, e)
    plain = function(*call)
    assert not torch.equal(plain, out), "the option changes nothing"


def test_causal_alignment_reaches_the_op(seed: int) -> None:
    problem = Problem(CASE.with_(causal=True, top_left=True), seed, "cpu")
    expected = torch.ops.flash_attn.fwd(
        **op_arguments(problem), **problem.float_tensors(), backend="aten"
    )[0]
    actual = flash_attn.flash_attn_func(
        problem.q, problem.k, problem.v, causal=True, causal_alignment="top-left"
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "window", [(4, None), (None, None), [4, 2], torch.tensor([4, 2]), (torch.tensor(4), 2)]
)
def test_forms_of_window_size(window, seed: int) -> None:
    problem = Problem(CASE, seed, "cpu")
    sides = tuple(-1 if side is None else int(side) for side in window)
    expected = flash_attn.flash_attn_func(problem.q, problem.k, problem.v, window_size=sides)
    actual = flash_attn.flash_attn_func(problem.q, problem.k, problem.v, window_size=window)
    assert torch.equal(actual, expected)


def test_packed_forms(seed: int) -> None:
    """The same bits as three tensors; the gradient is one packed tensor."""
    qkv = torch.randn(2, 20, 3, 4, 16, requires_grad=True)
    q, k, v = (x.detach().contiguous().requires_grad_() for x in qkv.unbind(2))
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    expected.sum().backward()
    gradients = torch.stack([x.grad for x in (q, k, v)], 2)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    out.sum().backward()
    assert torch.equal(out, expected) and torch.equal(qkv.grad, gradients)

    kv = torch.stack([k, v], 2).detach().requires_grad_()
    out = flash_attn.flash_attn_kvpacked_func(q.detach(), kv, causal=True)
    out.sum().backward()
    assert torch.equal(out, expected) and torch.equal(kv.grad, gradients[:, :, 1:])

    cu = torch.tensor([0, 20, 40], dtype=torch.int32)
    flat = qkv.detach().flatten(0, 1)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 20, causal=True)
    assert torch.equal(out, expected.flatten(0, 1))
    out = flash_attn.flash_attn_varlen_kvpacked_func(
        flat[:, 0], flat[:, 1:], cu, cu, 20, 20, causal=True
    )
    assert torch.equal(out, expected.flatten(0, 1))


PACKED_OPTIONS = {
    "dropout_p": 0.3,
    "softmax_scale": 0.7,
    "causal": True,
    "window_size": (3, 1),
    "softcap": 0.5,
    "alibi_slopes": torch.tensor([0.5, 0.25]),
    "attn_bias": torch.linspace(-3, 3, 7 * 7).view(7, 7),
    "learnable_sink": torch.tensor([1.0, -1.0]),
    "causal_alignment": "top-left",
}


@pytest.mark.parametrize("name", PACKED_OPTIONS)
@pytest.mark.parametrize("form", ["qkvpacked", "kvpacked"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_packed_forms_pass_every_option(varlen: bool, form: str, name: str) -> None:
    """With lengths of q and k that differ where they can; each option changes the result."""
    function = getattr(flash_attn, f"flash_attn{'_varlen' * varlen}_{form}_func")
    plain = flash_attn.flash_attn_varlen_func if varlen else flash_attn.flash_attn_func
    own_keys = form == "kvpacked"
    options = {name: PACKED_OPTIONS[name]}
    basis = {"causal": True, "window_size": (4, 0)} if name == "causal_alignment" else {}
    if name == "attn_bias" and own_keys:
        options["attn_bias"] = options["attn_bias"][:5]
    rows_q, rows_k = (5, 7) if own_keys else (7, 7)
    if varlen:
        q, k, v = torch.randn(9, 2, 8), *torch.randn(2, 11, 2, 8)
        cu_q = torch.tensor([0, rows_q, 9], dtype=torch.int32)
        cu_k = torch.tensor([0, 4, 11], dtype=torch.int32)
        if not own_keys:
            q, cu_q = torch.randn(11, 2, 8), cu_k
        lengths = (cu_q, cu_k, rows_q, rows_k) if own_keys else (cu_q, 7)
        plain_lengths = (cu_q, cu_k, rows_q, rows_k)
    else:
        q, (k, v) = torch.randn(2, rows_q, 2, 8), torch.randn(2, 2, rows_k, 2, 8)
        lengths = plain_lengths = ()
    packed = (q, torch.stack([k, v], -3)) if own_keys else (torch.stack([q, k, v], -3),)

    def drawn(call, *inputs: object, **given: object) -> tuple:
        torch.manual_seed(1)
        return call(*inputs, return_attn_probs=True, **basis, **given)

    actual, expected = (
        drawn(function, *packed, *lengths, **options),
        drawn(plain, q, k, v, *plain_lengths, **options),
    )
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    if own_keys or name != "causal_alignment":  # which needs lengths that differ
        assert not torch.equal(drawn(plain, q, k, v, *plain_lengths)[0], expected[0])


def test_packed_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend on the CPU tells it apart, so what is passed on is what counts."""
    seen: list[bool] = []
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        monkeypatch.setattr(packed, name, lambda *_, **__: seen.append(_[-2]) or torch.zeros(0))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 4, 3, 2, 8), deterministic=True)
    flash_attn.flash_attn_kvpacked_func(
        torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 2, 8), deterministic=True
    )
    flash_attn.flash_attn_varlen_qkvpacked_func(torch.zeros(4, 3, 2, 8), cu, 4, deterministic=True)
    flash_attn.flash_attn_varlen_kvpacked_func(
        torch.zeros(4, 2, 8), torch.zeros(4, 2, 2, 8), cu, cu, 4, 4, deterministic=True
    )
    assert seen == [True] * 4


@pytest.mark.parametrize("sides", [(2**63 - 1, 2**63 - 1), (2**63 - 1, 0), (0, 2**63 - 1)])
@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
def test_the_widest_window_is_none(alignment: str, sides: tuple[int, int]) -> None:
    """2^63 - 1 keys to a side, forward, backward and decode."""
    unlimited = tuple(-1 if side else 0 for side in sides)
    q, k, v = (torch.randn(2, n, 2, 8, requires_grad=True) for n in (9, 13, 13))
    results = []
    for window in (sides, unlimited):
        out = flash_attn.flash_attn_func(q, k, v, window_size=window, causal_alignment=alignment)
        with torch.no_grad():
            decoded = flash_attn.flash_decode_func(q, k, v, causal=False, window_size=window)
        results.append([out, decoded, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for a, e in zip(*results, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("shape", [(2, 5, 4, 4, 8), (2, 5, 3, 8), (2, 5, 2, 4, 8)])
def test_packed_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        RuntimeError, match=r"flash_attn: qkv: must have shape \(batch, seqlen, 3, heads"
    ):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(shape))


def test_returned_lse_has_a_gradient(seed: int) -> None:
    q, k, v = torch.randn(3, 1, 9, 2, 8, dtype=torch.float64)
    q.requires_grad_()
    _, lse, probs = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.requires_grad and not probs.requires_grad and lse.shape == (1, 2, 9)
    (dq,) = torch.autograd.grad(lse.sum(), q)
    p = (torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5).softmax(-1)
    torch.testing.assert_close(dq, torch.einsum("bhij,bjhd->bihd", p, k) * 8**-0.5)


def test_varlen_lse_is_unpadded() -> None:
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    q = torch.randn(9, 2, 8)
    _, lse, _ = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, return_attn_probs=True)
    assert lse.shape == (2, 9) and lse.dtype == torch.float32


def test_varlen_with_pages(seed: int) -> None:
    """block_table on flash_attn_varlen_func: the keys of scattered pages."""
    lengths, page = [37, 64, 5], 16
    k, v = torch.randn(2, sum(lengths), 2, 8)
    q = torch.randn(30, 4, 8)
    cu_q = torch.tensor([0, 10, 20, 30], dtype=torch.int32)
    cu_k = torch.tensor([0, 37, 101, 106], dtype=torch.int32)
    table = torch.randperm(12).view(3, 4).int()
    pages = torch.full((2, 13, page, 2, 8), torch.nan)
    for cache, x in zip(pages, (k, v), strict=True):
        for b, part in enumerate(x.split(lengths)):
            for i, piece in enumerate(part.split(page)):
                cache[table[b, i], : len(piece)] = piece
    expected = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 10, 64, causal=True)
    actual = flash_attn.flash_attn_varlen_func(
        q, *pages, cu_q, cu_k, 10, 64, causal=True, block_table=table
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("option", ["softmax_scale", "causal", "softcap", "learnable_sink"])
def test_each_option_of_decode_reaches_the_op(option: str) -> None:
    """As in a forward of as many keys."""
    q, k, v = torch.randn(2, 3, 4, 16), *torch.randn(2, 2, 12, 2, 16)
    value = {"softmax_scale": 0.5, "causal": True, "softcap": 2.0}.get(option, torch.randn(4))
    lengths = torch.full((2,), 12, dtype=torch.int32)
    plain = dict(causal=False)
    options = plain | {option: value}
    actual = flash_attn.flash_decode_func(q, k, v, lengths, **options)
    torch.testing.assert_close(actual, flash_attn.flash_attn_func(q, k, v, **options))
    assert not torch.equal(actual, flash_attn.flash_decode_func(q, k, v, lengths, **plain))


def test_can_use_has_the_defaults_of_the_calls() -> None:
    asked = inspect.signature(flash_attn.can_use).parameters
    called = inspect.signature(flash_attn.flash_attn_func).parameters
    shared = asked.keys() & called.keys()
    assert {n: asked[n].default for n in shared} == {n: called[n].default for n in shared}
    assert {"deterministic", "dropout_p", "causal_alignment"} <= shared


def test_private_forward_and_backward(seed: int) -> None:
    """What ring attention and TransformerEngine call: gradients into tensors that they allocate."""
    q, k, v, dout = torch.randn(4, 2, 12, 2, 16)
    options = dict(dropout_p=0.0, softmax_scale=0.25, causal=True)
    sides = dict(window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)
    out, lse, _, rng_state = flash_attn_interface._flash_attn_forward(
        q, k, v, **options, **sides, return_softmax=False
    )
    assert rng_state.shape == (2,), "seed and offset, with or without dropout"
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    flash_attn_interface._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        **options,
        **sides,
        deterministic=False,
        rng_state=rng_state,
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_attn.flash_attn_func(*leaves, softmax_scale=0.25, causal=True)
    assert torch.equal(out, expected)
    for actual, e in zip((dq, dk, dv), torch.autograd.grad(expected, leaves, dout), strict=True):
        assert torch.equal(actual, e)


@pytest.mark.parametrize("leaves_nothing", [(0, 4, 2, 8), (2, 0, 2, 8)])
def test_nothing_in_nothing_out(leaves_nothing: tuple[int, ...]) -> None:
    q = torch.zeros(leaves_nothing, requires_grad=True)
    out = flash_attn.flash_attn_func(q, q, q)
    out.sum().backward()
    assert out.shape == q.grad.shape == q.shape
