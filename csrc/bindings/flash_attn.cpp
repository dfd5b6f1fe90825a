#include "flash_attn.h"

#include "args.h"

namespace flash_attn {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const OptTensor& cu_seqlens_q, const OptTensor& cu_seqlens_k,
                                     c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k,
                                     const AttentionOptions& options) {
  OptTensor rng_state;
  if (options.dropout_p > 0) rng_state = call_rng_state(q);
  FwdArgs args = {.attn = {.q = q,
                           .k = k,
                           .v = v,
                           .cu_seqlens_q = cu_seqlens_q,
                           .cu_seqlens_k = cu_seqlens_k,
                           .seqused_q = std::nullopt,
                           .seqused_k = std::nullopt,
                           .leftpad_k = std::nullopt,
                           .block_table = std::nullopt,
                           .attn_bias = options.attn_bias,
                           .alibi_slopes = options.alibi_slopes,
                           .learnable_sink = options.learnable_sink,
                           .rng_state = rng_state,
                           .mask_tiles = std::nullopt,
                           .mask_rows = std::nullopt,
                           .mask_labels = std::nullopt,
                           .max_seqlen_q = std::move(max_seqlen_q),
                           .max_seqlen_k = std::move(max_seqlen_k),
                           .dropout_p = options.dropout_p,
                           .softmax_scale = options.softmax_scale,
                           .causal = options.causal,
                           .window_left = options.window_left,
                           .window_right = options.window_right,
                           .top_left = options.top_left,
                           .softcap = options.softcap,
                           .deterministic = options.deterministic},
                  .return_probs = false,
                  .return_max_logits = false,
                  .dropout_place = std::nullopt,
                  .backend = options.backend};
  auto [out, softmax_lse, probs, max_logits] = call_fwd(std::move(args));
  return {out, softmax_lse};
}

}  // namespace

std::tuple<Tensor, Tensor> flash_attn_func(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const AttentionOptions& options) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4,
              "flash_attn: q, k: must have shape (batch, seqlen, heads, head_dim), got ", q.sizes(),
              " and ", k.sizes());
  return attention(q, k, v, std::nullopt, std::nullopt, q.sym_size(1), k.sym_size(1), options);
}

std::tuple<Tensor, Tensor> flash_attn_varlen_func(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& cu_seqlens_q,
                                                  const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
                                                  int64_t max_seqlen_k,
                                                  const AttentionOptions& options) {
  return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options);
}

std::tuple<Tensor, Tensor> flash_decode_func(const Tensor& q, const Tensor& k_cache,
                                             const Tensor& v_cache,
                                             const std::optional<Tensor>& cache_seqlens,
                                             const DecodeOptions& options) {
  auto [out, softmax_lse, max_logits] = call_decode({.q = q,
                                                     .k_cache = k_cache,
                                                     .v_cache = v_cache,
                                                     .cache_seqlens = cache_seqlens,
                                                     .cache_batch_idx = options.cache_batch_idx,
                                                     .leftpad_k = options.leftpad_k,
                                                     .block_table = options.block_table,
                                                     .alibi_slopes = options.alibi_slopes,
                                                     .learnable_sink = options.learnable_sink,
                                                     .k_descale = options.k_descale,
                                                     .v_descale = options.v_descale,
                                                     .softmax_scale = options.softmax_scale,
                                                     .causal = options.causal,
                                                     .window_left = options.window_left,
                                                     .window_right = options.window_right,
                                                     .softcap = options.softcap,
                                                     .num_splits = options.num_splits,
                                                     .batch_invariant = options.batch_invariant,
                                                     .return_max_logits = false,
                                                     .backend = options.backend,
                                                     .prefix_source = options.prefix_source,
                                                     .prefix_lens = options.prefix_lens,
                                                     .attn_bias = options.attn_bias,
                                                     .tree_mask = options.tree_mask});
  return {out, softmax_lse};
}

}  // namespace flash_attn
