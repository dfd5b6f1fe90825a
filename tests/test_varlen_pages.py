"""Varlen calls whose keys lie in pages."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATTENTION_TARGETS,
    OP_TARGETS,
    SM80,
    SM90,
    Target,
    each_target,
    use,
)

import flash_attn


def paged_problem(target: Target, dtype: torch.dtype = torch.float32):
    """Two sequences of 10 and 7 keys in pages of 4; the entries past their lengths are garbage."""
    make = dict(device=target.device, dtype=dtype)
    q = torch.randn(5, 4, 32, **make)
    k, v = torch.randn(2, 6, 4, 2, 32, **make)
    cu = torch.tensor([0, 3, 5], dtype=torch.int32, device=target.device)
    cu_k = torch.tensor([0, 10, 17], dtype=torch.int32, device=target.device)
    table = torch.tensor([[5, 0, 3, -7], [1, 4, 99, 6]], dtype=torch.int32, device=target.device)
    lengths = dict(cu_seqlens_q=cu, cu_seqlens_k=cu_k, max_seqlen_q=3, max_seqlen_k=10)
    return q, k, v, lengths, table


def dense_of(pages: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """The keys of each sequence; a page that does not exist is NaN."""
    rows = []
    for row, length in zip(table.tolist(), lengths, strict=True):
        missing = torch.full_like(pages[:1], math.nan)
        keys = [pages[i : i + 1] if 0 <= i < len(pages) else missing for i in row]
        rows.append(torch.cat(keys).flatten(0, 1)[:length])
    return rows


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("causal", [False, True])
def test_pages(causal: bool, target: Target) -> None:
    """Out and gradients of scattered pages are those of the keys side by side; seqused_k counts
    where it is given; what lies past a length is not read."""
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    q, k, v, lengths, table = paged_problem(target, dtype)
    dout = torch.randn_like(q)
    for used in ([10, 7], [6, 7], [9, 0]):
        seqused = torch.tensor(used, dtype=torch.int32, device=target.device)
        extra = {} if used == [10, 7] else dict(seqused_k=seqused)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with use(target):
            out = flash_attn.flash_attn_varlen_func(
                *inputs, **lengths, block_table=table, causal=causal, **extra
            )
            gradients = torch.autograd.grad(out, inputs, dout)
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            packed = [torch.cat(dense_of(x, table, used)) for x in inputs[1:]]
            starts = [0, used[0], sum(used)]
            cu = torch.tensor(starts, dtype=torch.int32, device=target.device)
            expected = flash_attn.flash_attn_varlen_func(
                inputs[0], *packed, **lengths | {"cu_seqlens_k": cu}, causal=causal
            )
            expected_gradients = torch.autograd.grad(expected, inputs, dout)
        for a, e in zip([out, *gradients], [expected, *expected_gradients], strict=True):
            torch.testing.assert_close(
                a, e, rtol=1e-2, atol=1e-2 if dtype == torch.float16 else 1e-5
            )


OPTIONS: dict[str, dict] = {
    "plain": {},
    "causal": dict(causal=True),
    "bias": dict(attn_bias=(2, 4, 3, 10)),
    "bool": dict(attn_bias=(2, 4, 3, 10)),
    "leftpad": dict(leftpad_k=[3, 2]),
    "seqused_q": dict(seqused_q=[1, 2]),
    "sink": dict(learnable_sink=(4,)),
}


def options_of(name: str, target: Target, dtype: torch.dtype) -> dict:
    options = dict(OPTIONS[name])
    for tensor in ("attn_bias", "learnable_sink"):
        if tensor in options:
            options[tensor] = torch.randn(options[tensor], device=target.device, dtype=dtype)
    if name == "bool":
        options["attn_bias"] = options["attn_bias"] > -1
    for numbers in ("leftpad_k", "seqused_q"):
        if numbers in options:
            options[numbers] = torch.tensor(
                options[numbers], dtype=torch.int32, device=target.device
            )
    return options


def attend_and_grad(*inputs: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """Out, lse, and the gradients of q, k, v and, where there are some, of the bias and sinks."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    for name in ("attn_bias", "learnable_sink"):
        if name in options and options[name].is_floating_point():
            options[name] = options[name].detach().requires_grad_()
            inputs.append(options[name])
    out, lse, _ = flash_attn.flash_attn_varlen_func(*inputs[:3], **options, return_attn_probs=True)
    # A weight that differs from row to row: the sum of a row's dP would be 0 otherwise.
    # Computed on the CPU: in fp16, CUDA counts its steps in fp16, which ends at 65504.
    weight = torch.linspace(0.5, 2, out.numel(), dtype=torch.float64).half().to(out)
    return [out, lse, *torch.autograd.grad((out * weight.view_as(out)).sum(), inputs)]


def without_missing_pages(q, k, v, table, lengths, missing, options) -> list[torch.Tensor]:
    """The same in float64 on the CPU: the pages of a dense table, with a mask of the keys."""
    double = [x.detach().cpu().double() for x in (q, k, v)]
    options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    for name in ("attn_bias", "learnable_sink"):
        if name in options and options[name].is_floating_point():
            options[name] = options[name].double()
    exists = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    first = 4 - (3 if "leftpad_k" in options else 0)  # of the missing page, as keys are counted
    exists[0, ..., first : first + 4] = False
    bias = options.pop("attn_bias", exists)
    if bias.dtype == torch.bool:
        options["attn_bias"] = bias & exists
    else:
        options["attn_bias"] = bias.masked_fill(~exists, -math.inf)
    hidden = table.cpu().clone()
    hidden[missing] = 2  # a page of nobody's
    cpu = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in lengths.items()}
    return attend_and_grad(*double, block_table=hidden, **cpu, **options)


@each_target(*OP_TARGETS)
@pytest.mark.real_gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1])
def test_a_page_that_does_not_exist_has_no_keys(page: int, options: str, target: Target) -> None:
    """Out, lse and gradients of a call in which a mask hides those keys."""
    if target.backend == "sm90" and options in ("bias", "bool"):
        pytest.skip("the backward is sm80's")
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    q, k, v, lengths, table = paged_problem(target, dtype)
    table[0, 1] = page
    for pool in (k, v):
        pool[0] = math.nan  # of nobody's
    given = options_of(options, target, dtype)
    # A hint of all that the table holds, beyond which the padding moves keys.
    hint = lengths | ({"max_seqlen_k": 16} if options == "leftpad" else {})
    with use(target):
        actual = attend_and_grad(q, k, v, block_table=table, **hint, **given)
    expected = without_missing_pages(q, k, v, table, lengths, (0, 1), given)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            a.cpu().double(), e, rtol=1e-2, atol=1e-2 if dtype == torch.float16 else 1e-5
        )


@each_target(SM80, SM90)
@pytest.mark.sanitize
def test_a_missing_page_under_a_sanitizer(target: Target) -> None:
    q, k, v, lengths, table = paged_problem(target, torch.float16)
    table[0, 1] = -1
    with use(target):
        actual = attend_and_grad(q, k, v, block_table=table, causal=True, **lengths)
    expected = without_missing_pages(q, k, v, table, lengths, (0, 1), dict(causal=True))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-2, atol=1e-2)


@each_target(*OP_TARGETS)
@pytest.mark.parametrize("causal", [False, True])
def test_missing_pages_are_those_of_decode(causal: bool, target: Target) -> None:
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    q, k, v, lengths, table = paged_problem(target, dtype)
    table[0, 1] = 6
    with use(target):
        out = flash_attn.flash_attn_varlen_func(
            q, k, v, **lengths, block_table=table, causal=causal
        )
    for b, (first, last, length) in enumerate(((0, 3, 10), (3, 5, 7))):
        decoded = flash_attn.flash_decode_func(
            q[None, first:last],
            k,
            v,
            torch.tensor([length], dtype=torch.int32, device=target.device),
            causal=causal,
            block_table=table[b : b + 1],
        )
        torch.testing.assert_close(decoded[0], out[first:last], rtol=1e-2, atol=5e-3)


@each_target(*OP_TARGETS)
def test_dropout_and_largest_logits_with_a_missing_page(target: Target) -> None:
    """They see the keys that are left alone."""
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    q, k, v, lengths, table = paged_problem(target, dtype)
    table[0, 1] = 6

    def attend(**options: object) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        return flash_attn.flash_attn_varlen_func(
            q, k, v, **lengths, block_table=table, dropout_p=0.3, **options
        )

    exists = torch.ones(2, 1, 1, 10, dtype=torch.bool, device=target.device)
    exists[0, ..., 4:8] = False
    with use(target):
        out = attend()
    table[0, 1] = 2
    with flash_attn.use_backend("aten"):
        expected = attend(attn_bias=exists)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    table[0, 1] = 6
    with use(target):
        *_, largest = flash_attn.flash_attn_varlen_func(
            q, k, v, **lengths, block_table=table, return_max_logits=True
        )
    table[0, 1] = 2
    with flash_attn.use_backend("aten"):
        *_, wanted = flash_attn.flash_attn_varlen_func(
            *(q, k, v), **lengths, block_table=table, attn_bias=exists, return_max_logits=True
        )
    torch.testing.assert_close(largest, wanted, rtol=1e-2, atol=1e-2)


MANY = 9  # sequences; of every third a page is missing, first in its middle, last at its end
TERMS: dict[str, dict] = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(70, 9)),
    "softcap": dict(softcap=3.0),
    "alibi": dict(alibi_slopes=torch.linspace(0.05, 0.4, 4)),
    "sink": dict(learnable_sink=torch.linspace(-1, 1, 4)),
    "deterministic": dict(causal=True, deterministic=True),
    "top-left": dict(causal=True, causal_alignment="top-left"),
}


def many_problem(d: int, dtype: torch.dtype):
    """On the CPU: q, k, v, the lengths, and a table without and with missing pages."""
    lengths_q = torch.randint(1, 300, (MANY,))
    lengths_k = torch.randint(40, 480, (MANY,))
    q = torch.randn(int(lengths_q.sum()), 4, d)
    k, v = torch.randn(2, MANY * 16, 32, 2, d)
    starts = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (lengths_q, lengths_k)]
    table = torch.randperm(MANY * 16 - 1).add(1)[: MANY * 15].int().view(MANY, 15)
    table = torch.nn.functional.pad(table, (0, 1), value=-1)
    k[0], v[0] = math.nan, math.nan  # of nobody's
    lacking = table.clone()
    for b in range(0, MANY, 3):
        last = int(lengths_k[b] - 1) // 32
        lacking[b, min(b // 3, last) if b < 6 else last] = -1
    lengths = dict(
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        max_seqlen_q=int(lengths_q.max()),
        max_seqlen_k=int(lengths_k.max()),
    )
    return [x.to(dtype) for x in (q, k, v)], lengths, table, lacking


def to_device(given: dict, target: Target) -> dict:
    return {
        name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()
    }


@each_target(SM80, SM90)
@pytest.mark.real_gpu
@pytest.mark.parametrize("d", [13, 64, 128, 256])
@pytest.mark.parametrize("terms", TERMS)
def test_sequences_that_lack_a_page_among_others(terms: str, d: int, target: Target) -> None:
    """All are right, by float64 with the pages masked, and the others have the bits of a call in
    which no page is missing: they ran on the same kernels."""
    if target.backend == "sm90" and terms in ("softcap", "alibi") and d > 128:
        pytest.skip("the backward is sm80's")
    inputs, lengths, table, lacking = many_problem(d, torch.float16)
    options = TERMS[terms]
    on_device = dict(**to_device(lengths, target), **to_device(options, target))
    given = [x.to(target.device) for x in inputs]
    with use(target):
        whole = attend_and_grad(*given, block_table=table.to(target.device), **on_device)
        actual = attend_and_grad(*given, block_table=lacking.to(target.device), **on_device)
        again = attend_and_grad(*given, block_table=lacking.to(target.device), **on_device)
    expected = attend_and_grad(
        *(x.double() for x in inputs), block_table=lacking, **lengths, **options
    )
    names = ["out", "lse", "dq", "dk", "dv", "dsink"]
    for name, a, e in zip(names, actual, expected, strict=False):
        torch.testing.assert_close(
            a.cpu().double(), e.double(), rtol=2e-2, atol=2e-2, msg=lambda m, name=name: name + m
        )
    starts = lengths["cu_seqlens_q"].tolist()
    for b in range(MANY):
        rows = slice(starts[b], starts[b + 1])
        if b % 3 != 0:
            assert torch.equal(actual[0][rows], whole[0][rows]), b
            assert torch.equal(actual[1][:, rows], whole[1][:, rows]), b
    assert torch.equal(actual[0], again[0]) and torch.equal(actual[1], again[1])
    if options.get("deterministic"):
        for a, e in zip(actual, again, strict=True):
            assert torch.equal(a, e)


@each_target(SM80, SM90)
@pytest.mark.real_gpu
def test_a_max_seqlen_below_the_longest_hides_no_page(target: Target) -> None:
    """On a GPU it is a hint, of calls with pages, too; on a CPU it is refused."""
    inputs, lengths, table, _ = many_problem(64, torch.float16)
    given = [x.to(target.device) for x in inputs]
    on_device = to_device(lengths, target)
    with use(target):
        results = [
            flash_attn.flash_attn_varlen_func(
                *given, **on_device | {"max_seqlen_k": longest}, block_table=table.to(target.device)
            )
            for longest in (lengths["max_seqlen_k"], 40)
        ]
    assert torch.equal(*results)


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("columns", [4, 0])
def test_no_pages(columns: int, target: Target) -> None:
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    q, k, v, lengths, table = paged_problem(target, dtype)
    empty = [x[:0].requires_grad_() for x in (k, v)]
    with use(target):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, *empty, **lengths, block_table=table[:, :columns], return_attn_probs=True
        )
        out.sum().backward()
    assert not out.any() and (lse == -math.inf).all() and empty[0].grad.shape == empty[0].shape


@each_target(*ATTENTION_TARGETS)
@pytest.mark.parametrize("rows", [0, 3, 200])
def test_no_sequences(rows: int, target: Target) -> None:
    """Rows of no sequence are 0, and those of lse -inf."""
    make = {"device": target.device, "dtype": torch.float16}
    q = torch.full((rows, 4, 64), math.nan, **make)
    k, v = torch.randn(2, 5, 16, 2, 64, **make)
    starts = torch.zeros(1, dtype=torch.int32, device=target.device)
    table = torch.zeros(0, 40, dtype=torch.int32, device=target.device)
    with use(target):
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, starts, starts, 8, 600, block_table=table, return_attn_probs=True
        )
    assert torch.equal(out, torch.zeros_like(out)) and out.shape == q.shape
    assert lse.shape == (4, rows) and bool((lse == -math.inf).all())


@each_target(*ATTENTION_TARGETS)
def test_pages_of_v(target: Target) -> None:
    q, k, v, lengths, table = paged_problem(target)
    for wrong in (v[:4], v[:, :3], v.flatten(0, 1)):
        with use(target), pytest.raises(RuntimeError, match="flash_attn: v: expected "):
            flash_attn.flash_attn_varlen_func(q, k, wrong, **lengths, block_table=table)
