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

// What happens to the scores between Q Kᵀ and the mask. All zero: plain.
//
//   S = softcap · tanh(S / softcap),    S -= slope · |key - diagonal|,    l = Σ exp(S) + exp(sink)
struct ScoreParams {
  float softcap;                // 0: none
  const float* alibi_slopes;    // (heads_q) or (batch, heads_q), or null
  int64_t alibi_batch_stride;   // 0: the same for all sequences
  const float* learnable_sink;  // (heads_q), or null
};

struct FwdParams : AttnParams {
  ScoreParams score;  // only sm90 asks for it

  // Where k and v are a cache: sequence b's keys lie in entry kv_rows[b], of kv_batch entries; null:
  // in entry b.
  const int32_t* kv_rows;
  int kv_batch;
  int seqlen_new;  // keys of each sequence that seqused_k does not count: just appended

  void* out;  // like q, with head_dim_v
  Strides out_strides;
  float* lse;  // (batch, heads_q, seqlen_q) or (heads_q, total_q); natural log
  int64_t lse_batch_stride, lse_head_stride;  // varlen: batch stride 0. Rows are contiguous

  int32_t* tile_counter;  // workspace: one number, zeroed by the launch; only sm90 asks for it

  // Of sm90, dense q, head_dim_v = head_dim <= 128. num_splits > 1: each tile's keys are cut into
  // that many pieces, and what comes out is as in DecodeParams (plain) for cuda::run_decode_combine,
  // instead of out and lse.
  int num_splits;
  float *partial_o, *partial_lse;
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

// A cache of keys and values, dense or paged. Its index vectors live on the device and may hold
// anything: an entry that names no row or page has no keys.
struct CacheParams {
  // (cache_rows, capacity, heads_kv, head_dim), or (cache_rows pages, page_size, heads_kv, head_dim)
  const void* k_cache;
  const void* v_cache;           // likewise, with head_dim_v
  Strides k_strides, v_strides;  // batch: from one row of the cache, or page, to the next
  DType cache_dtype;             // that of q, kFp8E4M3 or kInt8
  int cache_rows, capacity;      // capacity: keys of one sequence; paged: max_pages · page_size
  int page_size;                 // dense: capacity

  const int32_t* block_table;  // (table_rows, max_pages), or null: dense
  int64_t table_stride;
  int table_rows;
  const int32_t*
      cache_batch_idx;           // (batch) row of the cache, or of block_table; null: the sequence
  const int32_t* cache_seqlens;  // (batch) tokens before the appended ones; null: capacity
  int seqlen_new;                // tokens appended by this call to every sequence

  // 8 bits: value = descale · what is stored; null: 1. Strides may be 0.
  const float *k_descale, *v_descale;
  int64_t k_descale_batch_stride, k_descale_head_stride;
  int64_t v_descale_batch_stride, v_descale_head_stride;

  // (rotary_rows, rotary_dim / 2) contiguous, dtype of q; null: no rotation. Row t turns position t.
  const void *rotary_cos, *rotary_sin;
  int rotary_rows, rotary_dim;
  bool rotary_interleaved;  // pairs (0, 1), (2, 3), …; else (i, i + rotary_dim / 2)

  DType dtype;  // of q, out, and k, v to append
  int batch, heads_kv, head_dim, head_dim_v;
};

struct AppendParams : CacheParams {
  const void *k, *v;  // (batch, seqlen_new, heads_kv, head_dim or head_dim_v)
  Strides k_new_strides, v_new_strides;
};

// Plain: a cache of q's dtype with head_dim_v = head_dim that nothing is appended to; no softcap,
// slopes or sink.
struct DecodeParams : CacheParams, ScoreParams {
  const void* q;  // (batch, seqlen_q, heads_q, head_dim): the newest tokens
  Strides q_strides;
  int heads_q, seqlen_q;
  int group;                 // heads_q / heads_kv; group · seqlen_q < 2^20
  const int32_t* leftpad_k;  // (batch) or null: keys to skip at the front

  float softmax_scale;
  int window_left, window_right;  // as in AttnParams, bottom-right
  bool rotate_by_row;  // query i rotates by its own position; else all by that of the first

  // Pieces that each sequence's keys are cut into, all alike. 0, not for plain calls: the keys of
  // the whole call are dealt out evenly, whatever the lengths.
  int num_splits;
  int keys_per_split;  // > 0: cut by length instead, into at most num_splits pieces
  // Plain calls cut by length: pieces of the whole call that fill the device, and the most that there
  // may be, but one a sequence more. keys_per_split gives way to them (cuda/decode/pieces.cuh). most_pieces
  // 0: never.
  int least_pieces, most_pieces;

  // (batch) or null. Not plain and num_splits = 1: a sequence whose entry is 0 is left to others.
  const int32_t* wanted;

  // Workspace of normalised partial results, null where there are none: (pieces, heads_q, seqlen_q,
  // head_dim) and the same without head_dim; piece s of sequence b is s · batch + b, or those of a
  // sequence follow one another. Not plain: (kvcache_slots, 16, head_dim_v).
  float *partial_o, *partial_lse;

  void* out;  // like q, with head_dim_v
  Strides out_strides;
  float* lse;  // (batch, heads_q, seqlen_q) contiguous, or null
};

// The keys of a paged cache that count, sequence after sequence, as the forward reads varlen ones.
struct PackedCache {
  void *k, *v;          // (rows, heads_kv, head_dim or head_dim_v) contiguous
  int64_t rows;         // that there is room for
  int32_t* cu_seqlens;  // (batch + 1)
  int32_t* seqused;     // (batch) 0 for a sequence that is not whole: no room, or a page is missing
  int32_t* missed;      // (batch) 1 for such a sequence
};

}  // namespace flash_attn
