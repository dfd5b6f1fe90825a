"""What FlashAttention-3's functions check before they call others, by the names they have here."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flash_attn._errors import check_wide, expect, shown

FP8 = torch.float8_e4m3fn


def _check_form(name: str, x: object, dtype: torch.dtype, dims: int, device: torch.device) -> None:
    is_tensor = isinstance(x, Tensor)
    if x is None or (is_tensor and (x.dtype, x.dim(), x.device) == (dtype, dims, device)):
        return
    got = f"{shown(x)} on {x.device}" if is_tensor else shown(x)
    expect(False, name, f"{dtype} and {dims} dimensions on {device} as q has", got)


def check_cached(q: Tensor, floats: Mapping, indices: Mapping) -> None:
    """What the functions that _with_cache_as_varlen calls know by other names. indices: each with
    its dimensions."""
    shapes = {3: "(total, heads, d)", 4: "(batch, seqlen, heads, d)"}
    dims_q, dims_new = (
        4 if indices[name][0] is None else 3 for name in ("cu_seqlens_q", "cu_seqlens_k_new")
    )
    check_wide("q", q, (dims_q,), shapes[dims_q])
    for name, x in floats.items():
        dims = 4 if name.endswith("cache") else dims_new
        _check_form(name, x, q.dtype, dims, q.device)
    for name, (x, dims) in indices.items():
        _check_form(name, x, torch.int32, dims, q.device)


def check_no_descale(q: Tensor, **descales: Tensor | None) -> None:
    """That a q which is not in fp8 comes without these."""
    for name, x in descales.items():
        if x is not None:
            raise RuntimeError(
                f"flash_attn: {name}: expected with q, k and v in {FP8}, got q in {q.dtype}"
            )


def _check_exactly(
    name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if x is not None and (x.dtype, x.shape, x.device) != (dtype, shape, device):
        raise RuntimeError(
            f"flash_attn: {name}: expected {dtype} and shape {shape} on {device} as q has, got"
            f" {shown(x)} on {x.device}"
        )


def _check_heads(q: Tensor, name: str, heads_kv: int) -> None:
    divides = heads_kv > 0 and q.size(-2) % heads_kv == 0
    expect(divides, name, f"heads that divide the {q.size(-2)} of q", heads_kv)


def check_queries_of_lengths(
    q: Tensor, cu_seqlens_q: Tensor, descales: Mapping, caches: Mapping
) -> None:
    """What has to fit before queries (total, heads, d) are dealt out to their sequences."""
    expect(q.dim() == 3, "q", "shape (total, heads, d) beside cu_seqlens_q", shown(q))
    _check_form("cu_seqlens_q", cu_seqlens_q, torch.int32, 1, q.device)
    if q.dtype != FP8:
        return check_no_descale(q, q_descale=descales["q_descale"])
    for name, x in caches.items():
        _check_form(name, x, FP8, 4, q.device)
    heads_kv = caches["k_cache"].size(2)
    _check_heads(q, "k_cache", heads_kv)
    for name, x in descales.items():
        _check_exactly(name, x, torch.float32, (cu_seqlens_q.numel() - 1, heads_kv), q.device)


def check_qv(q: Tensor, qv: Tensor, keys: Mapping[str, Tensor]) -> None:
    """What has to fit before the columns of two products are joined. keys: k and v, by name."""
    for name, x in {"q": q, **keys}.items():
        check_wide(name, x, (3, 4), "(…, heads, d) beside qv")
        fits = (x.dtype, x.device) == (q.dtype, q.device)
        expect(fits, name, f"{q.dtype} on {q.device} as q has", f"{x.dtype} on {x.device}")
    (name_k, k), (name_v, v) = keys.items()
    shape = (*k.shape[:-1], v.size(-1))
    expect(v.shape == shape, name_v, f"shape {shape} as {name_k} has", tuple(v.shape))
    _check_exactly("qv", qv, q.dtype, (*q.shape[:-1], v.size(-1)), q.device)


def check_fp8(inputs: Mapping, descales: Mapping, cu_seqlens: Mapping) -> None:
    """What has to fit before descales are multiplied; flash_attn's function says the rest.

    Arguments:
        inputs: q, k and v of a call, by name; k_cache and v_cache too where there is a cache.
        cu_seqlens: cu_seqlens_q and cu_seqlens_k; empty for dense q, k and v.
    """
    q, keys = inputs["q"], "k_cache" if "k_cache" in inputs else "k"
    is_dense = not cu_seqlens
    for name, x in inputs.items():
        _check_form(name, x, FP8, 4 if is_dense else 3, q.device)
    batch = q.size(0) if is_dense else cu_seqlens["cu_seqlens_q"].numel() - 1
    heads_kv = inputs[keys].size(-2)
    for name in ("k", "v"):
        x = inputs[name]
        if x is not None:
            expect(x.size(-2) == heads_kv, name, f"{heads_kv} heads as {keys} has", x.size(-2))
            fits = not is_dense or x.size(0) == batch
            expect(fits, name, f"batch {batch} as q has", x.size(0))
    _check_heads(q, keys, heads_kv)
    for name, x in cu_seqlens.items():
        _check_exactly(name, x, torch.int32, (batch + 1,), q.device)
    for name, x in descales.items():
        _check_exactly(name, x, torch.float32, (batch, heads_kv), q.device)
