// What an attention call is, in plain C++20: every kernel reads one of these structs, nothing else.
//
//   S = softmax_scale · Q Kᵀ → softcap → + bias, ALiBi → mask → online softmax → dropout → P V
//
// Layouts. Dense tensors are (batch, seqlen, heads, head_dim). Varlen tensors are (total, heads,
// head_dim): the sequences lie one after the other and cu_seqlens (batch + 1) holds their starts.
// The last dimension is contiguous in both; pointers and strides are multiples of 16 bytes. Strides
// count elements.
//
// cu_seqlens, seqused and leftpad live on the device and may hold anything: kernels clamp them
// (cuda/attn/seqlen.cuh) and stay inside the tensors.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace flash_attn {

using Stream = CUstream_st*;  // = cudaStream_t, without the CUDA header

enum class DType : uint8_t { kFp16, kBf16, kFp32, kFp64, kFp8E4M3, kInt8 };  // 8 bits: caches only

struct Strides {
  int64_t batch;  // 0 for varlen
  int64_t row;    // from one token to the next
  int64_t head;
};

// What forward and backward share. Sizes and offsets are 64-bit; only the length of one sequence
// fits 32 bits.
struct AttnParams {
  const void* q;  // (batch, seqlen_q, heads_q, head_dim) or (total_q, heads_q, head_dim)
  const void* k;  // (batch, seqlen_k, heads_kv, head_dim) or (total_k, heads_kv, head_dim)
  const void* v;  // (batch, seqlen_k, heads_kv, head_dim_v) or (total_k, heads_kv, head_dim_v)
  Strides q_strides, k_strides, v_strides;

  DType dtype;
  int batch, heads_q, heads_kv;  // query head h reads kv head h / (heads_q / heads_kv)
  int head_dim, head_dim_v;
  int seqlen_q, seqlen_k;    // dense: exact. varlen: the caller's max_seqlen, only a hint
  int64_t total_q, total_k;  // rows of the whole q and k tensors, over all batches

  const int32_t* cu_seqlens_q;  // (batch + 1) or null: dense
  const int32_t* cu_seqlens_k;  // (batch + 1) or null: dense
  const int32_t* seqused_q;     // (batch) or null: rows of each sequence that count
  const int32_t* seqused_k;     // (batch) or null
  const int32_t* leftpad_k;     // (batch) or null: keys to skip at the front of each sequence

  float softmax_scale;
  // Keys that a query sees to each side of its diagonal; -1: all. causal: right = 0.
  int window_left, window_right;
  bool top_left;  // diagonal of query i at key i; otherwise at key i + len_k - len_q (bottom-right)
};

struct FwdParams : AttnParams {
  void* out;  // like q, with head_dim_v
  Strides out_strides;
  float* lse;  // (batch, heads_q, seqlen_q) or (heads_q, total_q); natural log
  int64_t lse_batch_stride, lse_head_stride;  // varlen: batch stride 0. Rows are contiguous

  int32_t* tile_counter;  // workspace: one number, zeroed by the launch; only sm90 asks for it
};

struct BwdParams : AttnParams {
  const void* out;   // like q, with head_dim_v
  const void* dout;  // like out
  Strides out_strides, dout_strides;
  const float* lse;   // as in FwdParams
  const float* dlse;  // the gradient that flows into lse, or null; laid out like lse
  int64_t lse_batch_stride, lse_head_stride;

  void *dq, *dk, *dv;  // like q, k, v
  Strides dq_strides, dk_strides, dv_strides;

  float* delta;     // workspace laid out like lse: rowsum(dO ∘ O) - dLSE
  float* dq_accum;  // workspace (heads_q, dq_accum_rows, head-dim class), zeroed by the launch;
                    // null if deterministic
  int64_t dq_accum_rows;
  bool deterministic;
};

struct DecodeParams {
  const void* q;  // (batch, seqlen_q, heads_q, head_dim): the newest tokens, whose keys are in the
                  // cache already
  const void* k_cache;  // (batch, capacity, heads_kv, head_dim)
  const void* v_cache;  // (batch, capacity, heads_kv, head_dim)
  Strides q_strides, k_strides, v_strides;

  DType dtype;
  int batch, heads_q, heads_kv, head_dim;
  int seqlen_q, capacity;
  const int32_t*
      cache_seqlens;  // (batch) tokens in each cache, the new ones included; null: capacity

  float softmax_scale;
  int window_left, window_right;  // as in AttnParams, bottom-right

  int num_splits;    // pieces that each sequence's keys are cut into, >= 1
  float* partial_o;  // workspace (num_splits, batch, heads_q, seqlen_q, head_dim), normalised; null
                     // if num_splits = 1
  float* partial_lse;  // workspace (num_splits, batch, heads_q, seqlen_q)

  void* out;  // like q
  Strides out_strides;
  float* lse;  // (batch, heads_q, seqlen_q) contiguous, or null
};

}  // namespace flash_attn
