// What happens to decode's scores between Q Kᵀ and the mask. A row of scores is a (token, query
// head) pair, so each has a slope and a diagonal of its own.
//
//   S = softmax_scale · Q Kᵀ → softcap → ALiBi
#pragma once

#include <cfloat>

#include "../attn/online_softmax.cuh"

namespace flash_attn::cuda {

// tanh(x) = 1 - 2 / (exp(2x) + 1); near 0, where that difference has lost its digits, x - x³/3 +
// 2x⁵/15. The relative error is at most 5e-6, at 0.1, which is too much for fp32. The hardware's
// tanh is good to 11 bits only.
__device__ __forceinline__ float accurate_tanh(float x) {
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, 2.f / 15, -1.f / 3), 1.f);
  const float by_exp2 = 1.f - __fdividef(2.f, ptx::exp2(x * (2.f * kLog2E)) + 1.f);
  return fabsf(x) < 0.1f ? series : by_exp2;
}

// Where a row's maximum starts, in units of log 2: scores with terms are bounded.
__device__ __forceinline__ float least_max(const ScoreParams& score) {
  const bool bounded = score.softcap > 0.f || score.alibi_slopes != nullptr;
  return bounded ? kLeastScoreLog2 : -FLT_MAX;
}

// The terms of this thread's rows, g and g + 8 of the tile.
struct DecodeRowTerms {
  float scale[2];  // of Q Kᵀ, in units of log 2; with softcap, of its argument
  float slope[2];  // ALiBi's, in units of log 2
  int diagonal[2];

  // Row `half` is this token and query head. q_scale: what its products are multiplied with
  // besides.
  __device__ __forceinline__ void set(int half, const DecodeParams& params, int batch_idx,
                                      int len_k, int token, int head, float q_scale) {
    const ScoreParams& score = params.score;
    const float unit = score.softcap > 0.f ? 1.f / score.softcap : kLog2E;
    scale[half] = params.softmax_scale * unit * q_scale;
    const float* slopes = score.alibi_slopes;
    if (slopes != nullptr) slopes += batch_idx * score.alibi_batch_stride;
    slope[half] = slopes == nullptr ? 0.f : kLog2E * bounded_slope(slopes[head]);
    diagonal[half] = token + len_k - params.seqlen_q;
  }

  // Q Kᵀ becomes scores in units of log 2. first_key is that of the first column.
  template <bool kWide, int kKeys>
  __device__ __forceinline__ void finish(Accumulator<1, kKeys>& S, const ScoreParams& score,
                                         int first_key, int lane) const {
    scale_rows(S, scale);
    if (score.softcap > 0.f) {
      const float cap = score.softcap * kLog2E;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < S.kRowElements; ++i) {
          S.at(half, i) = cap * (kWide ? tanhf(S.at(half, i)) : accurate_tanh(S.at(half, i)));
        }
      }
    }
    if (score.alibi_slopes != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto first = static_cast<float>(first_key + fragment_col(0, lane) - diagonal[half]);
#pragma unroll
        for (int i = 0; i < S.kRowElements; ++i) {
          const float distance = fabsf(first + static_cast<float>(fragment_col(i, 0)));
          S.at(half, i) = fmaf(-slope[half], distance, S.at(half, i));
        }
      }
    }
  }
};

}  // namespace flash_attn::cuda
