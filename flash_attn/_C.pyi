"""The compiled module (csrc/bindings/module.cpp): the ops' schemas, arguments by position only."""

from collections.abc import Sequence

from torch import Tensor

def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    rng_state: Tensor | None,
    mask_tiles: Tensor | None,
    mask_rows: Tensor | None,
    mask_labels: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    top_left: bool,
    softcap: float,
    deterministic: bool,
    return_probs: bool,
    return_max_logits: bool,
    dropout_place: Sequence[int] | None,
    backend: str | None,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, softmax_lse, S_dmask, max_logits.

    Differentiable in q, k, v, attn_bias and learnable_sink.
    """

def bwd(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    rng_state: Tensor | None,
    mask_tiles: Tensor | None,
    mask_rows: Tensor | None,
    mask_labels: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    top_left: bool,
    softcap: float,
    deterministic: bool,
    grad_mask: Sequence[bool],
    dropout_place: Sequence[int] | None,
    backend: str | None,
    wide_key_gradients: bool,
    wide_query_gradient: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias, dsink; those that grad_mask leaves out are empty."""

def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    num_splits: int,
    batch_invariant: bool,
    return_max_logits: bool,
    backend: str | None,
    prefix_source: Tensor | None,
    prefix_lens: Tensor | None,
    attn_bias: Tensor | None,
    tree_mask: Tensor | None,
    /,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, softmax_lse, max_logits. Not differentiable."""

def kvcache(
    k: Tensor,
    v: Tensor,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    num_splits: int,
    batch_invariant: bool,
    return_max_logits: bool,
    backend: str | None,
    prefix_source: Tensor | None,
    prefix_lens: Tensor | None,
    attn_bias: Tensor | None,
    tree_mask: Tensor | None,
    /,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes k and v into the caches, then decode: out, softmax_lse, max_logits.

    cache_seqlens: before them.

    Without cache_seqlens the new tokens are the caches' last. Not differentiable.
    """

def heads_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
    causal: bool,
    gqa: bool,
    backend: str | None,
    /,
) -> Tensor | None:
    """fwd as scaled_dot_product_attention: (batch, heads, rows, d), differentiable as fwd is. None
    where something has to be broadcast or cast, the scale is not above 0, or a tensor is a subclass
    or otherwise not what kernels read as it lies there."""

def rows_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    top_left: bool,
    softcap: float,
    deterministic: bool,
    backend: str | None,
    /,
) -> Tensor | None:
    """fwd of (batch, rows, heads, d), of which out alone is wanted, differentiable as fwd is. None
    where something has to be cast, or a tensor is a subclass or otherwise not what kernels read as
    it lies there."""

def rng_state(like: Tensor, /) -> Tensor:
    """int64 (2): a fresh seed and offset from torch's generator of like's device."""

def unpack(packed: Tensor, /) -> list[Tensor]:
    """packed.unbind(-3); gradients of the results that lie side by side are not copied."""

def clear_pages(k: Tensor, v: Tensor, missing: Tensor, /) -> None:
    """Zeros in the pages that are missing of k and v (batch, max_pages, …), contiguous, of a GPU.

    missing: bool (batch, max_pages).
    """

# The backend, every other one with its reasons why not, and of each that can, how.
Explanation = tuple[str, dict[str, list[str]], dict[str, str]]

def reads_pages(*fwd_arguments: object) -> bool:
    """Whether fwd takes these arguments, which have a block_table, as they are."""

def explain_fwd(*fwd_arguments: object) -> Explanation:
    """The backend that serves fwd of these arguments, and every other's reasons why not."""

def explain_bwd(*fwd_arguments: object) -> Explanation:
    """The same for the backward that would follow fwd of these arguments."""

def explain_decode(*decode_arguments: object) -> Explanation:
    """The backend that serves decode of these arguments, and every other's reasons why not."""

# Queries of a part begin at a multiple of it.
PART_ROW_MULTIPLE: int

class BwdParts:
    """The backward of queries whose keys come part by part, of kernels that add to sums of dq.

    dout, out: (batch, seqlen_q, heads_q, head_dim_v) of all queries and all keys.
    softmax_lse, dlse: (batch, heads_q, seqlen_q).
    """

    has_sums: bool  # whether add() has added anything

    def __init__(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, softmax_lse: Tensor, /
    ) -> None: ...
    def add(self, first_row: int, /, *bwd_arguments: object) -> tuple[Tensor, Tensor] | None:
        """Adds to dq what bwd of these arguments gives, whose queries lie from first_row on.

        Returns dk and dv in fp32. None: its kernels have no sums that fit; nothing happened.
        """

    def store(self, dq: Tensor, /) -> None:
        """Writes dq (batch, seqlen_q, heads_q, head_dim), of q's dtype or fp32."""

def backend_names() -> list[str]:
    """Best first."""
