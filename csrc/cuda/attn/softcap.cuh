// Softcap of scores: X becomes cap · tanh(X / cap).
#pragma once

#include <cmath>

#include "../ptx/math.cuh"
#include "../tile/fragment.cuh"
#include "online_softmax.cuh"

namespace flash_attn {

// Caps a score by two operations of the special-function unit, which is good to 2⁻²³ of the cap.
__device__ __forceinline__ float capped(float x, float cap, float inverse_cap) {
  const float exponent = 2.f * kLog2E * inverse_cap;  // tanh(x) = 1 - 2 / (exp(2x) + 1)
  return fmaf(-2.f * cap, ptx::reciprocal(ptx::exp2(x * exponent) + 1.f), cap);
}

// tanh(X / cap), by a polynomial of X or by the special-function unit.
class SoftcapTanh {
 public:
  __device__ __forceinline__ SoftcapTanh(float cap, float inverse_cap)
      : cap_(cap), inverse_cap_(inverse_cap) {
    const float square = inverse_cap * inverse_cap;
    float factor = inverse_cap;  // coefficients of X² instead of x², and one more of X
#pragma unroll
    for (int power = 0; power <= kDegree; ++power) {
      c_[power] = coefficient(power) * factor;
      factor *= square;
    }
  }

  // Whether the polynomial serves scores whose squares are at most `square`.
  __device__ __forceinline__ bool are_near(float square) const {
    return are_within(square, kLimit);
  }
  __device__ __forceinline__ float near(float x) const {
    const float square = x * x;
    float value = c_[kDegree];
#pragma unroll
    for (int power = kDegree - 1; power >= 0; --power) value = fmaf(square, value, c_[power]);
    return x * value;
  }
  // The same of one degree less, for smaller scores. Its error is a share of the cap, and P feels
  // the score as it goes into exp2: so it does not serve a cap that is large there. cap_log2: the
  // cap in that unit.
  __device__ __forceinline__ bool are_nearer(float square, float cap_log2) const {
    return cap_log2 <= kNearerMaxCap * kLog2E && are_within(square, kNearerLimit);
  }
  __device__ __forceinline__ float nearer(float x) const {
    const float factor = inverse_cap_;
    return x * fmaf(x * x, kNearer1 * (factor * factor) * factor, kNearer0 * factor);
  }
  __device__ __forceinline__ float anywhere(float x) const {
    const float exponent = 2.f * kLog2E * inverse_cap_;  // tanh(x) = 1 - 2 / (exp(2x) + 1)
    return fmaf(-2.f, ptx::reciprocal(ptx::exp2(x * exponent) + 1.f), 1.f);
  }

 private:
  // tanh(x) = x · p(x²) up to |x| = kLimit: p minimax, relative error 3.4e-6.
  static constexpr int kDegree = 2;
  static constexpr float kLimit = 0.36f;
  __device__ static constexpr float coefficient(int power) {
    constexpr float kP[] = {0.999996616f, -0.332860899f, 0.123437237f};
    return kP[power];
  }

  // These are minimax up to |x| = kNearerLimit, with a relative error of 8.4e-6. There they are off
  // by as much of the cap as the other polynomial is at its own limit, which is 8e-5 of a score with
  // the largest softcap.
  static constexpr float kNearerLimit = 0.15f, kNearerMaxCap = 64.f;
  static constexpr float kNearer0 = 0.999991645f, kNearer1 = -0.330357648f;

  __device__ __forceinline__ bool are_within(float square, float limit) const {
    constexpr float kLeastCap = 1e-4f;  // whose eighth power is in the range of fp32
    return cap_ >= kLeastCap && square * (inverse_cap_ * inverse_cap_) <= limit * limit;
  }

  float cap_, inverse_cap_, c_[kDegree + 1];
};

// Caps scores by a polynomial where no score of the warp comes near the cap, as is usual, and else
// by capped().
template <int kMBlocks, int kN>
__device__ __forceinline__ void cap_scores(Accumulator<kMBlocks, kN>& S, float cap,
                                           float inverse_cap) {
  // tanh(x) = x · p(x²) up to |x| = kLimit: p of degree 4, minimax, relative error 6e-7.
  constexpr float kLimit = 0.75f;
  constexpr float kP[] = {0.999999464f, -0.333282501f, 0.132589832f, -0.0500563011f, 0.0129296323f};
  constexpr float kLeastCap = 1e-4f;  // whose eighth power is in the range of fp32
  float largest[4] = {};              // as many chains
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      float& of_chain = largest[row % 2 * 2 + i % 2];
      of_chain = fmaxf(of_chain, fabsf(S.at(row, i)));
    }
  }
  const float of_all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  if (cap >= kLeastCap && __all_sync(~0u, of_all * inverse_cap <= kLimit)) {
    const float square = inverse_cap * inverse_cap;  // coefficients of X² instead of x²
    const float c1 = kP[1] * square, c2 = kP[2] * square * square;
    const float c3 = kP[3] * square * square * square;
    const float c4 = kP[4] * square * square * square * square;
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        float& x = S.at(row, i);
        const float x2 = x * x;
        x *= fmaf(x2, fmaf(x2, fmaf(x2, fmaf(x2, c4, c3), c2), c1), kP[0]);
      }
    }
  } else {
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i)
        S.at(row, i) = capped(S.at(row, i), cap, inverse_cap);
    }
  }
}

}  // namespace flash_attn
