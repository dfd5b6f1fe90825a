// The backward's softmax: P again from S and LSE, and the gradient of S.
#pragma once

#include <cmath>

#include "../../core/score_range.h"
#include "../ptx/math.cuh"
#include "../tile/fragment.cuh"
#include "mask.cuh"
#include "online_softmax.cuh"

namespace flash_attn {

// Whether a row gives a gradient. It does not if it sees no key, nor if its LSE has no fraction
// (core/score_range.h). A row with NaN does.
__device__ __forceinline__ bool gives_gradient(float lse) {
  return !(fabsf(lse) > static_cast<float>(kMaxLse));
}

// What the backward keeps of a row's LSE: P = exp2(scale_log2 · S - lse_log2). For rows that give
// no gradient it is +inf, so that P = 0.
__device__ __forceinline__ float to_lse_log2(float lse) {
  return gives_gradient(lse) ? lse * kLog2E : INFINITY;
}

// S becomes P. `mask` sets scores to -inf in the blocks that need it; the scale comes first there,
// because a scale <= 0 would turn -inf around.
template <int kMBlocks, int kN, typename Mask>
__device__ __forceinline__ void recompute_probabilities(Accumulator<kMBlocks, kN>& S,
                                                        float scale_log2,
                                                        const float (&lse_log2)[2 * kMBlocks],
                                                        bool masked, const Mask& mask) {
  if (masked) {
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) S.at(row, i) *= scale_log2;
    }
    mask(S);
    scale_log2 = 1.f;
  }
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      S.at(row, i) = ptx::exp2(fmaf(S.at(row, i), scale_log2, -lse_log2[row]));
    }
  }
}

// dP becomes dS = P ∘ (dP - delta), the gradient of softmax_scale · S.
template <int kMBlocks, int kN>
__device__ __forceinline__ void softmax_gradient(Accumulator<kMBlocks, kN>& dP,
                                                 const Accumulator<kMBlocks, kN>& P,
                                                 const float (&delta)[2 * kMBlocks]) {
#pragma unroll
  for (int row = 0; row < P.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < P.kRowElements; ++i) {
      dP.at(row, i) = P.at(row, i) * (dP.at(row, i) - delta[row]);
    }
  }
}

}  // namespace flash_attn
