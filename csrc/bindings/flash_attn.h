// flash_attn for C++: the same functions as in Python, over libtorch. Link flash_attn::flash_attn
// (find_package(flash_attn)). Shapes, defaults and errors are those of the Python docstrings.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#define FLASH_ATTN_API __attribute__((visibility("default")))

namespace flash_attn {

struct AttentionOptions {
  double dropout_p = 0.0;
  std::optional<double> softmax_scale;  // none: head_dim^-0.5
  bool causal = false;
  int64_t window_left = -1, window_right = -1;  // keys to each side of the diagonal; -1: no limit
  bool top_left = false;                        // diagonal at key i for query i; else bottom-right
  double softcap = 0.0;                         // 0: off
  std::optional<at::Tensor> attn_bias;       // broadcasts to (batch, heads_q, seqlen_q, seqlen_k)
  std::optional<at::Tensor> alibi_slopes;    // fp32 (heads_q) or (batch, heads_q)
  std::optional<at::Tensor> learnable_sink;  // (heads_q)
  bool deterministic = false;                // of the backward pass; the forward always is
  std::optional<std::string_view> backend;   // none: the best that serves the call
};

// q (batch, seqlen_q, heads_q, head_dim); k (batch, seqlen_k, heads_kv, head_dim); v (…,
// head_dim_v). Returns out (batch, seqlen_q, heads_q, head_dim_v) and softmax_lse (batch, heads_q,
// seqlen_q), both differentiable.
FLASH_ATTN_API std::tuple<at::Tensor, at::Tensor> flash_attn_func(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const AttentionOptions& options = {});

// q (total_q, heads_q, head_dim), k and v (total_k, …); cu_seqlens int32 (batch + 1) on the
// tensors' device. Returns out like q and softmax_lse (heads_q, total_q).
FLASH_ATTN_API std::tuple<at::Tensor, at::Tensor> flash_attn_varlen_func(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const AttentionOptions& options = {});

struct DecodeOptions {
  std::optional<double> softmax_scale;
  bool causal = true;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  std::optional<at::Tensor> alibi_slopes, learnable_sink;
  std::optional<at::Tensor> cache_batch_idx, leftpad_k;  // int32 (batch)
  std::optional<at::Tensor>
      block_table;  // int32 (batch, max_pages): caches are (num_pages, page_size, heads_kv, d)
  std::optional<at::Tensor> k_descale, v_descale;  // fp32 (heads_kv) or (batch, heads_kv)
  int64_t num_splits = 0;                          // 0: chosen
  bool batch_invariant = false;
  std::optional<std::string_view> backend;
  // int32 (batch): the first prefix_lens[b] keys of sequence b are those of sequence
  // prefix_source[b]
  std::optional<at::Tensor> prefix_source, prefix_lens;
  // Broadcasts to (batch, heads_q, new tokens, capacity), floating or bool (false: hidden); or bool
  // (new tokens, new tokens), perhaps for each sequence: which of the newest keys a token sees.
  std::optional<at::Tensor> attn_bias, tree_mask;
};

// q (batch, new tokens, heads_q, head_dim), whose keys are in the caches (batch, capacity,
// heads_kv, head_dim) already; cache_seqlens int32 (batch), none: capacity. Returns out like q and
// softmax_lse (batch, heads_q, new tokens).
FLASH_ATTN_API std::tuple<at::Tensor, at::Tensor> flash_decode_func(
    const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
    const std::optional<at::Tensor>& cache_seqlens = std::nullopt,
    const DecodeOptions& options = {});

}  // namespace flash_attn
