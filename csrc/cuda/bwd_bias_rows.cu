// The gradient of a bias that broadcasts the keys: Σ dS over the keys of each row, without dS.
//
// With delta = rowsum(dO ∘ O) - dLSE, Σ P = 1 - P_sink and Σ P ∘ dP = rowsum(dO ∘ O),
//
//   Σ P ∘ (dP - delta) = dLSE + P_sink · delta,    P_sink = exp(sink - LSE)
#include <cmath>

#include "attn/block_range.cuh"
#include "attn/seqlen.cuh"
#include "attn/softmax_bwd.cuh"
#include "attn/tile_scheduler.cuh"
#include "bwd_steps.h"
#include "launch.h"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 128;  // a row each, of one head of one sequence
using Scheduler = TileScheduler<kThreads>;

__global__ void __launch_bounds__(kThreads)
    bwd_bias_rows_kernel(const __grid_constant__ BwdParams params,
                         const __grid_constant__ Scheduler scheduler) {
  const TileCoordinates tile = scheduler.tile(blockIdx.x);
  const SeqlenInfo seqlen(params, tile.batch_idx);
  const int row = tile.block * kThreads + static_cast<int>(threadIdx.x);
  if (row >= seqlen.len_q || row >= params.dbias.rows) return;
  const int64_t i = tile.batch_idx * params.lse_batch_stride + tile.head * params.lse_head_stride +
                    seqlen.q_begin + row;
  const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
  const float lse = params.lse[i];
  // Of a row without keys, whose LSE is the sink's, only rounding would be left.
  if (!gives_gradient(lse) || window.first_key(row) >= window.end_key(row)) return;
  float sum = params.dlse == nullptr ? 0.f : params.dlse[i];
  if (params.score.learnable_sink != nullptr) {
    const float sink = params.score.learnable_sink[tile.head];
    sum = fmaf(ptx::exp2((sink - lse) * kLog2E), params.delta[i], sum);
  }
  static_cast<float*>(params.dbias.data)[tile.batch_idx * params.dbias.batch_stride +
                                         tile.head * params.dbias.head_stride + row] = sum;
}

}  // namespace

void run_bwd_bias_rows(const BwdParams& params, Stream stream) {
  const Scheduler scheduler = Scheduler::make(params.cu_seqlens_q, params.total_q, params.seqlen_q,
                                              params.batch, params.heads_q, 0);
  if (scheduler.num_tiles() == 0) return;
  launch<bwd_bias_rows_kernel>(scheduler.num_tiles(), kThreads, 0, stream, params, scheduler);
}

}  // namespace flash_attn::cuda
