"""FlashAttention-3's public functions, served by the flash_attn package.

Names, order and defaults are FlashAttention-3's (hopper/flash_attn_interface.py, 3.0.0); shapes,
dtypes, devices and errors are those of the function of flash_attn that each one names. Those that
attend also take q, k and v in float8_e4m3fn, called fp8 below, and dequantise them to bf16.
num_splits, pack_gqa, sm_margin and scheduler_metadata are for tuning: they change no result but for
rounding.
"""

from collections.abc import Sequence

import flash_attn_3._C  # noqa: F401  (registers torch.ops.flash_attn_3)
import torch
from flash_attn_3._ops import (  # noqa: F401
    _flash_attn_backward,
    _flash_attn_forward,
    chunks,
    chunks_of_sequences,
    dequantized,
    flash_attn_combine,
    joined,
    refuse,
    with_cache,
)
from torch import Tensor

import flash_attn
from flash_attn._call import as_int, unpack
from flash_attn._errors import expect, explained

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = Sequence[int | None] | Tensor


@explained()
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_attn_func; with return_attn_probs (out, softmax_lse), both differentiable.

    Arguments:
        q, k, v: also fp8, all three of them, which have no backward.
        qv: (batch, seqlen_q, heads_q, d_v), dtype of q, not fp8: scores are softmax_scale · (q·k +
            qv·v), and softmax_scale is 1/√(d + d_v) by default. k and v are copied into one of a
            head dim of d + d_v: above 512 the call runs on aten.
        q_descale, k_descale, v_descale: fp32 (batch, heads_kv), for fp8: value = stored * descale.
            Default: 1.
        attention_chunk: a query sees the keys of its own chunk of so many; needs O(seqlen²) bytes.

    Returns: out, which is bf16 for fp8; with return_attn_probs also softmax_lse.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit, or there is a descale without
            fp8; the message names it.
        NotImplementedError: the backward of fp8.
    """
    q, k, v = joined(q, qv, dict(k=k, v=v))
    q, k, v = dequantized(q, k, v, q_descale, k_descale, v_descale)
    out, softmax_lse, _ = flash_attn.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=True,
        attn_bias=chunks(attention_chunk, q, k),
    )
    return (out, softmax_lse) if return_attn_probs else out


@explained(dict.fromkeys("qkv", "qkv"))
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_func of qkv (batch, seqlen, 3, heads, d), or (batch, seqlen, heads_q +
    2 * heads_kv, d) with num_heads_q. fp8, descales and errors: as there."""
    expect(qkv.dim() in (4, 5), "qkv", "4 or 5 dimensions", qkv.dim())
    if qkv.dim() == 5:
        expect(qkv.size(2) == 3, "qkv", "size 3 in dimension 2 of 5", qkv.size(2))
        q, k, v = unpack(qkv)
    elif num_heads_q is None:
        raise RuntimeError("flash_attn: num_heads_q: expected an int for a 4-d qkv, got None")
    else:
        heads, num_heads_q = qkv.size(2), as_int(num_heads_q, "num_heads_q")
        heads_kv, rest = divmod(heads - num_heads_q, 2)
        fits = 0 < num_heads_q < heads and rest == 0
        expect(fits, "num_heads_q", f"{heads} heads less those of k and v", num_heads_q)
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], 2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


@explained()
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_attn_varlen_func; with return_attn_probs (out, softmax_lse), differentiable.

    attention_chunk, fp8, descales, qv and errors: as in flash_attn_func. Row b of a descale is that
    of sequence b.
    """
    q, k, v = joined(q, qv, dict(k=k, v=v))
    descales = (q_descale, k_descale, v_descale)
    q, k, v = dequantized(q, k, v, *descales, cu_seqlens_q, cu_seqlens_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, softmax_lse, _ = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        *lengths,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=True,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        attn_bias=chunks_of_sequences(attention_chunk, q, k, *lengths, seqused_q, seqused_k),
    )
    return (out, softmax_lse) if return_attn_probs else out


@explained(
    {
        "block_table": "page_table",
        "leftpad_k": "cache_leftpad",
        "seqused_k": "cache_seqlens",
        "cos": "rotary_cos",
        "sin": "rotary_sin",
        "cos, sin": "rotary_cos, rotary_sin",
    },
    of_torch=True,
)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """flash_attn.flash_attn_with_kvcache, with page_table for its block_table.

    Arguments:
        q, k, v: also fp8, all of them and the caches, without a gradient; rotary_cos and rotary_sin
            are bf16 then.
        qv: as in flash_attn_func, without k and v. The caches are copied into one, unless each row
            of v_cache lies in front of its row of k_cache in memory.
        cu_seqlens_q, max_seqlen_q: queries of different lengths, q (total_q, heads_q, d), as in
            flash_attn_varlen_func.
        cu_seqlens_k_new: int32 (batch + 1): new keys of different lengths, k (total, heads_kv, d)
            and v.
        attention_chunk: a query sees the keys of its own chunk of so many, counted from
            cache_leftpad on; needs batch · seqlen_q · capacity bytes.
        rotary_seqlens: int32 (batch), the position of the first new token for rotary_cos. Default:
            cache_seqlens.
        q_descale, k_descale, v_descale: fp32 (batch, heads_kv), for fp8: value = stored * descale.
            Default: 1. With q of 16 bits or more, those of caches are as in flash_attn's function.
            Neither they nor q in fp8 go with attention_chunk, nor with cu_seqlens_q or
            cu_seqlens_k_new beside k and v. Queries of different lengths beside a cache of 8 bits
            are computed as if all were as many as max_seqlen_q.

    Returns: out, which is bf16 for q in fp8; with return_softmax_lse also softmax_lse and two empty
    tensors where FlashAttention-3 has its unfinished pieces.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it.
        NotImplementedError: qv or a descale is given with what it does not go with.
    """
    if k is not None:
        refuse(" with k and v", qv=qv)
    q, k_cache, v_cache = joined(q, qv, dict(k_cache=k_cache, v_cache=v_cache))
    out, softmax_lse = with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k_new,
        max_seqlen_q,
        q_descale,
        k_descale,
        v_descale,
        rotary_interleaved,
        num_splits,
        rotary_seqlens,
        attention_chunk,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )
    if not return_softmax_lse:
        return out
    return out, softmax_lse, softmax_lse.new_empty(0), softmax_lse.new_empty(0)


@explained()
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on cache_seqlens' device: nothing here is planned on the host."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
