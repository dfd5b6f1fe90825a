// The running softmax of the rows that a thread sees.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../../core/score_range.h"
#include "../ptx/math.cuh"
#include "../ptx/permute.cuh"
#include "../tile/fragment.cuh"
#include "constants.cuh"
#include "logit_record.cuh"

namespace flash_attn {

// Where a row's maximum starts if its scores are bounded (core/score_range.h), in units of log 2.
inline constexpr auto kLeastScoreLog2 = static_cast<float>(-kMaxScore * kLog2E);

// A sink in the range of core/score_range.h; NaN stays.
__device__ __forceinline__ float bounded_sink(float sink) {
  constexpr auto kLargest = static_cast<float>(kMaxSink);
  return sink < -kLargest ? -INFINITY : ptx::minimum_or_nan(sink, kLargest);
}

// A slope of ALiBi in the range of core/score_range.h; NaN stays.
__device__ __forceinline__ float bounded_slope(float slope) {
  constexpr auto kLeast = static_cast<float>(kMinSlope), kLargest = static_cast<float>(kMaxSlope);
  return slope < kLeast ? kLeast : ptx::minimum_or_nan(slope, kLargest);
}

// O[row] *= factor[row]
template <int kMBlocks, int kN>
__device__ __forceinline__ void scale_rows(Accumulator<kMBlocks, kN>& O,
                                           const float (&factor)[2 * kMBlocks]) {
#pragma unroll
  for (int row = 0; row < O.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < O.kRowElements; ++i) O.at(row, i) *= factor[row];
  }
}

// What OnlineSoftmax::step_ahead() does to the scores of a block as it exponentiates them: nothing.
// Others (sm90/fwd_steps.cuh) spare a pass over the block, and run beside the special-function
// unit.
struct NoStep {
  // What is subtracted from a row's exponents, in the other direction.
  __device__ __forceinline__ float addend(int /*row*/, float /*scale_log2*/, float row_max) const {
    return -row_max;
  }
  // The exponents of a score and its right neighbour. packed: of their P, before they are written.
  template <typename Element>
  __device__ __forceinline__ float2 exponents(float& first, float& second, int /*element*/,
                                              float scale_log2, float addend, uint32_t /*packed*/) {
    return {fmaf(first, scale_log2, addend), fmaf(second, scale_log2, addend)};
  }
  // Whether the exponents are wrong, and S must be completed and exponentiated again.
  __device__ __forceinline__ bool failed() const { return false; }
  // The score that x of S is, where exponents() leaves something out; it grows with x.
  __device__ __forceinline__ float score(int /*row*/, float x) const { return x; }
  // S becomes the scores.
  template <typename Scores>
  __device__ __forceinline__ void complete(Scores&) const {}
};

// After steps over blocks S₁ … S_j of a row's scores, with c = softmax_scale · log2 e:
//
//   row_max = max c·S      row_sum = Σ exp2(c·S - row_max) over this thread's columns
//
// A row lies in the four lanes of a quad: the maximum is exchanged in each step, the sums only in
// the end.
//
// row_max starts at a finite number instead of -inf: rows that saw only -inf then have exp2(-inf) =
// 0 in their sum, where -inf - (-inf) would be NaN. NaN scores reach row_sum through the
// exponentials. Where scores are bounded it starts at the border, and what lies below has no part
// in any sum.
//
// kSlackLog2 > 0: row_max is left behind, and nothing rescaled, while no P exceeds 2^kSlackLog2,
// nor both `share` of what its thread has summed of the row and twice the largest P of the row that
// is known to be exact. In exact arithmetic the result is the same; the second is for the rounding.
// With the true maximum the largest P is 1 and rounds without error; with an older one the rounding
// (2⁻⁹ of P in bf16) of a key that dominates its row would be that row's error. True maxima round
// all other keys, however heavy they are: so what has less than twice an exact P may be rounded in
// the place of that one.
//
// Record: LogitRecord, beside kSlackLog2 > 0, or nothing.
template <int kRows, int kSlackLog2 = 0, typename Record = NoRecord>
class OnlineSoftmax : Record {
 public:
  __device__ __forceinline__ explicit OnlineSoftmax(float softmax_scale, float least_max = -FLT_MAX)
      // A scale of 0 would make 0 · -inf; the least normal number gives the same probabilities.
      : scale_log2_(fmaxf(fabsf(softmax_scale) * kLog2E, FLT_MIN)), negate_(softmax_scale < 0.f) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      row_max_[row] = least_max;
      row_sum_[row] = 0.f;
      set_tolerated(row, kOfExact);
    }
  }

  // S becomes P = exp2(c·S - row_max). Whatever was accumulated with earlier P must be multiplied
  // by correction[row]; returns whether any row of the warp needs it. Skipping is exact: the
  // factors are all 1 then.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ bool step(Accumulator<kMBlocks, kN>& S, float (&correction)[kRows]) {
    const bool moved = update_max(S, correction);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(row, i) = exponentiate(row, S.at(row, i));
        add(row, S.at(row, i));
      }
    }
    return moved;
  }

  // step() that rounds P into an operand and keeps S, so that it can go ahead with the maxima of
  // the blocks before: those of this block are not on the way to the exponentials, which seldom
  // need them. Where some P exceeds 2^kSlackLog2 they are computed again, with the true maxima;
  // where one outweighs its row, row_max is moved so that it needs no rounding. A step other than
  // NoStep wants a scale that is not negative.
  template <typename Element, typename Step, int kMBlocks, int kN>
  __device__ __forceinline__ bool step_ahead(OperandA<kMBlocks, kN>& P,
                                             Accumulator<kMBlocks, kN>& S,
                                             float (&correction)[kRows], float share, Step& step) {
    static_assert(kSlackLog2 > 0);
    if constexpr (std::is_same_v<Step, NoStep>) {
      if (negate_) negate(S);
    }
    float sum_before[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) sum_before[row] = row_sum_[row];
    exponentiate_into<Element>(P, S, step);
    bool exceeds = step.failed(), overflows = step.failed();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float2 largest = ptx::unpack<Element>(row_max_of(P, row));
      exceeds |=
          fmaxf(largest.x, largest.y) > Record::limit(row, limit(row, sum_before[row], share));
      overflows |= fmaxf(largest.x, largest.y) > kLargest;
    }
    if (!__any_sync(~0u, exceeds)) return false;
    if (!__any_sync(~0u, overflows)) {
      make_largest_exact<Element>(S, correction, step);
      return true;
    }
    step.complete(S);
#pragma unroll
    for (int row = 0; row < kRows; ++row) row_sum_[row] = sum_before[row];
    raise_max<0>(S, correction);
    exponentiate_into<Element>(P, S);
    return true;
  }

  // After P has been rounded: moves the row_max of rows whose largest P is above 1, by less than
  // 2⁻⁸, to where that P is what it was rounded to. The block's other P are not computed again:
  // they are off by the same factor, no more than by their own rounding.
  template <typename Element, typename Step, int kMBlocks, int kN>
  __device__ __forceinline__ void make_largest_exact(const Accumulator<kMBlocks, kN>& S,
                                                     float (&correction)[kRows], const Step& step) {
    float maximum[kRows];
    row_maxima(S, maximum);
    Record::note(maximum, scale_log2_);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float largest = exponentiate(row, step.score(row, maximum[row]));
      const float rounded = ptx::unpack<Element>(ptx::pack<Element>(largest, 0.f)).x;
      correction[row] = largest > 1.f ? __fdividef(rounded, largest) : 1.f;
      row_max_[row] -= ptx::log2(correction[row]);
      row_sum_[row] *= correction[row];
      set_tolerated(row, fmaxf(tolerated(row), kOfExact * rounded));
    }
    Record::follow(row_max_);
  }

  // P = exp2(c·S - row_max), rounded; the unrounded ones join the sums.
  template <typename Element, int kMBlocks, int kN>
  __device__ __forceinline__ void exponentiate_into(OperandA<kMBlocks, kN>& P,
                                                    Accumulator<kMBlocks, kN>& S) {
    NoStep step;
    exponentiate_into<Element>(P, S, step);
  }

  // The first half of step(). The caller then calls exponentiate() for each element of S and add()
  // for each result, when it wants them.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ bool update_max(Accumulator<kMBlocks, kN>& S,
                                             float (&correction)[kRows], float share = 0.f) {
    if (negate_) negate(S);
    return raise_max<kSlackLog2>(S, correction, share);
  }

  // update_max() where S does not need its sign flipped any more; kSlack in the place of
  // kSlackLog2.
  template <int kSlack, int kMBlocks, int kN>
  __device__ __forceinline__ bool raise_max(const Accumulator<kMBlocks, kN>& S,
                                            float (&correction)[kRows], float share = 0.f) {
    float maximum[kRows];
    row_maxima(S, maximum);
    Record::note(maximum, scale_log2_);
    Record::follow(row_max_);
    bool moved = false;
    float raised[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      raised[row] = fmaxf(maximum[row] * scale_log2_, row_max_[row]);
      moved |= raised[row] != row_max_[row];
      correction[row] = ptx::exp2(row_max_[row] - raised[row]);
    }
    if constexpr (kSlack > 0) {  // for all rows of the warp: the lanes of a quad must agree
      bool exceeds = false;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        exceeds |= 1.f > correction[row] * limit(row, row_sum_[row], share);
      }
      if (!__any_sync(~0u, exceeds)) return false;
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      row_max_[row] = raised[row];
      row_sum_[row] *= correction[row];
      set_tolerated(row, kOfExact);
    }
    Record::follow(row_max_);
    return __any_sync(~0u, moved);
  }

  // S becomes what counts, for a step other than NoStep.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void flip_signs(Accumulator<kMBlocks, kN>& S) const {
    if (negate_) negate(S);
  }
  // Whether products count with the opposite sign.
  __device__ __forceinline__ bool negates() const { return negate_; }
  __device__ __forceinline__ float scale_log2() const { return scale_log2_; }
  __device__ __forceinline__ Record& record() { return *this; }

  // The score of one key becomes its probability.
  __device__ __forceinline__ float exponentiate(int row, float score) {
    return ptx::exp2(fmaf(score, scale_log2_, -row_max_[row]));
  }

  // Deals out what the lanes of a quad have summed, so that each has a fourth of its row's sum. From
  // here on what a thread has summed says what its row has, which may lie in one lane otherwise.
  __device__ __forceinline__ void even_out_sums() {
    finish();
#pragma unroll
    for (int row = 0; row < kRows; ++row) row_sum_[row] *= 0.25f;
  }

  // A probability, or a sum of them, joins the row's sum.
  __device__ __forceinline__ void add(int row, float p) { row_sum_[row] += p; }

  // Sums what the lanes of the quad have; call once, after the last step.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      row_sum_[row] += __shfl_xor_sync(~0u, row_sum_[row], 1);
      row_sum_[row] += __shfl_xor_sync(~0u, row_sum_[row], 2);
    }
  }

  // After finish() and before add_sink(), without slack: the row's largest score; -inf without
  // keys.
  __device__ __forceinline__ float largest_score(int row) const {
    static_assert(kSlackLog2 == 0);
    return row_sum_[row] == 0.f ? -INFINITY : row_max_[row] * kLn2;
  }

  // After finish(). A key with this score, of bounded_sink(), and a value of 0 joins each row.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void add_sink(Accumulator<kMBlocks, kN>& O, float sink) {
    float sinks[kRows];
#pragma unroll
    for (float& of_row : sinks) of_row = sink;
    add_sinks(O, sinks);
  }
  // The same with a score for each row.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void add_sinks(Accumulator<kMBlocks, kN>& O,
                                            const float (&sinks)[kRows]) {
    float correction[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float raised = fmaxf(row_max_[row], sinks[row] * kLog2E);
      correction[row] = ptx::exp2(row_max_[row] - raised);
      row_sum_[row] = row_sum_[row] * correction[row] + ptx::exp2(sinks[row] * kLog2E - raised);
      row_max_[row] = raised;
    }
    scale_rows(O, correction);
  }

  // After finish(): what the accumulated output is multiplied by. It is 0 for a row without keys.
  __device__ __forceinline__ float inverse_sum(int row) const {
    return row_sum_[row] == 0.f ? 0.f : 1.f / row_sum_[row];
  }
  // After finish(). ln Σ exp(softmax_scale · S); -inf for a row without keys.
  __device__ __forceinline__ float log_sum_exp(int row) const {
    return row_sum_[row] == 0.f ? -INFINITY : (row_max_[row] + ptx::log2(row_sum_[row])) * kLn2;
  }

 private:
  // The maxima of whole rows, over the quad that has them.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ static void row_maxima(const Accumulator<kMBlocks, kN>& S,
                                                    float (&maximum)[kRows]) {
    static_assert(Accumulator<kMBlocks, kN>::kRows == kRows);
#pragma unroll
    for (int row = 0; row < kRows; ++row) maximum[row] = S.at(row, 0);
#pragma unroll
    for (int i = 1; i < S.kRowElements; ++i) {  // kRows independent chains
#pragma unroll
      for (int row = 0; row < kRows; ++row) maximum[row] = fmaxf(maximum[row], S.at(row, i));
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      maximum[row] = fmaxf(maximum[row], __shfl_xor_sync(~0u, maximum[row], 1));
      maximum[row] = fmaxf(maximum[row], __shfl_xor_sync(~0u, maximum[row], 2));
    }
  }

  template <typename Element, int kMBlocks, int kN, typename Step>
  __device__ __forceinline__ void exponentiate_into(OperandA<kMBlocks, kN>& P,
                                                    Accumulator<kMBlocks, kN>& S, Step& step) {
    float addend[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      addend[row] = step.addend(row, scale_log2_, row_max_[row]);
    }
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int element = k * 4 + half * 2;
          uint32_t& packed = P.data[row / 2][k][half * 2 + row % 2];
          const float2 exponents =
              step.template exponents<Element>(S.at(row, element), S.at(row, element + 1), element,
                                               scale_log2_, addend[row], packed);
          const float first = ptx::exp2(exponents.x), second = ptx::exp2(exponents.y);
          add(row, first);
          add(row, second);
          packed = ptx::pack<Element>(first, second);
        }
      }
    }
  }

  // The largest of a row's elements in even and of those in odd columns, packed as they are.
  // Numbers that are not negative compare as their bits do, and integers in threes.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ static uint32_t row_max_of(const OperandA<kMBlocks, kN>& P, int row) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest = __vmaxu2(largest, P.data[row / 2][k][half * 2 + row % 2]);
      }
    }
    return largest;
  }

  // With a negative scale the largest score is the smallest product: flip the sign of both.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ static void negate(Accumulator<kMBlocks, kN>& S) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(row, i) = S.at(row, i) == -INFINITY ? -INFINITY : -S.at(row, i);
      }
    }
  }

  static constexpr float kLargest = 1 << kSlackLog2;
  static constexpr float kOfExact = 2.f;

  // The largest P that passes with an older maximum, by what the thread had summed of its row.
  __device__ __forceinline__ float limit(int row, float row_sum, float share) const {
    return fminf(fmaxf(share * row_sum, tolerated(row)), kLargest);
  }

  // kOfExact times the largest P of the row that is known to be exact. At first that is 1, the P of
  // the row's maximum.
  __device__ __forceinline__ float tolerated(int row) const {
    const float2 of_two = ptx::unpack<__nv_bfloat16>(tolerated_[row / 2]);
    return row % 2 == 0 ? of_two.x : of_two.y;
  }
  __device__ __forceinline__ void set_tolerated(int row, float p) {
    constexpr uint32_t kIntoLow = 0x3276, kIntoHigh = 0x7610;  // the upper half of p
    tolerated_[row / 2] = ptx::permute_bytes(tolerated_[row / 2], __float_as_uint(p),
                                             row % 2 == 0 ? kIntoLow : kIntoHigh);
  }

  float row_max_[kRows], row_sum_[kRows];
  uint32_t tolerated_[kRows / 2] = {};  // of two rows each, in bf16: registers are short
  float scale_log2_;
  bool negate_;
};

}  // namespace flash_attn
