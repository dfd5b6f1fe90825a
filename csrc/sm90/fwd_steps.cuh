// Score terms that the forward computes in step with its exponentials (OnlineSoftmax::step_ahead),
// for a warp's block of scores that needs no mask: no pass of their own over S, and what the
// special-function unit leaves idle of the other units does them.
#pragma once

#include "../cuda/attn/online_softmax.cuh"
#include "../cuda/attn/score_policy.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn::sm90 {

template <typename Step, typename Scores>
__device__ __forceinline__ void complete_by(const Step& step, Scores& S) {
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) S.at(row, i) = step.score(row, S.at(row, i));
  }
}

// ALiBi where the block lies wholly on one side of its rows' diagonals: linear in the column, and S
// has what the columns add (LinearTerm). The rest, a number for each row, joins the exponents'
// addend.
class AlibiStep : public NoStep {
 public:
  // of_row: of the lane's first row, in the unit of S. slope: what a score gains from a column to
  // the next.
  __device__ __forceinline__ AlibiStep(float of_row, float slope)
      : of_row_(of_row), slope_(slope) {}

  __device__ __forceinline__ float addend(int row, float scale_log2, float row_max) const {
    return fmaf(scale_log2, of_row(row), -row_max);
  }
  __device__ __forceinline__ float score(int row, float x) const { return x + of_row(row); }
  template <typename Scores>
  __device__ __forceinline__ void complete(Scores& S) const {
    complete_by(*this, S);
  }

 private:
  __device__ __forceinline__ float of_row(int row) const {
    return fmaf(-slope_, static_cast<float>(fragment_row(row, 0)), of_row_);
  }

  float of_row_, slope_;
};

// tanh(x) = x · p(x²), where p is minimax up to kLimit. By degree its relative error is 2e-6, for
// scores up to kLargestScore, then 8e-7 and 6e-7. It is kept times the cap, in units of log 2, as a
// polynomial of X = x · cap.
template <int kDegree>
class SoftcapPolynomial {
  static_assert(kDegree == 1 || kDegree == 2 || kDegree == 6);
  static constexpr float kLimit = kDegree == 1 ? 0.1f : kDegree == 2 ? 0.28f : 1.25f;
  static constexpr float kLargestScore = kDegree == 1 ? 15.f : INFINITY;
  // Caps of whose powers, up to twice the degree, fp32 has the inverse.
  static constexpr float kLeastCap = kDegree == 6 ? 1e-2f : 1e-4f;
  static constexpr float kLargestCap = kDegree == 6 ? 640.f : INFINITY;
  __device__ static constexpr float coefficient(int power) {
    constexpr float kFirst[] = {0.999998331f, -0.332004815f};
    constexpr float kSecond[] = {0.999999225f, -0.333155245f, 0.127209172f};
    constexpr float kSixth[] = {0.999999376f,  -0.333293388f,   0.132906435f,   -0.0522053324f,
                                0.0182289988f, -0.00462683831f, 0.000584480123f};
    return kDegree == 1 ? kFirst[power] : kDegree == 2 ? kSecond[power] : kSixth[power];
  }

 public:
  SoftcapPolynomial() = default;
  __device__ __forceinline__ SoftcapPolynomial(float cap, float inverse_scale,
                                               float softmax_scale) {
    const float square = cap * cap;
    float factor = fabsf(softmax_scale) * kLog2E;
#pragma unroll
    for (int power = 0; power <= kDegree; ++power) {
      c_[power] = coefficient(power) * factor;
      factor = __fdividef(factor, square);
    }
    const bool fits = cap >= kLeastCap && cap <= kLargestCap &&
                      kLimit * cap <= kLargestScore * fabsf(inverse_scale);
    limit_ = fits ? kLimit * kLimit * square : -1.f;
  }

  // Whether it may be tried.
  __device__ __forceinline__ bool fits() const { return limit_ >= 0.f; }
  // largest: the bits of the largest X². Numbers that are not negative compare as their bits do,
  // NaN above all.
  __device__ __forceinline__ bool serves(uint32_t largest) const {
    return largest <= __float_as_uint(limit_);
  }
  __device__ __forceinline__ float exponent(float x, float square, float addend) const {
    float value = c_[kDegree];
#pragma unroll
    for (int power = kDegree - 1; power >= 0; --power) value = fmaf(square, value, c_[power]);
    return fmaf(x, value, addend);
  }
  // Has the coefficients in registers from here on.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (float& of_power : c_) ptx::pin(of_power);
    ptx::pin(limit_);
  }

 private:
  float c_[kDegree + 1], limit_;
};

// Softcap where no score comes near the cap. That the scores were as small as that is found out
// beside the exponentials, each instruction of which a busy tensor core makes felt: so the lowest
// degree that serves.
template <typename Policy, int kDegree>
class SoftcapStep : public NoStep {
 public:
  __device__ __forceinline__ SoftcapStep(const Policy& score,
                                         const SoftcapPolynomial<kDegree>& polynomial)
      : score_(score), polynomial_(polynomial) {}

  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int /*element*/,
                                              float /*scale_log2*/, float addend,
                                              uint32_t /*packed*/) {
    const float first2 = first * first, second2 = second * second;
    largest_ = __vimax3_u32(largest_, __float_as_uint(first2), __float_as_uint(second2));
    return {polynomial_.exponent(first, first2, addend),
            polynomial_.exponent(second, second2, addend)};
  }
  __device__ __forceinline__ bool failed() const { return !polynomial_.serves(largest_); }
  __device__ __forceinline__ float score(int /*row*/, float x) const { return score_.capped(x); }
  template <typename Scores>
  __device__ __forceinline__ void complete(Scores& S) const {
    complete_by(*this, S);
  }

 private:
  const Policy& score_;
  const SoftcapPolynomial<kDegree>& polynomial_;
  uint32_t largest_ = 0;
};

// Softcap of larger scores: some by a polynomial, the others by the special-function unit, so that
// both have work. The polynomial takes those of even columns, and with kMostByPolynomial half of
// the others, too.
template <typename Policy, bool kMostByPolynomial>
class SoftcapMixedStep : public NoStep {
 public:
  __device__ __forceinline__ SoftcapMixedStep(const Policy& score, float scale_log2)
      : score_(score),
        polynomial_(score.mixed),
        twice_log2_(__fdividef(2.f * kLog2E, score.cap())),
        cap_log2_(score.cap() * scale_log2) {}

  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int element,
                                              float /*scale_log2*/, float addend,
                                              uint32_t /*packed*/) {
    const float first2 = first * first;
    if constexpr (kMostByPolynomial) {
      if (element % 4 == 0) {
        const float second2 = second * second;
        largest_ = __vimax3_u32(largest_, __float_as_uint(first2), __float_as_uint(second2));
        return {polynomial_.exponent(first, first2, addend),
                polynomial_.exponent(second, second2, addend)};
      }
    }
    if (has_before_) {
      largest_ = __vimax3_u32(largest_, before_, __float_as_uint(first2));
    } else {
      before_ = __float_as_uint(first2);
    }
    has_before_ = !has_before_;
    // tanh(x) = 1 - 2 / (exp(2x) + 1)
    const float inverse =
        flash_attn::ptx::reciprocal(flash_attn::ptx::exp2(second * twice_log2_) + 1.f);
    return {polynomial_.exponent(first, first2, addend),
            fmaf(-2.f * cap_log2_, inverse, addend + cap_log2_)};
  }
  __device__ __forceinline__ bool failed() const { return !polynomial_.serves(largest_); }
  __device__ __forceinline__ float score(int /*row*/, float x) const { return score_.capped(x); }
  template <typename Scores>
  __device__ __forceinline__ void complete(Scores& S) const {
    complete_by(*this, S);
  }

 private:
  const Policy& score_;
  const SoftcapPolynomial<6> polynomial_;
  float twice_log2_, cap_log2_;
  uint32_t largest_ = 0, before_ = 0;
  bool has_before_ = false;
};

// Scores with a bias in them that may be larger than a bias is. Such a number makes a P that
// overflows, so it is bounded where S is completed.
template <typename Policy>
class UnboundedStep : public NoStep {
 public:
  // are_scores: S needs no factor any more.
  __device__ __forceinline__ UnboundedStep(const Policy& score, bool are_scores)
      : score_(score), are_scores_(are_scores) {}

  template <typename Scores>
  __device__ __forceinline__ void complete(Scores& S) const {
    bound_scores(S, are_scores_ ? kMaxBias : kMaxBias * fabsf(score_.inverse_scale()));
  }

 private:
  const Policy& score_;
  bool are_scores_;
};

// What scores gain by ALiBi from a column of a block to the next, if all its keys lie before the
// diagonals of its 64 queries or all behind them. Else it is 0, and the general form serves. place:
// that of the block.
template <int kBlockN, typename Term, typename Policy>
__device__ __forceinline__ float linear_slope(const Policy& score, const ScorePlace& place) {
  const int to_diagonal = score.to_diagonal(place);
  const bool before = to_diagonal >= kBlockN - 1, behind = to_diagonal <= -63;
  const float slope = score.alibi();
  const bool serves = (before || behind) && fabsf(slope) <= Term::kLargestSlope;
  return serves ? before ? slope : -slope : 0.f;
}

// Adds a bias, each pair of which lies in the register where its P will. It is bounded as there.
class BiasStep : public NoStep {
 public:
  // factor: what makes a bias the S of a score.
  __device__ __forceinline__ explicit BiasStep(float factor) : factor_(factor) {}

  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int /*element*/,
                                              float scale_log2, float addend, uint32_t packed) {
    const float2 bias = flash_attn::ptx::unpack<Element>(packed);
    first = fmaf(bias.x, factor_, first);
    second = fmaf(bias.y, factor_, second);
    return {fmaf(first, scale_log2, addend), fmaf(second, scale_log2, addend)};
  }
  template <typename Scores>
  __device__ __forceinline__ void complete(Scores& S) const {
    bound_scores(S, kMaxBias * factor_);
  }

 private:
  float factor_;
};

// Adds a bias that broadcasts the queries. It is that of a block's keys, in the unit of S.
class KeyBiasStep : public NoStep {
 public:
  __device__ __forceinline__ KeyBiasStep(const float* of_keys, int lane)
      : of_lane_(of_keys + fragment_col(0, lane)) {}

  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int element,
                                              float scale_log2, float addend, uint32_t /*packed*/) {
    const float2 bias = *reinterpret_cast<const float2*>(of_lane_ + fragment_col(element, 0));
    first += bias.x;
    second += bias.y;
    return {fmaf(first, scale_log2, addend), fmaf(second, scale_log2, addend)};
  }

 private:
  const float* of_lane_;
};

}  // namespace flash_attn::sm90
