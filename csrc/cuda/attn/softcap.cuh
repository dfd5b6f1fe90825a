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

// The same with its slope 1 - tanh², of r = 1 / (exp(2|x|) + 1): tanh of |x| is 1 - 2r. The slope
// is 4r (1 - r), which keeps its digits near the cap, where 1 - tanh² has few of them or none.
struct CappedWithSlope {
  float score, slope;
};
__device__ __forceinline__ CappedWithSlope capped_with_slope(float x, float cap,
                                                             float inverse_cap) {
  const float exponent = 2.f * kLog2E * inverse_cap;
  const float r = ptx::reciprocal(ptx::exp2(fabsf(x) * exponent) + 1.f);
  return {.score = copysignf(fmaf(-2.f * cap, r, cap), x), .slope = 4.f * fmaf(-r, r, r)};
}

// The exponent of P = exp2(exponent) and the softcap's slope 1 - tanh², of t = tanh(X / cap).
struct CapOfTanh {
  float cap_log2;

  __device__ __forceinline__ float exponent(float t, float lse_log2) const {
    return fmaf(t, cap_log2, -lse_log2);
  }
  __device__ __forceinline__ float slope(float t) const { return fmaf(-t, t, 1.f); }
};

// The same of a small X itself, whose tanh is computed nowhere. Both the exponent ÷ X and the slope
// fall from their value at 0 as X² grows, so one follows from the other, and X² needs no register
// until then.
struct CapOfScore {
  float scale_log2, cubic;
  float fall;  // of the slope, for that of the exponent ÷ X
  static constexpr float kFall = 2.98517f;

  __device__ __forceinline__ float exponent(float x, float lse_log2) const {
    return fmaf(x, factor(x), -lse_log2);
  }
  __device__ __forceinline__ float slope(float x) const {
    return fmaf(factor(x), fall, 1.f - kFall);
  }

 private:
  __device__ __forceinline__ float factor(float x) const { return fmaf(x * x, cubic, scale_log2); }
};

// tanh(X / cap), by a polynomial of X or by the special-function unit; and what the exponent of P
// is made of, which would be scale_log2 · X - lse_log2 without a cap.
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
  __device__ __forceinline__ float anywhere(float x) const {
    const float exponent = 2.f * kLog2E * inverse_cap_;  // tanh(x) = 1 - 2 / (exp(2x) + 1)
    return fmaf(-2.f, ptx::reciprocal(ptx::exp2(x * exponent) + 1.f), 1.f);
  }

  // With a cap below this one, what is hidden would be seen. No score feels the difference.
  __device__ __forceinline__ CapOfTanh of_tanh(float scale_log2) const {
    return {.cap_log2 = fmaxf(cap_ * scale_log2, 1e-14f)};
  }
  // Whether of_small() serves scores whose squares are at most `square`. Its error is a share of
  // the cap, and P feels what the exponent is off by: so a large cap is not for it. The other
  // limits keep what comes of hidden_small() in the range of fp32.
  __device__ __forceinline__ bool are_small(float square, float scale_log2) const {
    const float cap_log2 = cap_ * scale_log2;
    return cap_log2 <= kSmallMaxCap * kLog2E && cap_log2 >= 1e-3f && cap_ <= 1e9f &&
           are_within(square, kSmallLimit);
  }
  __device__ __forceinline__ CapOfScore of_small(float scale_log2) const {
    return {.scale_log2 = scale_log2,
            .cubic = kSmallTanh * scale_log2 * (inverse_cap_ * inverse_cap_),
            .fall = CapOfScore::kFall * ptx::reciprocal(scale_log2)};
  }

  // What stands in the place of a hidden score, for of_tanh() and for of_small(): a tanh far below
  // -1, or an X as large as its cubic falls. P is 0 there, and so is P times the slope, which is
  // finite.
  __device__ __forceinline__ static float hidden_tanh() { return -1e18f; }
  __device__ __forceinline__ float hidden_small() const { return 1e9f * cap_; }

 private:
  // tanh(x) = x · p(x²) up to |x| = kLimit: p minimax, relative error 3.4e-6.
  static constexpr int kDegree = 2;
  static constexpr float kLimit = 0.36f;
  __device__ static constexpr float coefficient(int power) {
    constexpr float kP[] = {0.999996616f, -0.332860899f, 0.123437237f};
    return kP[power];
  }

  // Up to |x| = kSmallLimit, tanh(x) = x · (1 + kSmallTanh · x²) with a relative error of 1.15e-5,
  // which is 1.1e-4 of a score with the largest softcap, and its slope is
  // 1 + CapOfScore::kFall · kSmallTanh · x² with one of 5.8e-5. Both are minimax.
  static constexpr float kSmallLimit = 0.15f, kSmallMaxCap = 64.f;
  static constexpr float kSmallTanh = -0.330867f;

  __device__ __forceinline__ bool are_within(float square, float limit) const {
    constexpr float kLeastCap = 1e-4f;  // whose eighth power is in the range of fp32
    return cap_ >= kLeastCap && square * (inverse_cap_ * inverse_cap_) <= limit * limit;
  }

  float cap_, inverse_cap_, c_[kDegree + 1];
};

// Caps scores by a polynomial where no score of the warp comes near the cap, as is usual, and then
// calls far(score, row, i) for each. Else near(x, row, i) caps them.
template <int kMBlocks, int kN, typename Far, typename Near>
__device__ __forceinline__ void cap_scores(Accumulator<kMBlocks, kN>& S, float cap,
                                           float inverse_cap, const Far& far, const Near& near) {
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
        far(x, row, i);
      }
    }
  } else {
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) near(S.at(row, i), row, i);
    }
  }
}

// Caps scores.
template <int kMBlocks, int kN>
__device__ __forceinline__ void cap_scores(Accumulator<kMBlocks, kN>& S, float cap,
                                           float inverse_cap) {
  cap_scores(
      S, cap, inverse_cap, [](float, int, int) {},
      [=](float& x, int, int) { x = capped(x, cap, inverse_cap); });
}

// The same with the slopes. Far from the cap 1 - tanh² is at least 0.59 and has its digits.
template <int kMBlocks, int kN>
__device__ __forceinline__ void cap_scores(Accumulator<kMBlocks, kN>& S,
                                           Accumulator<kMBlocks, kN>& slope, float cap,
                                           float inverse_cap) {
  cap_scores(
      S, cap, inverse_cap,
      [&](float score, int row, int i) {
        const float tanh = score * inverse_cap;
        slope.at(row, i) = fmaf(-tanh, tanh, 1.f);
      },
      [&](float& x, int row, int i) {
        const CappedWithSlope both = capped_with_slope(x, cap, inverse_cap);
        x = both.score;
        slope.at(row, i) = both.slope;
      });
}

}  // namespace flash_attn
