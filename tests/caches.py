"""A cache call as data: every form of cache in one call, what it must leave in memory, what must
come out.

The model is a dict in effect: position p of sequence b is one place in a pool, or none. What no
sequence uses is poisoned, and the pool lies between guard zones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from cases import DECODE_TARGETS, DTYPES, Target, param
from numerics import assert_close, assert_lse_close
from poison import Guarded, dirty_allocator, fill_value

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.reference import attention_ref, condition_tensors, max_logits_ref

INT_MAX = 2**31 - 1
EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def quantize(x: torch.Tensor, dtype: torch.dtype, descale: torch.Tensor | None) -> torch.Tensor:
    """What a cache stores for x (…, heads, d)."""
    if dtype not in EIGHT_BITS.values():
        return x.to(dtype)
    scaled = x if descale is None else x / descale[..., None].to(x.dtype)
    if dtype == torch.int8:
        return scaled.nan_to_num(0.0).round().clamp(-128, 127).to(dtype)
    return scaled.clamp(-448, 448).to(dtype)


def assert_stored(name: str, actual: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    """The same bits; else, where a rotation may round another way, some values next to them."""
    same = actual.view(torch.uint8) == expected.view(torch.uint8)
    same = same.unflatten(-1, (-1, actual.element_size())).all(-1)
    if same.all():
        return
    assert not exact, f"{name}: {int((~same).sum())} values differ, not what the append must leave"
    a, e = actual[~same].float(), expected[~same].float()
    if actual.dtype == torch.int8:
        close = (a - e).abs() <= 1
    else:
        step = torch.finfo(actual.dtype).eps
        close = (a - e).abs() <= step * torch.maximum(e.abs(), torch.full_like(e, 2.0**-6))
    rare = len(a) <= 4 + actual.numel() // 50
    assert close.all() and rare, f"{name}: {len(a)} values differ, {int((~close).sum())} by far"


@dataclass(frozen=True, kw_only=True)
class CacheCase:
    """What has its default is not part of the id."""

    batch: int = 3
    seqlen_q: int = 1
    new: int = 0  # tokens to append
    capacity: int = 70
    heads_q: int = 4
    heads_kv: int = 2
    d: int = 32
    d_v: int | None = None
    dtype: str = "bf16"
    cache: str = ""  # "": dtype; else a key of EIGHT_BITS
    descale: str = "head"  # "", "head" or "sequence", for caches of 8 bits
    page_size: int = 0  # 0: dense
    beyond: int = 0  # entries of the table, of no page, behind those for `capacity` keys
    lengths: str = "tensor"  # "int", or "none" where nothing is appended
    rows: bool = False  # cache_batch_idx
    leftpad: bool = False
    rotary: str = ""  # "interleaved" or "halves"
    rotary_dim: int = 32
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    shared: bool = False  # leading pages with any sequence
    latent: bool = False  # values are the first columns of their keys, in memory once
    bias: str = ""  # "bool", "fp32", "same" or "fp64": the dtype; "same": q's
    bias_shape: str = "bhqk"  # in other dimensions it has one number for all
    tree: str = ""  # "one", or "each" sequence its own
    garbage: bool = False  # in every index tensor

    def __str__(self) -> str:
        default = type(self).__dataclass_fields__
        changed = [n for n, value in vars(self).items() if value != default[n].default]
        return "-".join(f"{n}={vars(self)[n]}".replace(" ", "") for n in changed) or "plain"


class CacheProblem:
    def __init__(self, case: CacheCase, seed: int, device: str = "cpu") -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = DTYPES[case.dtype]
        self.cache_dtype = EIGHT_BITS.get(case.cache, self.dtype)
        self.make_indices()
        self.make_tensors()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def random(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def make_indices(self) -> None:
        """On the CPU: lengths, rows, leftpad, table, with garbage where the case wants it."""
        c = self.case
        self.page = c.page_size or c.capacity
        pages_each = -(-c.capacity // self.page)
        self.capacity = pages_each * self.page
        cache_rows = c.batch + 2 if c.rows else c.batch
        count = cache_rows * pages_each + 3 if c.page_size else cache_rows
        self.pool_shape = (count, self.page)
        if c.lengths == "tensor":
            self.lengths = self.random(0, self.capacity - c.new + 1, c.batch)
        else:
            full = self.capacity if c.lengths == "none" else self.capacity // 2
            self.lengths = torch.full((c.batch,), full, dtype=torch.int32)
        order = torch.randperm(cache_rows, generator=self.generator)
        self.rows = order[: c.batch].int() if c.rows else None
        self.leftpad = self.random(0, self.capacity // 2, c.batch) if c.leftpad else None
        self.table = None
        if c.page_size:
            pages = torch.randperm(count, generator=self.generator)[: cache_rows * pages_each]
            beyond = torch.full((cache_rows, c.beyond), INT_MAX, dtype=torch.int32)
            self.table = torch.cat([pages.int().view(cache_rows, pages_each), beyond], 1)
        self.shared = None
        if c.shared:
            lens = self.random(0, pages_each + 1, c.batch) * self.page
            sources = max(c.batch // 8, 2)  # few: many rows for a thread block
            self.shared = flash_attn.SharedPrefix(self.random(0, sources, c.batch), lens)
        if c.garbage:
            self.spoil()

    def spoil(self) -> None:
        c = self.case
        if c.lengths == "tensor":
            wrong = [-5, self.capacity - 1, self.capacity + 9, INT_MAX, -INT_MAX]
            self.lengths[0] = wrong[int(self.random(0, len(wrong), 1))]
        if self.rows is not None:
            self.rows[-1] = [-1, c.batch + 2, INT_MAX][int(self.random(0, 3, 1))]
        if self.leftpad is not None:
            self.leftpad[1] = [-7, INT_MAX][int(self.random(0, 2, 1))]
        if self.table is not None:
            flat = self.table.view(-1)
            flat[:: max(flat.numel() // 3, 2)] = -1
            flat[1 :: max(flat.numel() // 2, 3)] = INT_MAX
        if self.shared is not None:
            self.shared.source[-1] = [-1, c.batch, INT_MAX][int(self.random(0, 3, 1))]
            self.shared.lens[0] = [-self.page, INT_MAX // self.page * self.page][
                int(self.random(0, 2, 1))
            ]

    def make_tensors(self) -> None:
        c = self.case
        d_v = c.d if c.d_v is None else c.d_v
        self.q = self.normal(c.batch, c.seqlen_q, c.heads_q, c.d)
        self.k = self.normal(c.batch, c.new, c.heads_kv, c.d) if c.new else None
        self.v = self.normal(c.batch, c.new, c.heads_kv, d_v) if c.new else None
        self.cos = self.sin = None
        if c.rotary:
            angles = torch.randn(self.capacity, c.rotary_dim // 2, generator=self.generator)
            self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.k_descale, self.v_descale = self.make_descale(0.01), self.make_descale(0.02)
        self.slopes = torch.rand(c.heads_q, generator=self.generator) * 0.3 if c.alibi else None
        self.sink = self.normal(c.heads_q) if c.sink else None
        self.make_bias()
        self.k_pool = self.make_pool(c.d, self.k_descale)
        if c.latent:
            self.v_pool = self.k_pool[..., :d_v]
        else:
            self.v_pool = self.make_pool(d_v, self.v_descale)

    def make_bias(self) -> None:
        c = self.case
        self.bias = self.tree = None
        if c.bias:
            sizes = zip("bhqk", (c.batch, c.heads_q, c.seqlen_q, self.capacity), strict=True)
            shape = [size if name in c.bias_shape else 1 for name, size in sizes]
            hidden = torch.rand(shape, generator=self.generator) < 0.2
            bias = torch.randn(shape, generator=self.generator).masked_fill(hidden, -torch.inf)
            dtypes = DTYPES | {"same": self.dtype}
            self.bias = ~hidden if c.bias == "bool" else bias.to(dtypes[c.bias])
        if c.tree:
            shape = (c.batch,) * (c.tree == "each") + (c.seqlen_q, c.seqlen_q)
            # A token sees itself, whatever else.
            self.tree = torch.rand(shape, generator=self.generator) < 0.4
            self.tree |= torch.eye(c.seqlen_q, dtype=torch.bool)

    def make_descale(self, size: float) -> torch.Tensor | None:
        c = self.case
        if not (c.cache and c.descale):
            return None
        shape = (c.heads_kv,) if c.descale == "head" else (c.batch, c.heads_kv)
        return size * (0.5 + torch.rand(shape, generator=self.generator))

    def make_pool(self, d: int, descale: torch.Tensor | None) -> torch.Tensor:
        """Poison but for the keys that some sequence sees before the append."""
        c = self.case
        poison = fill_value(self.cache_dtype, "nan")
        pool = torch.full((*self.pool_shape, c.heads_kv, d), poison, dtype=self.cache_dtype)
        for b in range(c.batch):
            rows = self.normal(self.capacity, c.heads_kv, d).float()
            rows = quantize(rows, self.cache_dtype, self.of_sequence(descale, b))
            # Where a new token would be a shared place is read, which the append does not write.
            for position in range(self.first(b), self.used(b, c.new if c.shared else 0)):
                place = self.place(b, position)
                if place is not None:
                    pool[place] = rows[position]
        return pool

    def of_sequence(self, descale: torch.Tensor | None, b: int) -> torch.Tensor | None:
        return descale if descale is None or descale.dim() == 1 else descale[b]

    def used(self, b: int, new: int = 0) -> int:
        """Tokens of sequence b, clamped."""
        return min(max(int(self.lengths[b]) + new, 0), self.capacity)

    def first(self, b: int) -> int:
        return 0 if self.leftpad is None else max(int(self.leftpad[b]), 0)

    def place(self, b: int, position: int, writes: bool = False) -> tuple[int, int] | None:
        """Page and slot; None where the position lies outside the cache. An append writes to the
        sequence's own pages."""
        if self.shared is not None and not writes and position < int(self.shared.lens[b]):
            b = int(self.shared.source[b])
            if not 0 <= b < self.case.batch:
                return None
        row = b if self.rows is None else int(self.rows[b])
        if not 0 <= position < self.capacity:
            return None
        if self.table is None:
            return (row, position) if 0 <= row < self.pool_shape[0] else None
        if not 0 <= row < self.table.size(0):
            return None
        page = int(self.table[row, position // self.page])
        return (page, position % self.page) if 0 <= page < self.pool_shape[0] else None

    def rotate(self, x: torch.Tensor, at_one: bool) -> torch.Tensor:
        """x at its positions in the dtype computed in; at_one: all at the first."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if not self.case.rotary:
            return x.to(wide)
        start = self.lengths.long()
        interleaved = self.case.rotary == "interleaved"
        tables = (self.cos.to(wide), self.sin.to(wide), interleaved)
        if at_one:
            parts = [apply_rotary_emb(y, *tables, False, start) for y in x.to(wide).split(1, 1)]
            return torch.cat(parts, 1)
        return apply_rotary_emb(x.to(wide), *tables, False, start)

    def append(self) -> None:
        """The pools as the call must leave them."""
        c = self.case
        for pool, new, descale in (
            (self.k_pool, self.rotate(self.k, False), self.k_descale),
            (
                self.v_pool,
                self.v.to(torch.promote_types(self.dtype, torch.float32)),
                self.v_descale,
            ),
        ):
            for b in range(c.batch):
                stored = quantize(new[b], self.cache_dtype, self.of_sequence(descale, b))
                for i in range(c.new):
                    place = self.place(b, int(self.lengths[b]) + i, writes=True)
                    if place is not None:
                        pool[place] = stored[i]

    def stored(self) -> list[torch.Tensor]:
        """The pools that lie in memory."""
        return [self.k_pool] if self.case.latent else [self.k_pool, self.v_pool]

    def given_pools(self, stored: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of a call, of copies of what is stored."""
        values = [pool[..., : self.v_pool.size(-1)] for pool in stored]
        return [stored[0], values[-1]]

    def options(self) -> dict:
        """The options that every function of the library takes."""
        c = self.case
        given = dict(
            cache_batch_idx=self.rows,
            cache_leftpad=self.leftpad,
            block_table=self.table,
            alibi_slopes=self.slopes,
            learnable_sink=self.sink,
            k_descale=self.k_descale,
            v_descale=self.v_descale,
            attn_bias=self.bias,
            tree_mask=self.tree,
        )
        moved = {n: None if x is None else x.to(self.device) for n, x in given.items()}
        return moved | dict(
            causal=c.causal,
            window_size=c.window,
            softcap=c.softcap,
            num_splits=c.num_splits,
            batch_invariant=c.batch_invariant,
            return_softmax_lse=True,
            shared_prefix=self.given_prefix(),
        )

    def given_prefix(self) -> flash_attn.SharedPrefix | None:
        if self.shared is None:
            return None
        return flash_attn.SharedPrefix(*(x.to(self.device) for x in self.shared))

    def op_arguments(self, backend: str) -> dict:
        """Everything of torch.ops.flash_attn.kvcache."""
        c = self.case
        given = self.options()
        del given["return_softmax_lse"]
        shared = given.pop("shared_prefix")
        given["prefix_source"], given["prefix_lens"] = shared or (None, None)
        window_left, window_right = given.pop("window_size")
        given["leftpad_k"] = given.pop("cache_leftpad")
        tensors = dict(
            k=self.k,
            v=self.v,
            rotary_cos=self.cos,
            rotary_sin=self.sin,
            q=self.q,
            k_cache=self.k_pool,
            v_cache=self.v_pool,
            cache_seqlens=self.lengths,
        )
        given |= {n: None if x is None else x.to(self.device) for n, x in tensors.items()}
        return given | dict(
            rotary_interleaved=c.rotary == "interleaved",
            softmax_scale=None,
            window_left=window_left,
            window_right=window_right,
            backend=backend,
        )

    def given_lengths(self) -> torch.Tensor | int | None:
        if self.case.lengths == "tensor":
            return self.lengths.to(self.device)
        return None if self.case.lengths == "none" else int(self.lengths[0])

    def support(self, **overrides: object) -> flash_attn.Support:
        """can_use of the call."""
        options = self.options() | overrides
        del options["return_softmax_lse"]
        pools = self.given_pools([pool.to(self.device) for pool in self.stored()])
        return flash_attn.can_use(self.q.to(self.device), *pools, op="decode", **options)

    def run(self, backend: str, **overrides: object) -> tuple[torch.Tensor, ...]:
        """One call; the pools and their guard zones hold what they must afterwards."""
        guards = [Guarded(pool.to(self.device)) for pool in self.stored()]
        pools = self.given_pools([guard.tensor for guard in guards])
        new = {"k": self.k, "v": self.v, "rotary_cos": self.cos, "rotary_sin": self.sin}
        given = {n: x.to(self.device) for n, x in new.items() if x is not None}
        with flash_attn.use_backend(backend), dirty_allocator(self.device):
            results = flash_attn.flash_attn_with_kvcache(
                self.q.to(self.device),
                *pools,
                cache_seqlens=self.given_lengths(),
                rotary_interleaved=self.case.rotary == "interleaved",
                **given,
                **self.options() | overrides,
            )
        if self.case.new:
            self.append()
        exact = backend == "aten" or self.dtype == torch.float32 or not self.case.rotary
        for name, guard, pool in zip("kv", guards, self.stored(), strict=False):
            wanted = Guarded(pool.to(self.device)).buffer
            assert_stored(f"{name}_cache", guard.buffer, wanted, exact or name == "v")
            pool.copy_(guard.tensor)
        return results

    def keys(self, pool: torch.Tensor, descale: torch.Tensor | None) -> torch.Tensor:
        """(batch, capacity, heads_kv, d) in float64, 0 where there is none."""
        rows = torch.zeros(self.case.batch, self.capacity, *pool.shape[2:], dtype=torch.float64)
        for b in range(self.case.batch):
            scale = self.of_sequence(descale, b)
            for position in range(self.first(b), self.used(b, self.case.new)):
                place = self.place(b, position)
                if place is not None:
                    row = pool[place].double()
                    rows[b, position] = row if scale is None else row * scale.double()[:, None]
        return rows

    def seen(self) -> torch.Tensor:
        """bool (batch, 1, 1, capacity): the positions that hold a key."""
        exists = [
            [p >= self.first(b) and self.place(b, p) is not None for p in range(self.capacity)]
            for b in range(self.case.batch)
        ]
        shape = self.case.batch, 1, 1, self.capacity
        return torch.tensor(exists, dtype=torch.bool).reshape(shape)

    def all_terms(self, lengths: list[int]) -> torch.Tensor:
        """What is not there, the bias and the tree in one, which broadcasts to (batch, heads_q,
        seqlen_q, capacity)."""
        seen = self.seen()
        if self.tree is not None:
            tokens = self.case.seqlen_q
            kept = torch.ones(len(lengths), 1, tokens, self.capacity, dtype=torch.bool)
            for b, tree in enumerate(self.tree.expand(len(lengths), -1, -1)):
                newest = min(tokens, lengths[b])
                kept[b, 0, :, lengths[b] - newest : lengths[b]] = tree[:, tokens - newest :]
            seen = seen & kept
        if self.bias is None or self.bias.dtype == torch.bool:
            return seen if self.bias is None else seen & self.bias
        return torch.where(seen, self.bias, -torch.inf)

    def compare(
        self, out: torch.Tensor, lse: torch.Tensor, max_logits: torch.Tensor | None = None
    ) -> None:
        """With float64, after run()."""
        c = self.case
        at_one = not c.causal and max(c.window) < 0
        totals = [self.used(b, c.new) for b in range(c.batch)]
        options = dict(
            q=self.rotate(self.q, at_one).to(self.dtype),
            k=self.keys(self.k_pool, self.k_descale),
            v=self.keys(self.v_pool, self.v_descale),
            causal=c.causal,
            window_size=c.window,
            softcap=c.softcap,
            alibi_slopes=self.slopes,
            learnable_sink=self.sink,
            attn_bias=self.all_terms(totals),
            seqused_k=torch.tensor(totals, dtype=torch.int32),
        )
        expected, expected_lse, _ = attention_ref(**options)
        conditions = condition_tensors(torch.zeros_like(expected), **options)
        largest = conditions.largest_score
        assert_close("out", out, expected, conditions.out, self.dtype, largest_score=largest)
        assert_lse_close(lse, expected_lse, largest)
        if max_logits is None:
            return
        del options["v"]
        # A rotated query may be rounded another way.
        tolerance = 2.0**-9 if c.rotary else 1e-5
        torch.testing.assert_close(
            max_logits.double().cpu(), max_logits_ref(**options), rtol=tolerance, atol=tolerance
        )


def each_cache(
    cases: list[CacheCase], targets: Sequence[Target] = DECODE_TARGETS, marks: Sequence = ()
) -> pytest.MarkDecorator:
    pairs = [param(c, t, *marks) for c in dict.fromkeys(cases) for t in targets]
    return pytest.mark.parametrize("case, target", pairs)


def skip_unless_served(problem: CacheProblem, target: Target, **overrides: object) -> None:
    support = problem.support(**overrides)
    if target.backend != support.backend and support.reasons.get(target.backend):
        pytest.skip("; ".join(support.reasons[target.backend]))
