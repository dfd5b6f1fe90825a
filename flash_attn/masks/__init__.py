"""Masks as objects: which keys a query sees, given wherever attn_bias (attn_mask) is.

    from flash_attn import masks

    mask = masks.causal() & masks.documents(ids)
    out = flash_attn_func(q, k, v, attn_bias=mask)

Masks are immutable and combine by & (seen by both), | (seen by one) and ~. A mask belongs to no
call: it takes lengths and device from each that it is given to. What it computes for one it keeps
for others of the same lengths, until a tensor that it was made of is written to. Nothing but
prepared() waits for the device. Under capture in a CUDA graph each call computes it anew, in every
replay, unless it is prepared().

What a mask costs depends on its form:

    causal, window, their intersections       the arguments of that name
    packed_documents, alone or with those     a varlen call
    documents in one piece each, prepared()   likewise, where q, k and v can be read as they lie
    the others                                tiles of 64 queries and 64 keys: hidden ones are
                                              skipped, those seen throughout are not masked

What is seen of other tiles takes O(seqlen) memory where it is one or two intervals of keys a row,
or of documents, as for prefixes and windows, and their unions and intersections as long as two are
enough; nothing for block-sparse masks; and else a bit for each query and key.

The kernels that skip tiles are those of sm80, on every GPU: fp16 and bf16, head dims up to 256, not
varlen, no softcap, ALiBi or dropout; in the backward not deterministic, and 163 KB of shared memory
a thread block. On Hopper sm90 has such kernels for the same calls. In any other call, and on the
CPU, a mask is read as a bool tensor, which takes O(seqlen²) memory. can_use says which it is.
"""

import torch
from torch import Tensor

from flash_attn._errors import shown
from flash_attn.masks.forms import (
    BlockSparse,
    Bool,
    Documents,
    PackedDocuments,
    Prefix,
    expect,
)
from flash_attn.masks.mask import Mask, Window

__all__ = [
    "Mask",
    "block_sparse",
    "causal",
    "documents",
    "from_bool",
    "packed_documents",
    "prefix",
    "prefix_lm",
    "window",
]


def _expect_tensor(x: object, argument: str, dtypes: tuple, dims: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"flash_attn: {argument}: expected torch.Tensor, got {shown(x)}")
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    form = " or ".join(map(str, dims))
    expect(
        x.dtype in dtypes and x.dim() in dims and x.layout == torch.strided,
        argument,
        f"{names} of {form} dimensions",
        x,
    )


def causal() -> Mask:
    """Query i sees the keys up to its diagonal, as causal=True of the call that it is given to."""
    return Window(-1, 0)


def window(left: int | None, right: int | None) -> Mask:
    """Query i sees the keys from diagonal - left to diagonal + right, as window_size=(left, right).

    Arguments:
        left, right: int >= 0; -1 or None: no limit.

    Raises:
        RuntimeError: below -1. TypeError: not an int.
    """
    sides = []
    for name, side in (("left", left), ("right", right)):
        side = -1 if side is None else side
        if not isinstance(side, int):
            raise TypeError(f"flash_attn: {name}: expected int or None, got {shown(side)}")
        expect(-1 <= side < 2**63, name, "-1 (no limit) to 2^63 - 1", side)
        sides.append(side)
    return Window(*sides)


def documents(ids: Tensor, ids_k: Tensor | None = None) -> Mask:
    """Query i sees the keys of its own document: those with ids_k[j] == ids[i], in any order.

    Arguments:
        ids: int32 or int64 (seqlen_q) or (batch, seqlen_q): the document of each query. Numbers
            from -2³¹ to 2³¹ - 2.
        ids_k: the same of the keys, (seqlen_k) or (batch, seqlen_k). Default: ids.

    Where each document lies in one piece, packed_documents is faster, and so is this mask once it
    is prepared().

    Raises:
        RuntimeError: dtype or dimensions; in a call, where ids and lengths differ.
        TypeError: no tensor.
    """
    ids_k = ids if ids_k is None else ids_k
    for name, x in (("ids", ids), ("ids_k", ids_k)):
        _expect_tensor(x, name, (torch.int32, torch.int64), (1, 2))
    return Documents(ids, ids_k)


def packed_documents(cu_seqlens: Tensor) -> Mask:
    """Query i sees the keys of its own document, where documents lie one behind the other.

    With causal() and window() in a dense call this runs as a varlen call does, and takes as long.

    Arguments:
        cu_seqlens: int32 (documents + 1) or (batch, documents + 1): document n is the rows
            cu_seqlens[n] to cu_seqlens[n + 1] of q and of k. Ascending; rows in no document see
            nothing, and are seen by none. Where sequences of a batch have fewer documents, repeat
            the last end.

    Raises:
        RuntimeError: dtype or dimensions; in a call, other numbers of queries and keys.
        TypeError: no tensor.
    """
    _expect_tensor(cu_seqlens, "cu_seqlens", (torch.int32,), (1, 2))
    expect(cu_seqlens.size(-1) >= 1, "cu_seqlens", "at least one number a sequence", cu_seqlens)
    return PackedDocuments(cu_seqlens)


def _prefix(lengths: int | Tensor, is_causal: bool) -> Mask:
    if isinstance(lengths, int):
        expect(0 <= lengths < 2**63, "lengths", "0 to 2^63 - 1", lengths)
    else:
        _expect_tensor(lengths, "lengths", (torch.int32, torch.int64), (1,))
    return Prefix(lengths, is_causal)


def prefix(lengths: int | Tensor) -> Mask:
    """All queries see the first keys: padding at the end, or with | window(…) tokens to keep.

    Arguments:
        lengths: int, or int32 or int64 (batch): how many.

    Raises:
        RuntimeError: below 0, dtype or dimensions. TypeError: neither an int nor a tensor.
    """
    return _prefix(lengths, False)


def prefix_lm(lengths: int | Tensor) -> Mask:
    """causal() | prefix(lengths): a prefix whose tokens see each other, and causal behind it.

    Arguments and errors: as prefix.
    """
    return _prefix(lengths, True)


def block_sparse(block_mask: Tensor, block_size: int = 128) -> Mask:
    """Query i sees key j where block_mask[…, i // block_size, j // block_size] is True.

    Arguments:
        block_mask: bool (blocks_q, blocks_k), (heads_q, …) or (batch, heads_q, …), batch and heads
            may be 1. At least as many blocks as cover the queries and keys.
        block_size: queries, and keys, of a block. Multiples of 64 need no bit for each query and
            key.

    Raises:
        RuntimeError: dtype or dimensions, a block_size below 1; in a call, too few blocks.
        TypeError: no tensor, no int.
    """
    _expect_tensor(block_mask, "block_mask", (torch.bool,), (2, 3, 4))
    if not isinstance(block_size, int):
        raise TypeError(f"flash_attn: block_size: expected int, got {shown(block_size)}")
    expect(block_size >= 1, "block_size", "at least 1", block_size)
    return BlockSparse(block_mask, block_size)


def from_bool(seen: Tensor) -> Mask:
    """Any mask. Which of its tiles are hidden is found once, and the mask kept as bits.

    Arguments:
        seen: bool, broadcastable to (batch, heads_q, seqlen_q, seqlen_k). True: query i sees key j.

    Raises:
        RuntimeError: dtype or dimensions; in a call, a shape that does not fit.
        TypeError: no tensor.
    """
    _expect_tensor(seen, "seen", (torch.bool,), (0, 1, 2, 3, 4))
    return Bool(seen)
