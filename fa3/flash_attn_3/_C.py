"""The ops that FlashAttention-3's extension module registers and xformers calls by position."""

import torch
from torch import Tensor

from flash_attn_3._ops import _flash_attn_backward, _flash_attn_forward, flash_attn_combine

_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,"
    " Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,"
    " Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None,"
    " Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, float softcap=0.,"
    " bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0,"
    " bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_COMBINE = (
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None,"
    " ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)"
)
_METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,"
    " int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None,"
    " Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0,"
    " bool is_causal=False, int window_size_left=-1, int window_size_right=-1,"
    " int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None,"
    " int sm_margin=0) -> Tensor"
)


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    *options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Writes dq, dk and dv. Returns softmax_d; the work space that follows it is empty."""
    lengths, others = options[:6], options[6:]
    softmax_d = _flash_attn_backward(dout, q, k, v, out, softmax_lse, *lengths, dq, dk, dv, *others)
    return softmax_d, *(softmax_d.new_empty(0) for _ in range(4))


def _metadata(*call: object) -> Tensor:
    """Nothing: no call is planned ahead here."""
    seqused_k = call[8]
    return seqused_k.new_empty(0)


_LIBRARY = torch.library.Library("flash_attn_3", "FRAGMENT")
for _schema in (_FWD, _BWD, _COMBINE, _METADATA):
    _LIBRARY.define(_schema)
_LIBRARY.impl("fwd", _flash_attn_forward, "CompositeExplicitAutograd")
_LIBRARY.impl("bwd", _bwd, "CompositeExplicitAutograd")
_LIBRARY.impl("fwd_combine", flash_attn_combine, "CompositeExplicitAutograd")
_LIBRARY.impl("get_scheduler_metadata", _metadata, "CompositeExplicitAutograd")
