// The backward for head dims above 256: bwd.cuh's kernel, and of the deterministic dQ a kernel of
// its own, as one warp cannot hold 16 rows of dQ (bwd_dq.cuh).
//
// A thread block owns kBlockM queries of one head and walks over their keys. The scores come as in
// bwd.cuh, through shared memory, so that a warp's part of dQ is 64 rows × 64 columns.
//
//   for n:  load K(n), V(n); wait; sync
//           P = exp(Q K(n)ᵀ - LSE), masked;  dS = P ∘ (dO V(n)ᵀ - delta) → shared memory
//           sync                                       // other warps' dS
//           dQ += dS K(n)
//           sync                                       // all warps are done with K(n)
//
// The loop here hides one load: V(n + 1) comes in during dS K(n).
#pragma once

#include <type_traits>

#include "bwd.cuh"

namespace flash_attn::sm80 {

// Walks over the keys; returns the sum dQ, not yet scaled.
template <typename Traits>
__device__ __forceinline__ void compute_large_dq_loop(const typename Traits::Params& params,
                                                      typename Traits::SharedStorage& smem,
                                                      const BwdQueryBlock& block,
                                                      const BlockRange& range,
                                                      typename Traits::WholeDqGrid::Part& dQ) {
  constexpr int kBlockN = Traits::kBlockN;
  using Grid = typename Traits::WholeDqGrid;
  const Grid grid;
  const int lane = threadIdx.x % 32;
  if (range.begin == range.end) return;

  const QueryLoader<Traits> queries(params, smem);
  const auto load_k = [&](int n) {
    load_keys<Traits>(smem.k, smem, params.k, params.k_strides, params.head_dim, n * kBlockN);
  };
  const auto load_v = [&](int n) {
    load_keys<Traits>(smem.v, smem, params.v, params.v_strides, params.head_dim_v, n * kBlockN);
  };
  queries.start_head(block.head);
  queries.start_row_values(0, block);
  queries.start_q(smem.q[0], block);
  queries.start_dout(smem.dout[0], block);
  load_v(range.begin);
  load_k(range.begin);
  ptx::cp_async_commit();
#pragma unroll 1
  for (int n = range.begin; n < range.end; ++n) {
    ptx::cp_async_wait<0>();
    __syncthreads();         // K(n), V(n) are there
    compute_scores<Traits>(  // P, dS
        params, smem, block, 0, 0, n < range.full_begin || n >= range.full_end,
        [&](typename Traits::ScoreGrid::Part& S) { mask_scores<Traits>(S, params, smem, block); });
    __syncthreads();  // dS is there, all warps are done with V(n)
    if (threadIdx.x == 0) smem.keys.first_key = (n + 1) * kBlockN;
    if (n + 1 < range.end) load_v(n + 1);
    gemm_smem<typename Traits::Element, kBlockN, Into::kSum>(  // dQ += dS K(n)
        dQ,
        SmemOperandA<Grid::Part::kMBlocks, 16, Layout::kKInner, typename Traits::PTile>(
            smem.ds, grid.row * Grid::kWarpRows, lane),
        DealtColumns<Grid::kGridCols, typename Traits::KTile>(smem.k, grid.col, lane));
    __syncthreads();  // all warps are done with K(n)
    if (n + 1 < range.end) load_k(n + 1);
    ptx::cp_async_commit();
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_dq_large_head_kernel(const __grid_constant__ typename Traits::Params params,
                             const __grid_constant__ typename Traits::QueryScheduler scheduler) {
  using Element = typename Traits::Element;
  using Grid = typename Traits::WholeDqGrid;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(dynamic_smem);
  const TileCoordinates tile = scheduler.tile(blockIdx.x);
  const SeqlenInfo seqlen(params, tile.batch_idx);
  const BwdQueryBlock block{.head = tile.head, .first_row = tile.block * Traits::kBlockM};
  if (block.first_row >= seqlen.segment_q) return;
  const BlockRange range = BlockRange::of_keys<Traits::kBlockM, Traits::kBlockN>(
      AttentionWindow(params, seqlen.len_q, seqlen.len_k), block.first_row);
  if (threadIdx.x == 0) {
    smem.seqlen = seqlen;
    smem.keys = {.batch_idx = tile.batch_idx,
                 .head_kv = tile.head / (params.heads_q / params.heads_kv),
                 .first_key = range.begin * Traits::kBlockN};
  }
  __syncthreads();

  typename Grid::Part dQ;
  dQ.fill(0.f);
  compute_large_dq_loop<Traits>(params, smem, block, range, dQ);

  const Grid grid;
  store_rounded<16 * Grid::kGridCols>(
      smem.q[0], dQ, grid.row * Grid::kWarpRows, grid.col * 16, threadIdx.x % 32,
      params.softmax_scale * Traits::ScorePolicy::output_scale(params.dropout));
  __syncthreads();
  constexpr int kRowChunks = Traits::kHeadDim / kChunk;
  Element* dq = static_cast<Element*>(params.dq) +
                SeqlenInfo::offset(params.dq_strides, tile.batch_idx, block.head,
                                   smem.seqlen.q_begin + block.first_row);
  for (int i = threadIdx.x; i < Traits::kBlockM * kRowChunks; i += Traits::kThreads) {
    const int row = i / kRowChunks, col = i % kRowChunks * kChunk;
    const int query = block.first_row + row;
    if (query >= smem.seqlen.segment_q || col >= params.head_dim) continue;
    uint4 chunk = {};
    if (query < smem.seqlen.len_q) {
      chunk = *reinterpret_cast<const uint4*>(smem.q[0].pointer(row, col));
    }
    *reinterpret_cast<uint4*>(dq + row * params.dq_strides.row + col) = chunk;
  }
}

template <DType kDType, bool kScoreTerms>
void launch_bwd_large_head(const BwdParams& params, Stream stream) {
  using Traits = BwdTraits<kDType, kLargeHeadDim, kBwdLargeHeadTile<kScoreTerms>,
                           std::conditional_t<kScoreTerms, GeneralScores, PlainScores>>;
  launch_bwd_kernel<Traits, SmemBudget::kLargest>(params, stream);
  if constexpr (kScoreTerms) {
    if (params.dbias.form == BiasGradientParams::Form::kShared) {
      launch_bwd_bias<kDType, kLargeHeadDim>(params, stream);
    }
  }
  if (params.dq_accum != nullptr) return;
  const int64_t group = params.heads_q / params.heads_kv;
  const auto scheduler = Traits::QueryScheduler::make(
      params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch, params.heads_q,
      int64_t{params.seqlen_k} * (params.head_dim + params.head_dim_v) *
          static_cast<int64_t>(sizeof(typename Traits::Element)) / group);
  if (scheduler.num_tiles() == 0) return;
  cuda::launch<bwd_dq_large_head_kernel<Traits>>(scheduler.num_tiles(), Traits::kThreads,
                                                 sizeof(typename Traits::SharedStorage), stream,
                                                 params, scheduler);
}

}  // namespace flash_attn::sm80
