// Where one sequence lies in the tensors of a call, and how much of it counts.
#pragma once

#include <cstdint>

#include "../../core/params.h"

namespace flash_attn {

// Rows of q (out, dq, lse) and of k, v (dk, dv) that belong to sequence `batch_idx`:
//
//   q   [q_begin … q_begin + segment_q)
//       len_q queries │ the rest: out 0, LSE -inf, gradient 0
//
//   k   [segment_k_begin … segment_k_begin + segment_k)
//       leftpad │ len_k keys from k_begin on │ beyond seqused_k        gradient 0 outside the keys
//
// Row numbers are within the batch entry for dense tensors, within the whole tensor for varlen
// (whose batch stride is 0), so that batch_idx · strides.batch + row · strides.row + head ·
// strides.head addresses both. Lengths that live on the device may hold anything and are clamped to
// the tensors. Varlen: the sequences number -1 and params.batch stand for the rows before
// cu_seqlens[0] and behind cu_seqlens[batch], none of which count.
struct SeqlenInfo {
  int64_t q_begin, k_begin, segment_k_begin;
  int segment_q, len_q, segment_k, len_k;

  __device__ __forceinline__ SeqlenInfo(const AttnParams& params, int batch_idx)
      : SeqlenInfo(params, batch_idx, 0) {}
  __device__ __forceinline__ SeqlenInfo(const FwdParams& params, int batch_idx)
      : SeqlenInfo(params, batch_idx, params.seqlen_new) {
    if (kv_row(params, batch_idx) < 0) len_k = 0;
  }

  // Of a sequence all of whose keys count.
  __device__ __forceinline__ SeqlenInfo(int q_begin, int segment_q, int len_q, int k_begin,
                                        int len_k)
      : q_begin(q_begin),
        k_begin(k_begin),
        segment_k_begin(k_begin),
        segment_q(segment_q),
        len_q(len_q),
        segment_k(len_k),
        len_k(len_k) {}

  // The key that query 0 meets on its diagonal.
  __device__ __forceinline__ int64_t diagonal(const AttnParams& params) const {
    return params.top_left ? 0 : static_cast<int64_t>(len_k) - len_q;
  }

  // The entry of k and v that a sequence's keys lie in; -1: there is none.
  __device__ __forceinline__ static int kv_row(const FwdParams& params, int batch_idx) {
    if (params.cache_batch_idx == nullptr) return batch_idx;
    const int row = params.cache_batch_idx[batch_idx];
    return row >= 0 && row < params.cache_rows ? row : -1;
  }

  // Offset in elements of row `row` of the tensor whose rows start at `begin`.
  __device__ __forceinline__ static int64_t offset(const Strides& strides, int batch_idx, int head,
                                                   int64_t row) {
    return batch_idx * strides.batch + head * strides.head + row * strides.row;
  }

 private:
  __device__ __forceinline__ SeqlenInfo(const AttnParams& params, int batch_idx, int seqlen_new) {
    const bool outside = batch_idx < 0 || batch_idx == params.batch;
    segment(params.cu_seqlens_q, params.total_q, params.seqlen_q, batch_idx, params.batch, q_begin,
            segment_q);
    segment(params.cu_seqlens_k, params.total_k, params.seqlen_k, batch_idx, params.batch,
            segment_k_begin, segment_k);
    len_q = outside ? 0 : used(params.seqused_q, batch_idx, segment_q);
    const int end_k = outside ? 0 : used(params.seqused_k, batch_idx, segment_k, seqlen_new);
    const int leftpad =
        outside || params.leftpad_k == nullptr ? 0 : used(params.leftpad_k, batch_idx, end_k);
    k_begin = segment_k_begin + leftpad;
    len_k = end_k - leftpad;
  }

  __device__ __forceinline__ static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
  }

  __device__ __forceinline__ static int used(const int32_t* lengths, int batch_idx, int limit,
                                             int more = 0) {
    if (lengths == nullptr) return limit;
    return static_cast<int>(clamp(int64_t{lengths[batch_idx]} + more, 0, limit));
  }

  __device__ __forceinline__ static void segment(const int32_t* cu_seqlens, int64_t total,
                                                 int seqlen, int batch_idx, int batch,
                                                 int64_t& begin, int& length) {
    if (cu_seqlens == nullptr) {
      begin = 0;
      length = batch_idx < batch ? seqlen : 0;
      return;
    }
    begin = batch_idx < 0 ? 0 : clamp(cu_seqlens[batch_idx], 0, total);
    const int64_t end = batch_idx == batch ? total : clamp(cu_seqlens[batch_idx + 1], begin, total);
    length = static_cast<int>(end - begin);
  }
};

}  // namespace flash_attn
