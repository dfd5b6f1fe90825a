// LSE and delta of a block of queries are subtracted from the columns of Sᵀ and dPᵀ. Either of them
// comes as numbers that consumers read, or as columns of the product itself.
#pragma once

#include <type_traits>

#include "../cuda/attn/constants.cuh"
#include "../cuda/ptx/math.cuh"
#include "ptx/fence.cuh"
#include "tile/term_columns.cuh"

namespace flash_attn::sm90 {

// LSE or delta of a lane's queries, which are two of every eight of some of a block's queries.
template <int kQueries>
struct LaneValues {
  float2 pairs[kQueries / 8];

  // values: those of the block's queries, in shared memory, with the first one wanted ahead.
  __device__ __forceinline__ void read(const float* values, int lane) {
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      pairs[n] = *reinterpret_cast<const float2*>(values + n * 8 + lane % 4 * 2);
    }
  }
  // These give the exponent of P, and the difference of dP and delta, from the score or its
  // gradient that is the lane's i-th of the n-th eight.
  __device__ __forceinline__ float exponent(float s, float scale_log2, int n, int i) const {
    return fmaf(s, scale_log2, -of(n, i));
  }
  __device__ __forceinline__ float difference(float dp, int n, int i) const {
    return dp - of(n, i);
  }

 private:
  __device__ __forceinline__ float of(int n, int i) const {
    return i % 2 == 0 ? pairs[n].x : pairs[n].y;
  }
};

// The values have been subtracted already.
template <int kQueries>
struct NoLaneValues {
  __device__ __forceinline__ float exponent(float s, float scale_log2, int, int) const {
    return s * scale_log2;
  }
  __device__ __forceinline__ float difference(float dp, int, int) const { return dp; }
};

struct NoOnes {};

// LSE or delta as a number for each query.
template <int kBlockM>
struct RowNumbers {
  static constexpr bool kFolds = false;
  template <int kQueries>
  using OfLane = LaneValues<kQueries>;

  alignas(16) float numbers[kBlockM];

  __device__ __forceinline__ void write(int row, float number) { numbers[row] = number; }
  __device__ __forceinline__ static NoOnes ones() { return {}; }
  __device__ __forceinline__ void subtract_from(Accumulator<1, kBlockM>&, NoOnes) const {}
  // Reads those of the block's queries from `first` on.
  template <int kQueries>
  __device__ __forceinline__ void read(LaneValues<kQueries>& values, int first, int lane) const {
    values.read(numbers + first, lane);
  }
};

// The left operand of RowColumns lies in registers; or in shared memory, which costs a product what
// it reads there. It is a base class: behind an empty member, be it [[no_unique_address]], device
// code lays out what follows elsewhere than the host, by whose size of shared memory the kernel is
// launched.
template <typename Element, bool kHoldsOnes>
struct ColumnOnes {
  using Ones = OperandA<1, 16>;

  __device__ __forceinline__ void write_ones(int /*row*/) {}
  // Called before the fence of the products.
  __device__ __forceinline__ static Ones ones() {
    const uint32_t two = flash_attn::ptx::pack<Element>(1.f, 1.f);
    Ones ones = {{{{two, two, two, two}}}};
    pin(ones);
    return ones;
  }
  __device__ __forceinline__ const Ones& left(const Ones& ones) const { return ones; }
};
template <typename Element>
struct ColumnOnes<Element, false> {
  using Ones = NoOnes;

  TermOnes<Element> stored;

  __device__ __forceinline__ void write_ones(int row) {
    if (row < 8) stored.write(row);
  }
  __device__ __forceinline__ static Ones ones() { return {}; }
  __device__ __forceinline__ const TermOnes<Element>& left(Ones) const { return stored; }
};

// LSE or delta as 16 more columns of Q or of dO, beside ones in those of K or V, so that the
// products are S - LSE / softmax_scale and dP - delta. Consumers would read numbers once for every
// 16 keys, beside products that leave little of shared memory's bandwidth. Three numbers of bf16
// have the bits of one of fp32, and its exponents as well; three of fp16 have not.
template <typename Element, int kBlockM, bool kHoldsOnes>
struct RowColumns : ColumnOnes<Element, kHoldsOnes> {
  static constexpr bool kFolds = true;
  template <int kQueries>
  using OfLane = NoLaneValues<kQueries>;

  TermColumns<Element, kBlockM> columns;

  // The product has each of the columns twice, so they have half of the number.
  __device__ __forceinline__ void write(int row, float number) {
    const uint2 three = as_three_numbers<Element>(-0.5f * number);
    *reinterpret_cast<uint4*>(columns.columns[row]) = {three.x, three.y, 0, 0};
    this->write_ones(row);
  }
  // Starts the subtraction in the batch of the products of S or of dP, which come first.
  __device__ __forceinline__ void subtract_from(
      Accumulator<1, kBlockM>& C,
      const typename ColumnOnes<Element, kHoldsOnes>::Ones& ones) const {
    columns.start(C, this->left(ones));
  }
  template <int kQueries>
  __device__ __forceinline__ void read(NoLaneValues<kQueries>&, int, int) const {}
};

// P = exp2(scale_log2 · S - lse_log2); delta is multiplied by dropout's keep probability.
template <typename Lse, typename Delta>
struct RowTerms {
  Lse lse;
  Delta delta;

  __device__ __forceinline__ static float scale_log2(float softmax_scale) {
    // Columns have LSE divided by the scale, so it must not be 0. With one as small no difference
    // of scores is felt, unless products come near the largest float.
    constexpr float kSmallest = 1e-35f;
    const float scale = softmax_scale * kLog2E;
    return Lse::kFolds ? fmaxf(scale, kSmallest) : scale;
  }
  __device__ __forceinline__ void write(int row, float lse_log2, float delta_of_row,
                                        float scale_log2) {
    if constexpr (Lse::kFolds) {
      // Beside a value as large, P is 0 with any scale_log2. Infinity would leave NaN beside it in
      // other products.
      constexpr float kLargest = 1e38f;
      // A division would take a branch, and more registers than the writing warp has.
      const float inverse = flash_attn::ptx::reciprocal(scale_log2);
      const float near = lse_log2 * inverse;
      const float in_scores = fmaf(fmaf(-near, scale_log2, lse_log2), inverse, near);
      lse.write(row, fabsf(near) > kLargest ? copysignf(kLargest, near) : in_scores);
    } else {
      lse.write(row, lse_log2);
    }
    delta.write(row, delta_of_row);
  }
  // Called by each thread that has written, before it says so.
  __device__ __forceinline__ void publish() const {
    if constexpr (Lse::kFolds || Delta::kFolds) {
      ptx::fence_async_shared();
    }
  }
};

// Room behind the last columns, which memcheck takes to be read (TermColumns).
template <typename Values>
struct BehindRows {};
template <typename Lse, typename Element, int kBlockM, bool kHoldsOnes>
struct BehindRows<RowTerms<Lse, RowColumns<Element, kBlockM, kHoldsOnes>>> {
  TermColumns<Element, kBlockM> columns;
};

}  // namespace flash_attn::sm90
