"""Masks as objects: which keys a query sees, given wherever attn_bias (attn_mask) is.

    from flash_attn import masks

    mask = masks.causal() & masks.documents(ids)
    out = flash_attn_func(q, k, v, attn_bias=mask)

Masks are immutable and combine by & (seen by both), | (seen by one) and ~. A mask belongs to no call:
it takes the lengths and the device of each that it is given to, and what was computed for one is used
again by the next of the same lengths, until a tensor that the mask was made of is written to. Nothing
waits for the device, and all of it can be captured in a CUDA graph, which then computes the mask anew in
each replay if it was not ready before.

What a mask costs depends on its form, each of which has its own way to the kernels:

    causal, window, and their intersections     the arguments of that name
    packed_documents, alone or with those       a varlen call
    the others                                  tiles of 64 queries and 64 keys: hidden ones are skipped,
                                                those that are seen throughout are not masked

Inside a tile that is seen in part, prefixes, windows and documents are intervals of a row, O(seqlen) in
memory, as long as two are enough for their unions and intersections; other masks have a bit for each
query and key. The kernels that skip tiles are sm80's: 16 bits, head dims up to 256, no softcap, ALiBi
or dropout, not varlen, and for the backward not deterministic and 163 KB of shared memory a thread
block. In any other call a mask is read as a bool tensor.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn._errors import shown

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

_TILE = 64  # csrc/core/tile_mask.h
_HIDDEN, _MIXED, _SEEN = range(3)


def _expect(condition: bool, argument: str, requirement: str, got: object) -> None:
    if not condition:
        raise RuntimeError(f"flash_attn: {argument}: expected {requirement}, got {shown(got)}")


def _expect_tensor(x: object, argument: str, dtypes: tuple, dims: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"flash_attn: {argument}: expected torch.Tensor, got {shown(x)}")
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    form = " or ".join(map(str, dims))
    _expect(
        x.dtype in dtypes and x.dim() in dims and x.layout == torch.strided,
        argument,
        f"{names} of {form} dimensions",
        x,
    )


@dataclass(frozen=True)
class Geometry:
    """The lengths that a mask is seen with, and the key that query 0 meets on its diagonal.

    diagonal: an int, or int64 (batch, 1, 1, 1), where the sequences' lengths differ.
    """

    seqlen_q: int
    seqlen_k: int
    diagonal: int | Tensor
    device: torch.device

    def queries(self) -> Tensor:
        return torch.arange(self.seqlen_q, device=self.device)

    def keys(self) -> Tensor:
        return torch.arange(self.seqlen_k, device=self.device)


class Intervals(NamedTuple):
    """Keys that rows see: int64 (batch or 1, heads or 1, seqlen_q, n, 2), first and end in
    [0, seqlen_k]; end may be less than first."""

    ends: Tensor

    @property
    def count(self) -> int:
        return self.ends.size(-2)


class Tiled(NamedTuple):
    """A mask as the ops take it: csrc/bindings/mask.h."""

    tiles: Tensor
    rows: Tensor | None = None
    labels: Tensor | None = None


def _tiles_of(length: int) -> int:
    return -(-length // _TILE)


def _padded(x: Tensor, dim: int, value: float) -> Tensor:
    """x with its dimension filled up to whole tiles, which become a dimension before it."""
    missing = -x.size(dim) % _TILE
    if missing:
        filler = x.new_full((1,), value).expand(
            *x.shape[:dim], missing, *x.shape[dim + 1 :]
        )
        x = torch.cat([x, filler], dim)
    return x.unflatten(dim, (-1, _TILE))


def _states(some: Tensor, every: Tensor) -> Tensor:
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def _tile_intervals(x: Intervals, at: Geometry) -> Tiled:
    """Of one or two intervals a row."""
    first, end = x.ends.unbind(-1)  # (batch, heads, seqlen_q, n)
    edges = torch.arange(_tiles_of(at.seqlen_k) + 1, device=at.device) * _TILE
    edges = edges.clamp(max=at.seqlen_k)
    first, end = first[..., None], end[..., None]
    some = ((first < edges[1:]) & (end > edges[:-1]) & (first < end)).any(-2)
    every = ((first <= edges[:-1]) & (end >= edges[1:])).any(-2)
    some, every = _padded(some, 2, False).any(3), _padded(every, 2, True).all(3)
    ends = x.ends.flatten(-2).to(torch.int32)
    if x.count == 1:
        ends = torch.cat([ends, torch.zeros_like(ends)], -1)
    return Tiled(_states(some, every), ends.contiguous())


def _tile_bool(seen: Tensor, at: Geometry) -> Tiled:
    """Of a bool tensor of four dimensions that broadcasts."""
    seen = seen.expand(*seen.shape[:2], at.seqlen_q, at.seqlen_k)
    some = _padded(_padded(seen, 3, False).any(4), 2, False).any(3)
    every = _padded(_padded(seen, 3, True).all(4), 2, True).all(3)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=seen.device)
    octets = _padded(seen, 3, False).flatten(3).unflatten(3, (-1, 8))
    bits = (octets * weights).sum(-1, dtype=torch.uint8)
    return Tiled(_states(some, every), bits)


def _has_only_whole_tiles(x: Tiled | None) -> bool:
    return x is not None and x.rows is None


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees. Made by this module's functions; &, | and ~ combine masks."""

    # The latest Lowered, and what it was computed for.
    _cache: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __and__(self, other: "Mask") -> "Mask":
        return _And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return _Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return _Not(self)

    def to_bool(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        device: torch.device | str | None = None,
        causal_alignment: str = "bottom-right",
    ) -> Tensor:
        """The mask as a tensor: its definition, of O(seqlen²) memory.

        Arguments:
            seqlen_q, seqlen_k: number of queries and keys of each sequence.
            device: of the tensors that the mask was made of. Default: theirs, or the CPU.
            causal_alignment: as in the call that the mask is for: "bottom-right", or "top-left" as in
                scaled_dot_product_attention. Moves causal(), window() and prefix_lm().

        Returns:
            bool (batch or 1, heads or 1, seqlen_q, seqlen_k), True: seen.

        Raises:
            RuntimeError: a tensor that the mask was made of does not fit these lengths.
        """
        if device is None:
            device = next((x.device for x in self._tensors()), torch.device("cpu"))
        diagonal = 0 if causal_alignment == "top-left" else seqlen_k - seqlen_q
        at = Geometry(seqlen_q, seqlen_k, diagonal, torch.device(device))
        seen = self._seen(at)
        return seen.expand(*seen.shape[:2], seqlen_q, seqlen_k)

    def _parts(self) -> tuple["Mask", ...]:
        """The masks that this one is the intersection of."""
        return (self,)

    def _tensors(self) -> tuple[Tensor, ...]:
        """All that it was made of."""
        raise NotImplementedError

    def _seen(self, at: Geometry) -> Tensor:
        """bool of four dimensions that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
        raise NotImplementedError

    def _intervals(self, at: Geometry) -> Intervals | None:
        """One or two a row; None: they are not enough."""
        return None

    def _tiled(self, at: Geometry) -> Tiled | None:
        """Without bits; None: they are needed."""
        intervals = self._intervals(at)
        return None if intervals is None else _tile_intervals(intervals, at)


@dataclass(frozen=True, eq=False)
class _Window(Mask):
    left: int  # -1: no limit
    right: int

    def _tensors(self):
        return ()

    def _seen(self, at):
        distance = at.keys() - at.queries()[:, None] - at.diagonal
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            seen = seen & (distance >= -self.left)
        if self.right >= 0:
            seen = seen & (distance <= self.right)
        return seen if seen.dim() == 4 else seen[None, None]

    def _intervals(self, at):
        diagonal = at.queries() + at.diagonal
        first = torch.zeros_like(diagonal) if self.left < 0 else diagonal - self.left
        end = torch.full_like(diagonal, at.seqlen_k)
        if self.right >= 0:
            end = diagonal + self.right + 1
        ends = torch.stack([first, end], -1).clamp(0, at.seqlen_k)
        return Intervals(ends[None, None, :, None])


@dataclass(frozen=True, eq=False)
class _Prefix(Mask):
    lengths: int | Tensor
    is_causal: bool  # besides, keys up to the diagonal

    def _tensors(self):
        return (self.lengths,) if isinstance(self.lengths, Tensor) else ()

    def _end(self, at: Geometry) -> Tensor:
        """(batch or 1, 1, seqlen_q or 1)"""
        if isinstance(self.lengths, Tensor):
            end = self.lengths.long()[:, None, None]
        else:
            end = torch.full((1, 1, 1), self.lengths, device=at.device)
        if not self.is_causal:
            return end
        diagonal = at.diagonal.flatten(2) if isinstance(at.diagonal, Tensor) else at.diagonal
        return torch.maximum(end, at.queries() + diagonal + 1)

    def _seen(self, at):
        return at.keys() < self._end(at)[..., None]

    def _intervals(self, at):
        end = self._end(at).clamp(0, at.seqlen_k)
        end = end.expand(end.size(0), 1, at.seqlen_q)
        return Intervals(torch.stack([torch.zeros_like(end), end], -1)[..., None, :])


@dataclass(frozen=True, eq=False)
class _Documents(Mask):
    ids_q: Tensor  # (batch or 1, seqlen_q)
    ids_k: Tensor

    def _tensors(self):
        return (self.ids_q, self.ids_k)

    def _check(self, at: Geometry) -> None:
        for name, ids, length in (
            ("ids_q", self.ids_q, at.seqlen_q),
            ("ids_k", self.ids_k, at.seqlen_k),
        ):
            _expect(ids.size(-1) == length, name, f"{length} ids a sequence", ids)

    def _seen(self, at):
        self._check(at)
        return (self.ids_q[:, :, None] == self.ids_k[:, None, :])[:, None]

    def _tiled(self, at):
        self._check(at)
        if 0 in (at.seqlen_q, at.seqlen_k):
            return None
        low_q, high_q = self._ranges(self.ids_q, at.seqlen_q)
        low_k, high_k = self._ranges(self.ids_k, at.seqlen_k)
        low_q, high_q = low_q[:, :, None], high_q[:, :, None]
        low_k, high_k = low_k[:, None], high_k[:, None]
        some = (low_q <= high_k) & (low_k <= high_q)
        every = (low_q == high_q) & (low_k == high_k)
        ids = self.ids_q.to(torch.int32)
        nothing = torch.zeros_like(ids)
        rows = torch.stack([ids, ids + 1, nothing, nothing], -1)
        labels = self.ids_k.to(torch.int32).contiguous()
        return Tiled(_states(some, every)[:, None], rows[:, None], labels)

    @staticmethod
    def _ranges(ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Least and largest of each tile: (batch or 1, tiles)."""
        ids = ids[:, torch.arange(_tiles_of(length) * _TILE, device=ids.device).clamp(max=length - 1)]
        return ids.unflatten(1, (-1, _TILE)).aminmax(dim=2)


@dataclass(frozen=True, eq=False)
class PackedDocuments(Mask):
    cu_seqlens: Tensor  # (batch or 1, documents + 1)

    def _tensors(self):
        return (self.cu_seqlens,)

    def _ends(self, at: Geometry) -> tuple[Tensor, Tensor]:
        """Of each query's document: (batch or 1, seqlen_q)."""
        _expect(
            at.seqlen_q == at.seqlen_k,
            "cu_seqlens",
            "as many keys as queries in a mask of packed_documents",
            f"{at.seqlen_q} queries and {at.seqlen_k} keys",
        )
        cu_seqlens = self.cu_seqlens.contiguous()
        queries = at.queries().to(cu_seqlens.dtype).expand(cu_seqlens.size(0), -1).contiguous()
        number = torch.searchsorted(cu_seqlens, queries, right=True)
        last = cu_seqlens.size(1) - 1
        outside = (number == 0) | (number > last)
        first = cu_seqlens.gather(1, (number - 1).clamp(0, last))
        end = cu_seqlens.gather(1, number.clamp(max=last)).masked_fill(outside, 0)
        return first, end

    def _seen(self, at):
        first, end = (x[:, None, :, None] for x in self._ends(at))
        return (at.keys() >= first) & (at.keys() < end)

    def _intervals(self, at):
        ends = torch.stack(self._ends(at), -1).long().clamp(0, at.seqlen_k)
        return Intervals(ends[:, None, :, None])


@dataclass(frozen=True, eq=False)
class _BlockSparse(Mask):
    blocks: Tensor  # (batch or 1, heads or 1, blocks of queries, blocks of keys)
    block_size: int

    def _tensors(self):
        return (self.blocks,)

    def _repeated(self, size_q: int, size_k: int, times: int) -> Tensor:
        _expect(
            self.blocks.size(2) * times >= size_q and self.blocks.size(3) * times >= size_k,
            "block_mask",
            f"at least {-(-size_q // times)} by {-(-size_k // times)} blocks",
            self.blocks,
        )
        rows = self.blocks.repeat_interleave(times, 2)[:, :, :size_q]
        return rows.repeat_interleave(times, 3)[..., :size_k]

    def _seen(self, at):
        return self._repeated(at.seqlen_q, at.seqlen_k, self.block_size)

    def _tiled(self, at):
        if self.block_size % _TILE:
            return None
        sizes = _tiles_of(at.seqlen_q), _tiles_of(at.seqlen_k)
        tiles = self._repeated(*sizes, self.block_size // _TILE)
        return Tiled(tiles.to(torch.uint8) * _SEEN)


@dataclass(frozen=True, eq=False)
class _Bool(Mask):
    seen: Tensor  # of four dimensions

    def _tensors(self):
        return (self.seen,)

    def _seen(self, at):
        for dim, length in ((2, at.seqlen_q), (3, at.seqlen_k)):
            _expect(
                self.seen.size(dim) in (1, length),
                "seen",
                f"a shape that broadcasts to (…, {at.seqlen_q}, {at.seqlen_k})",
                self.seen,
            )
        return self.seen


@dataclass(frozen=True, eq=False)
class _Both(Mask):
    left: Mask
    right: Mask

    def _tensors(self):
        return self.left._tensors() + self.right._tensors()

    def _with_whole_tiles(self, at: Geometry) -> tuple[Tensor, Tiled] | None:
        """The states of the one that has only whole tiles, and the other."""
        left, right = self.left._tiled(at), self.right._tiled(at)
        if left is None or right is None:
            return None
        if _has_only_whole_tiles(left):
            return left.tiles, right
        return (right.tiles, left) if _has_only_whole_tiles(right) else None


@dataclass(frozen=True, eq=False)
class _And(_Both):
    def _parts(self):
        return self.left._parts() + self.right._parts()

    def _seen(self, at):
        return self.left._seen(at) & self.right._seen(at)

    def _intervals(self, at):
        left, right = self.left._intervals(at), self.right._intervals(at)
        if left is None or right is None or left.count * right.count > 2:
            return None
        first = torch.maximum(left.ends[..., 0], right.ends[..., 0])
        end = torch.minimum(left.ends[..., 1], right.ends[..., 1])
        return Intervals(torch.stack([first, end], -1))

    def _tiled(self, at):
        tiled = super()._tiled(at)
        if tiled is not None:
            return tiled
        parts = self._with_whole_tiles(at)
        if parts is None:
            return None
        states, other = parts
        return other._replace(tiles=torch.where(states == _SEEN, other.tiles, _HIDDEN))


@dataclass(frozen=True, eq=False)
class _Or(_Both):
    def _seen(self, at):
        return self.left._seen(at) | self.right._seen(at)

    def _intervals(self, at):
        left, right = self.left._intervals(at), self.right._intervals(at)
        if left is None or right is None or left.count + right.count > 2:
            return None
        shape = torch.broadcast_shapes(left.ends.shape[:3], right.ends.shape[:3])
        return Intervals(torch.cat([x.ends.expand(*shape, 1, 2) for x in (left, right)], -2))

    def _tiled(self, at):
        tiled = super()._tiled(at)
        if tiled is not None:
            return tiled
        parts = self._with_whole_tiles(at)
        if parts is None:
            return None
        states, other = parts
        return other._replace(tiles=torch.where(states == _SEEN, _SEEN, other.tiles))


@dataclass(frozen=True, eq=False)
class _Not(Mask):
    of: Mask

    def __invert__(self):
        return self.of

    def _tensors(self):
        return self.of._tensors()

    def _seen(self, at):
        return ~self.of._seen(at)

    def _intervals(self, at):
        inner = self.of._intervals(at)
        if inner is None or inner.count > 1:
            return None
        first, end = inner.ends.unbind(-1)
        end = torch.maximum(first, end)
        before = torch.stack([torch.zeros_like(first), first], -1)
        behind = torch.stack([end, torch.full_like(end, at.seqlen_k)], -1)
        return Intervals(torch.cat([before, behind], -2))

    def _tiled(self, at):
        tiled = super()._tiled(at)
        if tiled is not None:
            return tiled
        inner = self.of._tiled(at)
        return Tiled(_SEEN - inner.tiles) if _has_only_whole_tiles(inner) else None


def causal() -> Mask:
    """Query i sees the keys up to its diagonal, as causal=True of the call that it is given to."""
    return _Window(-1, 0)


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
        _expect(side >= -1, name, "at least -1 (-1: no limit)", side)
        sides.append(side)
    return _Window(*sides)


def _as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]


def documents(ids: Tensor, ids_k: Tensor | None = None) -> Mask:
    """Query i sees the keys of its own document: those with ids_k[j] == ids[i], in any order.

    Arguments:
        ids: int32 or int64 (seqlen_q) or (batch, seqlen_q): the document of each query. Numbers from
            -2³¹ to 2³¹ - 2.
        ids_k: the same of the keys, (seqlen_k) or (batch, seqlen_k). Default: ids.

    Where documents lie one behind the other and their bounds are known, packed_documents is faster.

    Raises:
        RuntimeError: dtype or dimensions; in a call, where ids and lengths differ. TypeError: no tensor.
    """
    ids_k = ids if ids_k is None else ids_k
    for name, x in (("ids", ids), ("ids_k", ids_k)):
        _expect_tensor(x, name, (torch.int32, torch.int64), (1, 2))
    return _Documents(_as_rows(ids), _as_rows(ids_k))


def packed_documents(cu_seqlens: Tensor) -> Mask:
    """Query i sees the keys of its own document, where documents lie one behind the other.

    With causal() and window() in a dense call this runs as a varlen call does, and takes as long.

    Arguments:
        cu_seqlens: int32 (documents + 1) or (batch, documents + 1): document n is the rows
            cu_seqlens[n] to cu_seqlens[n + 1] of q and of k. Ascending; rows in no document see nothing,
            and are seen by none. Where sequences of a batch have fewer documents, repeat the last end.

    Raises:
        RuntimeError: dtype or dimensions; in a call, other numbers of queries and keys. TypeError: no
            tensor.
    """
    _expect_tensor(cu_seqlens, "cu_seqlens", (torch.int32,), (1, 2))
    _expect(cu_seqlens.size(-1) >= 1, "cu_seqlens", "at least one number a sequence", cu_seqlens)
    return PackedDocuments(_as_rows(cu_seqlens))


def _prefix(lengths: int | Tensor, is_causal: bool) -> Mask:
    if isinstance(lengths, int):
        _expect(lengths >= 0, "lengths", "at least 0", lengths)
    else:
        _expect_tensor(lengths, "lengths", (torch.int32, torch.int64), (1,))
    return _Prefix(lengths, is_causal)


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
        block_mask: bool (blocks_q, blocks_k), (heads_q, …) or (batch, heads_q, …), batch and heads may
            be 1. At least as many blocks as cover the queries and keys.
        block_size: queries, and keys, of a block. Multiples of 64 need no bit for each query and key.

    Raises:
        RuntimeError: dtype or dimensions, a block_size below 1; in a call, too few blocks. TypeError: no
            tensor, no int.
    """
    _expect_tensor(block_mask, "block_mask", (torch.bool,), (2, 3, 4))
    if not isinstance(block_size, int):
        raise TypeError(f"flash_attn: block_size: expected int, got {shown(block_size)}")
    _expect(block_size >= 1, "block_size", "at least 1", block_size)
    return _BlockSparse(block_mask[(None,) * (4 - block_mask.dim())], block_size)


def from_bool(seen: Tensor) -> Mask:
    """Any mask. Which of its tiles are hidden is found once, and the mask kept as bits.

    Arguments:
        seen: bool, broadcastable to (batch, heads_q, seqlen_q, seqlen_k). True: query i sees key j.

    Raises:
        RuntimeError: dtype or dimensions; in a call, a shape that does not fit. TypeError: no tensor.
    """
    _expect_tensor(seen, "seen", (torch.bool,), (0, 1, 2, 3, 4))
    return _Bool(seen[(None,) * (4 - seen.dim())])


class Lowered(NamedTuple):
    """A mask as a call's arguments. window: (left, right), -1: no limit."""

    window: tuple[int, int]
    attn_bias: Tensor | None = None
    tiled: Tiled | None = None


def _narrower(*sides: int) -> int:
    return min((side for side in sides if side >= 0), default=-1)


def _split(mask: Mask) -> tuple[tuple[int, int], list[Mask]]:
    """What the windows of an intersection come to, and its other parts."""
    parts = mask._parts()
    windows = [part for part in parts if isinstance(part, _Window)]
    left = _narrower(*(part.left for part in windows))
    right = _narrower(*(part.right for part in windows))
    return (left, right), [part for part in parts if not isinstance(part, _Window)]


def _intersection(parts: list[Mask]) -> Mask:
    whole = parts[0]
    for part in parts[1:]:
        whole = _And(whole, part)
    return whole


def _check_batch(mask: Mask, x: Tensor, batch: int, heads: int, at: Geometry) -> None:
    if x.size(0) not in (1, batch) or x.size(1) not in (1, heads):
        raise RuntimeError(
            "flash_attn: attn_bias: expected a mask that broadcasts to"
            f" ({batch}, {heads}, {at.seqlen_q}, {at.seqlen_k}), got one of batch {x.size(0)} and"
            f" {x.size(1)} heads"
        )


def _check_device(mask: Mask, device: torch.device) -> None:
    for x in mask._tensors():
        if x.device != device:
            raise RuntimeError(
                f"flash_attn: attn_bias: expected a mask of tensors on {device} as q is, got one on"
                f" {x.device}"
            )


def _cache_key(mask: Mask, at: Geometry) -> tuple | None:
    """None: what is computed now must not be used again."""
    tensors = mask._tensors()
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    # What is computed under capture is there in replays only.
    if at.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    if any(x.is_inference() for x in tensors) or torch.is_inference_mode_enabled():
        return None  # without versions nobody hears of writes
    stream = torch.cuda.current_stream(at.device) if at.device.type == "cuda" else None
    return at, stream, tuple(x._version for x in tensors)


def lower(mask: Mask, batch: int, heads: int, at: Geometry) -> Lowered:
    """Of a dense call: what of the mask is a window, and the rest as tiles.

    Raises:
        RuntimeError: the mask does not fit the call.
    """
    _check_device(mask, at.device)
    sides, rest = _split(mask)
    if not rest:
        return Lowered(sides)
    key = _cache_key(mask, at)
    tiled = mask._cache.get(key) if key is not None else None
    if tiled is None:
        whole = _intersection(rest)
        tiled = whole._tiled(at)
        if tiled is None:
            tiled = _tile_bool(whole._seen(at), at)
        if key is not None:
            mask._cache.clear()
            mask._cache[key] = tiled
    for x in (tiled.tiles, tiled.rows):
        if x is not None:
            _check_batch(mask, x, batch, heads, at)
    return Lowered(sides, tiled=Tiled(*(x if x is None else x.contiguous() for x in tiled)))


def lower_to_bool(mask: Mask, batch: int, heads: int, at: Geometry) -> Lowered:
    """The same with the rest as a bool tensor, which is computed in each call."""
    _check_device(mask, at.device)
    sides, rest = _split(mask)
    if not rest:
        return Lowered(sides)
    seen = _intersection(rest)._seen(at)
    _check_batch(mask, seen, batch, heads, at)
    return Lowered(sides, attn_bias=seen)


def intersect_windows(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The window (left, right) of what both let pass."""
    return _narrower(a[0], b[0]), _narrower(a[1], b[1])


def packed_bounds(mask: Mask) -> tuple[tuple[int, int], Tensor] | None:
    """Of packed documents in windows and no more: the windows, and cu_seqlens (batch or 1, n + 1)."""
    sides, rest = _split(mask)
    if len(rest) != 1 or not isinstance(rest[0], PackedDocuments):
        return None
    return sides, rest[0].cu_seqlens
