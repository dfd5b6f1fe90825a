"""flash_attn.masks: what does not make a mask, or does not fit a call, is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Case, Problem, op_arguments

import flash_attn
from flash_attn import masks
from flash_attn.masks import Mask

SQUARE = Case(seqlen_q=200, dtype="bf16", d=64)


def test_masks_combine_with_masks_only() -> None:
    for other in (True, torch.ones(3, 3, dtype=torch.bool)):
        with pytest.raises(TypeError):
            masks.causal() & other
        with pytest.raises(TypeError):
            masks.causal() | other
    inner = masks.window(3, 3)
    assert ~~inner is inner


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: masks.window(-2, 0), "left"),
        (lambda: masks.window(0, 1.5), "right"),
        (lambda: masks.documents([0, 1]), "ids"),
        (lambda: masks.documents(torch.zeros(3), torch.zeros(3)), "ids"),
        (lambda: masks.documents(torch.zeros(3).int(), torch.zeros(1, 1, 3).int()), "ids_k"),
        (lambda: masks.packed_documents(torch.zeros(3).long()), "cu_seqlens"),
        (lambda: masks.packed_documents(torch.zeros(0).int()), "cu_seqlens"),
        (lambda: masks.prefix(-1), "lengths"),
        (lambda: masks.prefix_lm(torch.zeros(2)), "lengths"),
        (lambda: masks.block_sparse(torch.zeros(2, 2)), "block_mask"),
        (lambda: masks.block_sparse(torch.zeros(2, 2).bool(), 0), "block_size"),
        (lambda: masks.block_sparse(torch.zeros(2, 2).bool(), 64.0), "block_size"),
        (lambda: masks.from_bool(torch.zeros(2, 2)), "seen"),
        (lambda: masks.from_bool(None), "seen"),
    ],
)
def test_wrong_arguments(make: Callable, named: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as error:
        make()
    assert str(error.value).startswith(f"flash_attn: {named}: expected ")
    assert len(str(error.value)) <= 300


@pytest.mark.parametrize(
    "mask, named",
    [
        (masks.documents(torch.zeros(65).int()), "ids"),
        (masks.documents(torch.zeros(64).int(), torch.zeros(3, 70).int()), "attn_bias"),
        (masks.packed_documents(torch.tensor([0, 64]).int()), "cu_seqlens"),
        (masks.block_sparse(torch.ones(1, 1, dtype=torch.bool), 64), "block_mask"),
        (masks.block_sparse(torch.ones(3, 2, 2, dtype=torch.bool), 64), "attn_bias"),
        (masks.from_bool(torch.ones(64, 69, dtype=torch.bool)), "seen"),
        (masks.prefix(torch.zeros(3).int()), "attn_bias"),
        (masks.prefix(torch.zeros(2, device="meta").int()), "attn_bias"),
    ],
    ids=["length", "batch-of-ids", "packed", "blocks", "heads", "keys", "batch", "device"],
)
def test_masks_that_do_not_fit(mask: Mask, named: str) -> None:
    q = torch.zeros(2, 64, 2, 32)
    k = torch.zeros(2, 70, 2, 32)
    with pytest.raises(RuntimeError) as error:
        flash_attn.flash_attn_func(q, k, k, attn_bias=mask)
    assert str(error.value).startswith(f"flash_attn: {named}: expected ")
    assert len(str(error.value)) <= 300


@pytest.mark.parametrize("shape", [(3, 4, 2, 32), (2, 9, 2, 32), (6, 2, 32), (32,)], ids=str)
@pytest.mark.parametrize("is_prepared", [False, True], ids=["packed", "prepared"])
def test_values_that_do_not_fit_packed_documents(shape: tuple[int, ...], is_prepared: bool) -> None:
    """Whatever they hold, these are no rows of a varlen call."""
    if is_prepared:
        mask = masks.documents(torch.zeros(6).int()).prepared(6, 6)
    else:
        mask = masks.packed_documents(torch.tensor([0, 6]).int())
    q, v = torch.zeros(2, 6, 2, 32), torch.zeros(shape)
    with pytest.raises(RuntimeError, match="^flash_attn: v: "):
        flash_attn.flash_attn_func(q, q, v, attn_bias=mask)


TILES = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
ROWS = torch.zeros(1, 1, 200, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    "given, named",
    [
        (dict(mask_rows=ROWS), "mask_tiles"),
        (dict(mask_tiles=TILES.int()), "mask_tiles"),
        (dict(mask_tiles=TILES[..., :3]), "mask_tiles"),
        (dict(mask_tiles=TILES.expand(3, -1, -1, -1)), "mask_tiles"),
        (dict(mask_tiles=TILES, attn_bias=torch.zeros(200, 200)), "attn_bias"),
        (dict(mask_tiles=TILES, mask_rows=ROWS.long()), "mask_rows"),
        (dict(mask_tiles=TILES, mask_rows=ROWS[:, :, 1:]), "mask_rows"),
        (dict(mask_tiles=TILES, mask_rows=ROWS.to(torch.uint8)), "mask_rows"),
        (dict(mask_tiles=TILES, mask_labels=torch.zeros(1, 200).int()), "mask_rows"),
        (
            dict(mask_tiles=TILES, mask_rows=ROWS, mask_labels=ROWS[0, :, :, 0].long()),
            "mask_labels",
        ),
        (dict(mask_tiles=TILES, mask_rows=ROWS, mask_labels=ROWS[0, 0]), "mask_labels"),
    ],
)
def test_wrong_arguments_of_the_op(given: dict, named: str) -> None:
    """What reaches the ops without flash_attn.masks is checked there."""
    arguments = op_arguments(Problem(SQUARE, 0, "cpu")) | dict(backend=None) | given
    q, k, v = torch.zeros(2, 200, 4, 64), *torch.zeros(2, 2, 200, 2, 64)
    with pytest.raises(RuntimeError, match=f"flash_attn: {named}: ") as error:
        torch.ops.flash_attn.fwd(q, k, v, **arguments)
    assert len(str(error.value).splitlines()[0]) <= 300
