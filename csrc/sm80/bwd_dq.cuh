// The deterministic dQ with mma.sync and cp.async: dQ = softmax_scale · dS K without reductions
// between thread blocks.
//
// A thread block owns kBlockM queries of one head and walks over their keys, as the forward does.
// It computes S and dP a second time (seven products instead of five over both kernels); dS stays
// in registers. Where those of a warp do not hold its rows of dQ, several warps share the columns.
//
//   for n:  load K(n), V(n); wait; sync
//           P = exp(Q K(n)ᵀ - LSE), score terms, masked;  dS = P ∘ (dO V(n)ᵀ - delta)
//           dQ += dS K(n)
//           sync                                       // all warps are done with the tiles
//
// The loop here hides the loads: V(n + 1) comes in during dS K(n), K(n + 1) during nothing.
//
// Shared memory: │ Q, in the end dQ │ dO │ K │ V │
#pragma once

#include "../cuda/attn/seqlen.cuh"
#include "../cuda/attn/sequences.cuh"
#include "../cuda/attn/tile_scheduler.cuh"
#include "../cuda/launch.h"
#include "../cuda/tile/copy.cuh"
#include "../cuda/tile/gemm.cuh"
#include "../cuda/tile/store.cuh"
#include "bwd_config.h"
#include "bwd_score_gradient.cuh"

namespace flash_attn::sm80 {

template <DType kDType, int kHeadDimClass, typename ScorePolicyType>
struct BwdDqTraits {
  using Element = flash_attn::Element<kDType>;
  using ScorePolicy = ScorePolicyType;
  using Params = ParamsOf<BwdParams, ScorePolicy>;
  static constexpr BwdDqTile kPlainTile =
      kIsWide<Element> ? kBwdDqWideTile<kHeadDimClass> : kBwdDqTile<kHeadDimClass>;
  static constexpr BwdDqTile kScoresTile =
      kIsWide<Element> ? kBwdDqWideScoresTile<kHeadDimClass> : kBwdDqScoresTile<kHeadDimClass>;
  static constexpr BwdDqTile kTile = ScorePolicy::kGeneral ? kScoresTile : kPlainTile;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.num_warps;
  static constexpr int kColWarps = kTile.col_warps;
  static constexpr int kWarpRows = kBlockM * kColWarps / kTile.num_warps;
  static constexpr int kWarpCols = kHeadDim / kColWarps;  // of dQ
  static_assert(kWarpRows % 16 == 0);

  using QTile = SmemTile<Element, kBlockM, kHeadDim>;  // dO, dQ too
  using KTile = SmemTile<Element, kBlockN, kHeadDim>;  // V too
  using Scores = Accumulator<kWarpRows / 16, kBlockN>;
  using Gradient = Accumulator<kWarpRows / 16, kWarpCols>;
  using Scheduler = TileScheduler<kBlockM>;

  struct SharedStorage {
    QTile q;  // in the end dQ
    QTile dout;
    KTile k, v;
    ScorePolicy score;
  };
  static_assert(sizeof(SharedStorage) <= bwd_smem_bytes(SmemBudget::kSmall));
};

// The thread block's queries.
struct DqBlock {
  int batch_idx, head, first_row;
};

// This warp's part of dQ. The warps of the same rows compute the same dS.
template <typename Traits>
struct DqPart {
  int row = static_cast<int>(threadIdx.x) / 32 / Traits::kColWarps * Traits::kWarpRows;
  int col = static_cast<int>(threadIdx.x) / 32 % Traits::kColWarps * Traits::kWarpCols;
};

// Walks over the keys; returns the sum dQ, not yet scaled.
template <typename Traits>
__device__ __forceinline__ void compute_dq_loop(const BwdParams& params, const SeqlenInfo& seqlen,
                                                const DqBlock& block,
                                                typename Traits::SharedStorage& smem,
                                                typename Traits::Gradient& dQ) {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  constexpr int kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  const int thread = threadIdx.x, lane = thread % 32;
  const DqPart<Traits> part;
  const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
  const BlockRange range = BlockRange::of_keys<Traits::kBlockM, kBlockN>(window, block.first_row);
  if (range.begin == range.end) return;

  const int head_kv = block.head / (params.heads_q / params.heads_kv);
  const auto matrix = [&](const void* tensor, const Strides& strides, int head, int64_t row) {
    return static_cast<const Element*>(tensor) +
           SeqlenInfo::offset(strides, block.batch_idx, head, row);
  };
  const TileLoader<KTile, Traits::kThreads> k_loader(
      matrix(params.k, params.k_strides, head_kv, seqlen.k_begin), params.k_strides.row,
      params.head_dim, thread);
  const TileLoader<KTile, Traits::kThreads> v_loader(
      matrix(params.v, params.v_strides, head_kv, seqlen.k_begin), params.v_strides.row,
      params.head_dim_v, thread);
  TileLoader<QTile, Traits::kThreads>(
      matrix(params.q, params.q_strides, block.head, seqlen.q_begin), params.q_strides.row,
      params.head_dim, thread)
      .load(smem.q, block.first_row, seqlen.len_q);
  TileLoader<QTile, Traits::kThreads>(
      matrix(params.dout, params.dout_strides, block.head, seqlen.q_begin), params.dout_strides.row,
      params.head_dim_v, thread)
      .load(smem.dout, block.first_row, seqlen.len_q);

  using Rows = SmemOperandA<Scores::kMBlocks, 16, Layout::kKInner, QTile>;
  const Rows Q(smem.q, part.row, lane), dO(smem.dout, part.row, lane);
  const SmemOperandB<KTile, Layout::kKInner> K(smem.k, 0, lane), V(smem.v, 0, lane);
  const SmemOperandB<KTile, Layout::kKOuter> K_outer(smem.k, part.col, lane);

  const int64_t lse_row = block.batch_idx * params.lse_batch_stride +
                          block.head * params.lse_head_stride + seqlen.q_begin;
  int query[Scores::kRows];
  float lse_log2[Scores::kRows], delta[Scores::kRows];
#pragma unroll
  for (int row = 0; row < Scores::kRows; ++row) {
    query[row] = block.first_row + part.row + row / 2 * 16 + fragment_row(row, lane);
    const bool exists = query[row] < seqlen.len_q;
    lse_log2[row] = to_lse_log2(exists ? params.lse[lse_row + query[row]] : -INFINITY);
    delta[row] = exists ? params.delta[lse_row + query[row]] : 0.f;
  }

  if (thread == 0) {
    smem.score = {params, block.batch_idx, block.head, seqlen.diagonal(params)};
  }
  k_loader.load(smem.k, range.begin * kBlockN, seqlen.len_k);
  v_loader.load(smem.v, range.begin * kBlockN, seqlen.len_k);
  ptx::cp_async_commit();
#pragma unroll 1
  for (int n = range.begin; n < range.end; ++n) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K(n), V(n) are there
    Scores dS, slope;
    compute_score_gradient<Element, kHeadDim>(
        params, smem.score, Q, K, dO, V, lse_log2, delta,
        ScorePlace{block.first_row + part.row, n * kBlockN},
        n < range.full_begin || n >= range.full_end,
        [&](Scores& S) { mask_keys(S, window, query, n * kBlockN, lane); }, lane, dS, slope);
    smem.score.differentiate(dS, slope);

    __syncthreads();  // all warps are done with V(n)
    if (n + 1 < range.end) v_loader.load(smem.v, (n + 1) * kBlockN, seqlen.len_k);
    gemm_register<Element>(dQ, to_operand_a<Element>(dS), K_outer);  // dQ += dS K(n)
    __syncthreads();                                                 // all warps are done with K(n)
    if (n + 1 < range.end) k_loader.load(smem.k, (n + 1) * kBlockN, seqlen.len_k);
    ptx::cp_async_commit();
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_dq_kernel(const __grid_constant__ typename Traits::Params params,
                  const __grid_constant__ typename Traits::Scheduler scheduler) {
  using Element = typename Traits::Element;
  if (!has_chosen(params)) return;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(dynamic_smem);
  const TileCoordinates tile = scheduler.tile(blockIdx.x);
  const SeqlenInfo seqlen(params, tile.batch_idx);
  const DqBlock block{
      .batch_idx = tile.batch_idx, .head = tile.head, .first_row = tile.block * Traits::kBlockM};
  if (block.first_row >= seqlen.segment_q || !is_chosen(params, tile.batch_idx)) return;

  typename Traits::Gradient dQ;
  dQ.fill(0.f);
  compute_dq_loop<Traits>(params, seqlen, block, smem, dQ);

  const DqPart<Traits> part;
  const int lane = threadIdx.x % 32;
  if constexpr (Traits::kColWarps > 1) __syncthreads();  // no other warp reads these rows of Q
  store_rounded(smem.q, dQ, part.row, part.col, lane,
                params.softmax_scale * Traits::ScorePolicy::output_scale(params.dropout));
  __syncwarp();
  constexpr int kChunk = kChunkOf<Element>, kRowChunks = Traits::kWarpCols / kChunk;
  Element* dq = static_cast<Element*>(params.dq) +
                SeqlenInfo::offset(params.dq_strides, block.batch_idx, block.head,
                                   seqlen.q_begin + block.first_row);
  for (int i = lane; i < Traits::kWarpRows * kRowChunks; i += 32) {
    const int row = part.row + i / kRowChunks, col = part.col + i % kRowChunks * kChunk;
    const int query = block.first_row + row;
    if (query >= seqlen.segment_q || col >= params.head_dim) continue;
    uint4 chunk = {};
    if (query < seqlen.len_q) chunk = *reinterpret_cast<const uint4*>(smem.q.pointer(row, col));
    *reinterpret_cast<uint4*>(dq + row * params.dq_strides.row + col) = chunk;
  }
}

template <DType kDType, int kHeadDim, typename ScorePolicy>
void launch_bwd_dq(const ParamsOf<BwdParams, ScorePolicy>& params, Stream stream) {
  using Traits = BwdDqTraits<kDType, kHeadDim, ScorePolicy>;
  const int64_t group = params.heads_q / params.heads_kv;
  const auto scheduler = Traits::Scheduler::make(
      params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch, params.heads_q,
      int64_t{params.seqlen_k} * (params.head_dim + params.head_dim_v) *
          static_cast<int64_t>(sizeof(typename Traits::Element)) / group);
  if (scheduler.num_tiles() == 0) return;
  cuda::launch<bwd_dq_kernel<Traits>>(scheduler.num_tiles(), Traits::kThreads,
                                      sizeof(typename Traits::SharedStorage), stream, params,
                                      scheduler);
}

}  // namespace flash_attn::sm80
