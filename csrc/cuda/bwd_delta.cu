// delta = rowsum(dO ∘ O) - dLSE, once a row before the backward's products: dS = P ∘ (dP - delta);
// and zeros for the sums of dQ.
#include <algorithm>
#include <cmath>

#include "bwd_steps.h"
#include "launch.h"
#include "row_grid.h"
#include "tile/element.cuh"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanesPerRow = 8;  // 8 chunks of 16 bytes: a whole line of O and of dO at once
// Heads whose rows are under way together, in eight loads a lane; and how many thread blocks their
// registers leave room for on a multiprocessor.
template <typename Element>
constexpr int kHeadsAtOnce = 8 / static_cast<int>(sizeof(Element));
constexpr int kResidentBlocks = 3;
constexpr int kRowsPerBlock = kThreads / kLanesPerRow;
constexpr unsigned kZeroingBlocks = 64;  // of a part, which has nothing else to do

__device__ __forceinline__ float2 to_float2(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}

template <typename Element>
struct PairOf;
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

// Eight elements of a row, as they are loaded: 16 bytes of 16 bits each, or twice as many of fp32.
template <typename Element>
struct Eight {
  uint4 chunks[sizeof(Element) / 2];

  __device__ __forceinline__ static Eight load(const Element* from) {
    return *reinterpret_cast<const Eight*>(from);
  }
};

// Σ a ∘ b over eight elements.
template <typename Element>
__device__ __forceinline__ float dot(const Eight<Element>& a, const Eight<Element>& b) {
  using Pair = typename PairOf<Element>::type;
  const Pair* a_pairs = reinterpret_cast<const Pair*>(&a);
  const Pair* b_pairs = reinterpret_cast<const Pair*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = to_float2(a_pairs[i]), y = to_float2(b_pairs[i]);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

template <>
__device__ __forceinline__ float dot<float>(const Eight<float>& a, const Eight<float>& b) {
  const float4* a_fours = reinterpret_cast<const float4*>(&a);
  const float4* b_fours = reinterpret_cast<const float4*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 x = a_fours[i], y = b_fours[i];
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
  }
  return sum;
}

// This thread block's share of the workspace becomes 0, while its loads are under way. The sums of a
// part go on.
__device__ __forceinline__ void zero_share(const BwdParams& params) {
  if (params.tile_counter != nullptr && blockIdx.x + blockIdx.y + threadIdx.x == 0) {
    *params.tile_counter = 0;
  }
  if (params.dq_accum == nullptr) return;
  const int64_t rows = dq_accum_heads(params) * params.dq_accum_rows;
  const int64_t threads = int64_t{gridDim.x} * gridDim.y * kThreads;
  const int64_t thread = (blockIdx.y * int64_t{gridDim.x} + blockIdx.x) * kThreads + threadIdx.x;
  float4* const sums = reinterpret_cast<float4*>(params.dq_accum);
  const int64_t fours = params.is_part ? 0 : rows * (params.dq_accum_cols / 4);
  for (int64_t i = thread; i < fours; i += threads) sums[i] = {};
  if (params.dq_pool.places > 0) {
    const int64_t numbers = dq_pool_numbers(params);
    for (int64_t i = thread; i < numbers; i += threads) params.dq_pool.progress[i] = 0;
  }
  for (int64_t i = thread; i < params.splits.num_arrivals; i += threads) {
    params.splits.arrived[i] = 0;
  }
  if (params.dq_turns == nullptr) return;
  const int64_t turns = dq_turn_numbers(params);
  for (int64_t i = thread; i < turns; i += threads) params.dq_turns[i] = 0;
}

// Eight lanes sum one row of some heads at a time. blockIdx.x counts blocks of rows, over all
// batch entries; blockIdx.y starts the heads.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    bwd_delta_kernel(const __grid_constant__ BwdParams params, unsigned blocks_per_batch,
                     int64_t rows_per_batch) {
  constexpr int kHeads = kHeadsAtOnce<Element>;
  static_assert(kHeads <= kLanesPerRow);
  zero_share(params);
  if (params.is_part) return;
  const int batch_idx = blockIdx.x / blocks_per_batch;
  const int64_t row = int64_t{blockIdx.x % blocks_per_batch} * kRowsPerBlock +
                      static_cast<int>(threadIdx.x) / kLanesPerRow;
  const int lane_of_row = threadIdx.x % kLanesPerRow;
  const bool exists = row < rows_per_batch;
  for (int first_head = blockIdx.y * kHeads; first_head < params.heads_q;
       first_head += gridDim.y * kHeads) {
    // Lane h of a row writes delta of the h-th of these heads, and reads LSE before the rows come.
    const int head = first_head + lane_of_row;
    const bool writes = exists && lane_of_row < kHeads && head < params.heads_q;
    const int64_t i = batch_idx * params.lse_batch_stride + head * params.lse_head_stride + row;
    const float lse = writes ? params.lse[i] : 0.f;
    float sums[kHeads] = {};
    if (exists) {
      const auto matrix_row = [&](const void* tensor, const Strides& strides) {
        return static_cast<const Element*>(tensor) + batch_idx * strides.batch + row * strides.row +
               first_head * strides.head;
      };
      const Element* out = matrix_row(params.out, params.out_strides);
      const Element* dout = matrix_row(params.dout, params.dout_strides);
      // Heads that do not exist are the last one once more: a branch would part the loads.
      const int last = params.heads_q - 1 - first_head;
#pragma unroll 1
      for (int col = lane_of_row * kChunk; col < params.head_dim_v; col += kLanesPerRow * kChunk) {
        Eight<Element> of_out[kHeads], of_dout[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          of_out[h] = Eight<Element>::load(out + min(h, last) * params.out_strides.head + col);
          of_dout[h] = Eight<Element>::load(dout + min(h, last) * params.dout_strides.head + col);
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) sums[h] += dot(of_out[h], of_dout[h]);
      }
    }
    float delta = 0.f;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = sums[h];
#pragma unroll
      for (int lane = kLanesPerRow / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
      if (lane_of_row == h) delta = sum;
    }
    if (!writes) continue;
    if (params.dlse != nullptr) delta -= params.dlse[i];
    params.delta[i] = lse == -INFINITY ? 0.f : delta;
  }
}

}  // namespace

void run_bwd_delta(const BwdParams& params, Stream stream) {
  RowGrid grid(params, kRowsPerBlock);
  if (grid.blocks.x == 0) return;
  const auto launch_of = [&]<typename Element> {
    grid.blocks.y = (grid.blocks.y + kHeadsAtOnce<Element> - 1) / kHeadsAtOnce<Element>;
    if (params.is_part) grid.blocks = {std::min(grid.blocks.x, kZeroingBlocks)};
    launch<bwd_delta_kernel<Element>>(grid.blocks, kThreads, 0, stream, params,
                                      grid.blocks_per_batch, grid.rows_per_batch);
  };
  if (params.dtype == DType::kFp16) return launch_of.template operator()<__half>();
  if (params.dtype == DType::kBf16) return launch_of.template operator()<__nv_bfloat16>();
  launch_of.template operator()<float>();
}

}  // namespace flash_attn::cuda
