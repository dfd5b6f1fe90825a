"""torch's scaled_dot_product_attention with this library behind it: one changed import, or none
with enable().
"""

import math
import threading

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flash_attn._call import attend, heads_first
from flash_attn._errors import explain
from flash_attn._torch_flash import override
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn.masks import Mask

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


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores from a scale above 0, which is what the op takes."""
    if scale == 0:
        return query * 0, 1.0
    return -query, -scale


def _jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Of nested tensors (batch, heads, ragged, d): each sequence by itself."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.layout != torch.jagged or x.dim() != 4:
            kind = f"nested tensor of {x.dim()} dimensions" if x.is_nested else "dense tensor"
            raise RuntimeError(
                f"flash_attn: {name}: expected a nested tensor of layout torch.jagged and shape"
                f" (batch, heads, ragged, d) as query is nested, got a {kind}, {x.layout}"
            )
    if attn_mask is not None:
        raise RuntimeError("flash_attn: attn_mask: expected None with nested tensors, got a tensor")
    if scale is not None and scale <= 0:
        query, scale = _with_positive_scale(query, scale)
    sequences = [x.transpose(1, 2).contiguous() for x in (query, key, value)]
    offsets_q, offsets_k, offsets_v = (x.offsets() for x in sequences)
    # On a GPU, offsets that are not one tensor could be compared by waiting for it alone.
    if offsets_k.is_cpu and not torch.equal(offsets_k, offsets_v):
        raise RuntimeError("flash_attn: value: expected the lengths of key, got others")
    # NestedTensor keeps these numbers: read by public functions they would cost a synchronisation
    # in each call.
    longest_q, longest_k = (x._get_max_seqlen() for x in sequences[:2])
    out = flash_attn_varlen_func(
        *(x.values() for x in sequences),
        offsets_q.int(),
        offsets_k.int(),
        longest_q,
        longest_k,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        causal_alignment="top-left",
    )
    out = torch.nested.nested_tensor_from_jagged(out, offsets_q, max_seqlen=longest_q)
    return out.transpose(1, 2)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · query keyᵀ + attn_mask) value: torch's signature, torch's meaning.

    Arguments:
        query: (…, heads, seqlen_q, d); key: (…, heads, seqlen_k, d); value: (…, heads, seqlen_k,
            d_v). The leading dimensions are any number, and broadcast. fp16, bf16, fp32 or fp64.
            Or all three nested tensors of layout torch.jagged, (batch, heads, ragged, d).
        attn_mask: broadcastable to (…, heads, seqlen_q, seqlen_k). bool: True takes part. Float:
            added to the scores; it has a gradient. -inf and what is below -2^26, as
            torch.finfo(torch.float32).min or -1e9, hide a key; a query without any other gives 0;
            see flash_attn_func. Or a mask of flash_attn.masks. None for nested tensors.
        dropout_p: probability that a weight is dropped. Not tied to any module's training flag.
        is_causal: query i sees keys 0 to i (top-left), whatever the lengths; 1: seen. Not together
            with attn_mask. For seqlen_q = 2, seqlen_k = 5 and seqlen_q = 5, seqlen_k = 2:

                1 0 0 0 0        1 0
                1 1 0 0 0        1 1
                                 1 1
                                 1 1
                                 1 1

        scale: factor of query keyᵀ, of any sign. Default: d ** -0.5.
        enable_gqa: key and value may have fewer heads than query; query head h reads their head
            h // (heads_q // heads_kv).

    Returns:
        (…, heads, seqlen_q, d_v), dtype of query. A query that the mask leaves nothing gives 0.

    The layout is turned by views: nothing is copied, and the result has the strides of a transposed
    (…, seqlen_q, heads, d_v) tensor.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it.
    """
    if has_torch_function((query, key, value, attn_mask)):
        return handle_torch_function(
            scaled_dot_product_attention,
            (query, key, value, attn_mask),
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if getattr(query, "is_nested", False):
        return _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale)
    try:
        if attn_mask is not None and is_causal:
            raise RuntimeError(
                "flash_attn: attn_mask: expected None with is_causal=True (Explicit attn_mask"
                " should not be set when is_causal=True), got a tensor"
            )
        out = heads_first(query, key, value, attn_mask, dropout_p, scale, is_causal, enable_gqa)
        if out is not None:
            return out
        if scale is not None and scale <= 0:
            query, scale = _with_positive_scale(query, scale)
        leading, dims = None, query.dim()
        if not _is_plain(query, key, value, enable_gqa):
            dims = max(dims, key.dim(), value.dim())
            query, key, value, leading = _broadcast(query, key, value, enable_gqa)
            if isinstance(attn_mask, Tensor):
                attn_mask = _mask_as_batch(attn_mask, leading)
        out, *_ = attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_bias=attn_mask,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
            causal_alignment="top-left",
        )
        out = out.transpose(1, 2)
        if leading is None:
            return out
        return out.reshape(*leading, *out.shape[1:] if dims > 2 else out.shape[2:])
    except Exception as error:
        explain(error, scaled_dot_product_attention, locals(), _NAMES, of_torch=True)
        raise


def _serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's op: scaled_dot_product_attention, and torch's formula for what is not served here."""
    if query.is_nested and query.layout == torch.strided:
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


class Enabled:
    """What enable() returns. remove(), or the end of its with block, restores torch's own."""

    # Those that have not been removed, and what they share: torch has one implementation at a time.
    _alive: set["Enabled"] = set()
    _library: torch.library.Library | None = None
    _had_fastpath = True
    _lock = threading.Lock()

    def __init__(self) -> None:
        with Enabled._lock:
            if not Enabled._alive:
                Enabled._install()
            Enabled._alive.add(self)

    @staticmethod
    def _install() -> None:
        library = torch.library.Library("aten", "IMPL")
        # The second is where torch.func's transforms begin, which take no autograd function later.
        for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
            override(library, "scaled_dot_product_attention", _serve, key)
        Enabled._library = library
        Enabled._had_fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def remove(self) -> None:
        """torch's own again, unless another enable() holds. A second call does nothing."""
        with Enabled._lock:
            if self not in Enabled._alive:
                return
            Enabled._alive.remove(self)
            if not Enabled._alive:
                Enabled._library = None
                torch.backends.mha.set_fastpath_enabled(Enabled._had_fastpath)

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def enable() -> Enabled:
    """Puts this library behind torch's own attention, in the whole process, on every device.

        handle = flash_attn.sdpa.enable()      # until handle.remove()
        with flash_attn.sdpa.enable(): ...     # until its end

    Served, with all options and their gradients: torch.nn.functional.scaled_dot_product_attention,
    under whatever name it was imported before, and what calls it: nn.MultiheadAttention with
    need_weights=False, nn.TransformerEncoder and nn.TransformerDecoder, in training and in
    evaluation. torch's fast path for nn.MultiheadAttention and nn.TransformerEncoderLayer in
    evaluation, which has an attention of its own, is switched off meanwhile.

    Not served: need_weights=True (its default), where torch stores the weights; nested tensors;
    graphs that torch.compile made before; torch.nn.attention.sdpa_kernel, whose choice is ignored.
    Graphs compiled meanwhile keep this library afterwards.

    The smaller step, for CPU and CUDA, is torch's own registry (torch.nn.attention), in which this
    library stands as "flash_attn": activate_flash_attention_impl("flash_attn") serves the calls
    that torch would give to its flash kernel, torch.nn.attention.varlen and nested tensors of
    layout torch.jagged on CUDA among them, until restore_flash_attention_impl().

    Returns:
        an object with remove(). Where several are alive, the last one to be removed restores.
    """
    return Enabled()
