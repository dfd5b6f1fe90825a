"""What FlashAttention-3's functions check before they call others, by the names they have here."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flash_attn._errors import check_wide, expect, shown


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
