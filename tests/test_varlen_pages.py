"""Varlen calls whose keys lie in pages."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    ATEN_CPU,
    ATEN_CUDA,
    ATTENTION_TARGETS,
    SM80,
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
    weight = torch.linspace(0.5, 2, out.numel(), device=out.device, dtype=out.dtype)
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


@each_target(ATEN_CPU)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1])
def test_a_page_that_does_not_exist_has_no_keys(page: int, options: str, target: Target) -> None:
    """Out, lse and gradients of a call in which a mask hides those keys."""
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    q, k, v, lengths, table = paged_problem(target, dtype)
    table[0, 1] = page
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


@each_target(ATEN_CUDA, SM80)
def test_a_missing_page_shows_on_a_gpu(target: Target) -> None:
    dtype = torch.float32 if target.backend == "aten" else torch.float16
    q, k, v, lengths, table = paged_problem(target, dtype)
    table[0, 1] = 6
    with use(target):
        out = flash_attn.flash_attn_varlen_func(q, k, v, **lengths, block_table=table)
    assert out[:3].isnan().all() and out[3:].isfinite().all()


@each_target(ATEN_CPU)
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


@each_target(ATEN_CPU)
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
        expected = attend(attn_bias=exists)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    if target.backend == "aten":
        table[0, 1] = 6
        with use(target):
            *_, largest = flash_attn.flash_attn_varlen_func(
                q, k, v, **lengths, block_table=table, return_max_logits=True
            )
            table[0, 1] = 2
            *_, wanted = flash_attn.flash_attn_varlen_func(
                *(q, k, v), **lengths, block_table=table, attn_bias=exists, return_max_logits=True
            )
        torch.testing.assert_close(largest, wanted)


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
def test_pages_of_v(target: Target) -> None:
    q, k, v, lengths, table = paged_problem(target)
    for wrong in (v[:4], v[:, :3], v.flatten(0, 1)):
        with use(target), pytest.raises(RuntimeError, match="flash_attn: v: expected "):
            flash_attn.flash_attn_varlen_func(q, k, wrong, **lengths, block_table=table)
