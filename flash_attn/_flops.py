"""What torch.utils.flop_counter.FlopCounterMode counts for the ops.

As for torch's own attention: two flops a multiply-add of each matrix product, that of the
recomputed scores included, for every score of the call's lengths, masked or not.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# Products over the head dim of q and k, and over that of v.
FORWARD = 1, 1  # Q Kᵀ; P V
BACKWARD = 3, 2  # Q Kᵀ, dS K, dSᵀ Q; dO Vᵀ, Pᵀ dO
PRODUCTS = {
    "fwd": FORWARD,
    "decode": FORWARD,
    "kvcache": FORWARD,
    "bwd": BACKWARD,
    "_flash_attn_forward": FORWARD,
    "_flash_attn_varlen_forward": FORWARD,
    "_flash_attn_backward": BACKWARD,
    "_flash_attn_varlen_backward": BACKWARD,
}


def _readable(x: Tensor | None) -> bool:
    """Whether x has numbers: it is no meta or fake tensor."""
    return x is not None and type(x) is Tensor and x.device.type != "meta"


def _pairs_of_queries_and_keys(call: dict) -> int:
    """Their number in one head. Reading lengths from a GPU waits for it."""
    q = call["q"]
    if "k_cache" in call:
        batch, seqlen_q = q.shape[:2]
        lengths, table = call["cache_seqlens"], call["block_table"]
        if _readable(lengths):
            new = call["k"].shape[1] if "k" in call else 0
            return seqlen_q * (int(lengths.sum()) + batch * new)
        pages = 1 if table is None else table.shape[1]
        return batch * seqlen_q * call["k_cache"].shape[1] * pages
    cu_seqlens_q, cu_seqlens_k = call.get("cu_seqlens_q"), call.get("cu_seqlens_k")
    if cu_seqlens_q is None:
        return q.shape[0] * q.shape[1] * call["k"].shape[1]
    lengths_k = call.get("seqused_k") if cu_seqlens_k is None else cu_seqlens_k.diff()  # of pages
    if _readable(cu_seqlens_q) and _readable(lengths_k):
        return int((cu_seqlens_q.diff().long() * lengths_k).sum())
    batch = cu_seqlens_q.shape[0] - 1
    return batch * call["max_seqlen_q"] * call["max_seqlen_k"]


def _register(name: str, products: tuple[int, int]) -> None:
    op = getattr(torch.ops.flash_attn, name)
    names = [argument.name for argument in op.default._schema.arguments]

    @register_flop_formula(op, get_raw=True)
    def formula(*args, out_val=None, **kwargs) -> int:
        call = dict(zip(names, args, strict=False)) | kwargs
        heads, d = call["q"].shape[-2:]
        d_v = call["v_cache" if "v_cache" in call else "v"].shape[-1]
        of_d, of_d_v = products
        return 2 * _pairs_of_queries_and_keys(call) * heads * (of_d * d + of_d_v * d_v)


def register() -> None:
    """Registers the formulas of all ops, which have to be there."""
    for name, products in PRODUCTS.items():
        _register(name, products)
