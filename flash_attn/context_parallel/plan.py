"""From a mask over whole sequences to calls over the pieces that two ranks hold.

Query i of a document sees the keys from i + offset - left to i + offset + right. Between rows of
one rank and keys of another the same band stands D columns further to the right, where D is the
distance of their first tokens:

    keys      0 1 2 3 4 5 6 7           rows 4 to 7 against keys 0 to 3 under a causal mask with
    query 4   . 1 1 1 1 . . .           left = 3: D = 4. The first key (column 0) is seen by none
          5   . . 1 1 1 1 . .           of the rows and is left out, and so is row 7, which sees
          6   . . . 1 1 1 1 .           none of the keys. What remains is the band of a top-left
          7   . . . . 1 1 1 1           call with window (0, 3 or more).

Rows and keys at the edges that see or show nothing are always cut off; then both limits of the band
are at least 0 when counted from the top-left corner, and a call can say them. So no kernel has to
know D: for ALiBi alone it matters (see `_alibi_parts`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from flash_attn.context_parallel.shards import Range, Ranges

NO_LIMIT = -1


@dataclass(frozen=True)
class Mask:
    """The mask of the whole call. -1: no limit; causal is right = 0."""

    left: int = NO_LIMIT
    right: int = NO_LIMIT
    top_left: bool = False
    alibi: bool = False
    dropout: bool = False


@dataclass(frozen=True)
class Documents:
    """Where the sequences of a call start, in tokens: (0, …, total), as cu_seqlens."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    # Documents are rows of one varlen tensor; otherwise there is one, with a batch dimension.
    varlen: bool = False


@dataclass(frozen=True)
class Rectangle:
    """Rows of q against rows of k, both as they lie on their ranks, and the band between them.

    Query i of them sees the keys from i - left to i + right: the diagonal starts in the top-left
    corner, or ends in the bottom-right one.
    """

    q: Range
    k: Range
    document: int
    left: int
    right: int
    top_left: bool = True
    # With ALiBi, where all keys lie on one side of all diagonals: -1, to their left, or 1. Query i
    # and key j are then side · (j - i - distance) apart.
    side: int = 0
    distance: int = 0
    # Where the first row and the first key lie in their document.
    query: int = 0
    key: int = 0

    @property
    def rows(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def keys(self) -> int:
        return self.k[1] - self.k[0]

    @property
    def full(self) -> bool:
        return self.left == NO_LIMIT and self.right == NO_LIMIT

    def without_idle_limits(self) -> "Rectangle":
        """Without limits that no pair of row and key reaches."""
        if not self.top_left:
            return self
        left = NO_LIMIT if self.left >= self.rows - 1 else self.left
        right = NO_LIMIT if self.right >= self.keys - 1 else self.right
        return replace(self, left=left, right=right)


# Rectangles that one call of the op serves. More than one: a varlen call, in which they have the
# same limits and follow one another in both q and k.
Call = tuple[Rectangle, ...]


@lru_cache(maxsize=4096)
def calls(mask: Mask, documents: Documents, q: Ranges, k: Ranges) -> tuple[Call, ...]:
    """The calls for the tokens `q` of one rank against the tokens `k` of another; may be none."""
    rectangles = list(_rectangles(mask, documents, q, k))
    if mask.dropout:  # a call can say one place in the mask
        return tuple((r.without_idle_limits(),) for r in rectangles)
    if documents.varlen:
        return tuple(_grouped(rectangles))
    if not mask.alibi:
        rectangles = _fused(rectangles)
    return tuple((r.without_idle_limits(),) for r in rectangles)


def share_rows(planned: Iterable[Call]) -> bool:
    """Whether several of the calls have keys for the same row."""
    rows = sorted(r.q for call in planned for r in call)
    return any(before[1] > after[0] for before, after in pairwise(rows))


def _rectangles(mask: Mask, documents: Documents, q: Ranges, k: Ranges) -> Iterator[Rectangle]:
    for row, (q_first, q_last) in _with_rows(q):
        # Only those that overlap, as there may be thousands.
        first = bisect_right(documents.q, q_first) - 1
        for document in range(first, bisect_left(documents.q, q_last)):
            start_q, end_q = documents.q[document : document + 2]
            start_k, end_k = documents.k[document : document + 2]
            query, last = max(q_first, start_q), min(q_last, end_q)
            if query >= last:
                continue
            offset = 0 if mask.top_left else (end_k - start_k) - (end_q - start_q)
            rows = (row + query - q_first, row + last - q_first)
            for column, (k_first, k_last) in _with_rows(k):
                key, end = max(k_first, start_k), min(k_last, end_k)
                if key >= end:
                    continue
                keys = (column + key - k_first, column + end - k_first)
                place = (query - start_q, key - start_k)
                distance = place[0] - place[1] + offset
                for part in _parts(mask, rows, keys, document, distance):
                    shift = (part.q[0] - rows[0], part.k[0] - keys[0])
                    yield replace(part, query=place[0] + shift[0], key=place[1] + shift[1])


def _parts(mask: Mask, q: Range, k: Range, document: int, distance: int) -> Iterator[Rectangle]:
    if mask.alibi:
        yield from _alibi_parts(mask, q, k, document, distance)
    elif part := _band(mask, q, k, document, distance):
        yield part


def _with_rows(ranges: Ranges) -> Iterator[tuple[int, Range]]:
    """Each range with the row where it starts on its rank."""
    row = 0
    for first, last in ranges:
        yield row, (first, last)
        row += last - first


def _band(mask: Mask, q: Range, k: Range, document: int, distance: int) -> Rectangle | None:
    """The band as a top-left call says it, without the edges that see nothing; None: nothing left.

    distance: the column of the diagonal in the first row.
    """
    (q0, q1), (k0, k1) = q, k
    if mask.right >= 0:
        blind = max(0, -(distance + mask.right))  # rows before the first key
        q0, distance = q0 + blind, distance + blind
    if mask.left >= 0:
        unseen = max(0, distance - mask.left)  # keys that even the first row does not reach
        k0, distance = k0 + unseen, distance - unseen
    if mask.right >= 0:
        k1 = min(k1, k0 + distance + mask.right + q1 - q0)
    if mask.left >= 0:
        q1 = min(q1, q0 + k1 - k0 - distance + mask.left)
    if q0 >= q1 or k0 >= k1:
        return None
    left = NO_LIMIT if mask.left < 0 else mask.left - distance
    right = NO_LIMIT if mask.right < 0 else mask.right + distance
    return Rectangle((q0, q1), (k0, k1), document, left, right)


def _alibi_parts(
    mask: Mask, q: Range, k: Range, document: int, distance: int
) -> Iterator[Rectangle]:
    """The same with ALiBi, whose distances count from a diagonal that no call can move.

    Rows whose diagonal crosses the keys: with the keys up to the last of their diagonals they are a
    bottom-right call. Elsewhere all keys lie on one side of the diagonal, and what ALiBi adds is a
    number for each key plus one for each row.
    """
    (q0, q1), (k0, k1) = q, k
    first = min(q1, max(q0, q0 - distance))  # the first row with its diagonal among the keys
    last = max(first, min(q1, q0 + k1 - k0 - distance))  # behind the last such row

    def beside(rows: Range, keys: Range, side: int) -> Iterator[Rectangle]:
        d = distance + (rows[0] - q0) - (keys[0] - k0)
        part = _band(mask, rows, keys, document, d)
        if part is not None:
            d += (part.q[0] - rows[0]) - (part.k[0] - keys[0])
            yield replace(part, side=side, distance=d).without_idle_limits()

    yield from beside((q0, first), k, 1)
    if first < last:
        behind = k0 + distance + last - q0  # the key behind the last diagonal
        yield Rectangle((first, last), (k0, behind), document, mask.left, mask.right, False)
        yield from beside((first, last), (behind, k1), 1)
    yield from beside((last, q1), k, -1)


def _fused(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Neighbours as one where they show the same as one band: one launch less."""
    wide: list[Rectangle] = []
    for r in (r.without_idle_limits() for r in rectangles):
        before = wide[-1] if wide else None
        if before and before.q == r.q and before.k[1] == r.k[0] and before.full and r.left < 0:
            right = NO_LIMIT if r.right < 0 else r.right + before.keys
            wide[-1] = replace(before, k=(before.k[0], r.k[1]), right=right)
        else:
            wide.append(r)
    result: list[Rectangle] = []
    for r in wide:
        if result and _continues(result[-1], r):
            before = result[-1]
            result[-1] = replace(before, q=(before.q[0], r.q[1]), k=r.k)
        else:
            result.append(r)
    return result


def _continues(above: Rectangle, below: Rectangle) -> bool:
    """Whether the rows below go on with the band above, whose keys may end earlier."""
    if above.q[1] != below.q[0] or above.k[0] != below.k[0] or above.left >= 0 or below.left >= 0:
        return False
    if above.right < 0 or below.right < 0:
        return above.full and below.full and above.k == below.k
    ends_by_itself = above.rows - 1 + above.right <= above.keys - 1
    return below.right - above.rows == above.right and ends_by_itself and above.k[1] <= below.k[1]


def _grouped(rectangles: list[Rectangle]) -> list[Call]:
    """Rectangles with the same limits side by side in one varlen call."""
    groups: list[list[Rectangle]] = []
    for r in rectangles:
        for group in groups:
            last = group[-1]
            alike = (last.left, last.right, last.top_left) == (r.left, r.right, r.top_left)
            behind = last.q[1] <= r.q[0] and last.k[1] <= r.k[0]
            if alike and behind and r.side == last.side == 0:
                group.append(r)
                break
        else:
            groups.append([r])
    return [tuple(g) if len(g) > 1 else (g[0].without_idle_limits(),) for g in groups]
