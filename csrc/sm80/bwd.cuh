// Backward attention with mma.sync and cp.async, for sm_80 and everything newer: dK, dV and the
// parts of dQ.
//
//   P  = exp(softmax_scale · Q Kᵀ - LSE), masked        dV = Pᵀ dO
//   dS = P ∘ (dO Vᵀ - delta)                            dK = softmax_scale · dSᵀ Q
//   delta = rowsum(dO ∘ O) - dLSE                       dQ = softmax_scale · dS K
//
// A thread block owns kBlockN keys of one kv head; K, V and the sums dK, dV stay with it while it
// walks over the query heads that read this kv head and over their queries in blocks of kBlockM.
// Nobody else adds to its dK and dV: the same bits every time. dQ is summed over thread blocks by
// fp32 reductions in global memory; where these bits shall be the same as well, by bwd_dq.cuh. All
// warps have one role; each product's result is split over them in a grid of its own.
//
// The plain loop:
//
//   load K, V
//   for head, m:  load Q(m), dO(m); wait; sync
//                 S = Q Kᵀ; score terms; mask; P = exp(S - LSE)   → P to shared memory
//                 dP = dO Vᵀ; dS = P ∘ (dP - delta)     → dS to shared memory
//                 sync                                   // other warps' P and dS
//                 dK += dSᵀ Q;  dV += Pᵀ dO
//                 dQ(m) += dS K                          // reductions in global memory
//                 sync                                   // all warps are done with the tiles
//
// The last sync is the first one of the next iteration. How the loop here hides the loads:
//
//   two stages: Q, dO(m + 1) come in during iteration m.
//
//     products    │ Q Kᵀ   dO Vᵀ │ dSᵀ Q   Pᵀ dO   dS K │
//     loads       │ Q, dO(m + 1)  ………………………………………………… │
//     sync       ▲              ▲
//
//   one stage: Q(m + 1) comes in from dSᵀ Q on, dO(m + 1) from Pᵀ dO on, each after a sync of its
//   own, and S is computed before dO is waited for.
//
//     products    │ Q Kᵀ │ dO Vᵀ │ dSᵀ Q │ Pᵀ dO │ dS K │
//     loads        dO(m) …│               Q(m + 1) ………………
//     sync       ▲       ▲      ▲       ▲       ▲
//
// A burst of dQ's reductions holds up the loads from shared memory behind it. Either dS K comes
// last and they drain while the next iteration starts; or (spread_dq) it comes first and they go
// one by one between the steps of dSᵀ Q and Pᵀ dO, which is faster above d = 128, with one stage.
//
// Compiled with dQ's reductions, without them, and with score terms (cuda/attn/score_policy.cuh),
// where they are a branch; for 16 bits and, as the forward, for fp32. For masks: bwd_masked.cuh.
//
// Shared memory: │ K, in the end dK │ V, in the end dV │ Q, stages │ dO, stages │ P │ dS │ LSE, delta │
#pragma once

#include "../cuda/attn/key_gradient.cuh"
#include "../cuda/attn/seqlen.cuh"
#include "../cuda/attn/sequences.cuh"
#include "../cuda/attn/softmax_bwd.cuh"
#include "../cuda/attn/tile_mask.cuh"
#include "../cuda/attn/tile_scheduler.cuh"
#include "../cuda/ptx/opaque.cuh"
#include "../cuda/tile/copy.cuh"
#include "../cuda/tile/gemm.cuh"
#include "../cuda/tile/store.cuh"
#include "../cuda/tile/warp_grid.cuh"
#include "bwd.h"
#include "bwd_bias.cuh"
#include "bwd_config.h"
#include "bwd_dq.cuh"
#include "bwd_dq_reduction.cuh"
#include "bwd_scores.cuh"
#include "large_head.h"

namespace flash_attn::sm80 {

// The thread block's keys: block_idx · kBlockN … of those that count.
struct BwdKeyBlock {
  int batch_idx, head_kv, first_key;
};

// kTileOfClass is a value, so that a class with the same tile for both budgets is compiled once.
template <DType kDType, int kHeadDimClass, BwdTile kTileOfClass, typename ScorePolicyType>
struct BwdTraits {
  using Element = flash_attn::Element<kDType>;
  using ScorePolicy = ScorePolicyType;
  using Params = ParamsOf<BwdParams, ScorePolicy>;
  static constexpr BwdTile kTile = kTileOfClass;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.num_warps, kStages = kTile.stages;
  static_assert(kBlockM <= kDqAccumPadding);
  static_assert(kThreads >= 2 * kBlockM);  // a thread loads one LSE or one delta

  using QTile = SmemTile<Element, kBlockM, kHeadDim>;  // dO too
  using KTile = SmemTile<Element, kBlockN, kHeadDim>;  // V too
  using PTile = SmemTile<Element, kBlockM, kBlockN>;   // dS too
  using ScoreGrid = WarpGrid<kTile.num_warps, kTile.score_warps, kBlockM, kBlockN>;
  using DkvGrid = WarpGrid<kTile.num_warps, kTile.dkv_warps, kBlockN, kHeadDim>;
  static constexpr int kDqPassCols =
      kHeadDim > kMaxHeadDim ? kBwdLargeHeadDqCols<ScorePolicy::kGeneral> : kHeadDim;
  static constexpr int kDqPasses = kHeadDim / kDqPassCols;
  static_assert(!kTile.spread_dq || kDqPasses <= 2);  // one under dK, one under dV
  using DqGrid = WarpGrid<kTile.num_warps, kTile.dq_warps, kBlockM, kDqPassCols>;
  // So many warps share the sums of a score over the head dim. Terms leave no registers for it.
  static constexpr int kDepthWarps = kHeadDim > kMaxHeadDim && !ScorePolicy::kGeneral ? 4 : 1;
  using Scheduler = TileScheduler<kBlockN, TileOrder::kFirstBlocksFirst>;
  // bwd_large_head.cuh uses these.
  using WholeDqGrid = WarpGrid<kTile.num_warps, kTile.dq_warps, kBlockM, kHeadDim>;
  using QueryScheduler = TileScheduler<kBlockM>;

  struct SharedStorage {
    KTile k, v;  // in the end dK, dV
    QTile q[kStages], dout[kStages];
    PTile p, ds;
    // It stands here, as nvcc 13.0 places it by the bytes before it, not by its alignment.
    [[no_unique_address]] SplitScoreSums<BwdTraits> exchange;
    float lse[2][kBlockM], delta[2][kBlockM];  // of this iteration and the next
    SeqlenInfo seqlen;  // read here where it is needed: no registers for it in the loop
    BwdKeyBlock keys;
    BlockRange range;      // of queries
    ScorePolicy score[2];  // of this query head and the next, by turns
    // Sums of dS, for each row of the warps' grid: a bias that broadcasts the queries needs them.
    float column_sums[ScorePolicy::kGeneral ? kTile.score_warps : 1]
                     [ScorePolicy::kGeneral ? kBlockN : 1];
  };
};

// Brings in what belongs to a block of queries: Q, dO, LSE, delta.
template <typename Traits>
class QueryLoader {
  using Element = typename Traits::Element;
  using Loader = TileLoader<typename Traits::QTile, Traits::kThreads>;

 public:
  __device__ __forceinline__ QueryLoader(const typename Traits::Params& params,
                                         typename Traits::SharedStorage& smem)
      : params_(params), smem_(smem) {}

  // The caller commits.
  __device__ __forceinline__ void start_q(const typename Traits::QTile& tile,
                                          const BwdQueryBlock& block) const {
    load(tile, params_.q, params_.q_strides, params_.head_dim, block);
  }
  __device__ __forceinline__ void start_dout(const typename Traits::QTile& tile,
                                             const BwdQueryBlock& block) const {
    load(tile, params_.dout, params_.dout_strides, params_.head_dim_v, block);
  }

  // Is called for a block of another head than the one before.
  __device__ __forceinline__ void start_head(int head) const {
    if (!kSkipsTiles<typename Traits::ScorePolicy> && threadIdx.x == 0) {
      smem_.score[head % 2] = {params_, smem_.keys.batch_idx, head, smem_.seqlen.diagonal(params_)};
    }
  }

  // The first kBlockM threads bring in one LSE each, the next kBlockM one delta. Both are 0 for
  // rows that do not exist: as their Q and dO are 0 too, so are their dP, dS and Pᵀ dO.
  __device__ __forceinline__ void start_row_values(int parity, const BwdQueryBlock& block) const {
    const int thread = threadIdx.x, row = thread % Traits::kBlockM;
    if (thread >= 2 * Traits::kBlockM) return;
    const bool is_lse = thread < Traits::kBlockM;
    const int64_t first_row = smem_.keys.batch_idx * params_.lse_batch_stride +
                              block.head * params_.lse_head_stride + smem_.seqlen.q_begin;
    const int query = block.first_row + row;
    ptx::cp_async_4(ptx::smem_address(is_lse ? &smem_.lse[parity][row] : &smem_.delta[parity][row]),
                    (is_lse ? params_.lse : params_.delta) + first_row + query,
                    query < smem_.seqlen.len_q ? 4 : 0);
  }

 private:
  __device__ __forceinline__ void load(const typename Traits::QTile& tile, const void* tensor,
                                       const Strides& strides, int num_cols,
                                       const BwdQueryBlock& block) const {
    const Element* matrix =
        static_cast<const Element*>(tensor) +
        SeqlenInfo::offset(strides, smem_.keys.batch_idx, block.head, smem_.seqlen.q_begin);
    Loader(matrix, strides.row, num_cols, threadIdx.x)
        .load(tile, block.first_row, smem_.seqlen.len_q);
  }

  const typename Traits::Params& params_;
  typename Traits::SharedStorage& smem_;
};

// Starts the copy of kBlockN rows of K or V. The caller commits.
template <typename Traits>
__device__ __forceinline__ void load_keys(const typename Traits::KTile& tile,
                                          const typename Traits::SharedStorage& smem,
                                          const void* tensor, const Strides& strides, int num_cols,
                                          int first_key) {
  const auto* matrix =
      static_cast<const typename Traits::Element*>(tensor) +
      SeqlenInfo::offset(strides, smem.keys.batch_idx, smem.keys.head_kv, smem.seqlen.k_begin);
  TileLoader<typename Traits::KTile, Traits::kThreads>(matrix, strides.row, num_cols, threadIdx.x)
      .load(tile, first_key, smem.seqlen.len_k);
}

// Brings P and dS of this block of queries to shared memory.
template <typename Traits, typename Mask>
__device__ __forceinline__ void compute_scores(const typename Traits::Params& params,
                                               typename Traits::SharedStorage& smem,
                                               const BwdQueryBlock& block, int stage, int parity,
                                               bool masked, const Mask& mask) {
  using Element = typename Traits::Element;
  using Grid = typename Traits::ScoreGrid;
  using Scores = typename Grid::Part;
  constexpr bool kGeneral = Traits::ScorePolicy::kGeneral;
  constexpr bool kSkips = kSkipsTiles<typename Traits::ScorePolicy>;
  // With terms or a mask, registers are too short for what could be computed before the loop.
  const unsigned thread = kGeneral || kSkips ? ptx::opaque(threadIdx.x) : threadIdx.x;
  const int lane = thread % 32, warp = static_cast<int>(thread) / 32;
  const Grid grid = {.row = warp / Grid::kGridCols, .col = warp % Grid::kGridCols};
  const int first_row = grid.row * Grid::kWarpRows, first_col = grid.col * Grid::kWarpCols;
  const auto& score = score_of<Traits>(params, smem, block.head);
  const ScorePlace place = {block.first_row + first_row, smem.keys.first_key + first_col};
  float lse_log2[Scores::kRows], delta[Scores::kRows];
  if constexpr (kSkips) masked |= score.hides(place);

  Scores P, dS, slope;
  multiply_rows<Traits>(P, smem.exchange, smem.q[stage], smem.k, warp, lane);  // S = Q Kᵀ
  score.finish(P, slope, place, lane);
  score.template add_bias<BiasElement<Element>>(P, params.score.bias, place, lane);
#pragma unroll
  for (int row = 0; row < Scores::kRows; ++row) {
    const int tile_row = first_row + row / 2 * 16 + fragment_row(row, lane);
    // With terms, the scores of a row that does not exist are not 0, and their P may overflow.
    const bool finite = !kGeneral || block.first_row + tile_row < smem.seqlen.len_q;
    lse_log2[row] = finite ? to_lse_log2(smem.lse[parity][tile_row]) : INFINITY;
  }
  recompute_probabilities(P, params.softmax_scale * kLog2E, lse_log2, masked,
                          mask);  // P = exp(S - LSE)
  if constexpr (Traits::kStages == 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // dO(i) is there
  }
  multiply_rows<Traits>(dS, smem.exchange, smem.dout[stage], smem.v, warp, lane);  // dP = dO Vᵀ
#pragma unroll
  for (int row = 0; row < Scores::kRows; ++row) {
    delta[row] = smem.delta[parity][first_row + row / 2 * 16 + fragment_row(row, lane)];
  }
  score.gradient(dS, P, delta, params.dropout, place, lane);  // dS = P ∘ (dP - delta)
  // Only now, so that the exponentials can be scheduled between the products of dO Vᵀ.
  store_rounded(smem.p, P, first_row, first_col, lane);
  if constexpr (kGeneral) {
    score.template store_bias_gradient<BiasElement<Element>>(
        dS, params.dbias, params.dropout, smem.keys.batch_idx, block.head, place, lane);
    if (params.dbias.form == BiasGradientParams::Form::kKeys) {
      sum_columns(dS, smem.column_sums[grid.row] + first_col, lane);
    }
  }
  score.differentiate(dS, slope);
  store_rounded(smem.ds, dS, first_row, first_col, lane);
}

// Call it once all column_sums are there. A thread owns a key: nobody else adds to this head's.
template <typename Traits>
__device__ __forceinline__ void add_column_sums(const BwdParams& params,
                                                const typename Traits::SharedStorage& smem,
                                                int head) {
  const int col = threadIdx.x, key = smem.keys.first_key + col;
  if (col >= Traits::kBlockN || key >= params.dbias.keys) return;
  float sum = 0.f;
#pragma unroll
  for (int row = 0; row < Traits::kTile.score_warps; ++row) sum += smem.column_sums[row][col];
  float* const gradient = static_cast<float*>(params.dbias.data) +
                          smem.keys.batch_idx * params.dbias.batch_stride +
                          head * params.dbias.head_stride + key;
  *gradient += sum * Traits::ScorePolicy::output_scale(params.dropout);
}

// Walks over the query heads and their queries; returns the sums dK (not yet scaled) and dV. kSumDq:
// dQ is summed in dq_accum; with score terms, if there is one, as this spares a kernel without.
template <typename Traits, bool kSumDq>
__device__ __forceinline__ void compute_loop(const typename Traits::Params& params,
                                             typename Traits::SharedStorage& smem,
                                             typename Traits::DkvGrid::Part& dK,
                                             typename Traits::DkvGrid::Part& dV) {
  using Element = typename Traits::Element;
  using Grid = typename Traits::DkvGrid;
  constexpr int kBlockM = Traits::kBlockM, kStages = Traits::kStages;
  constexpr bool kSpreadDq = Traits::kTile.spread_dq;
  static_assert(!kSpreadDq || !Traits::ScorePolicy::kGeneral);
  using Cols = DealtColumns<Grid::kGridCols, typename Traits::QTile>;
  // With one stage dO comes in later than Q, in a group of its own.
  constexpr int kPendingLoads = kStages == 1 ? 1 : 0;
  const Grid grid;
  const int lane = threadIdx.x % 32;
  const BlockRange range = smem.range;
  if (range.begin == range.end) return;

  const QueryLoader<Traits> queries(params, smem);

  const int first_key = smem.keys.first_key;
  load_keys<Traits>(smem.k, smem, params.k, params.k_strides, params.head_dim, first_key);
  load_keys<Traits>(smem.v, smem, params.v, params.v_strides, params.head_dim_v, first_key);
  const int group = params.heads_q / params.heads_kv;
  const int end_head = (smem.keys.head_kv + 1) * group;
  BwdQueryBlock next{.head = end_head - group, .first_row = range.begin * kBlockM};
  next = seen_query_block<Traits>(params, smem, next, end_head);
  if (kSkipsTiles<typename Traits::ScorePolicy> && next.head == end_head) return drain_loads();
  queries.start_head(next.head);
  queries.start_row_values(0, next);
  queries.start_q(smem.q[0], next);
  if (kStages == 1) ptx::cp_async_commit();
  queries.start_dout(smem.dout[0], next);
  ptx::cp_async_commit();
#pragma unroll 1
  for (int i = 0; next.head < end_head; ++i) {
    const BwdQueryBlock block = next;
    const int stage = i % kStages, m = block.first_row / kBlockM;
    next.first_row += kBlockM;
    if (next.first_row == range.end * kBlockM) {
      next = {.head = block.head + 1, .first_row = range.begin * kBlockM};
    }
    next = seen_query_block<Traits>(params, smem, next, end_head);
    const bool more = next.head < end_head;
    ptx::cp_async_wait<kPendingLoads>();
    __syncthreads();  // Q(i) is there, all warps are done with iteration i - 1
    if (more && next.head != block.head) queries.start_head(next.head);
    if (kStages == 2 && more) {
      queries.start_row_values((i + 1) % 2, next);
      queries.start_q(smem.q[(i + 1) % kStages], next);
      queries.start_dout(smem.dout[(i + 1) % kStages], next);
      ptx::cp_async_commit();
    }

    compute_scores<Traits>(  // P, dS
        params, smem, block, stage, i % 2, m < range.full_begin || m >= range.full_end,
        [&](typename Traits::ScoreGrid::Part& S) { mask_scores<Traits>(S, params, smem, block); });
    __syncthreads();  // P, dS are there
    if constexpr (Traits::ScorePolicy::kGeneral) {
      if (params.dbias.form == BiasGradientParams::Form::kKeys) {
        add_column_sums<Traits>(params, smem, block.head);
      }
    }

    DqReduction<Traits> dq;
    if constexpr (kSumDq && kSpreadDq) dq.compute(params, block, smem, 0);  // dQ = dS K
    gemm_smem<Element, kBlockM, Into::kSum>(                                // dK += dSᵀ Q
        dK, RowsAndReductions<Traits, 0, kSumDq>(smem.ds, lane, dq),
        Cols(smem.q[stage], grid.col, lane));
    if (kStages == 1 && more) {
      __syncthreads();  // all warps are done with Q(i)
      queries.start_row_values((i + 1) % 2, next);
      queries.start_q(smem.q[0], next);
      ptx::cp_async_commit();
    }
    if constexpr (kSumDq && kSpreadDq && Traits::kDqPasses == 2) {
      dq.compute(params, block, smem, 1);
    }
    gemm_smem<Element, kBlockM, Into::kSum>(  // dV += Pᵀ dO
        dV, RowsAndReductions<Traits, kBlockM / kStepK<Element>, kSumDq>(smem.p, lane, dq),
        Cols(smem.dout[stage], grid.col, lane));
    if (kStages == 1 && more) {
      __syncthreads();  // all warps are done with dO(i)
      queries.start_dout(smem.dout[0], next);
      ptx::cp_async_commit();
    }
    if constexpr (kSumDq && !kSpreadDq) {
      if (Traits::ScorePolicy::kGeneral && params.dq_accum == nullptr) continue;
#pragma unroll
      for (int pass = 0; pass < Traits::kDqPasses; ++pass) {
        dq.compute(params, block, smem, pass);  // dQ = dS K
        dq.send(0, 1);
      }
    }
  }
}

template <typename Traits, bool kSumDq>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(const __grid_constant__ typename Traits::Params params,
               const __grid_constant__ typename Traits::Scheduler scheduler) {
  using Grid = typename Traits::DkvGrid;
  if (!has_chosen(params)) return;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(dynamic_smem);
  const TileCoordinates tile = scheduler.tile(blockIdx.x);
  const int first_key = tile.block * Traits::kBlockN;
  const SeqlenInfo seqlen(params, tile.batch_idx);
  if (first_key >= seqlen.segment_k || !is_chosen(params, tile.batch_idx)) return;
  if (threadIdx.x == 0) {
    smem.seqlen = seqlen;
    smem.keys = {.batch_idx = tile.batch_idx, .head_kv = tile.head, .first_key = first_key};
    smem.range = BlockRange::of_queries<Traits::kBlockM, Traits::kBlockN>(
        AttentionWindow(params, seqlen.len_q, seqlen.len_k), first_key);
  }
  __syncthreads();

  typename Grid::Part dK, dV;
  dK.fill(0.f);
  dV.fill(0.f);
  compute_loop<Traits, kSumDq>(params, smem, dK, dV);

  __syncthreads();  // all warps are done with K and V
  const Grid grid;
  const int lane = threadIdx.x % 32, first_row = grid.row * Grid::kWarpRows;
  const float scale = Traits::ScorePolicy::output_scale(params.dropout);
  store_rounded<16 * Grid::kGridCols>(smem.k, dK, first_row, grid.col * 16, lane,
                                      params.softmax_scale * scale);
  store_rounded<16 * Grid::kGridCols>(smem.v, dV, first_row, grid.col * 16, lane, scale);
  __syncthreads();
  const KeyGradientRows rows(smem.seqlen, smem.keys.batch_idx, smem.keys.head_kv, first_key);
  rows.template store<Traits::kBlockN, Traits::kThreads>(params.dk, params.dk_strides,
                                                         params.head_dim, smem.k, 0, threadIdx.x);
  rows.template store<Traits::kBlockN, Traits::kThreads>(params.dv, params.dv_strides,
                                                         params.head_dim_v, smem.v, 0, threadIdx.x);
}

template <typename Traits, SmemBudget kBudget>
void launch_bwd_kernel(const typename Traits::Params& params, Stream stream) {
  static_assert(sizeof(typename Traits::SharedStorage) <= smem_bytes(kBudget));
  const int64_t group = params.heads_q / params.heads_kv;
  const auto scheduler = Traits::Scheduler::make(
      params.cu_seqlens_k, params.total_k, params.seqlen_k, params.batch, params.heads_kv,
      int64_t{params.seqlen_q} * (params.head_dim + params.head_dim_v) * group * 2 *
          static_cast<int64_t>(sizeof(typename Traits::Element)));
  if (scheduler.num_tiles() == 0) return;
  const auto launch = [&]<bool kSumDq> {
    cuda::launch<bwd_kernel<Traits, kSumDq>>(scheduler.num_tiles(), Traits::kThreads,
                                             sizeof(typename Traits::SharedStorage), stream, params,
                                             scheduler);
  };
  if constexpr (!kSkipsTiles<typename Traits::ScorePolicy> && !Traits::ScorePolicy::kGeneral) {
    if (params.dq_accum == nullptr) return launch.template operator()<false>();
  }
  launch.template operator()<true>();
}

template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  const auto launch = [&]<SmemBudget kBudget> {
    using Traits = BwdTraits<kDType, kHeadDim, kBwdTile<kHeadDim, kBudget>, PlainScores>;
    launch_bwd_kernel<Traits, kBudget>(params, stream);
  };
  if (bwd_smem_budget(device.smem_optin_bytes) == SmemBudget::kLarge) {
    launch.template operator()<SmemBudget::kLarge>();
  } else {
    launch.template operator()<SmemBudget::kSmall>();
  }
  if (params.dq_accum == nullptr) launch_bwd_dq<kDType, kHeadDim, PlainScores>(params, stream);
}

// One tile a class, which any budget holds.
template <DType kDType, int kHeadDim>
void launch_bwd_with_scores(const OfSequences<BwdParams>& params, Stream stream) {
  using Traits = BwdTraits<kDType, kHeadDim, kBwdTile<kHeadDim, SmemBudget::kSmall>, GeneralScores>;
  launch_bwd_kernel<Traits, SmemBudget::kSmall>(params, stream);
  if (params.dq_accum == nullptr) launch_bwd_dq<kDType, kHeadDim, GeneralScores>(params, stream);
  if (params.dbias.form == BiasGradientParams::Form::kShared) {
    launch_bwd_bias<kDType, kHeadDim>(params, stream);
  }
}

}  // namespace flash_attn::sm80
