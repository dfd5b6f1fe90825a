// LSE and delta of a block of queries, which are subtracted from the columns of Sᵀ and dPᵀ: as numbers that
// consumers read, or as columns of the products themselves.
#pragma once

#include <cuda/ptx>

#include "../cuda/attn/constants.cuh"
#include "../cuda/ptx/math.cuh"
#include "tile/term_columns.cuh"

namespace flash_attn::sm90 {

// LSE or delta of a lane's queries: two of every eight of some of a block's queries.
template <int kQueries>
struct LaneValues {
  float2 pairs[kQueries / 8];

  // values: of the block's queries, in shared memory, the first one wanted ahead.
  __device__ __forceinline__ void read(const float* values, int lane) {
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      pairs[n] = *reinterpret_cast<const float2*>(values + n * 8 + lane % 4 * 2);
    }
  }
  // What P and dS consist of, from the score or its gradient that is the lane's i-th of the n-th eight.
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

struct NoOnes {};

// P = exp2(scale_log2 · S - lse_log2); delta is multiplied by dropout's keep probability.
template <int kBlockM>
struct alignas(16) RowValues {
  template <int kQueries>
  using OfLane = LaneValues<kQueries>;

  float lse_log2[kBlockM], delta[kBlockM];

  __device__ __forceinline__ static float scale_log2(float softmax_scale) {
    return softmax_scale * kLog2E;
  }
  __device__ __forceinline__ void write(int row, float lse_log2_of_row, float delta_of_row,
                                        float /*scale_log2*/) {
    lse_log2[row] = lse_log2_of_row;
    delta[row] = delta_of_row;
  }
  __device__ __forceinline__ void publish() const {}
  __device__ __forceinline__ static NoOnes ones() { return {}; }
  __device__ __forceinline__ void subtract_lse(Accumulator<1, kBlockM>&, NoOnes) const {}
  __device__ __forceinline__ void subtract_delta(Accumulator<1, kBlockM>&, NoOnes) const {}
  __device__ __forceinline__ void read_lse(LaneValues<kBlockM>& values, int lane) const {
    values.read(lse_log2, lane);
  }
  template <int kQueries>
  __device__ __forceinline__ void read_delta(LaneValues<kQueries>& values, int first,
                                             int lane) const {
    values.read(delta + first, lane);
  }
};

// They have been subtracted.
template <int kQueries>
struct NoLaneValues {
  __device__ __forceinline__ float exponent(float s, float scale_log2, int, int) const {
    return s * scale_log2;
  }
  __device__ __forceinline__ float difference(float dp, int, int) const { return dp; }
};

// As 16 more columns of Q and dO, beside ones in those of K and V: S - LSE / softmax_scale, dP - delta. Consumers
// would read them once for every 16 keys, beside products that leave little of shared memory's
// bandwidth. Three parts have the bits of fp32 in bf16 alone, which has its exponents as well.
template <typename Element, int kBlockM>
struct RowTerms {
  template <int kQueries>
  using OfLane = NoLaneValues<kQueries>;
  using Columns = TermColumns<Element, kBlockM>;
  using Left = typename Columns::Left;

  Columns lse, delta;

  // LSE is divided by it, so it is not 0. With one as small no difference of scores is felt.
  __device__ __forceinline__ static float scale_log2(float softmax_scale) {
    constexpr float kSmallest = 1e-30f;
    return fmaxf(softmax_scale * kLog2E, kSmallest);
  }
  __device__ __forceinline__ void write(int row, float lse_log2, float delta_of_row,
                                        float scale_log2) {
    // Beside it P is 0, and infinity would leave NaN beside it in other products.
    constexpr float kLargest = 1e38f;
    const float in_scores = -lse_log2 / scale_log2;
    write(lse, row, fabsf(in_scores) > kLargest ? copysignf(kLargest, in_scores) : in_scores);
    write(delta, row, -delta_of_row);
  }
  // By each thread that has written, before it says so.
  __device__ __forceinline__ void publish() const {
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }
  // The left operand, before the fence of the products.
  __device__ __forceinline__ static Left ones() {
    const uint32_t two = flash_attn::ptx::pack<Element>(1.f, 1.f);
    Left ones = {{{{two, two, two, two}}}};
    pin(ones);
    return ones;
  }
  // In the batch of the products of S, of dP, which come first.
  __device__ __forceinline__ void subtract_lse(Accumulator<1, kBlockM>& S, const Left& ones) const {
    lse.start(S, ones);
  }
  __device__ __forceinline__ void subtract_delta(Accumulator<1, kBlockM>& dP,
                                                 const Left& ones) const {
    delta.start(dP, ones);
  }
  template <int kQueries>
  __device__ __forceinline__ void read_lse(NoLaneValues<kQueries>&, int) const {}
  template <int kQueries>
  __device__ __forceinline__ void read_delta(NoLaneValues<kQueries>&, int, int) const {}

 private:
  // The product has each of the columns twice, so they have half of the number.
  __device__ __forceinline__ static void write(Columns& columns, int row, float value) {
    const uint2 parts = in_three_parts<Element>(0.5f * value);
    *reinterpret_cast<uint4*>(columns.columns[row]) = {parts.x, parts.y, 0, 0};
  }
};

// What memcheck takes to be read behind the last columns: of their second eight it does not see that they
// are the first once more.
template <typename Values>
struct BehindRows {};
template <typename Element, int kBlockM>
struct BehindRows<RowTerms<Element, kBlockM>> {
  typename RowTerms<Element, kBlockM>::Columns columns;
};

}  // namespace flash_attn::sm90
