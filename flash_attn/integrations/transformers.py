"""transformers' models on this library, on any device, by transformers' public hooks.

    from flash_attn.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

transformers' own attn_implementation="flash_attention_2" finds this package, too, but transformers
allows it on a GPU and for 16 bits only, and without position bias. Where it is allowed, it is the
faster one for padded batches: it removes the padding where this one masks it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn._errors import explained, shown
from flash_attn.flash_attn_interface import flash_attn_func

__all__ = ["attention", "register"]

# The attribute of a mask that is nothing but a causal window: how many keys a query sees.
_WINDOW = "_flash_attn_window"


def _window_of(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    config: object = None,
    **_: object,
) -> int | None:
    """The window of a mask made with these arguments, if it is the causal one that ends with the
    last key, without padding, packed sequences or a program's own changes."""
    # Chunks are a local_size, too. A mask for one query is small; offsets of static caches are on
    # the device.
    is_window = local_size == getattr(config, "sliding_window", None)
    is_chunk = local_size == getattr(config, "attention_chunk_size", None)
    if local_size is None or not is_window or is_chunk or not allow_is_causal_skip:
        return None
    if q_length == 1 or isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        return None
    if q_offset - kv_offset != kv_length - q_length or torch.compiler.is_compiling():
        return None
    return local_size if attention_mask is None or bool(attention_mask.all()) else None


def _with_windows(sdpa_mask: Callable) -> Callable:
    """transformers' mask function for sdpa, whose masks also say where they are windows. Whoever
    changes such a mask gets one that says nothing."""

    def mask(**arguments: object) -> Tensor | None:
        made = sdpa_mask(**arguments)
        if made is not None and (window := _window_of(**arguments)) is not None:
            setattr(made, _WINDOW, window)
        return made

    return mask


def _bias(attention_mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """Both as one attn_bias. A bool mask is True where a key takes part; a float one is added."""
    if position_bias is None:
        return attention_mask
    if not position_bias.is_floating_point():
        raise RuntimeError(
            f"flash_attn: position_bias: expected a floating dtype, got {shown(position_bias)}"
        )
    if attention_mask is None:
        return position_bias
    if not (attention_mask.dtype == torch.bool or attention_mask.is_floating_point()):
        raise RuntimeError(
            "flash_attn: attention_mask: expected bool or a floating dtype, got"
            f" {shown(attention_mask)}"
        )
    if attention_mask.dtype == torch.bool:
        return position_bias.masked_fill(~attention_mask, float("-inf"))
    return position_bias + attention_mask


# flash_attn_func's names of the arguments.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "attn_bias": "attention_mask, position_bias",
    "dropout_p": "dropout",
    "learnable_sink": "s_aux",
    "softmax_scale": "scaling",
}


@explained(_NAMES, of_torch=True)
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """flash_attn_func with the signature of transformers' attention functions.

    Arguments:
        module: the attention layer; its is_causal counts where the call says nothing.
        query: (batch or 1, heads, seqlen_q, d); key: (batch, heads_kv, seqlen_k, d); value: (batch,
            heads_kv, seqlen_k, d_v).
        attention_mask: broadcastable to (batch, heads, seqlen_q, seqlen_k), bool (True takes part)
            or added to the scores. It has all of the mask in it, windows too; one that register's
            mask function made as a causal window and nothing else is not read. None: causal where
            there is more than one query and the layer is causal, with query i at key i, which is
            also right for the unused end of a static cache.
        scaling: factor of query keyᵀ. Default: d ** -0.5.
        dropout: probability that a weight is dropped.
        is_causal: default: module.is_causal, or True.
        softcap: as in flash_attn_func. None: off.
        s_aux: (heads), learnable sinks.
        position_bias: broadcastable as attention_mask is, added to the scores; has a gradient.
        output_attentions: must be False.
        _: what other layers tell other functions. Windows are among it, and in attention_mask.

    Returns:
        (batch, seqlen_q, heads, d_v), and None for the weights.

    Raises:
        NotImplementedError: output_attentions. Others: as flash_attn_func.
    """
    if output_attentions:
        raise NotImplementedError(
            "flash_attn: output_attentions: expected False, as the weights are never stored"
            ' (attn_implementation="eager" has them), got True'
        )
    if query.dim() != 4:
        raise RuntimeError(
            "flash_attn: query: expected shape (batch or 1, heads, seqlen_q, d), got"
            f" {tuple(query.shape)}"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = attention_mask is None and is_causal and bool(query.size(2) > 1)
    window_size, alignment = (-1, -1), "top-left"
    window = None if torch.compiler.is_compiling() else getattr(attention_mask, _WINDOW, None)
    if window is not None and attention_mask.shape[2:] == (query.size(2), key.size(2)):
        attention_mask, window_size, alignment = None, (window - 1, 0), "bottom-right"
    out = flash_attn_func(
        query.expand(key.size(0), -1, -1, -1).transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=causal,
        window_size=window_size,
        softcap=softcap or 0.0,
        attn_bias=_bias(attention_mask, position_bias),
        learnable_sink=s_aux,
        causal_alignment=alignment,
    )
    return out, None


def register(name: str = "exact_attention") -> str:
    """Makes attn_implementation=name this library, in this process, for every model.

    Arguments:
        name: any, without "flash" in it: transformers takes such names for kernels of its hub.

    Returns:
        name.

    Raises:
        ValueError: name. ImportError: there is no transformers with AttentionMaskInterface.
    """
    if not isinstance(name, str) or "flash" in name:
        raise ValueError(
            'flash_attn: name: expected a str without "flash" in it, which transformers would look'
            f" for on its hub, got {shown(name)}"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _with_windows(AttentionMaskInterface()["sdpa"]))
    return name
