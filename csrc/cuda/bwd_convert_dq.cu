// dQ = softmax_scale · dropout's scale · dq_accum, from the order of the sums to rows.
#include "attn/dq_convert.cuh"
#include "attn/seqlen.cuh"
#include "attn/tile_scheduler.cuh"
#include "bwd_steps.h"
#include "ptx/griddepcontrol.cuh"
#include "tile/element.cuh"
#include "tile/fragment.cuh"

namespace flash_attn::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
// So many on a multiprocessor leave registers for all loads of a step at once.
constexpr int kResidentBlocks = 12;
constexpr int kRows = kDqAccumRows * kWarps;  // of a thread block: of one head of one sequence
using Scheduler = TileScheduler<kRows>;

// A warp converts the 16 rows that a block of dq_accum has. The rows of the segment that do not
// count get 0; where none does, no sum is read: rows before the first sequence have none.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
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
  for (int col = 0; col < params.head_dim; col += kDqConvertCols) {
    uint32_t pairs[2][kDqConvertBlocks] = {};
    if (first_row < seqlen.len_q) {
      float4 values[kDqConvertBlocks];
#pragma unroll
      for (int b = 0; b < kDqConvertBlocks; ++b) {
        values[b] = dq_values(accum + (col / 8 + b) * kDqAccumBlock, order, lane);
      }
#pragma unroll
      for (int b = 0; b < kDqConvertBlocks; ++b) {
        pairs[0][b] = ptx::pack<Element>(values[b].x * scale, values[b].y * scale);
        pairs[1][b] = ptx::pack<Element>(values[b].z * scale, values[b].w * scale);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_dq(dq + col, params.dq_strides.row, pairs[half], half, seqlen.segment_q - first_row,
               seqlen.len_q - first_row, params.head_dim - col, lane);
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
    float4 values = {};
    if (first_row < seqlen.len_q) {
      values = dq_values(accum + first_col / 8 * kDqAccumBlock, order, lane);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(half, lane);
      if (first_row + row >= seqlen.segment_q) continue;
      float2 pair = {};
      if (first_row + row < seqlen.len_q) {
        pair = half == 0 ? float2{values.x * scale, values.y * scale}
                         : float2{values.z * scale, values.w * scale};
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

int64_t bwd_dq_accum_sequence_rows(const AttnParams& params) {
  return (int64_t{params.seqlen_q} + kDqAccumRows - 1) / kDqAccumRows * kDqAccumRows;
}

int64_t bwd_dq_accum_rows(const BwdParams& params) {
  return dq_accum_first_row(params, params.total_q, params.batch) + kDqAccumRows + kDqAccumPadding;
}

int64_t bwd_dq_turns(const BwdParams& params) { return dq_turn_numbers(params); }

int64_t bwd_dq_pool_progress(const BwdParams& params) { return dq_pool_numbers(params); }

DqAccumOrder portable_dq_accum_order() {
  return compiled_architecture<bwd_convert_dq_kernel<__half>>() >= 90 ? DqAccumOrder::kByLane
                                                                      : DqAccumOrder::kByValue;
}

void run_bwd_convert_dq(const BwdParams& params, DqAccumOrder order, Stream stream) {
  if (params.wide_query_gradient) return launch_convert<float>(params, order, stream);
  if (params.dtype == DType::kFp16) return launch_convert<__half>(params, order, stream);
  if (params.dtype == DType::kBf16) return launch_convert<__nv_bfloat16>(params, order, stream);
  launch_convert<float>(params, order, stream);
}

}  // namespace flash_attn::cuda
