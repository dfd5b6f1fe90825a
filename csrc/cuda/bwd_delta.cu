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
constexpr int kHeads = 4;        // whose loads are under way together
static_assert(kHeads <= kLanesPerRow);
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

// Σ a ∘ b over the eight elements of a chunk.
template <typename Element>
__device__ __forceinline__ float dot_chunk(const Element* a, const Element* b) {
  using Pair = typename PairOf<Element>::type;
  const uint4 a_chunk = *reinterpret_cast<const uint4*>(a);
  const uint4 b_chunk = *reinterpret_cast<const uint4*>(b);
  const Pair* a_pairs = reinterpret_cast<const Pair*>(&a_chunk);
  const Pair* b_pairs = reinterpret_cast<const Pair*>(&b_chunk);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 x = to_float2(a_pairs[i]), y = to_float2(b_pairs[i]);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

// The same of fp32, whose eight elements are two chunks.
template <>
__device__ __forceinline__ float dot_chunk<float>(const float* a, const float* b) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i += kChunkOf<float>) {
    const float4 x = *reinterpret_cast<const float4*>(a + i);
    const float4 y = *reinterpret_cast<const float4*>(b + i);
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

// Eight lanes sum one row of kHeads heads at a time. blockIdx.x counts blocks of rows, over all
// batch entries; blockIdx.y starts the heads.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    bwd_delta_kernel(const __grid_constant__ BwdParams params, unsigned blocks_per_batch,
                     int64_t rows_per_batch) {
  zero_share(params);
  if (params.is_part) return;
  const int batch_idx = blockIdx.x / blocks_per_batch;
  const int64_t row = int64_t{blockIdx.x % blocks_per_batch} * kRowsPerBlock +
                      static_cast<int>(threadIdx.x) / kLanesPerRow;
  const int lane_of_row = threadIdx.x % kLanesPerRow;
  const bool exists = row < rows_per_batch;
  for (int first_head = blockIdx.y * kHeads; first_head < params.heads_q;
       first_head += gridDim.y * kHeads) {
    float sums[kHeads] = {};
    if (exists) {
      const auto matrix_row = [&](const void* tensor, const Strides& strides) {
        return static_cast<const Element*>(tensor) + batch_idx * strides.batch + row * strides.row +
               first_head * strides.head;
      };
      const Element* out = matrix_row(params.out, params.out_strides);
      const Element* dout = matrix_row(params.dout, params.dout_strides);
      for (int col = lane_of_row * kChunk; col < params.head_dim_v; col += kLanesPerRow * kChunk) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (first_head + h >= params.heads_q) break;
          sums[h] += dot_chunk(out + h * params.out_strides.head + col,
                               dout + h * params.dout_strides.head + col);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = sums[h];
#pragma unroll
      for (int lane = kLanesPerRow / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
      const int head = first_head + h;
      if (!exists || lane_of_row != h || head >= params.heads_q) continue;
      const int64_t i = batch_idx * params.lse_batch_stride + head * params.lse_head_stride + row;
      if (params.dlse != nullptr) sum -= params.dlse[i];
      params.delta[i] = params.lse[i] == -INFINITY ? 0.f : sum;
    }
  }
}

}  // namespace

void run_bwd_delta(const BwdParams& params, Stream stream) {
  RowGrid grid(params, kRowsPerBlock);
  if (grid.blocks.x == 0) return;
  grid.blocks.y = (grid.blocks.y + kHeads - 1) / kHeads;
  if (params.is_part) grid.blocks = {std::min(grid.blocks.x, kZeroingBlocks)};
  const auto launch_of = [&]<typename Element> {
    launch<bwd_delta_kernel<Element>>(grid.blocks, kThreads, 0, stream, params,
                                      grid.blocks_per_batch, grid.rows_per_batch);
  };
  if (params.dtype == DType::kFp16) return launch_of.template operator()<__half>();
  if (params.dtype == DType::kBf16) return launch_of.template operator()<__nv_bfloat16>();
  launch_of.template operator()<float>();
}

}  // namespace flash_attn::cuda
