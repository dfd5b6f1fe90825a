// Score terms: what happens to Q Kᵀ before the mask.
#pragma once

#include "../../core/params.h"
#include "../tile/fragment.cuh"
#include "online_softmax.cuh"

namespace flash_attn {

// tanh(x) = 1 - 2 / (exp(2x) + 1); near 0, where that difference has lost its digits, x - x³/3 +
// 2x⁵/15. Relative error at most 5e-6, at 0.1; the hardware's tanh is good to 11 bits only.
__device__ __forceinline__ float accurate_tanh(float x) {
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, 2.f / 15, -1.f / 3), 1.f);
  const float by_exp2 = 1.f - __fdividef(2.f, ptx::exp2(x * (2.f * kLog2E)) + 1.f);
  return fabsf(x) < 0.1f ? series : by_exp2;
}

// Q Kᵀ becomes scores, before the mask. slope: ALiBi's. diagonal: the column that the thread's first
// row meets; its other rows lie 8 further down each.
template <int kN>
__device__ __forceinline__ void apply_score_terms(Accumulator<1, kN>& S, const ScoreParams& params,
                                                  float softmax_scale, float slope, int diagonal,
                                                  int lane) {
  const bool capped = params.softcap > 0.f;
  const float scale = capped ? __fdividef(softmax_scale, params.softcap) : softmax_scale;
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) S.at(row, i) *= scale;
    if (capped) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(row, i) = params.softcap * accurate_tanh(S.at(row, i));
      }
    }
    if (params.alibi_slopes != nullptr) {
      // Rounded only where the distance is beyond 2²⁴.
      const auto first = static_cast<float>(fragment_col(0, lane) - diagonal - 8 * row);
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(row, i) -= slope * fabsf(first + static_cast<float>(fragment_col(i, 0)));
      }
    }
  }
}

}  // namespace flash_attn
