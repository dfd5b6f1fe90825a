// dQ = softmax_scale · dq_accum, from the fp32 sums to 16 bits.
#include "attn/dq_accum.cuh"
#include "bwd.h"
#include "launch.h"
#include "ptx/math.cuh"
#include "row_grid.h"
#include "tile/element.cuh"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 192;  // a multiple of each class's blocks a row: 4, 6, 8, 12, 16
constexpr int kCols = 16;      // of a thread: the unit of dq_accum's order

template <typename Element>
__device__ __forceinline__ void convert_block(const BwdParams& params, const float* source,
                                              Element* dq, int num_cols) {
  float4 vectors[kCols / 4];
  const float4* source_vectors = reinterpret_cast<const float4*>(source);
#pragma unroll
  for (int v = 0; v < kCols / 4; ++v) vectors[v] = source_vectors[v];
  const float* sums = reinterpret_cast<const float*>(vectors);

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * kChunk >= num_cols) break;
    uint32_t pairs[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      pairs[t] =
          ptx::pack<Element>(sums[dq_accum_position(t, 2 * half)] * params.softmax_scale,
                             sums[dq_accum_position(t, 2 * half + 1)] * params.softmax_scale);
    }
    *reinterpret_cast<uint4*>(dq + half * kChunk) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

// A thread converts 16 columns of one row, head by head.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    bwd_convert_dq_kernel(const __grid_constant__ BwdParams params, int dq_accum_cols,
                          unsigned blocks_per_batch, int64_t rows_per_batch) {
  const int blocks_per_row = dq_accum_cols / kCols, rows_per_block = kThreads / blocks_per_row;
  const int thread = threadIdx.x;
  const int batch_idx = blockIdx.x / blocks_per_batch;
  const int64_t row =
      int64_t{blockIdx.x % blocks_per_batch} * rows_per_block + thread / blocks_per_row;
  const int col = thread % blocks_per_row * kCols;
  if (row >= rows_per_batch || col >= params.head_dim) return;
  for (int head = blockIdx.y; head < params.heads_q; head += gridDim.y) {
    const int64_t accum_row = head * params.dq_accum_rows + batch_idx * rows_per_batch + row;
    convert_block(params, params.dq_accum + accum_row * dq_accum_cols + col,
                  static_cast<Element*>(params.dq) + batch_idx * params.dq_strides.batch +
                      row * params.dq_strides.row + head * params.dq_strides.head + col,
                  params.head_dim - col);
  }
}

}  // namespace

void run_bwd_convert_dq(const BwdParams& params, int dq_accum_cols, Stream stream) {
  const RowGrid grid(params, kThreads / (dq_accum_cols / kCols));
  if (grid.blocks.x == 0) return;
  if (params.dtype == DType::kFp16) {
    launch<bwd_convert_dq_kernel<__half>>(grid.blocks, kThreads, 0, stream, params, dq_accum_cols,
                                          grid.blocks_per_batch, grid.rows_per_batch);
  } else {
    launch<bwd_convert_dq_kernel<__nv_bfloat16>>(grid.blocks, kThreads, 0, stream, params,
                                                 dq_accum_cols, grid.blocks_per_batch,
                                                 grid.rows_per_batch);
  }
}

}  // namespace flash_attn::cuda
