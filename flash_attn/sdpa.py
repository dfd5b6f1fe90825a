"""torch's scaled_dot_product_attention with this library behind it: one changed import."""

import math

import torch
from torch import Tensor

from flash_attn._call import fwd, fwd_arguments
from flash_attn._errors import explain

# The op's names of the arguments.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "attn_bias": "attn_mask",
    "softmax_scale": "scale",
}


def _is_plain(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether the shapes are the op's own: four dimensions, one batch, nothing to broadcast."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.size(0) == key.size(0) == value.size(0)
        and key.size(1) == value.size(1)
        and (enable_gqa or query.size(1) == key.size(1))
    )


def _as_batch(x: Tensor, leading: tuple[int, ...], heads: int) -> Tensor:
    """(…, heads or 1, rows, d), broadcast, as (batch, heads, rows, d). A view if that can be."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    rows_and_columns = x.shape[-2:]
    x = x.expand(*leading, heads, *rows_and_columns)
    return x.reshape(math.prod(leading), heads, *rows_and_columns)


def _mask_as_batch(mask: Tensor, leading: tuple[int, ...]) -> Tensor:
    """attn_mask with its leading dimensions made one; not broadcast where it is one for all."""
    if mask.dim() <= 3 or len(leading) == 1:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(mask.shape[-3:])
    mask = mask.expand(*leading, *mask.shape[-3:])
    return mask.reshape(math.prod(leading), *mask.shape[-3:])


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool):
    """The three as (batch, heads, rows, d), key and value of the same heads; the leading shape."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if min(map(len, shapes)) < 2:
        raise RuntimeError(
            "flash_attn: query, key, value: expected at least 2 dimensions, got"
            f" {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    leading = torch.broadcast_shapes(*(shape[:-3] for shape in shapes))
    heads_q, heads_k, heads_v = ((1, *shape)[-3] for shape in shapes)
    if enable_gqa and heads_k != heads_v:
        key = key.repeat_interleave(heads_q // heads_k, -3)
        value = value.repeat_interleave(heads_q // heads_v, -3)
        heads_kv = heads_q
    else:
        heads_kv = max(heads_k, heads_v)
    if not enable_gqa:
        if len({heads_q, heads_k, heads_v} - {1}) > 1:
            raise RuntimeError(
                f"flash_attn: key: expected {heads_q} heads as query has (or enable_gqa=True), got"
                f" {heads_k} and {heads_v} for value"
            )
        heads_q = max(heads_q, heads_kv)
    query, key, value = (
        _as_batch(x, leading, heads)
        for x, heads in ((query, heads_q), (key, heads_kv), (value, heads_kv))
    )
    return query, key, value, leading


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · query keyᵀ + attn_mask) value: torch's signature, torch's meaning.

    Arguments:
        query: (…, heads, seqlen_q, d); key: (…, heads, seqlen_k, d); value: (…, heads, seqlen_k,
            d_v). The leading dimensions are any number, and broadcast. fp16, bf16, fp32 or fp64.
        attn_mask: broadcastable to (…, heads, seqlen_q, seqlen_k). bool: True takes part. Float:
            added to the scores; it has a gradient. -inf and what is below -2.358e38, as
            torch.finfo(torch.float32).min, hide a key; see flash_attn_func.
        dropout_p: probability that a weight is dropped. Not tied to any module's training flag.
        is_causal: query i sees keys 0 to i (top-left), whatever the lengths; 1: seen. Not together
            with attn_mask. For seqlen_q = 2, seqlen_k = 5 and seqlen_q = 5, seqlen_k = 2:

                1 0 0 0 0        1 0
                1 1 0 0 0        1 1
                                 1 1
                                 1 1
                                 1 1

        scale: factor of query keyᵀ. Default: d ** -0.5.
        enable_gqa: key and value may have fewer heads than query; query head h reads their head
            h // (heads_q // heads_kv).

    Returns:
        (…, heads, seqlen_q, d_v), dtype of query. A query that the mask leaves nothing gives 0.

    The layout is turned by views: nothing is copied, and the result has the strides of a transposed
    (…, seqlen_q, heads, d_v) tensor.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it.
    """
    try:
        if attn_mask is not None and is_causal:
            raise RuntimeError(
                "flash_attn: attn_mask: expected None with is_causal=True (Explicit attn_mask"
                " should not be set when is_causal=True), got a tensor"
            )
        leading, dims = None, query.dim()
        if not _is_plain(query, key, value, enable_gqa):
            dims = max(dims, key.dim(), value.dim())
            query, key, value, leading = _broadcast(query, key, value, enable_gqa)
            if attn_mask is not None:
                attn_mask = _mask_as_batch(attn_mask, leading)
        arguments = fwd_arguments(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_bias=attn_mask,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
            causal_alignment="top-left",
        )
        out = fwd(arguments)[0].transpose(1, 2)
        if leading is None:
            return out
        return out.reshape(*leading, *out.shape[1:] if dims > 2 else out.shape[2:])
    except Exception as error:
        explain(error, scaled_dot_product_attention, locals(), _NAMES, of_torch=True)
        raise
