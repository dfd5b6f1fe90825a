// Forward attention for head dims above 256: fwd.cuh's loop, whose rows of O are too wide for one
// warp's registers.
//
// A thread block owns 64 queries of one head. Its eight warps share every product in a grid of
// their own. S = Q K(n)ᵀ: two blocks of 32 rows × two halves of the keys × two halves of the head
// dim, as a warp that reads 32 × 32 fragments reads each number of shared memory for 32 others. Two
// warps then add their sums over the halves of the head dim, and each goes on with 16 of the 32
// rows. The maximum of a row is exchanged between the two warps that hold its keys. O: all rows ×
// an eighth of the columns a warp, for which P and the corrections of O go through shared memory.
//
//   for n:  sync                           // K(n) is there, all warps are done with V(n + 1)
//           S' = Q K(n)ᵀ over half of the head dim
//           S = S' + the other warp's S'; score terms; mask
//           m = max over both warps' keys; P = exp(S - m) → shared memory
//           sync                           // V(n), P are there, all warps are done with K(n)
//           O = O · exp(m_old - m) + P V(n)
//
//   loads     │ Q K(n) │ V(n)            │ K(n-1)  │ V(n-1)      │ …
//   compute   │        │ Q K(n)ᵀ   exp   │ P V(n)  │ Q K(n-1)ᵀ   │ …
//   sync              ▲                 ▲         ▲
//
// Shared memory: │ Q, in the end O │ K │ V │ P │ sums on their way to the other warp │ maxima, corrections │
#pragma once

#include "../cuda/ptx/barrier.cuh"
#include "../cuda/tile/store_operand.cuh"
#include "../cuda/tile/warp_grid.cuh"
#include "fwd.cuh"
#include "large_head.h"

namespace flash_attn::sm80 {

template <DType kDType, int kHeadDimClass, int kKeys, typename ScorePolicyType>
struct FwdLargeHeadTraits {
  using Element = flash_attn::Element<kDType>;
  using ScorePolicy = ScorePolicyType;
  static constexpr bool kReadsPages = false;
  using Params = FwdParams;
  static constexpr int kBlockM = kFwdLargeHeadBlockM, kBlockN = kKeys;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kHeadDim = kHeadDimClass, kHalfDim = kHeadDim / 2;
  static constexpr int kWarpKeys = kBlockN / 2;
  static_assert(kBlockM == 64 && kWarpKeys % 16 == 0);

  // Halves of the head dim: as slabs lie one behind the other, two of them are one tile.
  using QTile = SmemTile<Element, kBlockM, kHalfDim>;
  using KTile = SmemTile<Element, kBlockN, kHalfDim>;  // V too
  using PTile = SmemTile<Element, kBlockM, kBlockN>;
  using PartialScores = Accumulator<2, kWarpKeys>;
  using Scores = Accumulator<1, kWarpKeys>;
  using Output = Accumulator<kBlockM / 16, kHeadDim / kWarps>;
  using Softmax = OnlineSoftmax<Scores::kRows>;
  using Scheduler = TileScheduler<kBlockM>;
};

template <typename Traits>
struct FwdLargeHeadStorage {
  union {
    typename Traits::QTile q[2];
    typename Traits::QTile o[2];
  };
  typename Traits::KTile k[2], v[2];
  typename Traits::PTile p;
  float4 sums[Traits::kWarps][Traits::kWarpKeys / 8][32];
  float row_values[2][Traits::kBlockM];  // maxima, in the end sums, by half of the keys
  float correction[Traits::kBlockM];     // in the end what O is multiplied by
  alignas(FwdWork<Traits>) unsigned char work[sizeof(FwdWork<Traits>)];
};

// A warp's places in the grids: while it has scores, and while it has a part of O.
struct LargeHeadWarp {
  int lane, warp;

  __device__ __forceinline__ LargeHeadWarp()
      : lane(static_cast<int>(threadIdx.x) % 32), warp(static_cast<int>(threadIdx.x) / 32) {}
  __device__ __forceinline__ int first_row() const { return warp / 4 * 32; }  // of 32
  __device__ __forceinline__ int depth() const { return warp % 2; }     // half of the head dim
  __device__ __forceinline__ int keys() const { return warp / 2 % 2; }  // half of the keys
  __device__ __forceinline__ int score_row() const { return first_row() + 16 * depth(); }  // of 16
  // Columns of O: every fourth block of 16 of a half.
  __device__ __forceinline__ int out_half() const { return warp / 4; }
  __device__ __forceinline__ int out_block() const { return warp % 4; }

  // Between the two warps of one sum over the head dim, and the two that hold a row's keys.
  __device__ __forceinline__ void sync_depths() const { ptx::barrier_sync<64>(1 + warp / 2); }
  __device__ __forceinline__ void sync_keys() const {
    ptx::barrier_sync<64>(5 + warp / 4 * 2 + warp % 2);
  }
};

// The sums over the whole head dim, of 16 of the 32 rows: the other rows' go to the other warp.
template <typename Traits>
__device__ __forceinline__ typename Traits::Scores exchange_sums(
    FwdLargeHeadStorage<Traits>& smem, const typename Traits::PartialScores& partial,
    const LargeHeadWarp& place) {
  const bool upper = place.depth() == 1;
  typename Traits::Scores S;
#pragma unroll
  for (int n = 0; n < Traits::kWarpKeys / 8; ++n) {
    float sent[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sent[i] = upper ? partial.data[0][n][i] : partial.data[1][n][i];
      S.data[0][n][i] = upper ? partial.data[1][n][i] : partial.data[0][n][i];
    }
    smem.sums[place.warp][n][place.lane] = {sent[0], sent[1], sent[2], sent[3]};
  }
  place.sync_depths();
#pragma unroll
  for (int n = 0; n < Traits::kWarpKeys / 8; ++n) {
    const float4 received = smem.sums[place.warp ^ 1][n][place.lane];
    S.data[0][n][0] += received.x;
    S.data[0][n][1] += received.y;
    S.data[0][n][2] += received.z;
    S.data[0][n][3] += received.w;
  }
  return S;
}

// value[row] of a row and that of the other half of the keys.
template <typename Traits, typename Join>
__device__ __forceinline__ void join_rows(FwdLargeHeadStorage<Traits>& smem, float (&value)[2],
                                          const LargeHeadWarp& place, const Join& join) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    value[row] = join(value[row], __shfl_xor_sync(~0u, value[row], 1));
    value[row] = join(value[row], __shfl_xor_sync(~0u, value[row], 2));
    const int tile_row = place.score_row() + fragment_row(row, place.lane);
    if (place.lane % 4 == 0) smem.row_values[place.keys()][tile_row] = value[row];
  }
  place.sync_keys();
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int tile_row = place.score_row() + fragment_row(row, place.lane);
    value[row] = join(value[row], smem.row_values[1 - place.keys()][tile_row]);
  }
}

// One number a row, from those who have its scores to those who have its O.
template <typename Traits>
__device__ __forceinline__ void send_row_factors(FwdLargeHeadStorage<Traits>& smem,
                                                 const float (&factor)[2],
                                                 const LargeHeadWarp& place) {
  if (place.keys() != 0 || place.lane % 4 != 0) return;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    smem.correction[place.score_row() + fragment_row(row, place.lane)] = factor[row];
  }
}

template <typename Traits>
__device__ __forceinline__ void scale_by_row_factors(const FwdLargeHeadStorage<Traits>& smem,
                                                     typename Traits::Output& O,
                                                     const LargeHeadWarp& place) {
  float factor[Traits::Output::kRows];
  bool moved = false;
#pragma unroll
  for (int row = 0; row < O.kRows; ++row) {
    factor[row] = smem.correction[row / 2 * 16 + fragment_row(row, place.lane)];
    moved |= factor[row] != 1.f;
  }
  if (__any_sync(~0u, moved)) scale_rows(O, factor);
}

// S becomes P, in shared memory; row_sum: of this thread's keys.
template <typename Traits>
__device__ __forceinline__ void softmax_step(const FwdParams& params,
                                             FwdLargeHeadStorage<Traits>& smem,
                                             const FwdWork<Traits>& work,
                                             typename Traits::Scores& S,
                                             typename Traits::Softmax& softmax, float (&row_sum)[2],
                                             int n, const LargeHeadWarp& warp) {
  using Element = typename Traits::Element;
  const int lane = warp.lane, first_key = n * Traits::kBlockN + warp.keys() * Traits::kWarpKeys;
  const ScorePlace place = {work.first_row + warp.score_row(), first_key};
  work.score.finish(S, place, lane);
  work.score.template add_bias<BiasElement<Element>>(S, params.score.bias, place, lane);
  if (n < work.range.full_begin || n >= work.range.full_end) {  // S = -inf where nothing is seen
    const int query = place.query + fragment_row(0, lane);
    mask_keys(S, work.window, {query, query + 8}, first_key, lane);
  }
  if (softmax.negates()) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(row, i) = S.at(row, i) == -INFINITY ? -INFINITY : -S.at(row, i);
      }
    }
  }

  float maximum[2] = {S.at(0, 0), S.at(1, 0)};
#pragma unroll
  for (int i = 1; i < S.kRowElements; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) maximum[row] = fmaxf(maximum[row], S.at(row, i));
  }
  join_rows(smem, maximum, warp, [](float a, float b) { return fmaxf(a, b); });
  Accumulator<1, 8> maxima;
#pragma unroll
  for (int i = 0; i < 4; ++i) maxima.data[0][0][i] = maximum[i / 2];
  float correction[2];
  softmax.template raise_max<0>(maxima, correction);
  send_row_factors(smem, correction, warp);

#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      S.at(row, i) = softmax.exponentiate(row, S.at(row, i));
      sum += S.at(row, i);
    }
    row_sum[row] = row_sum[row] * correction[row] + sum;
  }
  auto P = to_operand_a<Element>(S);
  work.score.drop(P, params.dropout, place, lane);
  store_operand(smem.p, P, warp.score_row(), warp.keys() * Traits::kWarpKeys, lane);
}

// Walks over the keys; returns O (not yet normalised), and the maxima and sums of the warp's
// scores.
template <typename Traits>
__device__ __forceinline__ void compute_loop(
    const FwdParams& params, FwdLargeHeadStorage<Traits>& smem, const FwdWork<Traits>& work,
    typename Traits::Output& O, typename Traits::Softmax& softmax, float (&row_sum)[2]) {
  using Element = typename Traits::Element;
  constexpr int kBlockN = Traits::kBlockN, kHalfDim = Traits::kHalfDim;
  const LargeHeadWarp warp;
  // opaque(): as in fwd.cuh.
  const auto load = [&](const auto& tiles, const Element* matrix, int64_t row_stride, int num_cols,
                        int first_row, int num_rows, int skipped_rows) {
    using Tile = std::remove_cvref_t<decltype(tiles[0])>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      TileLoader<Tile, Traits::kThreads>(matrix + half * kHalfDim, row_stride,
                                         num_cols - half * kHalfDim, ptx::opaque(threadIdx.x))
          .load(tiles[half], first_row, num_rows, skipped_rows);
    }
  };
  const auto load_k = [&](int n) {
    load(smem.k, work.k, params.k_strides.row, params.head_dim, n * kBlockN, work.end_key, 0);
  };
  // What nobody sees is not read: its P is 0, but 0 · NaN would reach O.
  const auto load_v = [&](int n) {
    load(smem.v, work.v, params.v_strides.row, params.head_dim_v, n * kBlockN, work.end_key,
         work.first_key);
  };

  int n = work.range.end - 1;
  if (n < work.range.begin) return;
  load(smem.q, work.q, params.q_strides.row, params.head_dim, work.first_row, work.window.len_q(),
       0);
  load_k(n);
  ptx::cp_async_commit();
#pragma unroll 1
  for (; n >= work.range.begin; --n) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K(n) is there, all warps are done with V(n + 1)
    load_v(n);
    ptx::cp_async_commit();

    typename Traits::PartialScores partial;
    gemm_smem<Element, kHalfDim, Into::kZero>(
        partial,
        SmemOperandA<2, 16, Layout::kKInner, typename Traits::QTile>(smem.q[warp.depth()],
                                                                     warp.first_row(), warp.lane),
        SmemOperandB<typename Traits::KTile, Layout::kKInner>(
            smem.k[warp.depth()], warp.keys() * Traits::kWarpKeys, warp.lane));
    typename Traits::Scores S = exchange_sums(smem, partial, warp);  // S = Q K(n)ᵀ
    softmax_step(params, smem, work, S, softmax, row_sum, n, warp);

    ptx::cp_async_wait<0>();
    __syncthreads();  // V(n), P, corrections are there, all warps are done with K(n)
    if (n > work.range.begin) load_k(n - 1);
    ptx::cp_async_commit();

    scale_by_row_factors(smem, O, warp);  // O = O · exp(m_old - m)
    gemm_smem<Element, kBlockN, Into::kSum>(
        O,
        SmemOperandA<Traits::Output::kMBlocks, 16, Layout::kKInner, typename Traits::PTile>(
            smem.p, 0, warp.lane),
        DealtColumns<4, typename Traits::KTile>(smem.v[warp.out_half()], warp.out_block(),
                                                warp.lane));
  }
}

// Normalises O and writes it and LSE; rows of the segment that do not count get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void store_tile(const FwdParams& params,
                                           FwdLargeHeadStorage<Traits>& smem,
                                           const FwdWork<Traits>& work, typename Traits::Output& O,
                                           typename Traits::Softmax& softmax, float (&row_sum)[2]) {
  using Element = typename Traits::Element;
  const LargeHeadWarp warp;
  __syncthreads();  // all warps are done with Q, the maxima and the corrections
  join_rows(smem, row_sum, warp, [](float a, float b) { return a + b; });
#pragma unroll
  for (int row = 0; row < 2; ++row) softmax.add(row, row_sum[row]);
  Accumulator<1, 8> factors;
  factors.fill(1.f);
  if (params.max_logits != nullptr && warp.keys() == 0) {
    float largest = -INFINITY;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int query = work.first_row + warp.score_row() + fragment_row(row, warp.lane);
      if (query < work.window.len_q()) largest = fmaxf(largest, softmax.largest_score(row));
    }
    raise_to_largest(params.max_logits + work.head, largest, warp.lane);
  }
  if (work.sink != -INFINITY) softmax.add_sink(factors, bounded_sink(work.sink));
  float factor[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int query = work.first_row + warp.score_row() + fragment_row(row, warp.lane);
    if (warp.keys() == 0 && warp.lane % 4 == 0 && query < work.segment_q) {
      work.lse[query] = query < work.window.len_q() ? softmax.log_sum_exp(row) : -INFINITY;
    }
    factor[row] = factors.at(row, 0) * softmax.inverse_sum(row) *
                  Traits::ScorePolicy::output_scale(params.dropout);
  }
  send_row_factors(smem, factor, warp);
  __syncthreads();
  scale_by_row_factors(smem, O, warp);
  store_rounded<64>(smem.o[warp.out_half()], O, 0, warp.out_block() * 16, warp.lane);
  __syncthreads();

  // Whole rows in chunks of 16 bytes, as TileLoader reads them.
  constexpr int kRowChunks = Traits::kHeadDim / kChunk;
#pragma unroll 4
  for (int i = threadIdx.x; i < Traits::kBlockM * kRowChunks; i += Traits::kThreads) {
    const int row = i / kRowChunks, col = i % kRowChunks * kChunk;
    const int query = work.first_row + row;
    if (query >= work.segment_q || col >= params.head_dim_v) continue;
    uint4 chunk = {};
    if (query < work.window.len_q()) {
      chunk = *reinterpret_cast<const uint4*>(
          smem.o[col / Traits::kHalfDim].pointer(row, col % Traits::kHalfDim));
    }
    *reinterpret_cast<uint4*>(work.out + query * params.out_strides.row + col) = chunk;
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_large_head_kernel(const __grid_constant__ FwdParams params,
                          const __grid_constant__ typename Traits::Scheduler scheduler) {
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<FwdLargeHeadStorage<Traits>*>(dynamic_smem);
  auto& work = *reinterpret_cast<FwdWork<Traits>*>(smem.work);
  if (threadIdx.x < 32) {
    const TileCoordinates tile = scheduler.tile(blockIdx.x);
    if (threadIdx.x == 0) new (&work) FwdWork<Traits>(params, tile, {params, tile.batch_idx});
  }
  __syncthreads();
  if (work.first_row >= work.segment_q) return;

  typename Traits::Output O;
  typename Traits::Softmax softmax(params.softmax_scale, Traits::ScorePolicy::kLeastMax);
  float row_sum[2] = {};
  O.fill(0.f);
  compute_loop<Traits>(params, smem, work, O, softmax, row_sum);
  store_tile<Traits>(params, smem, work, O, softmax, row_sum);
}

template <DType kDType, int kHeadDim, bool kScoreTerms>
void launch_fwd_large_head(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  const auto launch = [&]<SmemBudget kBudget> {
    using Traits = FwdLargeHeadTraits<kDType, kHeadDim, kFwdLargeHeadBlockN<kBudget>,
                                      std::conditional_t<kScoreTerms, GeneralScores, PlainScores>>;
    static_assert(sizeof(FwdLargeHeadStorage<Traits>) <= smem_bytes(kBudget));
    const int64_t group = params.heads_q / params.heads_kv;
    const auto scheduler = Traits::Scheduler::make(
        params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch, params.heads_q,
        int64_t{params.seqlen_k} * (params.head_dim + params.head_dim_v) *
            static_cast<int64_t>(sizeof(typename Traits::Element)) / group);
    if (scheduler.num_tiles() == 0) return;
    cuda::launch<fwd_large_head_kernel<Traits>>(scheduler.num_tiles(), Traits::kThreads,
                                                sizeof(FwdLargeHeadStorage<Traits>), stream, params,
                                                scheduler);
  };
  if (smem_budget(device.smem_optin_bytes) == SmemBudget::kLargest) {
    launch.template operator()<SmemBudget::kLargest>();
  } else {
    launch.template operator()<SmemBudget::kLarge>();
  }
}

}  // namespace flash_attn::sm80
