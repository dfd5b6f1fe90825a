// The largest score of a head (FwdParams::max_logits), kept beside a running softmax.
#pragma once

#include <cfloat>
#include <cmath>

#include "../ptx/math.cuh"
#include "../tile/fragment.cuh"
#include "constants.cuh"

namespace flash_attn {

// *place becomes the larger of both. Integers order as numbers of one sign do; -inf is the least.
__device__ __forceinline__ void raise_to(float* place, float value) {
  value += 0.f;  // -0 would be the least integer
  if (value >= 0.f) {
    atomicMax(reinterpret_cast<int*>(place), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(place), __float_as_uint(value));
  }
}

// Does the same with the largest value of all lanes, by one of them. A maximum that has seen
// nothing but NaN is where OnlineSoftmax begins, at -FLT_MAX in units of log 2. All lanes of a warp
// call it.
__device__ __forceinline__ void raise_to_largest(float* place, float value, int lane) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  }
  if (lane == 0 && value > -FLT_MAX / 2) raise_to(place, value);
}

// The record of a softmax that keeps none.
struct NoRecord {
  template <int kRows>
  __device__ __forceinline__ void note(const float (&)[kRows], float /*scale_log2*/) {}
  template <int kRows>
  __device__ __forceinline__ void follow(const float (&)[kRows]) {}
  __device__ __forceinline__ float limit(int /*row*/, float of_softmax) const { return of_softmax; }
};

// The record of a softmax that looks at the maxima of a block only when a P exceeds a limit
// (OnlineSoftmax::step_ahead). A score that is a record has a P of more than exp2(record -
// row_max); P is rounded by less than 2⁻⁷, so with that much less as the limit no record is missed:
// what is kept is exact. Scores in units of log 2.
template <int kRows>
class LogitRecord {
 public:
  // Is called before a tile's first block. known is the largest score of the head so far. Only the
  // first rows_that_count rows of the warp take part, as the queries of others are zeros.
  __device__ __forceinline__ void start(float known, int rows_that_count, int lane) {
    largest_ = known;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const bool counts = row / 2 * 16 + fragment_row(row, lane) < rows_that_count;
      limit_[row] = counts ? 0.f : INFINITY;
    }
  }

  // Takes note of the maxima of whole rows of a block, in the unit of Q Kᵀ.
  __device__ __forceinline__ void note(const float (&maximum)[kRows], float scale_log2) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (limit_[row] < INFINITY) largest_ = fmaxf(largest_, maximum[row] * scale_log2);
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      largest_ = fmaxf(largest_, __shfl_xor_sync(~0u, largest_, lanes));
    }
  }
  // After row_max has moved, or not.
  __device__ __forceinline__ void follow(const float (&row_max)[kRows]) {
    constexpr float kRounding = 1.f - 0x1p-7f;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float record = ptx::exp2(largest_ - row_max[row]) * kRounding;
      if (limit_[row] < INFINITY) limit_[row] = fminf(record, FLT_MAX);
    }
  }
  __device__ __forceinline__ float limit(int row, float of_softmax) const {
    return fminf(of_softmax, limit_[row]);
  }

  // After a tile. What was known when it began is left alone: turned from one unit to the other, it
  // may have changed.
  __device__ __forceinline__ void publish(float* max_logit, float known, int lane) const {
    if (largest_ > known && lane == 0) raise_to(max_logit, largest_ * kLn2);
  }

 private:
  float largest_, limit_[kRows];
};

}  // namespace flash_attn
