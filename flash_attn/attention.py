"""Attention over whole sequences: dense, and packed one after the other.

Shapes, dtypes and values are checked in C++: RuntimeError for bad ones, NotImplementedError for
legal combinations that are not built, TypeError for what is not a tensor or a number.
"""

from collections.abc import Sequence

from torch import Tensor

from flash_attn._call import as_int, attend, fwd, fwd_arguments, rows_first
from flash_attn._errors import explain
from flash_attn.masks import Mask

Window = Sequence[int | None] | Tensor
Result = Tensor | tuple[Tensor, ...]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: bool = False,
) -> Result:
    """Exact attention in O(seqlen) memory (Dao et al. 2022, 2023); differentiable, in reverse mode.

        S = softmax_scale · Q Kᵀ → softcap → + attn_bias, ALiBi → mask
        out = dropout(softmax(S)) V,   softmax_lse = log Σⱼ exp(Sⱼ)

    Arguments:
        q: (batch, seqlen_q, heads_q, d). fp16, bf16, fp32 or fp64; any strides, any device.
        k: (batch, seqlen_k, heads_kv, d). Same dtype and device as q. heads_kv divides heads_q:
            query head h reads key head h // (heads_q // heads_kv) (GQA, MQA).
        v: (batch, seqlen_k, heads_kv, d_v). d_v may differ from d.
        dropout_p: probability in [0, 1) that a weight is dropped, rounded to a multiple of 2⁻⁸;
            the others are scaled by 1 / (1 - that). Pass 0.0 in evaluation.
        softmax_scale: factor of Q Kᵀ. Default: d ** -0.5.
        causal: query i sees the keys up to its diagonal, i + seqlen_k - seqlen_q. Aligned
            bottom-right; 1: seen. For seqlen_q = 2, seqlen_k = 5 and seqlen_q = 5, seqlen_k = 2:

                1 1 1 1 0        0 0
                1 1 1 1 1        0 0
                                 0 0
                                 1 0
                                 1 1

        window_size: (left, right): query i sees the keys from diagonal - left to diagonal + right,
            both included. -1 or None: no limit. With causal, right is 0. (1, 0) for 4 queries and
            4 keys:

                1 0 0 0
                1 1 0 0
                0 1 1 0
                0 0 1 1

        softcap: above 0, S becomes softcap · tanh(S / softcap) (Gemma 2). Default 0.0: off.
        alibi_slopes: fp32 (heads_q) or (batch, heads_q): S gets -slope · |diagonal of i - j| (Press
            et al. 2022). No gradient.
        deterministic: the backward gives the same bits every run (it may take longer).
        return_attn_probs: also return softmax_lse and S_dmask.
        attn_bias: broadcastable to (batch, heads_q, seqlen_q, seqlen_k). A float tensor is added to
            S and has a gradient; a bool tensor keeps the keys where it is True; a mask of
            flash_attn.masks says the same and costs only what it leaves. -inf hides a key,
            and so does what is below -2^26, about -6.7e7: torch.finfo(...).min of fp32 and bf16,
            -1e9; torch.finfo(...).min of fp16 is a number. What is above 2^26 counts as that.
        learnable_sink: float (heads_q): a key without a value, of score learnable_sink[h]: it adds
            exp(learnable_sink[h]) to the softmax's denominator. Has a gradient.
        causal_alignment: "bottom-right", or "top-left": the diagonal of query i is key i, as in
            torch's scaled_dot_product_attention. Moves causal, window_size and ALiBi together. For
            seqlen_q = 2, seqlen_k = 5 and for seqlen_q = 5, seqlen_k = 2:

                1 0 0 0 0        1 0
                1 1 0 0 0        1 1
                                 1 1
                                 1 1
                                 1 1

        return_max_logits: also return max_logits, as the last of the results. On a GPU a call with
            softcap, alibi_slopes, dropout or a bias of numbers may run a second time for them,
            without these (can_use tells).

    Extreme scores have one meaning in every dtype and on every backend: with softcap, attn_bias,
    alibi_slopes or dropout, a key of a score below -2^26 is hidden, and a query with no other key
    has nothing to attend to. Slopes count as -64 to 1024, a sink as at most 2.358e38. A query whose
    softmax_lse lies beyond ±2^22 (fp64: ±2^51), one with a bias of -1e7 for every key, say, has its
    out but gives no gradient: from such a softmax_lse the weights can't be computed again.

    Returns:
        out: (batch, seqlen_q, heads_q, d_v), dtype of q. A query with nothing to attend to gives 0.
        softmax_lse (with return_attn_probs): (batch, heads_q, seqlen_q), natural logarithm, fp32
            (fp64 for fp64 inputs), differentiable; -inf for a query with nothing to attend to (with
            a sink: the sink).
        S_dmask (with return_attn_probs): with dropout, (batch, heads_q, seqlen_q, seqlen_k), the
            probabilities before dropout, negative where dropped, each row divided by its largest,
            as upstream has them: O(seqlen²) memory, for tests. Without dropout: empty.
        max_logits (with return_max_logits): (heads_q), fp32 (fp64 for fp64 inputs): the largest
            softmax_scale · q·k of each head, before softcap, bias and ALiBi, over the whole batch
            and all keys that a query sees: what QK-clip asks for. -inf if there are none; a score
            of NaN is passed over. A key that is hidden by a score below -2^26, and neither by a
            mask nor by a bias, counts on some backends. No gradient.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it. Or
            use_backend insists on a backend that cannot serve this call.
        TypeError: not a tensor, not a number. ValueError: causal_alignment. NotImplementedError: an
            input has a tangent of forward-mode AD.
    """
    try:
        is_out_alone = not (return_attn_probs or return_max_logits)
        if is_out_alone and alibi_slopes is None and learnable_sink is None:
            out = rows_first(
                q,
                k,
                v,
                attn_bias,
                dropout_p,
                softmax_scale,
                causal,
                window_size,
                causal_alignment,
                softcap,
                deterministic,
            )
            if out is not None:
                return out
        results = attend(
            q,
            k,
            v,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            return_probs=_wants_probs(return_attn_probs, dropout_p),
            attn_bias=attn_bias,
            learnable_sink=learnable_sink,
            causal_alignment=causal_alignment,
            return_max_logits=return_max_logits,
        )
        return _chosen(results, return_attn_probs, return_max_logits)
    except Exception as error:
        explain(error, flash_attn_func, locals())
        raise


def _chosen(results, return_attn_probs: bool, return_max_logits: bool) -> Result:
    """Of out, softmax_lse, S_dmask and max_logits those that a call asks for."""
    out, softmax_lse, S_dmask, max_logits = results
    chosen = (out, softmax_lse, S_dmask) if return_attn_probs else (out,)
    if return_max_logits:
        chosen += (max_logits,)
    return chosen if len(chosen) > 1 else out


def _wants_probs(return_attn_probs: bool, dropout_p: float) -> bool:
    """Like upstream, only with dropout: S_dmask takes O(seqlen²) memory, and most callers who set
    return_attn_probs are after softmax_lse."""
    return return_attn_probs and dropout_p > 0.0


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    return_max_logits: bool = False,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Result:
    """flash_attn_func for sequences of different lengths, one after the other, without padding.

    Sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k and v.
    Masks, ALiBi and attn_bias count positions from the start of each sequence.

    Arguments (the others: see flash_attn_func):
        q: (total_q, heads_q, d); k: (total_k, heads_kv, d); v: (total_k, heads_kv, d_v).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), starting with 0, on q's device. Values that
            lie outside the tensors are clamped.
        max_seqlen_q, max_seqlen_k: int, at least the longest sequence. A 0-dim tensor works, at the
            price of a synchronisation. Too small a number is refused on the CPU; on a GPU the host
            does not know. There queries beyond give NaN where the backend is aten, as do all those
            of a sequence with keys beyond; where it is cuda, as with few queries, the first queries
            of such a sequence do, though not where query heads share tiles (sm90). On Hopper the
            gradient of a sequence of q that is longer than max_seqlen_q may be NaN.
        alibi_slopes: fp32 (heads_q) or (batch, heads_q).
        attn_bias: broadcastable to (batch, heads_q, max_seqlen_q, max_seqlen_k). A mask of
            flash_attn.masks is a bool tensor here, but for causal and window.
        block_table: int32 (batch, max_pages): k and v are pages (num_pages, page_size, heads_kv,
            d), of any page size, and cu_seqlens_k only gives the lengths. Where no gradient is
            wanted, pages are read in place by the kernels for few queries beside many keys. So are
            pages of a multiple of 8 keys on Hopper, with fp16 and bf16, without a leftpad, dropout
            or a bias, and without a window of fewer than 8 keys or one from the top left. Others
            are copied side by side first. A page that does not exist has no
            keys. Entries past a sequence's length, or of keys that no query's window reaches, may
            hold anything.
        seqused_q, seqused_k: int32 (batch): only that many first rows of each sequence count.
            Queries beyond give out 0, softmax_lse -inf and no gradient.
        leftpad_k: int32 (batch): keys to skip at the start of each sequence; positions count from
            there.

    Returns:
        out: (total_q, heads_q, d_v); rows outside every sequence are 0.
        softmax_lse (with return_attn_probs): (heads_q, total_q).
        S_dmask (with return_attn_probs): with dropout (batch, heads_q, max_seqlen_q, max_seqlen_k).
        max_logits (with return_max_logits): (heads_q).

    Raises: as flash_attn_func.
    """
    try:
        lengths_k = cu_seqlens_k if block_table is None or seqused_k is None else seqused_k
        for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", lengths_k)):
            if lengths is None:
                raise TypeError(
                    f"flash_attn: {name}: expected int32 of shape (batch + 1), got None"
                )
        arguments = fwd_arguments(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            block_table=block_table,
            max_seqlen_q=as_int(max_seqlen_q, "max_seqlen_q"),
            max_seqlen_k=as_int(max_seqlen_k, "max_seqlen_k"),
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            return_probs=_wants_probs(return_attn_probs, dropout_p),
            attn_bias=attn_bias,
            learnable_sink=learnable_sink,
            causal_alignment=causal_alignment,
            return_max_logits=return_max_logits,
        )
        return _chosen(fwd(arguments), return_attn_probs, return_max_logits)
    except Exception as error:
        explain(error, flash_attn_varlen_func, locals())
        raise
