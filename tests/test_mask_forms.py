"""What masks of flash_attn.masks mean, position by position, and what they become for a kernel:
tiles, rows and labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Problem
from test_masks import MASKS, PACKED, SQUARE, lowered, random_ids

from flash_attn import masks
from flash_attn.masks import lowering
from flash_attn.masks.mask import Window, intersection, split


def spelled_out(seen: Callable[[int, int], bool], seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    return torch.tensor([[seen(i, j) for j in range(seqlen_k)] for i in range(seqlen_q)])


@pytest.mark.parametrize("top_left", [False, True], ids=["bottom-right", "top-left"])
def test_definitions(top_left: bool) -> None:
    """to_bool is what the docstrings say, position by position."""
    seqlen_q, seqlen_k = 7, 11
    diagonal = 0 if top_left else seqlen_k - seqlen_q
    ids_q, ids_k = [1, 1, 5, 2, 2, 5, 9], [5, 1, 1, 2, 9, 9, 3, 5, 5, 2, 1]
    blocks = torch.tensor([[True, False, True, False], [False, True, True, False]])

    def is_causal(i: int, j: int) -> bool:
        return j <= i + diagonal

    def near(i: int, j: int) -> bool:
        return i + diagonal - 2 <= j <= i + diagonal + 1

    documents = masks.documents(torch.tensor(ids_q), torch.tensor(ids_k))
    pairs = {
        "causal": (masks.causal(), is_causal),
        "window": (masks.window(2, 1), near),
        "left": (masks.window(2, None), lambda i, j: j >= i + diagonal - 2),
        "prefix": (masks.prefix(3), lambda i, j: j < 3),
        "prefix-lm": (masks.prefix_lm(3), lambda i, j: j < 3 or is_causal(i, j)),
        "documents": (documents, lambda i, j: ids_q[i] == ids_k[j]),
        "blocks": (masks.block_sparse(blocks, 4), lambda i, j: bool(blocks[i // 4, j // 4])),
        "bool": (masks.from_bool(blocks[:1, :1].expand(7, 1)), lambda i, j: True),
        "and": (documents & masks.causal(), lambda i, j: ids_q[i] == ids_k[j] and is_causal(i, j)),
        "or": (documents | masks.window(2, 1), lambda i, j: ids_q[i] == ids_k[j] or near(i, j)),
        "not": (~masks.window(2, 1), lambda i, j: not near(i, j)),
    }
    for name, (mask, seen) in pairs.items():
        actual = mask.to_bool(
            seqlen_q, seqlen_k, causal_alignment="top-left" if top_left else "bottom-right"
        )
        assert actual.shape == (1, 1, seqlen_q, seqlen_k), name
        assert torch.equal(actual[0, 0], spelled_out(seen, seqlen_q, seqlen_k)), name


def test_definition_of_packed_documents() -> None:
    bounds = [1, 3, 3, 6]
    mask = masks.packed_documents(torch.tensor(bounds, dtype=torch.int32))
    of_row = {1: 0, 2: 0, 3: 2, 4: 2, 5: 2}
    expected = spelled_out(lambda i, j: i in of_row and of_row[i] == of_row.get(j), 8, 8)
    assert torch.equal(mask.to_bool(8, 8)[0, 0], expected)


def test_documents_found_to_be_packed() -> None:
    """By prepared(), where each lies in one piece, in whatever order."""
    x = torch.zeros(2, 6, 1, 8)

    def packed(*ids: list[int], **keys: torch.Tensor) -> tuple[list[list[int]], int] | None:
        mask = masks.documents(torch.tensor(ids), **keys).prepared(6, 6)
        found = lowering.packed_documents(mask, x, x, x)
        return None if found is None else (found[1].cu_seqlens.tolist(), found[1].longest)

    one, three = [7] * 6, [5, 5, -2, 9, 9, 9]
    assert packed(three) == ([[0, 2, 3, 6]], 3)
    assert packed(three, one) == ([[0, 2, 3, 6], [0, 6, 6, 6]], 6)
    assert packed(three, ids_k=torch.tensor(three)) == ([[0, 2, 3, 6]], 3)
    assert packed(three, ids_k=torch.tensor(one)) is None
    assert packed(one, [5, 5, 2, 5, 9, 9]) is None
    assert packed(one, three, one) is None  # of three sequences, for a call of two
    ready = masks.documents(torch.tensor(three)).prepared(6, 6)
    again = (ready & masks.window(3, 3)).prepared(6, 6)
    assert lowering.packed_documents(again, x, x, x)[0] == (3, 3)
    for other in (ready & masks.prefix(2), masks.documents(torch.tensor(three))):
        assert lowering.packed_documents(other, x, x, x) is None
    assert lowering.packed_documents(ready, *x[:, :5].expand(3, *x[:, :5].shape)) is None


@pytest.mark.parametrize("name", [*MASKS, *PACKED])
def test_tiles(name: str) -> None:
    """Where a tile is said to be hidden or seen throughout, it is."""
    problem = Problem(SQUARE.with_(seqlen_q=333), 1, "cpu")
    mask = (MASKS | PACKED)[name](problem)
    tiles, rows, _ = lowered(problem, mask)
    if tiles is None:
        assert all(isinstance(part, Window) for part in mask.parts())
        return
    seen = intersection(split(mask)[1]).to_bool(333, 333)
    shape = [max(a, b) for a, b in zip(seen.shape[:2], tiles.shape[:2], strict=True)]
    seen, tiles = seen.expand(*shape, -1, -1), tiles.expand(*shape, -1, -1)
    mixed = 0
    for row in range(tiles.size(2)):
        for col in range(tiles.size(3)):
            tile = seen[..., 64 * row : 64 * row + 64, 64 * col : 64 * col + 64].flatten(2)
            state = tiles[..., row, col]
            assert torch.equal(state == 0, ~tile.any(-1)) or "documents" in name
            assert not (tile.any(-1) & (state == 0)).any()
            assert tile.all(-1)[state == 2].all()
            mixed += int((state == 1).sum())
    assert mixed == 0 or rows is not None


@pytest.mark.parametrize("ascends", [True, False])
def test_labels_of_documents(ascends: bool) -> None:
    """Positions where the ids of the keys ascend, of which the rows tell, whatever those of the
    queries do; else the ids."""
    problem = Problem(SQUARE, 6, "cpu")
    ids = random_ids(problem, 200, 4)
    ids_k = ids.sort(1).values if ascends else ids.flip(1)
    mask = masks.documents(ids, ids_k)
    _, rows, labels = lowered(problem, mask)
    assert torch.equal(labels, torch.arange(200).expand_as(labels)) == ascends
    assert (rows[..., 3] < rows[..., 2]).all() == ascends
    labels = labels[:, None, None]
    seen = (labels >= rows[..., :1]) & (labels < rows[..., 1:2])
    assert torch.equal(seen, mask.to_bool(200, 200))
