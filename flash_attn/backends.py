"""Which backend serves a call, and how to insist on one.

aten: ATen operations, any device and dtype. sm80: CUDA forward and backward. sm90: both on Hopper.
cuda: split-KV decode, and forwards of few queries beside many keys. Calls against a cache with many
new tokens a sequence are served by sm90 and sm80 where those are faster. The append belongs to all
three.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash_attn import _cache_call, _call
from flash_attn._errors import explain, shown
from flash_attn._library import C
from flash_attn.masks import Mask
from flash_attn.shared_prefix import SharedPrefix

# Read once: torch.compile traces use_backend, but no pybind11 function.
_NAMES = tuple(C.backend_names())


class use_backend:
    """Context manager: the backend `name` serves every call inside, or it raises why not.

        with use_backend("sm80"):
            out = flash_attn_func(q, k, v)  # never another backend

    The backward of a call belongs to the forward's backend, which must serve both. Blocks nest; the
    innermost counts. The choice holds in this thread, or in this async context with the tasks that
    are started in it: a thread that is started inside begins without one. So does what
    torch.utils.checkpoint runs again on a GPU; its context_fn takes a block, too. torch.compile
    guards on the choice: compiled code follows the block it runs in.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: at a call that the backend cannot serve, with every reason.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or name not in _NAMES:
            raise ValueError(
                f"flash_attn: name: expected one of {', '.join(_NAMES)}, got {shown(name)}"
            )
        self.name = name

    def __enter__(self) -> "use_backend":
        _call.forced_backends.names = (*_call.forced_backends.names, self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        _call.forced_backends.names = _call.forced_backends.names[:-1]


@dataclass(frozen=True)
class Support:
    """What can_use found. True where some backend serves the call.

    backend: the one that serves the call; None where use_backend insists on one that cannot.
    reasons: for each other backend every reason why it cannot; empty: it could, but a better one
    can too.
    plan: how that backend serves it: which of its kernels, and how decode cuts the keys.
    """

    backend: str | None
    reasons: dict[str, list[str]] = field(default_factory=dict)
    plan: str | None = None

    def __bool__(self) -> bool:
        return self.backend is not None

    def __str__(self) -> str:
        plan = f" ({self.plan})" if self.plan else ""
        lines = [f"served by: {self.backend or 'none'}{plan}"]
        for name, reasons in self.reasons.items():
            lines.append(
                f"{name}: {'; '.join(reasons) or 'can serve it, but is not the first choice'}"
            )
        return "\n".join(lines)


def can_use(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    op: str = "fwd",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    return_max_logits: bool = False,
    attn_bias: Tensor | Mask | None = None,
    learnable_sink: Tensor | None = None,
    causal_alignment: str = "bottom-right",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    shared_prefix: SharedPrefix | None = None,
    tree_mask: Tensor | None = None,
) -> Support:
    """The backend that would serve a call, and for each other one every reason why not.

    Arguments:
        q, k, v: the call's tensors; for op="decode" q, k_cache and v_cache.
        op: "fwd", a call of flash_attn_func (with cu_seqlens_q: of flash_attn_varlen_func);
            "bwd", its backward pass; or "decode", a call of flash_decode_func, or of
            flash_attn_with_kvcache, whose append every backend serves.
        others: as in that function. Options of the other op are ignored.

    Raises:
        RuntimeError: what the call itself would raise: no backend serves such tensors.
        ValueError: op, or causal_alignment.
    """
    try:
        if op in ("fwd", "bwd"):
            dropout = dropout_p > 0.0
            tensors, options = (
                (q, k, v),
                dict(
                    cu_seqlens_q=cu_seqlens_q,
                    cu_seqlens_k=cu_seqlens_k,
                    seqused_q=seqused_q,
                    seqused_k=seqused_k,
                    leftpad_k=leftpad_k,
                    block_table=block_table,
                    attn_bias=attn_bias,
                    alibi_slopes=alibi_slopes,
                    learnable_sink=learnable_sink,
                    # Not drawn: asking must not move the generator.
                    rng_state=q.new_empty(2, dtype=torch.int64) if dropout else None,
                    max_seqlen_q=max_seqlen_q,
                    max_seqlen_k=max_seqlen_k,
                    dropout_p=dropout_p,
                    softmax_scale=softmax_scale,
                    causal=causal,
                    window_size=window_size,
                    causal_alignment=causal_alignment,
                    softcap=softcap,
                    deterministic=deterministic,
                    return_probs=return_attn_probs and dropout,
                    return_max_logits=return_max_logits,
                ),
            )
            varlen = None if cu_seqlens_q is not None else _call.packed_call(q, k, v, **options)
            if varlen is not None:
                tensors, options = varlen[0], options | varlen[1]
            ask = C.explain_fwd if op == "fwd" else C.explain_bwd
            chosen, reasons, plans = ask(*_call.fwd_arguments(*tensors, **options))
        elif op == "decode":
            arguments = _cache_call.decode_arguments(
                q,
                k,
                v,
                cache_seqlens=cache_seqlens,
                cache_batch_idx=cache_batch_idx,
                cache_leftpad=cache_leftpad,
                block_table=block_table,
                alibi_slopes=alibi_slopes,
                learnable_sink=learnable_sink,
                k_descale=k_descale,
                v_descale=v_descale,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                num_splits=num_splits,
                batch_invariant=batch_invariant,
                return_max_logits=return_max_logits,
                shared_prefix=shared_prefix,
                attn_bias=attn_bias,
                tree_mask=tree_mask,
            )
            chosen, reasons, plans = C.explain_decode(*arguments)
        else:
            raise ValueError(f'flash_attn: op: expected "fwd", "bwd" or "decode", got {shown(op)}')
        serves = not reasons.get(chosen)
        return Support(chosen if serves else None, reasons, plans.get(chosen))
    except Exception as error:
        explain(error, can_use, locals(), {"k_cache": "k", "v_cache": "v"})
        raise
