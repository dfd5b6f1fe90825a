"""What masks keep from call to call, and of whom: tiles, packed documents, copies, traces,
prepared()."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import ATEN_CPU, SM80, SM90, Problem, Target, each_target, use
from test_masks import SQUARE, attend, bounds_of_documents, lowered, random_ids, seen_by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash_attn
from flash_attn import masks
from flash_attn.masks import Mask


def test_packed_documents_of_nothing() -> None:
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    ready = masks.documents(torch.arange(10) // 4).prepared(10, 10)
    for mask, *shape in (
        (masks.packed_documents(bounds), 0, 10),
        (masks.packed_documents(bounds), 2, 0),
        (ready, 0, 10),
    ):
        x = torch.zeros(*shape, 4, 16)
        assert flash_attn.flash_attn_func(x, x, x, attn_bias=mask).shape == x.shape


def attend_packed(mask: Mask, batch: int) -> torch.Tensor:
    x = torch.arange(batch * 10 * 8.0).reshape(batch, 10, 1, 8).cos()
    return flash_attn.flash_attn_func(x, x, x, attn_bias=mask)


def test_kept_lengths_are_those_of_the_call() -> None:
    """Of the batch, and of the numbers that the bounds hold by then."""
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    mask = masks.packed_documents(bounds)
    for batch in (2, 3, 2):
        fresh = masks.packed_documents(bounds.clone())
        assert torch.equal(attend_packed(mask, batch), attend_packed(fresh, batch))
    bounds[1] = 6
    fresh = masks.packed_documents(bounds.clone())
    assert torch.equal(attend_packed(mask, 2), attend_packed(fresh, 2))


def test_copies_hear_of_writes() -> None:
    """To the copies of what the mask was made of."""
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    mask = masks.packed_documents(bounds)
    attend_packed(mask, 2)
    bounds_copy, copied = copy.deepcopy((bounds, mask))
    assert torch.equal(attend_packed(copied, 2), attend_packed(mask, 2))
    bounds_copy[1] = 6
    fresh = masks.packed_documents(bounds_copy.clone())
    assert torch.equal(attend_packed(copied, 2), attend_packed(fresh, 2))


def test_prepared_where_nothing_has_numbers() -> None:
    with FakeTensorMode():
        mask = masks.documents(torch.zeros(10).long()).prepared(10, 10)
        assert attend_packed(mask, 2).shape == (2, 10, 1, 8)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_traced_masks(tracing_mode: str) -> None:
    """By make_fx: tiles, and documents that are prepared."""

    def attend_both(q: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        documents = masks.documents(ids)
        both = documents | masks.prefix(3), documents.prepared(q.size(1), q.size(1))
        return [flash_attn.flash_attn_func(q, q, q, attn_bias=mask) for mask in both]

    q, ids = torch.randn(2, 70, 2, 16), torch.arange(70) // 20
    traced = make_fx(attend_both, tracing_mode=tracing_mode)(q, ids)
    q, ids = torch.randn(2, 70, 2, 16), torch.arange(70) // 30
    for actual, expected in zip(traced(q, ids), attend_both(q, ids), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("form", ["tiles", "packed"])
def test_prepared_in_inference_mode(form: str) -> None:
    """For calls that train as well."""
    documents = masks.documents(torch.arange(10) // 4)
    mask = documents | masks.prefix(3) if form == "tiles" else documents
    with torch.inference_mode():
        ready = mask.prepared(10, 10)
    gradients = []
    for given in (mask, ready):
        q = torch.ones(2, 10, 2, 8, requires_grad=True)
        out = flash_attn.flash_attn_func(q, q, q.cumsum(1), attn_bias=given)
        gradients += torch.autograd.grad(out.square().sum(), q)
    torch.testing.assert_close(*gradients)


@each_target(ATEN_CPU, SM80, SM90)
def test_written_tensors_are_read_again(target: Target) -> None:
    """What is kept of a mask holds until a tensor it was made of is written to."""
    problem = Problem(SQUARE, 4, target.device)
    ids = random_ids(problem, 200, 3)
    mask = masks.documents(ids)
    first = lowered(problem, mask)
    assert lowered(problem, mask).tiles is first.tiles
    ids.copy_(ids.flip(1).sort(1).values)
    assert lowered(problem, mask).tiles is not first.tiles
    with use(target):
        actual = attend(problem, mask)["out"]
        expected = attend(problem, masks.documents(ids.clone()))["out"]
    assert torch.equal(actual, expected)


@each_target(ATEN_CPU, SM80, SM90)
def test_prepared(target: Target) -> None:
    """The same mask, whose tiles are those of the time when it was prepared, for those lengths."""
    problem = Problem(SQUARE.with_(causal=True), 8, target.device)
    ids = random_ids(problem, 200, 4).sort(1).values.int()
    mask = masks.documents(ids) & masks.window(50, 0)
    ready = mask.prepared(200, 200)
    assert lowered(problem, ready).tiles is lowered(problem, ready).tiles
    assert torch.equal(seen_by(problem, ready), seen_by(problem, mask))
    with use(target):
        unprepared, expected = attend(problem, mask), attend(problem, ready)
        ids.zero_()
        actual = attend(problem, ready)
    assert all(torch.equal(actual[name], expected[name]) for name in ("out", "dk", "dv"))
    for name in ("out", "dk", "dv"):
        torch.testing.assert_close(actual[name], unprepared[name], rtol=0.02, atol=0.02)
    packed = masks.packed_documents(bounds_of_documents(problem)) & masks.causal()
    assert packed.prepared(200, 200) is packed
