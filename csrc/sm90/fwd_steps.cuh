// Score terms that the forward computes in step with its exponentials (OnlineSoftmax::step_ahead), for a
// warp's block of scores that needs no mask: no pass of their own over S, and what the
// special-function unit leaves idle of the other units does them.
#pragma once

#include "../cuda/attn/online_softmax.cuh"
#include "../cuda/attn/score_policy.cuh"

namespace flash_attn::sm90 {

// ALiBi where the block lies wholly on one side of its rows' diagonals: from a column to the next all
// scores change by the same. It joins the exponents' addends, which do not wait for S, and leaves S as it
// is: S with it, for the rare block that is completed, would take registers in all. finish(S): the
// general form of it.
template <typename Finish>
class AlibiStep : public NoStep {
 public:
  // alibi: what a score loses a key away from the diagonal, in the unit of S. to_diagonal: from the
  // block's first key to its first query's diagonal.
  __device__ __forceinline__ AlibiStep(float alibi, float scale_log2, int to_diagonal, int lane,
                                       const Finish& finish)
      : per_column_((to_diagonal > 0 ? alibi : -alibi) * scale_log2),
        from_diagonal_(fragment_col(0, lane) - fragment_row(0, lane) - to_diagonal),
        finish_(finish) {}

  __device__ __forceinline__ float addend(int row, float /*scale_log2*/, float row_max) const {
    return fmaf(per_column_, static_cast<float>(from_diagonal_ - fragment_row(row, 0)), -row_max);
  }
  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int element,
                                              float scale_log2, float addend, uint32_t /*packed*/) {
    return {fmaf(first, scale_log2, of_column(element, addend)),
            fmaf(second, scale_log2, of_column(element + 1, addend))};
  }
  template <typename Scores>
  __device__ __forceinline__ void complete(Scores& S) const {
    finish_(S);
  }

 private:
  __device__ __forceinline__ float of_column(int element, float addend) const {
    return fmaf(per_column_, static_cast<float>(fragment_col(element, 0)), addend);
  }

  float per_column_;   // what a score gains from a column to the next, in units of log 2
  int from_diagonal_;  // of the lane's first row and column
  const Finish& finish_;
};
template <int kN>
__device__ __forceinline__ bool alibi_is_linear(int to_diagonal) {
  return to_diagonal >= kN - 1 || to_diagonal <= -15;
}

// Softcap where no score comes near the cap: tanh(x) = x · p(x²), p minimax up to kLimit, relative error
// 2e-6, of scores up to kLargestScore, and 8e-7. That the scores were as small as that is found out beside
// the exponentials, each instruction of which a busy tensor core makes felt: so the lowest degree that
// serves.
template <int kDegree>
struct SoftcapPolynomial {
  static_assert(kDegree == 1 || kDegree == 2);
  static constexpr float kLimit = kDegree == 1 ? 0.1f : 0.28f;
  static constexpr float kLargestScore = kDegree == 1 ? 15.f : INFINITY;
  __device__ static constexpr float coefficient(int power) {
    constexpr float kFirst[] = {0.999998331f, -0.332004815f};
    constexpr float kSecond[] = {0.999999225f, -0.333155245f, 0.127209172f};
    return kDegree == 1 ? kFirst[power] : kSecond[power];
  }
};

template <typename Policy, int kDegree>
class SoftcapStep : public NoStep {
  using Polynomial = SoftcapPolynomial<kDegree>;

 public:
  __device__ __forceinline__ static bool fits(const Policy& score) {
    constexpr float kLeastCap = 1e-4f;  // whose eighth power is in the range of fp32
    const float largest_score = Polynomial::kLargestScore * fabsf(score.inverse_scale());
    return score.cap() >= kLeastCap && Polynomial::kLimit * score.cap() <= largest_score;
  }
  __device__ __forceinline__ SoftcapStep(const Policy& score, float scale_log2) : score_(score) {
    const float square = score.cap() * score.cap();
    float factor = scale_log2;  // coefficients of X² instead of x²
#pragma unroll
    for (int power = 0; power <= kDegree; ++power) {
      c_[power] = Polynomial::coefficient(power) * factor;
      factor = __fdividef(factor, square);
    }
  }

  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int /*element*/,
                                              float /*scale_log2*/, float addend,
                                              uint32_t /*packed*/) {
    const float first2 = first * first, second2 = second * second;
    // Numbers that are not negative compare as their bits do, NaN above all.
    largest_ = __vimax3_u32(largest_, __float_as_uint(first2), __float_as_uint(second2));
    return {fmaf(first, polynomial(first2), addend), fmaf(second, polynomial(second2), addend)};
  }
  __device__ __forceinline__ bool failed() const {
    const float limit = Polynomial::kLimit * score_.cap();
    return largest_ > __float_as_uint(limit * limit);
  }
  template <typename Scores>
  __device__ __forceinline__ void complete(Scores& S) const {
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) S.at(row, i) = score_.capped(S.at(row, i));
    }
  }

 private:
  __device__ __forceinline__ float polynomial(float square) const {
    float value = c_[kDegree];
#pragma unroll
    for (int power = kDegree - 1; power >= 0; --power) value = fmaf(square, value, c_[power]);
    return value;
  }

  const Policy& score_;
  float c_[kDegree + 1];
  uint32_t largest_ = 0;
};

// A bias, of which each pair lies where its P will.
class BiasStep : public NoStep {
 public:
  __device__ __forceinline__ explicit BiasStep(float factor) : factor_(factor) {}

  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int /*element*/,
                                              float scale_log2, float addend, uint32_t packed) {
    const float2 bias = unpack_bias<Element>(packed);
    first = fmaf(bias.x, factor_, first);
    second = fmaf(bias.y, factor_, second);
    return {fmaf(first, scale_log2, addend), fmaf(second, scale_log2, addend)};
  }

 private:
  float factor_;
};

// A bias that broadcasts the queries, of a block's keys, in the unit of S.
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
