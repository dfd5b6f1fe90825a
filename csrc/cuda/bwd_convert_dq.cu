// dQ = softmax_scale · dropout's scale · dq_accum, from the order of the sums to rows.
#include "attn/dq_accum.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "bwd_steps.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "tile/element.cuh"
#include "tile/fragment.cuh"

namespace flash_attn::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = kDqAccumRows * kWarps;  // of a thread block: of one head of one sequence
constexpr int kBlocks = 4;                    // of 8 columns that a warp converts at a time
using Scheduler = TileScheduler<kRows>;

// Lane t of each quad holds pairs[b] of block b; then it holds block t, pairs[s] that of lane s.
__device__ __forceinline__ void transpose_quad(uint32_t (&pairs)[kBlocks], int lane) {
#pragma unroll
  for (int step = 1; step < kBlocks; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if ((i & step) != 0) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? pairs[i] : pairs[i + step], step);
      (upper ? pairs[i] : pairs[i + step]) = received;
    }
  }
}

// A warp converts the 16 rows that a block of dq_accum has. The rows of the segment that do not count
// get 0.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    bwd_convert_dq_kernel(const __grid_constant__ BwdParams params,
                          const __grid_constant__ Scheduler scheduler, DqAccumOrder order,
                          float scale) {
  ptx::wait_for_prerequisites();
  const TileCoordinates tile = scheduler.tile(blockIdx.x);
  const SeqlenInfo seqlen(params, tile.batch_idx);
  const int lane = threadIdx.x % 32;
  const int first_row = tile.block * kRows + static_cast<int>(threadIdx.x) / 32 * kDqAccumRows;
  if (first_row >= seqlen.segment_q) return;
  const int64_t accum_row = tile.head * params.dq_accum_rows +
                            dq_accum_first_row(params, seqlen.q_begin, tile.batch_idx) + first_row;
  const float* const accum = params.dq_accum + accum_row * params.dq_accum_cols;
  Element* const dq =
      static_cast<Element*>(params.dq) +
      SeqlenInfo::offset(params.dq_strides, tile.batch_idx, tile.head, seqlen.q_begin + first_row);
  for (int first_col = 0; first_col < params.head_dim; first_col += 8 * kBlocks) {
    uint32_t pairs[2][kBlocks];  // of rows lane / 4 and lane / 4 + 8
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float* const block = accum + (first_col / 8 + b) * kDqAccumBlock;
      float sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] = block[dq_accum_position(order, lane, i)] * scale;
      }
      pairs[0][b] = ptx::pack<Element>(sums[0], sums[1]);
      pairs[1][b] = ptx::pack<Element>(sums[2], sums[3]);
    }
    const int col = first_col + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose_quad(pairs[half], lane);
      const int row = fragment_row(half, lane);
      if (first_row + row >= seqlen.segment_q || col >= params.head_dim) continue;
      uint4 chunk = {};
      if (first_row + row < seqlen.len_q) {
        chunk = {pairs[half][0], pairs[half][1], pairs[half][2], pairs[half][3]};
      }
      *reinterpret_cast<uint4*>(dq + row * params.dq_strides.row + col) = chunk;
    }
  }
}

// fp32: a lane writes its two neighbouring numbers of a row.
template <>
__global__ void __launch_bounds__(kThreads) bwd_convert_dq_kernel<float>(
    const __grid_constant__ BwdParams params, const __grid_constant__ Scheduler scheduler,
    DqAccumOrder order, float scale) {
  ptx::wait_for_prerequisites();
  const TileCoordinates tile = scheduler.tile(blockIdx.x);
  const SeqlenInfo seqlen(params, tile.batch_idx);
  const int lane = threadIdx.x % 32;
  const int first_row = tile.block * kRows + static_cast<int>(threadIdx.x) / 32 * kDqAccumRows;
  if (first_row >= seqlen.segment_q) return;
  const int64_t accum_row = tile.head * params.dq_accum_rows +
                            dq_accum_first_row(params, seqlen.q_begin, tile.batch_idx) + first_row;
  const float* const accum = params.dq_accum + accum_row * params.dq_accum_cols;
  float* const dq =
      static_cast<float*>(params.dq) +
      SeqlenInfo::offset(params.dq_strides, tile.batch_idx, tile.head, seqlen.q_begin + first_row);
  for (int first_col = 0; first_col < params.head_dim; first_col += 8) {
    const float* const block = accum + first_col / 8 * kDqAccumBlock;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(half, lane);
      if (first_row + row >= seqlen.segment_q) continue;
      float2 pair = {};
      if (first_row + row < seqlen.len_q) {
        pair = {block[dq_accum_position(order, lane, 2 * half)] * scale,
                block[dq_accum_position(order, lane, 2 * half + 1)] * scale};
      }
      *reinterpret_cast<float2*>(dq + row * params.dq_strides.row + first_col +
                                 fragment_col(0, lane)) = pair;
    }
  }
}

template <typename Element>
void launch_convert(const BwdParams& params, DqAccumOrder order, Stream stream) {
  const Scheduler scheduler = Scheduler::make(params.cu_seqlens_q, params.total_q, params.seqlen_q,
                                              params.batch, params.heads_q, 0);
  if (scheduler.num_tiles() == 0) return;
  launch_overlapping<bwd_convert_dq_kernel<Element>>(scheduler.num_tiles(), kThreads, 0, true,
                                                     stream, params, scheduler, order,
                                                     params.softmax_scale * params.dropout.scale);
}

}  // namespace

int64_t bwd_dq_accum_rows(const AttnParams& params) {
  return dq_accum_first_row(params, params.total_q, params.batch) + kDqAccumRows + kDqAccumPadding;
}

int64_t bwd_dq_turns(const BwdParams& params) { return params.dq_accum_rows / kDqAccumRows; }

DqAccumOrder portable_dq_accum_order() {
  return compiled_architecture<bwd_convert_dq_kernel<__half>>() >= 90 ? DqAccumOrder::kByLane
                                                                      : DqAccumOrder::kByValue;
}

void run_bwd_convert_dq(const BwdParams& params, DqAccumOrder order, Stream stream) {
  if (params.dtype == DType::kFp16) return launch_convert<__half>(params, order, stream);
  if (params.dtype == DType::kBf16) return launch_convert<__nv_bfloat16>(params, order, stream);
  launch_convert<float>(params, order, stream);
}

}  // namespace flash_attn::cuda
