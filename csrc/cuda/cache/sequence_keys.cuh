// How many keys a sequence has in a cache, and which of them its queries see.
#pragma once

#include "../../core/params.h"

namespace flash_attn::cuda {

// Keys of the sequence, the appended ones included. Anything may stand in cache_seqlens.
__device__ __forceinline__ int kvcache_len_k(const CacheParams& params, int batch_idx) {
  if (params.cache_seqlens == nullptr) return params.capacity;
  const int start = min(max(params.cache_seqlens[batch_idx], -params.seqlen_new), params.capacity);
  return min(start + params.seqlen_new, params.capacity);
}

// The keys that some queries of a sequence see, by length, window and leftpad.
struct SequenceKeys {
  int first, end;

  // Those that the queries first_token … last_token see. Masks are aligned bottom-right.
  __device__ __forceinline__ SequenceKeys(const DecodeParams& params, int batch_idx, int len_k,
                                          int first_token, int last_token) {
    const int leftpad = params.leftpad_k == nullptr ? 0 : max(params.leftpad_k[batch_idx], 0);
    const int from =
        params.window_left < 0 ? 0 : len_k - params.seqlen_q + first_token - params.window_left;
    const int beyond = last_token + 1 - params.seqlen_q + params.window_right;
    end = params.window_right < 0 ? len_k : max(len_k + min(beyond, 0), 0);
    first = min(max(from, leftpad), end);
  }
  // Those that any query of the sequence sees.
  __device__ __forceinline__ SequenceKeys(const DecodeParams& params, int batch_idx)
      : SequenceKeys(params, batch_idx, kvcache_len_k(params, batch_idx), 0, params.seqlen_q - 1) {}
  SequenceKeys() = default;

  template <int kKeys>
  __device__ __forceinline__ int first_tile() const {
    return first / kKeys;
  }
  // There is at least one, so that each sequence is visited and its output written.
  template <int kKeys>
  __device__ __forceinline__ int tiles() const {
    return max((end + kKeys - 1) / kKeys - first / kKeys, 1);
  }
};

}  // namespace flash_attn::cuda
