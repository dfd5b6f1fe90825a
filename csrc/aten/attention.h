// The tiled online-softmax algorithm in ATen operations: any device, any dtype, any head dim, every
// score term.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "core/params.h"

namespace flash_attn::aten {

// A checked call: shapes and dtypes agree (bindings/checks.h), softmax_scale is resolved, causal is
// in window_right.
struct Args {
  at::Tensor q, k,
      v;  // dense (batch, seqlen, heads, d) or varlen (total, heads, d), any strides, one dtype
  std::optional<at::Tensor> cu_seqlens_q, cu_seqlens_k;  // int32 (batch + 1): varlen
  std::optional<at::Tensor> seqused_q, seqused_k;        // int32 (batch)
  std::optional<at::Tensor> leftpad_k;                   // int32 (batch)
  std::optional<at::Tensor>
      attn_bias;  // broadcastable to (batch, heads_q, max_seqlen_q, max_seqlen_k); bool: keep
  std::optional<at::Tensor> alibi_slopes;    // fp32 (heads_q) or (batch, heads_q)
  std::optional<at::Tensor> learnable_sink;  // (heads_q), any float dtype
  std::optional<at::Tensor> rng_state;       // int64 (2): seed, offset; needed when dropout_p > 0
  int64_t max_seqlen_q, max_seqlen_k;        // dense: the lengths; varlen: the caller's maxima
  double dropout_p = 0.0;
  DropoutPlace dropout_place;
  double softmax_scale = 1.0;
  int64_t window_left = -1, window_right = -1;  // -1: no limit
  bool top_left = false;
  double softcap = 0.0;
  bool wants_max_logits = false;  // forward only
};

// out like q with v's head dim; lse (batch, heads_q, seqlen_q) or (heads_q, total_q), fp64 for fp64
// inputs, else fp32; S_dmask (batch, heads_q, max_seqlen_q, max_seqlen_k) when return_probs, else
// empty: the probabilities, each row divided by its largest, negated where dropout drops them;
// max_logits (heads_q), of lse's dtype, when args.wants_max_logits, else empty: the largest
// softmax_scale · q·k that is seen, -inf if none is.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fwd(const Args& args, bool return_probs);

struct Grads {
  at::Tensor dq, dk, dv, dbias, dsink;  // those that grad_mask leaves out are empty (0,) tensors
};
// dlse: the gradient that flows into lse, if any. grad_mask: which of q, k, v, attn_bias,
// learnable_sink need one. into: dq, dk and dv as zeros to write to, of any strides; those that are
// undefined are made here.
Grads bwd(const Args& args, const at::Tensor& dout, const std::optional<at::Tensor>& dlse,
          const at::Tensor& out, const at::Tensor& lse, std::array<bool, 5> grad_mask,
          const std::array<at::Tensor, 3>& into = {});

struct DecodeArgs {
  at::Tensor q;  // (batch, seqlen_q, heads_q, d): the newest tokens
  // (rows, capacity, heads_kv, d), or paged (num_pages, page_size, heads_kv, d); q's dtype, fp8
  // (e4m3fn) or int8.
  at::Tensor k_cache, v_cache;
  // int32 (batch), any values. cache_seqlens: the new tokens included; none: capacity.
  // cache_batch_idx: the row of the cache, or of block_table, of each sequence; none: its own.
  std::optional<at::Tensor> cache_seqlens, cache_batch_idx, leftpad_k;
  std::optional<at::Tensor> block_table;  // int32 (rows, max_pages), any values: paged
  // Broadcastable to (batch, heads_q, seqlen_q, positions of the cache); bool: keep.
  std::optional<at::Tensor> attn_bias;
  // bool (seqlen_q, seqlen_q) or (batch, …), without attn_bias: which of the last seqlen_q keys
  // each query keeps.
  std::optional<at::Tensor> tree_mask;
  std::optional<at::Tensor> alibi_slopes, learnable_sink;
  // fp32 (heads_kv) or (batch, heads_kv), for caches of 8 bits: value = stored · descale.
  std::optional<at::Tensor> k_descale, v_descale;
  double softmax_scale = 1.0;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  int64_t num_splits = 0;  // 0: chosen here; on a GPU keys are not cut
  bool batch_invariant = false, wants_max_logits = false;
};
// out like q (v's head dim), lse (batch, heads_q, seqlen_q), max_logits as in fwd().
std::tuple<at::Tensor, at::Tensor, at::Tensor> decode(const DecodeArgs& args);

struct NewTokens {
  at::Tensor k, v;  // (batch, seqlen_new, heads_kv, d) of q's dtype
  std::optional<at::Tensor> rotary_cos, rotary_sin;  // (rows, rotary_dim / 2)
  bool rotary_interleaved = false;
};
struct Appended {
  at::Tensor q;              // rotated
  at::Tensor cache_seqlens;  // the new tokens included
};
// Writes the new tokens, rotated, into the caches of `args` from its cache_seqlens on (none: so
// that they are the last). What has no place there is dropped.
Appended append(const DecodeArgs& args, const NewTokens& tokens);

}  // namespace flash_attn::aten
