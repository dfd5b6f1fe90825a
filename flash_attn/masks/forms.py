"""What masks there are beside windows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn._errors import shown
from flash_attn.masks.mask import Mask
from flash_attn.masks.tensors import in_line, to_dims
from flash_attn.masks.tiles import SEEN, TILE, Geometry, Intervals, Tiled, states_of, tiles_of


def expect(condition: bool, argument: str, requirement: str, got: object) -> None:
    if not condition:
        raise RuntimeError(f"flash_attn: {argument}: expected {requirement}, got {shown(got)}")


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    lengths: int | Tensor
    is_causal: bool  # besides, keys up to the diagonal

    def tensors(self):
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

    def seen_at(self, at):
        return at.keys() < self._end(at)[..., None]

    def intervals_at(self, at):
        end = self._end(at).clamp(0, at.seqlen_k)
        end = end.expand(end.size(0), 1, at.seqlen_q)
        return Intervals(torch.stack([torch.zeros_like(end), end], -1)[..., None, :])


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    # As they were given: a view of one would not hear of writes to a copy of it.
    given_q: Tensor  # (seqlen_q) or (batch or 1, seqlen_q)
    given_k: Tensor

    @property
    def ids_q(self) -> Tensor:
        """(batch or 1, seqlen_q)"""
        return to_dims(self.given_q, 2)

    @property
    def ids_k(self) -> Tensor:
        return to_dims(self.given_k, 2)

    def tensors(self):
        return (self.given_q, self.given_k)

    def _are_the_same(self) -> bool:
        return self.given_k is self.given_q

    def _check(self, at: Geometry) -> None:
        for name, ids, length in (
            ("ids", self.ids_q, at.seqlen_q),
            ("ids_k", self.ids_k, at.seqlen_k),
        ):
            expect(ids.size(-1) == length, name, f"{length} ids a sequence", ids)

    def seen_at(self, at):
        self._check(at)
        return (self.ids_q[:, :, None] == self.ids_k[:, None, :])[:, None]

    def tiled_at(self, at):
        self._check(at)
        if 0 in (at.seqlen_q, at.seqlen_k):
            return None
        of_q = self._ranges(self.ids_q, at.seqlen_q)
        of_k = of_q if self._are_the_same() else self._ranges(self.ids_k, at.seqlen_k)
        low_q, high_q = (x[:, :, None] for x in of_q)
        low_k, high_k = (x[:, None] for x in of_k)
        some = (low_q <= high_k) & (low_k <= high_q)
        every = (low_q == high_q) & (low_k == high_k)
        return Tiled(states_of(some, every)[:, None], *self._rows(at))

    def _rows(self, at: Geometry) -> tuple[Tensor, Tensor]:
        """What each query sees, as labels of keys: the ids, or, where these ascend, positions, of
        which a kernel reads none."""
        batch = max(self.ids_q.size(0), self.ids_k.size(0))

        def in_int32(ids: Tensor) -> Tensor:
            return ids.to(torch.int32).expand(batch, -1).contiguous()

        ids_k = in_int32(self.ids_k)
        ids_q = ids_k if self._are_the_same() else in_int32(self.ids_q)
        nothing = torch.zeros_like(ids_q)
        by_ids = torch.stack([ids_q, ids_q + 1, nothing, nothing], -1)
        ends = [
            torch.searchsorted(ids_k, ids_q, right=right, out_int32=True) for right in (False, True)
        ]
        by_positions = torch.stack([*ends, nothing, nothing - 1], -1)
        ascends = (ids_k[:, 1:] >= ids_k[:, :-1]).all()
        positions = at.keys().to(torch.int32).expand(batch, -1)
        rows = torch.where(ascends, by_positions, by_ids)
        return rows[:, None], torch.where(ascends, positions, ids_k)

    def packed_at(self, at):
        self._check(at)
        ids, length = self.ids_q, at.seqlen_q
        if ids.numel() == 0 or length != at.seqlen_k:
            return None
        if not self._are_the_same() and not torch.equal(self.ids_k, ids):
            return None
        begins = ids[:, 1:] != ids[:, :-1]
        come_again = begins.sum(1) != (ids.sort(1).values.diff() != 0).sum(1)
        ends = torch.where(begins, at.queries()[1:], length).sort(1).values
        ends = torch.nn.functional.pad(ends, (1, 1), value=length)
        ends[:, 0] = 0
        facts = [come_again.any(), begins.sum(1).max(), ends.diff().max()]
        any_comes_again, most_begin, longest = torch.stack([x.long() for x in facts]).tolist()
        if any_comes_again:
            return None
        bounds = ends[:, : most_begin + 2].int()
        return PackedDocuments(bounds, longest, in_line(bounds[:, :-1], length))

    @staticmethod
    def _ranges(ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Least and largest of each tile: (batch or 1, tiles)."""
        ids = ids[:, torch.arange(tiles_of(length) * TILE, device=ids.device).clamp(max=length - 1)]
        return ids.unflatten(1, (-1, TILE)).aminmax(dim=2)


@dataclass(frozen=True, eq=False)
class PackedDocuments(Mask):
    is_packed = True
    given: Tensor  # (documents + 1) or (batch or 1, documents + 1)
    # Where no row lies outside of them: the longest one's length, and the bounds in a tensor in
    # which one sequence lies behind the other. None: only the device knows.
    longest: int | None = None
    in_line: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """(batch or 1, documents + 1)"""
        return to_dims(self.given, 2)

    def tensors(self):
        return (self.given,)

    def packed_for(self, q, k, v):
        return self

    def _ends(self, at: Geometry) -> tuple[Tensor, Tensor]:
        """Of each query's document: (batch or 1, seqlen_q)."""
        expect(
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

    def seen_at(self, at):
        first, end = (x[:, None, :, None] for x in self._ends(at))
        return (at.keys() >= first) & (at.keys() < end)

    def intervals_at(self, at):
        ends = torch.stack(self._ends(at), -1).long().clamp(0, at.seqlen_k)
        return Intervals(ends[:, None, :, None])


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    given: Tensor  # of two to four dimensions
    block_size: int

    @property
    def blocks(self) -> Tensor:
        """(batch or 1, heads or 1, blocks of queries, blocks of keys)"""
        return to_dims(self.given, 4)

    def tensors(self):
        return (self.given,)

    def _repeated(self, size_q: int, size_k: int, times: int) -> Tensor:
        expect(
            self.blocks.size(2) * times >= size_q and self.blocks.size(3) * times >= size_k,
            "block_mask",
            f"at least {-(-size_q // times)} by {-(-size_k // times)} blocks",
            self.blocks,
        )
        # No more than there are, however large a block is.
        rows = self.blocks.repeat_interleave(min(times, size_q), 2)[:, :, :size_q]
        return rows.repeat_interleave(min(times, size_k), 3)[..., :size_k]

    def seen_at(self, at):
        return self._repeated(at.seqlen_q, at.seqlen_k, self.block_size)

    def tiled_at(self, at):
        if self.block_size % TILE:
            return None
        sizes = tiles_of(at.seqlen_q), tiles_of(at.seqlen_k)
        tiles = self._repeated(*sizes, self.block_size // TILE)
        return Tiled(tiles.to(torch.uint8) * SEEN)


@dataclass(frozen=True, eq=False)
class Bool(Mask):
    given: Tensor  # of up to four dimensions

    @property
    def seen(self) -> Tensor:
        """Of four dimensions."""
        return to_dims(self.given, 4)

    def tensors(self):
        return (self.given,)

    def seen_at(self, at):
        for dim, length in ((2, at.seqlen_q), (3, at.seqlen_k)):
            expect(
                self.seen.size(dim) in (1, length),
                "seen",
                f"a shape that broadcasts to (…, {at.seqlen_q}, {at.seqlen_k})",
                self.seen,
            )
        return self.seen
