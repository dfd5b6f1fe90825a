"""From Python's options to the ops' argument lists: the one place that knows their order.

Eager calls go to `_C` (pybind11 into a typed dispatcher handle), traced ones to
`torch.ops.flash_attn`, those inside torch.func's transforms to `_functorch`.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_attn import _checks, _functorch, _log
from flash_attn._errors import shown
from flash_attn._library import C
from flash_attn._masked_call import lower_mask, runs_packed, used_lengths
from flash_attn._pages import may_stay_in_pages, unpage
from flash_attn.masks import Mask, lowering
from flash_attn.masks.tiles import Tiled, is_top_left

# `names`: the backends that this thread's or async context's use_backend blocks name, outermost
# first. torch.compile guards on it.
forced_backends = C.ForcedBackends()


def forced_backend() -> str | None:
    """The backend of the innermost use_backend block, if any."""
    names = forced_backends.names
    return names[-1] if names else None


def ops():
    """Where the ops are called: traced as torch's, eager past its boxing."""
    return torch.ops.flash_attn if torch.compiler.is_compiling() else C


def as_int(value, argument: str):
    """A SymInt, or as an int what has __index__: bools, NumPy's ints, 0-dim tensors."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(
            f"flash_attn: {argument}: expected an int, got {type(value).__name__}"
        ) from None


def window_sides(window_size):
    """(left, right) as ints, with -1 for "no limit"."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(
            f"flash_attn: window_size: expected (left, right), got {shown(window_size)}"
        ) from None
    if type(left) is int and type(right) is int:
        return left, right
    return tuple(-1 if side is None else as_int(side, "window_size") for side in (left, right))


def dense_seqlen(x: Tensor) -> int:
    """The length of a (batch, seqlen, heads, d) tensor; 0 for another rank, which C++ reports."""
    return x.size(1) if x.dim() == 4 else 0


def fwd_arguments(
    q,
    k,
    v,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
    block_table=None,
    attn_bias=None,
    alibi_slopes=None,
    learnable_sink=None,
    rng_state=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    causal_alignment="bottom-right",
    softcap=0.0,
    deterministic=False,
    return_probs=False,
    return_max_logits=False,
    dropout_place=None,
):
    """The argument list of the op `fwd`.

    Lengths that are None are those of dense tensors; with dropout an rng_state of None is drawn.
    dropout_place: (sequence, head, heads, query, key), where the call is a part of a larger one of
    so many heads, whose mask it draws: its first sequence, head, query (a multiple of 16) and key
    (of 32).
    """
    if max_seqlen_q is None:
        max_seqlen_q = dense_seqlen(q)
    if max_seqlen_k is None:
        max_seqlen_k = dense_seqlen(k)
    if _checks.ENABLED:
        _checks.fwd(
            q,
            k,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            block_table=block_table,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
    window_left, window_right = window_sides(window_size)
    top_left = is_top_left(causal_alignment)
    tiled = Tiled(None)
    if isinstance(attn_bias, Mask):
        lengths = ()
        if cu_seqlens_q is not None:
            lengths = (
                used_lengths(cu_seqlens_q, seqused_q),
                used_lengths(cu_seqlens_k, seqused_k, leftpad_k),
            )
        (window_left, window_right), attn_bias, tiled = lower_mask(
            attn_bias,
            q,
            (max_seqlen_q, max_seqlen_k),
            (window_left, window_right),
            top_left,
            *lengths,
        )
    if rng_state is None and dropout_p > 0.0:
        rng_state = draw_rng_state(q)

    def with_keys(k, v, cu_seqlens_k, seqused_k, max_seqlen_k, attn_bias, block_table=None):
        return (
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            leftpad_k,
            block_table,
            attn_bias,
            alibi_slopes,
            learnable_sink,
            rng_state,
            *tiled,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_left,
            window_right,
            top_left,
            softcap,
            deterministic,
            return_probs,
            return_max_logits,
            dropout_place,
            forced_backend(),
        )

    if block_table is None:
        return with_keys(k, v, cu_seqlens_k, seqused_k, max_seqlen_k, attn_bias)
    if may_stay_in_pages(q, k, v, block_table, learnable_sink):
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        in_place = with_keys(k, v, None, lengths, max_seqlen_k, attn_bias, block_table)
        if C.reads_pages(*in_place):
            return in_place
    return with_keys(
        *unpage(
            k,
            v,
            block_table,
            cu_seqlens_k,
            seqused_k,
            leftpad_k,
            max_seqlen_k,
            attn_bias,
            return_probs,
        )
    )


def fwd(arguments):
    """Runs the op `fwd` on fwd_arguments(…). Returns out, softmax_lse, S_dmask, max_logits."""
    if torch.compiler.is_compiling():
        return torch.ops.flash_attn.fwd(*arguments)
    if _log.ENABLED:
        _log.call("fwd", arguments)
    run = _functorch.fwd if _functorch.is_active() else C.fwd
    return run(*arguments)


def _is_only_eager(attn_bias) -> bool:
    """Whether a call is nothing but the op: neither traced, transformed, logged, nor rewritten."""
    return not (
        torch.compiler.is_compiling()
        or _functorch.is_active()
        or _log.ENABLED
        or _checks.ENABLED
        or isinstance(attn_bias, Mask)
    )


def heads_first(query, key, value, attn_mask, dropout_p, scale, causal, gqa):
    """The op `fwd` of (batch, heads, rows, d), turned in C++; None where the call needs more."""
    if not _is_only_eager(attn_mask):
        return None
    options = (dropout_p, scale, causal, gqa, forced_backend())
    return C.heads_first(query, key, value, attn_mask, *options)


def rows_first(
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
):
    """The op `fwd` of (batch, rows, heads, d), of which out alone is wanted; None where the call
    needs more. It has fewer hops than fwd(fwd_arguments(…))."""
    if not _is_only_eager(attn_bias):
        return None
    left, right = window_sides(window_size)
    if type(left) is not int or type(right) is not int:
        return None
    return C.rows_first(
        q,
        k,
        v,
        attn_bias,
        dropout_p,
        softmax_scale,
        causal,
        left,
        right,
        is_top_left(causal_alignment),
        softcap,
        deterministic,
        forced_backend(),
    )


def attend(
    q, k, v, *, attn_bias=None, alibi_slopes=None, dropout_p=0.0, return_probs=False, **options
):
    """The op `fwd` of dense tensors, or what packed documents make of it."""
    options |= {"alibi_slopes": alibi_slopes, "dropout_p": dropout_p, "return_probs": return_probs}
    varlen = packed_call(q, k, v, attn_bias=attn_bias, **options)
    if varlen is None:
        return fwd(fwd_arguments(q, k, v, attn_bias=attn_bias, **options))
    tensors, of_documents = varlen
    out, softmax_lse, *rest = fwd(fwd_arguments(*tensors, **options | of_documents))
    # Not unflatten(), which is Python and takes several times as long.
    batch, seqlen, heads = q.shape[:3]
    softmax_lse = softmax_lse.view(heads, batch, seqlen).transpose(0, 1)
    return out.view(batch, seqlen, heads, v.size(-1)), softmax_lse, *rest


def packed_call(
    q,
    k,
    v,
    *,
    attn_bias,
    alibi_slopes,
    dropout_p,
    return_probs,
    learnable_sink=None,
    window_size=(-1, -1),
    **_,
):
    """What packed documents make of a call of dense tensors: the tensors of a varlen call, and
    those of its arguments that are others. None: nothing."""
    packed = runs_packed(q, k, v, attn_bias, alibi_slopes, dropout_p, return_probs)
    if packed is None:
        return None
    window, documents = packed
    batch, seqlen = q.shape[:2]
    if batch == 1 and learnable_sink is None:
        # Rows outside of all documents: out 0, LSE -inf.
        cu_seqlens, used = documents.cu_seqlens.flatten(), None
    else:
        cu_seqlens, used = lowering.packed_lengths(documents, batch, seqlen)
    longest = seqlen if documents.longest is None else documents.longest
    return [x.flatten(0, 1) for x in (q, k, v)], {
        "attn_bias": None,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "seqused_k": used,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "window_size": lowering.intersect_windows(window, window_sides(window_size)),
    }


def unpack(packed: Tensor) -> Sequence[Tensor]:
    """packed.unbind(-3), for calls whose backward leaves the gradients side by side, as packed has
    them: torch's own unbind would copy them all."""
    is_plain = type(packed) in (Tensor, Parameter)  # a subclass may have an unbind of its own
    if torch.compiler.is_compiling() or _functorch.is_active() or not is_plain:
        return packed.unbind(-3)
    return C.unpack(packed)


def draw_rng_state(like):
    """What a call with dropout draws its mask from: int64 (2) on the device of `like`."""
    return ops().rng_state(like)


def bwd_arguments(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    *,
    dlse=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    attn_bias=None,
    alibi_slopes=None,
    rng_state=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale,
    causal=False,
    window_size,
    causal_alignment="bottom-right",
    softcap,
    deterministic,
    dropout_place=None,
    wide_key_gradients=False,
    wide_query_gradient=False,
):
    """The arguments of the op `bwd` for q, k and v.

    k and v may be some of the keys only, where out and softmax_lse belong to all of them: the
    results then are what these keys contribute to dq, and dk and dv of these keys.
    wide_key_gradients: dk and dv come in fp32, as whoever adds them up wants them;
    wide_query_gradient: so does dq.
    """
    window_left, window_right = window_sides(window_size)
    return (
        dout,
        dlse,
        out,
        softmax_lse,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        None,  # seqused_q
        None,  # seqused_k
        None,  # leftpad_k
        None,  # block_table
        attn_bias,
        alibi_slopes,
        None,  # learnable_sink
        rng_state,
        None,  # mask_tiles
        None,  # mask_rows
        None,  # mask_labels
        dense_seqlen(q) if max_seqlen_q is None else max_seqlen_q,
        dense_seqlen(k) if max_seqlen_k is None else max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_left,
        window_right,
        is_top_left(causal_alignment),
        softcap,
        deterministic,
        [True, True, True, False, False],
        dropout_place,
        forced_backend(),
        wide_key_gradients,
        wide_query_gradient,
    )


def bwd(*tensors, **options):
    """Runs the op `bwd` for q, k and v, arguments as bwd_arguments. Returns dq, dk, dv."""
    return ops().bwd(*bwd_arguments(*tensors, **options))[:3]
