"""Adapters of calls that read keys from a cache or from pages, as those of backends.py."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right

from benchmarks.backends import PEERS, Unsupported, alibi_slopes, free_sdpa
from benchmarks.cache_shapes import DecodeCase, PagedCase
from flash_attn.cli import peers
from flash_attn.cli.common import forced_backend


@dataclass
class Cache:
    k: torch.Tensor  # (batch, length, heads_kv, d)
    v: torch.Tensor


def make_caches(
    case: DecodeCase, count: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, list[Cache]]:
    """q (batch, tokens, heads, d) and ``count`` caches."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, dtype=dtype, device=device, generator=generator)
    shape = (case.batch, case.length, case.heads_kv, case.head_dim)
    caches = [Cache(normal(shape), normal(shape)) for _ in range(count)]
    return normal((case.batch, case.tokens, case.heads, case.head_dim)), caches


def decode(
    name: str, case: DecodeCase, q: torch.Tensor, cache: Cache, num_splits: int = 0
) -> Callable[[], torch.Tensor]:
    if name in PEERS:
        if name not in (*peers.SDPA, "sdpa"):
            raise Unsupported("no decode adapter")
        attend = free_sdpa(False) if name == "sdpa" else peers.sdpa(name, causal=False)
        return functools.partial(attend, q, cache.k, cache.v)
    from flash_attn import flash_decode_func

    seqlens = torch.full((case.batch,), case.length, dtype=torch.int32, device=q.device)

    def call() -> torch.Tensor:
        with forced_backend(name):
            return flash_decode_func(q, cache.k, cache.v, seqlens, num_splits=num_splits)

    return call


DECODE_TERMS = ("plain", "softcap", "alibi", "bias", "key_bias", "tree")


def decode_term(
    name: str, case: DecodeCase, q: torch.Tensor, cache: Cache
) -> Callable[[], torch.Tensor]:
    """Ours with one of DECODE_TERMS."""
    from flash_attn import flash_decode_func

    seqlens = torch.full((case.batch,), case.length, dtype=torch.int32, device=q.device)
    chain = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device=q.device).tril()
    options = {
        "plain": {},
        "softcap": dict(softcap=30.0),
        "alibi": dict(alibi_slopes=alibi_slopes(case.heads, q.device)),
        "bias": dict(attn_bias=q.new_ones(case.heads, case.tokens, case.length)),
        "key_bias": dict(attn_bias=q.new_ones(case.length)),
        "tree": dict(tree_mask=chain),
    }[name]

    def call() -> torch.Tensor:
        with forced_backend("cuda"):
            return flash_decode_func(q, cache.k, cache.v, seqlens, **options)

    return call


def scattered(
    tensors: Sequence[torch.Tensor], page: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tensors of (batch, length, heads, d) in pages that lie in no order, and the block table of
    all of them."""
    batch, length = tensors[0].shape[:2]
    generator = torch.Generator(tensors[0].device).manual_seed(0)
    order = torch.randperm(batch * length // page, device=generator.device, generator=generator)
    pages = [x.reshape(-1, page, *x.shape[2:]) for x in tensors]
    places = [torch.empty_like(x).index_copy_(0, order, x) for x in pages]
    return places, order.int().view(batch, -1)


def varlen_pages(
    case: PagedCase, device: torch.device, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """Ours of scattered pages, or of keys in one row."""
    from flash_attn import flash_attn_varlen_func

    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, dtype=dtype, device=device, generator=generator)
    q = normal((case.batch * case.tokens, case.heads, case.head_dim))
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    common = dict(
        cu_seqlens_q=starts * case.tokens,
        cu_seqlens_k=starts * case.length,
        max_seqlen_q=case.tokens,
        max_seqlen_k=case.length,
        causal=True,
    )
    kv = normal((2, case.batch, case.length, case.heads_kv, case.head_dim))
    if case.page_size == 0:
        return functools.partial(flash_attn_varlen_func, q, *kv.flatten(1, 2), **common)
    pages, table = scattered(kv, case.page_size)
    spare = case.capacity // case.page_size - table.size(1)
    table = torch.nn.functional.pad(table, (0, spare), value=-1)
    return functools.partial(flash_attn_varlen_func, q, *pages, **common, block_table=table)


CACHE_FORMS = ("plain", "rows", "paged16", "paged64", "paged256", "paged1", "e4m3", "int8")
FLASHINFER = ("flashinfer", "xqa", "xqa_e4m3")  # its forms of a paged cache
DESCALE = 0.05  # of 8-bit caches of N(0, 1)


def decode_form(
    name: str,
    case: DecodeCase,
    q: torch.Tensor,
    caches: list[Cache],
    backend: str | None = "cuda",
) -> list[Callable[[], torch.Tensor]]:
    """Ours on each cache, brought into one of CACHE_FORMS, or into pages of 8 bits (as in
    "paged64_e4m3"); or one of FLASHINFER; or a peer that decode() knows."""
    from flash_attn import flash_decode_func

    device, options = q.device, {}
    if name in PEERS:
        return [decode(name, case, q, cache) for cache in caches]
    if name == "flashinfer":
        return _flashinfer(case, q, *_in_pages(caches, 16))
    if name in FLASHINFER:
        eight_bits = name == "xqa_e4m3"
        caches, table = _in_pages(caches, 64 if eight_bits else 16)
        return _xqa(case, q, quantised(caches, "e4m3") if eight_bits else caches, table)
    seqlens = torch.full((case.batch,), case.length, dtype=torch.int32, device=device)
    layout, _, dtype = name.partition("_")
    if layout in ("e4m3", "int8"):
        layout, dtype = "plain", layout
    if layout == "rows":
        options["cache_batch_idx"] = torch.arange(case.batch, dtype=torch.int32, device=device)
    elif layout.startswith("paged"):
        page = int(layout.removeprefix("paged"))
        if page == 1 and case.batch * case.length > 1 << 19:
            raise Unsupported("a table this long is nobody's")
        caches, options["block_table"] = _in_pages(caches, page)
    if dtype:
        descale = torch.full((case.heads_kv,), DESCALE, device=device)
        options |= {"k_descale": descale, "v_descale": descale}
        caches = quantised(caches, dtype)

    def call(cache: Cache) -> torch.Tensor:
        with forced_backend(backend):
            return flash_decode_func(q, cache.k, cache.v, seqlens, **options)

    return [functools.partial(call, cache) for cache in caches]


def quantised(caches: list[Cache], dtype: str) -> list[Cache]:
    """Divided by DESCALE, in e4m3 or int8."""
    stored = torch.float8_e4m3fn if dtype == "e4m3" else torch.int8
    return [
        Cache(*((x / DESCALE).clamp(-127, 127).to(stored) for x in (cache.k, cache.v)))
        for cache in caches
    ]


def _in_pages(caches: list[Cache], page: int) -> tuple[list[Cache], torch.Tensor]:
    """The same tokens in pages, and the block table of all the caches."""
    pages, table = scattered([x for cache in caches for x in (cache.k, cache.v)], page)
    return [Cache(k, v) for k, v in zip(pages[::2], pages[1::2], strict=True)], table


def _flashinfer(
    case: DecodeCase, q: torch.Tensor, caches: list[Cache], table: torch.Tensor
) -> list[Callable[[], torch.Tensor]]:
    """Planned once, outside of what is timed; tensor cores, as FlashInfer advises for GQA."""
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    except ImportError as error:
        raise Unsupported("flashinfer is not installed") from error
    batch, pages, page = *table.shape, caches[0].k.size(1)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * pages
    last_page = torch.full((batch,), page, dtype=torch.int32, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=q.device),
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=table.flatten().clone(),
        paged_kv_last_page_len_buffer=last_page.clone(),
    )
    wrapper.plan(
        *(indptr, table.flatten(), last_page, case.heads, case.heads_kv, case.head_dim, page),
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )

    def call(cache: Cache) -> torch.Tensor:
        return wrapper.run(q.squeeze(1), (cache.k, cache.v)).unsqueeze(1)

    return [functools.partial(call, cache) for cache in caches]


def _xqa(
    case: DecodeCase, q: torch.Tensor, caches: list[Cache], table: torch.Tensor
) -> list[Callable[[], torch.Tensor]]:
    """FlashInfer's XQA kernel, which multiplies by 1/√d itself."""
    try:
        from flashinfer.xqa import xqa
    except ImportError as error:
        raise Unsupported("flashinfer is not installed") from error
    eight_bits = caches[0].k.dtype == torch.float8_e4m3fn
    seqlens = torch.full((case.batch, 1), case.length, device=q.device).to(torch.uint32)
    # More than any case needs; the kernel leaves its semaphores at zero.
    workspace, semaphores = (
        torch.zeros(n << 20, dtype=torch.uint8, device=q.device) for n in (256, 8)
    )

    def call(cache: Cache) -> torch.Tensor:
        out = torch.empty_like(q)
        xqa(
            q,
            *(cache.k, cache.v, table, seqlens, out, workspace, semaphores.view(torch.uint32)),
            *(case.heads_kv, cache.k.size(1)),
            kv_scale=DESCALE if eight_bits else 1.0,
        )
        return out

    return [functools.partial(call, cache) for cache in caches]


def chunk(
    name: str, case: DecodeCase, q: torch.Tensor, caches: list[Cache]
) -> list[Callable[[], torch.Tensor]]:
    """A chunk of new tokens against each cache. name: a backend of ours, with a form of CACHE_FORMS
    behind a dot or plain; fa2, whose causal mask is aligned as ours; or another of torch's
    backends, which gets the mask as a tensor."""
    backend, _, form = name.partition(".")
    if backend not in peers.SDPA:
        return decode_form(form or "plain", case, q, caches, backend)
    if name == "fa2":
        mask = causal_lower_right(case.tokens, case.length)
    else:
        mask = ~peers.causal_hidden(case.tokens, case.length, q.device)
    attend = peers.sdpa(name, causal=False, bias=mask)
    return [functools.partial(attend, q, cache.k, cache.v) for cache in caches]


def decode_pages(
    lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """32 / 8 heads of 128 against sequences of these lengths in pages of 64."""
    from flash_attn import flash_decode_func

    needs = [-(-length // 64) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(sum(needs), generator=generator).int()
    table = torch.full((len(lengths), max(needs)), -1, dtype=torch.int32)
    for row, own in zip(table, pages.split(needs), strict=True):
        row[: len(own)] = own
    table = table.to(device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(len(lengths), 1, 32, 128, device=device, dtype=dtype)
    k, v = (torch.randn(len(pages), 64, 8, 128, device=device, dtype=dtype) for _ in range(2))

    def call(**options) -> torch.Tensor:
        with forced_backend("cuda"):
            return flash_decode_func(q, k, v, seqlens, block_table=table, **options)

    return call
