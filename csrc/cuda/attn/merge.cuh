// Attention over disjoint sets of keys, merged.
#pragma once

#include <cmath>

#include "online_softmax.cuh"

namespace flash_attn {

// A piece leaves (o, lse): its normalised output and ln of its sum of exponentials. Pieces merge to
//
//   lse = ln Σᵢ exp(lseᵢ),    o = Σᵢ exp(lseᵢ - lse) · oᵢ
//
// This is the running softmax's (o, l, m) with m + ln l in one number: associative, commutative,
// and (anything, -inf) is neutral. NaN in any lseᵢ reaches lse and every weight.

// What lseᵢ are taken against in a sum of exponentials: 0 when all are -inf, so that -inf - (-inf)
// does not arise.
__device__ __forceinline__ float merge_reference(float max_lse) {
  return max_lse == -INFINITY ? 0.f : max_lse;
}

// lse from Σᵢ exp(lseᵢ - reference).
__device__ __forceinline__ float merge_finish(float reference, float sum) {
  return reference + ptx::log2(sum) * kLn2;
}

// exp(lseᵢ - lse); 0 for a piece without keys, also when the whole has none.
__device__ __forceinline__ float merge_weight(float piece_lse, float lse) {
  return piece_lse == -INFINITY ? 0.f : ptx::exp2((piece_lse - lse) * kLog2E);
}

}  // namespace flash_attn
