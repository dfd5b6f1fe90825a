// The gradient of a bias that sequences, heads or both share, with mma.sync and cp.async:
// dbias = Σ dS over all who share it.
//
// A thread block owns kBlockM × kBlockN places of the gradient and walks over the (sequence, query
// head) pairs that read them; it computes S and dP of each a second time. The sum stays in
// registers: no workspace, no atomics, and the same bits every time.
//
//   for pair:  sync                                   // all warps are done with the tiles
//              load Q, dO, K, V; wait; sync
//              P = exp(Q Kᵀ - LSE), score terms, masked;  dbias += P ∘ (dO Vᵀ - delta)
//
// Nothing hides the loads but other thread blocks of the multiprocessor.
//
// Shared memory: │ Q │ dO │ K │ V │
#pragma once

#include <algorithm>

#include "../cuda/attn/seqlen.cuh"
#include "../cuda/launch.h"
#include "../cuda/tile/copy.cuh"
#include "bwd_score_gradient.cuh"
#include "large_head.h"

namespace flash_attn::sm80 {

template <DType kDType, int kHeadDimClass>
struct BwdBiasTraits {
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr BwdDqTile kTile =
      kIsWide<Element> ? kBwdBiasWideTile<kHeadDim> : kBwdBiasTile<kHeadDim>;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.num_warps;
  static constexpr int kWarpRows = kBlockM / kTile.num_warps;
  static_assert(kWarpRows == 16);

  using QTile = SmemTile<Element, kBlockM, kHeadDim>;  // dO too
  using KTile = SmemTile<Element, kBlockN, kHeadDim>;  // V too
  using Scores = Accumulator<1, kBlockN>;

  struct SharedStorage {
    QTile q, dout;
    KTile k, v;
    GeneralScores score;
  };
  static_assert(sizeof(SharedStorage) <= (kHeadDim > kMaxHeadDim
                                              ? smem_bytes(SmemBudget::kLargest)
                                              : bwd_smem_bytes(SmemBudget::kSmall)));
};

// dS of one pair joins dbias.
template <typename Traits>
__device__ __forceinline__ void add_pair(const BwdParams& params,
                                         typename Traits::SharedStorage& smem, int batch_idx,
                                         int head, int first_row, int n,
                                         typename Traits::Scores& dbias) {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  constexpr int kBlockN = Traits::kBlockN;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * Traits::kWarpRows, first_key = n * kBlockN;
  const SeqlenInfo seqlen(params, batch_idx);
  const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
  const BlockRange range = BlockRange::of_keys<Traits::kBlockM, kBlockN>(window, first_row);
  if (n < range.begin || n >= range.end) return;

  const int head_kv = head / (params.heads_q / params.heads_kv);
  const auto load = [&]<typename Tile>(const Tile& tile, const void* tensor, const Strides& strides,
                                       int of_head, int64_t begin, int num_cols, int row,
                                       int num_rows) {
    const Element* matrix = static_cast<const Element*>(tensor) +
                            SeqlenInfo::offset(strides, batch_idx, of_head, begin);
    TileLoader<Tile, Traits::kThreads>(matrix, strides.row, num_cols, thread)
        .load(tile, row, num_rows);
  };
  __syncthreads();  // all warps are done with the pair before
  load(smem.q, params.q, params.q_strides, head, seqlen.q_begin, params.head_dim, first_row,
       seqlen.len_q);
  load(smem.k, params.k, params.k_strides, head_kv, seqlen.k_begin, params.head_dim, first_key,
       seqlen.len_k);
  load(smem.dout, params.dout, params.dout_strides, head, seqlen.q_begin, params.head_dim_v,
       first_row, seqlen.len_q);
  load(smem.v, params.v, params.v_strides, head_kv, seqlen.k_begin, params.head_dim_v, first_key,
       seqlen.len_k);
  ptx::cp_async_commit();
  if (thread == 0) smem.score = {params, batch_idx, head, seqlen.diagonal(params)};

  const int64_t lse_row =
      batch_idx * params.lse_batch_stride + head * params.lse_head_stride + seqlen.q_begin;
  int query[Scores::kRows];
  float lse_log2[Scores::kRows], delta[Scores::kRows];
#pragma unroll
  for (int row = 0; row < Scores::kRows; ++row) {
    query[row] = first_row + warp_row + fragment_row(row, lane);
    const bool exists = query[row] < seqlen.len_q;
    lse_log2[row] = to_lse_log2(exists ? params.lse[lse_row + query[row]] : -INFINITY);
    delta[row] = exists ? params.delta[lse_row + query[row]] : 0.f;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // the tiles are there

  using Rows = SmemOperandA<1, 16, Layout::kKInner, QTile>;
  using Cols = SmemOperandB<KTile, Layout::kKInner>;
  Scores dS, slope;
  compute_score_gradient<Element, Traits::kHeadDim>(
      params, smem.score, Rows(smem.q, warp_row, lane), Cols(smem.k, 0, lane),
      Rows(smem.dout, warp_row, lane), Cols(smem.v, 0, lane), lse_log2, delta,
      ScorePlace{first_row + warp_row, first_key}, n < range.full_begin || n >= range.full_end,
      [&](Scores& S) { mask_keys(S, window, query, first_key, lane); }, lane, dS, slope);
#pragma unroll
  for (int row = 0; row < Scores::kRows; ++row) {
#pragma unroll
    for (int i = 0; i < Scores::kRowElements; ++i) dbias.at(row, i) += dS.at(row, i);
  }
}

// blockIdx.x counts tiles of the gradient, keys first; blockIdx.y starts its entries.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    bwd_bias_kernel(const __grid_constant__ BwdParams params) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(dynamic_smem);
  const BiasGradientParams& gradient = params.dbias;
  const int key_blocks = (gradient.keys + Traits::kBlockN - 1) / Traits::kBlockN;
  const int n = blockIdx.x % key_blocks, first_row = blockIdx.x / key_blocks * Traits::kBlockM;
  // Whoever shares an entry: all sequences or one, all heads or one.
  const bool of_all_batches = gradient.batch_stride == 0, of_all_heads = gradient.head_stride == 0;
  const int batches = of_all_batches ? 1 : params.batch, heads = of_all_heads ? 1 : params.heads_q;
#pragma unroll 1
  for (int entry = blockIdx.y; entry < batches * heads; entry += gridDim.y) {
    const int batch_begin = of_all_batches ? 0 : entry / heads;
    const int batch_end = of_all_batches ? params.batch : batch_begin + 1;
    const int head_begin = of_all_heads ? 0 : entry % heads;
    const int head_end = of_all_heads ? params.heads_q : head_begin + 1;
    typename Traits::Scores dbias;
    dbias.fill(0.f);
#pragma unroll 1
    for (int batch_idx = batch_begin; batch_idx < batch_end; ++batch_idx) {
#pragma unroll 1
      for (int head = head_begin; head < head_end; ++head) {
        add_pair<Traits>(params, smem, batch_idx, head, first_row, n, dbias);
      }
    }
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * Traits::kWarpRows;
    const int64_t offset = batch_begin * gradient.batch_stride + head_begin * gradient.head_stride;
    with_bias_gradient_type<BiasElement<Element>>(
        gradient.dtype, [&]<typename Number>(const Number*) {
          store_bias_gradient(dbias, gradient, static_cast<Number*>(gradient.data) + offset,
                              GeneralScores::output_scale(params.dropout), first_row + warp_row,
                              n * Traits::kBlockN, threadIdx.x % 32);
        });
  }
}

template <DType kDType, int kHeadDim>
void launch_bwd_bias(const BwdParams& params, Stream stream) {
  using Traits = BwdBiasTraits<kDType, kHeadDim>;
  const BiasGradientParams& gradient = params.dbias;
  const auto blocks = [](int64_t length, int block) { return (length + block - 1) / block; };
  const int64_t tiles =
      blocks(gradient.rows, Traits::kBlockM) * blocks(gradient.keys, Traits::kBlockN);
  const int64_t entries = int64_t{gradient.batch_stride == 0 ? 1 : params.batch} *
                          (gradient.head_stride == 0 ? 1 : params.heads_q);
  if (tiles == 0 || entries == 0) return;
  if (tiles > INT32_MAX) {
    fail({"flash_attn: attn_bias: expected at most ", INT32_MAX, " tiles of ", Traits::kBlockM,
          " rows and ", Traits::kBlockN, " keys, got ", tiles});
  }
  const dim3 grid(static_cast<unsigned>(tiles),
                  static_cast<unsigned>(std::min<int64_t>(entries, 65535)));
  cuda::launch<bwd_bias_kernel<Traits>>(grid, Traits::kThreads,
                                        sizeof(typename Traits::SharedStorage), stream, params);
}

}  // namespace flash_attn::sm80
