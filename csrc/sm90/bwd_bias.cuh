// Computes the gradient of a bias that sequences, heads or both share, with wgmma and TMA:
// dbias = Σ dS over all who share it.
//
// A tile is 128 × 128 elements of the gradient. A thread block takes tile after tile and walks over
// the (sequence, query head) pairs that read its elements; S and dP of each pair are computed a
// second time, behind the backward. The sum stays in registers, and so does the bias, which is the
// same for all pairs. So there is no workspace and no atomic, and the bits are the same every time.
//
//   producer warp 0          for tile:  load the bias
//                            for pair:  load Q, dO;  for half of the keys:  load K, V
//   producer warp 1          for pair:  LSE, delta, its score terms
//   producer warps 2, 3      for a tile that no pair sees:  zeros to memory
//   consumer warpgroups      for tile:  bias to registers; in its place the sum before, which goes to
//   (64 queries each)                   memory from there
//                            for pair, for half of the keys:
//                                       S = Q Kᵀ;  dP = dO Vᵀ             // under way together
//                                       P = exp(S + bias - LSE), masked
//                                       dbias += P ∘ (dP - delta)
//
// All keys at once would take too many registers. One consumer's products run beside the other's
// arithmetic.
#pragma once

#include "../cuda/attn/seqlen.cuh"
#include "../cuda/attn/softmax_bwd.cuh"
#include "../cuda/device.h"
#include "../cuda/launch.h"
#include "../cuda/ptx/ldmatrix.cuh"
#include "../cuda/ptx/opaque.cuh"
#include "bwd_bias_traits.cuh"
#include "bwd_work.cuh"
#include "ptx/fence.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

struct BwdBiasMaps : BwdTensorMaps {
  CUtensorMap bias;
};

// Walks over a thread block's tiles and the pairs that see any of their keys. All producer warps
// walk alike. begin(number) is called before a tile's first pair, visit(tile, SeqlenInfo,
// AttentionWindow, masked, batch_idx, head) for each pair, and pass(tile) for a tile without pairs.
template <typename Traits, typename Begin, typename Visit, typename Pass>
__device__ __forceinline__ void for_each_pair(const BwdParams& params, int num_tiles,
                                              const Begin& begin, const Visit& visit,
                                              const Pass& pass) {
#pragma unroll 1
  for (int number = blockIdx.x; number < num_tiles; number += gridDim.x) {
    const BiasTile tile = BiasTile::make(params, number);
    const int n = tile.first_key / Traits::kBlockN;
    bool has_begun = false;
#pragma unroll 1
    for (int batch_idx = tile.batch_begin; batch_idx < tile.batch_end; ++batch_idx) {
      const SeqlenInfo seqlen(params, batch_idx);
      const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
      const BlockRange range =
          BlockRange::of_keys<Traits::kBlockM, Traits::kBlockN>(window, tile.first_row);
      if (n < range.begin || n >= range.end) continue;
      const bool masked = n < range.full_begin || n >= range.full_end;
      if (!has_begun) begin(number);
      has_begun = true;
#pragma unroll 1
      for (int head = tile.head_begin; head < tile.head_end; ++head) {
        visit(tile, seqlen, window, masked, batch_idx, head);
      }
    }
    if (!has_begun) pass(tile);
  }
}

template <typename Traits, typename Begin, typename Visit>
__device__ __forceinline__ void for_each_pair(const BwdParams& params, int num_tiles,
                                              const Begin& begin, const Visit& visit) {
  for_each_pair<Traits>(params, num_tiles, begin, visit, [](const BiasTile&) {});
}

// Writes zeros to the tiles that no pair sees: consumers never hear of them, and the gradient comes
// without zeros in it. Several whole warps call it and share the rows.
template <typename Traits>
__device__ __forceinline__ void zero_unseen_tiles_loop(const BwdParams& params, int num_tiles,
                                                       int warp, int num_warps) {
  using Element = typename Traits::Element;
  constexpr int kChunk = 16 / sizeof(Element), kRowChunks = BiasTile::kKeys / kChunk;
  const int thread = warp * 32 + static_cast<int>(threadIdx.x) % 32;
  const BiasGradientParams& gradient = params.dbias;
  for_each_pair<Traits>(
      params, num_tiles, [](int) {}, [](auto&&...) {},
      [&](const BiasTile& tile) {
        Element* const of_entry = gradient_of<Element>(params, tile);
        for (int i = thread; i < BiasTile::kRows * kRowChunks; i += num_warps * 32) {
          const int query = tile.first_row + i / kRowChunks,
                    key = tile.first_key + i % kRowChunks * kChunk;
          if (query >= gradient.rows || key >= gradient.keys) continue;
          *reinterpret_cast<uint4*>(of_entry + int64_t{query} * gradient.keys + key) = uint4{};
        }
      });
}

// Into how many halves of a tile's keys a sequence's keys fall. A box of TMA that begins behind
// them must not be asked for.
template <typename Traits>
__device__ __forceinline__ int num_halves(const BiasTile& tile, const SeqlenInfo& seqlen) {
  return tile.first_key + Traits::kHalfKeys < seqlen.len_k ? Traits::kHalves : 1;
}

// Loads biases, Q, dO, K and V. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void load_pairs_loop(const BwdParams& params, const BwdBiasMaps& maps,
                                                typename Traits::SharedStorage& smem,
                                                int num_tiles) {
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  constexpr auto kHint = ptx::CacheHint::kEvictLast;
  Ring<Traits::kStages.rows> row_ring(smem.row_ring);
  Ring<Traits::kStages.keys> key_ring(smem.key_ring);
  const auto load_bias = [&](int number) {
    using BiasSlab = typename Traits::BiasSlab;
    const BiasParams& bias = params.score.bias;
    const BiasTile tile = BiasTile::make(params, number);
    const MatrixPlace place = {.box = {bias.rows, 0, bias.rows},
                               .head = bias.head_stride == 0 ? 0 : tile.head_begin,
                               .batch = bias.batch_stride == 0 ? 0 : tile.batch_begin};
    const int halves = tile.first_key + Traits::kHalfKeys < bias.keys ? Traits::kHalves : 1;
    row_ring.wait_empty();
    row_ring.expect_bytes(halves * loaded_bytes<BiasSlab>(Traits::kHalfKeys));
    for (int half = 0; half < halves; ++half) {
      load_tile(smem.bias(row_ring.stage(), half), maps.bias, place, tile.first_row,
                Traits::kHalfKeys, row_ring.full(), ptx::CacheHint::kEvictFirst,
                tile.first_key + half * Traits::kHalfKeys);
    }
    row_ring.advance();
  };
  for_each_pair<Traits>(
      params, num_tiles, load_bias,
      [&](const BiasTile& tile, const SeqlenInfo& seqlen, const auto&, bool, int batch_idx,
          int head) {
        const MatrixPlace q = {.box = {params.seqlen_q, seqlen.q_begin, seqlen.len_q},
                               .head = head,
                               .batch = batch_idx};
        const MatrixPlace k = {.box = {params.seqlen_k, seqlen.k_begin, seqlen.len_k},
                               .head = head / (params.heads_q / params.heads_kv),
                               .batch = batch_idx};
        row_ring.wait_empty();
        row_ring.expect_bytes(loaded_bytes<QTile>(params.head_dim) +
                              loaded_bytes<QTile>(params.head_dim_v));
        auto& rows = smem.rows[row_ring.stage()];
        load_tile(rows.q, maps.q, q, tile.first_row, params.head_dim, row_ring.full(), kHint);
        load_tile(rows.dout, maps.dout, q, tile.first_row, params.head_dim_v, row_ring.full(),
                  kHint);
        row_ring.advance();
#pragma unroll 1
        for (int half = 0; half < num_halves<Traits>(tile, seqlen); ++half) {
          const int first_key = tile.first_key + half * Traits::kHalfKeys;
          key_ring.wait_empty();
          key_ring.expect_bytes(loaded_bytes<KTile>(params.head_dim) +
                                loaded_bytes<KTile>(params.head_dim_v));
          auto& keys = smem.keys[key_ring.stage()];
          load_tile(keys.k, maps.k, k, first_key, params.head_dim, key_ring.full(), kHint);
          load_tile(keys.v, maps.v, k, first_key, params.head_dim_v, key_ring.full(), kHint);
          key_ring.advance();
        }
      });
  row_ring.wait_empty();  // for the end of the last tile
  row_ring.arrive_full();
}

// Tells the consumers which pairs come. A whole warp calls it, each thread of which says what it
// has written.
template <typename Traits>
__device__ __forceinline__ void tell_pairs_loop(const BwdParams& params,
                                                typename Traits::SharedStorage& smem,
                                                int num_tiles) {
  constexpr int kRows = Traits::kBlockM / 32;  // of a lane
  const int lane = threadIdx.x % 32;
  Ring<Traits::kStages.rows> ring(smem.row_ring);
  constexpr int kNone = -1;
  int last = kNone;
  const auto go_to = [&](int next) {
    ring.wait_empty();
    if (lane == 0) {
      BiasVisit& visit = smem.visits[ring.stage()];
      visit.is_pair = false;
      visit.ends_tile = last != kNone;
      visit.begins_tile = next != kNone;
      visit.tile = BiasTile::make(params, last);
      visit.next = BiasTile::make(params, next);
    }
    ring.arrive_full();
    ring.advance();
    last = next;
  };
  for_each_pair<Traits>(params, num_tiles, go_to,
                        [&](const BiasTile& tile, const SeqlenInfo& seqlen,
                            const AttentionWindow& window, bool masked, int batch_idx, int head) {
                          const int64_t first = batch_idx * params.lse_batch_stride +
                                                head * params.lse_head_stride + seqlen.q_begin;
                          float lse[kRows], delta[kRows];
#pragma unroll
                          for (int i = 0; i < kRows; ++i) {
                            const int query = tile.first_row + i * 32 + lane;
                            const bool exists = query < seqlen.len_q;
                            lse[i] = exists ? params.lse[first + query] : -INFINITY;
                            delta[i] = exists ? params.delta[first + query] : 0.f;
                          }
                          ring.wait_empty();
                          BiasVisit& visit = smem.visits[ring.stage()];
#pragma unroll
                          for (int i = 0; i < kRows; ++i) {
                            visit.lse_log2[i * 32 + lane] = to_lse_log2(lse[i]);
                            visit.delta[i * 32 + lane] = delta[i];
                          }
                          if (lane == 0) {
                            visit.is_pair = true;
                            visit.masked = masked;
                            visit.num_halves = num_halves<Traits>(tile, seqlen);
                            visit.tile = tile;
                            visit.window = window;
                            new (visit.score_storage) BiasVisit::ScorePolicy(
                                params, batch_idx, head, seqlen.diagonal(params));
                          }
                          ring.arrive_full();
                          ring.advance();
                        });
  go_to(kNone);
}

template <typename Traits>
class BiasConsumer {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using Bias = typename Traits::Bias;
  using Storage = typename Traits::SharedStorage;
  static constexpr int kHalves = Traits::kHalves;

 public:
  __device__ __forceinline__ BiasConsumer(const BwdParams& params, Storage& smem, int consumer)
      : params_(params),
        smem_(smem),
        consumer_(consumer),
        row_ring_(smem.row_ring),
        key_ring_(smem.key_ring) {}

  __device__ __forceinline__ void run() {
    Scores dbias[kHalves];
    Bias bias[kHalves];
#pragma unroll 1
    for (;; release_visit()) {
      row_ring_.wait_full();
      const BiasVisit& visit = smem_.visits[row_ring_.stage()];
      if (visit.is_pair) {
        add_pair(dbias, bias, visit);
        continue;
      }
      if (visit.begins_tile) read(bias);
      if (visit.ends_tile) store(dbias, visit.tile);
      if (!visit.begins_tile) return;
      ptx::fence_async_shared();  // TMA writes there next
      for (Scores& half : dbias) half.fill(0.f);
    }
  }

 private:
  __device__ __forceinline__ void add_pair(Scores (&dbias)[kHalves], const Bias (&bias)[kHalves],
                                           const BiasVisit& visit) {
    const int first_query = visit.tile.first_row + warp_row();
    float lse_log2[Scores::kRows], delta[Scores::kRows];
#pragma unroll
    for (int row = 0; row < Scores::kRows; ++row) {
      const int query = warp_row() + fragment_row(row, lane());
      lse_log2[row] = visit.lse_log2[query];
      delta[row] = visit.delta[query];
    }
    const auto& rows = smem_.rows[row_ring_.stage()];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half == visit.num_halves) break;
      Scores P, dP;
      key_ring_.wait_full();
      const auto& keys = smem_.keys[key_ring_.stage()];
      start_product(P, rows.q, keys.k);      // S = Q Kᵀ
      start_product(dP, rows.dout, keys.v);  // dP = dO Vᵀ
      const ScorePlace place = {first_query, visit.tile.first_key + half * Traits::kHalfKeys};
      ptx::wgmma_wait<1>();
      pin(P);
      visit.score().finish(P, place, lane());
      visit.score().template add_bias<Element>(P, bias[half]);
      recompute_probabilities(P, params_.softmax_scale * kLog2E, lse_log2, visit.masked,
                              [&](Scores& S) {
                                int query[Scores::kRows];
#pragma unroll
                                for (int row = 0; row < Scores::kRows; ++row) {
                                  query[row] = first_query + fragment_row(row, lane());
                                }
                                mask_keys(S, visit.window, query, place.key, lane());
                              });
      ptx::wgmma_wait<0>();
      pin(dP);
      release_keys();
#pragma unroll
      for (int row = 0; row < Scores::kRows; ++row) {
#pragma unroll
        for (int i = 0; i < Scores::kRowElements; ++i) {
          float& sum = dbias[half].at(row, i);
          sum = fmaf(P.at(row, i), dP.at(row, i) - delta[row], sum);
        }
      }
    }
  }

  // Starts C = A Bᵀ of this consumer's queries and half of the keys.
  __device__ __forceinline__ void start_product(Scores& C, const typename Traits::QTile& rows,
                                                const typename Traits::KTile& keys) const {
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(
        C,
        WgmmaOperand<Layout::kKInner, typename Traits::QTile>(
            rows, static_cast<int>(flash_attn::ptx::opaque(consumer_)) * 64),
        WgmmaOperand<Layout::kKInner, typename Traits::KTile>(keys));
    ptx::wgmma_commit();
  }

  // Reads the bias of this warp's queries.
  __device__ __forceinline__ void read(Bias (&bias)[kHalves]) const {
    using Slab = typename Traits::BiasSlab;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t address =
          smem_.bias(row_ring_.stage(), half).address(warp_row() + lane() % 16, lane() / 16 * 8);
#pragma unroll
      for (int col = 0; col < Slab::kCols; col += 16) {
        flash_attn::ptx::ldmatrix_x4(bias[half].data[0][col / 16], Slab::advance(address, 0, col));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store(const Scores (&dbias)[kHalves],
                                        const BiasTile& tile) const {
    using Slab = typename Traits::BiasSlab;
    constexpr int kChunk = Slab::kChunk, kRowChunks = Slab::kCols / kChunk;
    const BiasGradientParams& gradient = params_.dbias;
    Element* const of_entry = gradient_of<Element>(params_, tile);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Slab& slab = smem_.bias(row_ring_.stage(), half);
      store_rounded(slab, dbias[half], 0, warp_row(), lane());
      __syncwarp();
      for (int i = lane(); i < 16 * kRowChunks; i += 32) {
        const int row = warp_row() + i / kRowChunks, col = i % kRowChunks * kChunk;
        const int query = tile.first_row + row, key = tile.first_key + half * Slab::kCols + col;
        if (query >= gradient.rows || key >= gradient.keys) continue;
        *reinterpret_cast<uint4*>(of_entry + int64_t{query} * gradient.keys + key) =
            *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(slab.data) +
                                            Slab::byte_offset(row, col));
      }
    }
  }

  // What follows from the thread's number is computed anew at each use, as there are no registers
  // to keep it.
  __device__ __forceinline__ static int lane() {
    return static_cast<int>(flash_attn::ptx::opaque(threadIdx.x) % 32);
  }
  // The first of the warp's 16 queries in the tile.
  __device__ __forceinline__ int warp_row() const {
    return 64 * consumer_ + static_cast<int>(flash_attn::ptx::opaque(threadIdx.x)) % 128 / 32 * 16;
  }

  // The warp is done with K and V.
  __device__ __forceinline__ void release_keys() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) key_ring_.arrive_empty();
    key_ring_.advance();
  }
  // Every lane arrives, as threads write the visit: racecheck follows nothing else.
  __device__ __forceinline__ void release_visit() {
    row_ring_.arrive_empty();
    row_ring_.advance();
  }

  const BwdParams& params_;
  Storage& smem_;
  const int consumer_;
  Ring<Traits::kStages.rows> row_ring_;
  Ring<Traits::kStages.keys> key_ring_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_bias_kernel(const __grid_constant__ BwdParams params,
                    const __grid_constant__ BwdBiasMaps maps, int num_tiles) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(dynamic_smem);
  if (threadIdx.x == 0) {
    smem.row_ring.init(1 + 32, 128 * Traits::kConsumers);
    smem.key_ring.init(1, 4 * Traits::kConsumers);
    ptx::fence_mbarrier_init();
  }
  const auto zero_absent = [](auto& tile, int num_cols) {
    zero_absent_slabs(tile, num_cols, threadIdx.x, Traits::kThreads);
  };
  // Slabs in whose place a bias comes are loaded for every pair (computes_bias_gradient()), so the
  // bias overwrites none of these zeros.
  for (auto& rows : smem.rows) {
    zero_absent(rows.q, params.head_dim);
    zero_absent(rows.dout, params.head_dim_v);
  }
  for (auto& keys : smem.keys) {
    zero_absent(keys.k, params.head_dim);
    zero_absent(keys.v, params.head_dim_v);
  }
  ptx::fence_async_shared();
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) load_pairs_loop<Traits>(params, maps, smem, num_tiles);
    if (warp == 1) tell_pairs_loop<Traits>(params, smem, num_tiles);
    if (warp >= 2) zero_unseen_tiles_loop<Traits>(params, num_tiles, warp - 2, 2);
  } else {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    BiasConsumer<Traits>(params, smem, warp / 4 - 1).run();
  }
}

template <DType kDType, int kHeadDim>
void launch_bwd_bias(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  using Traits = BwdBiasTraits<kDType, kHeadDim>;
  const int64_t tiles = BiasTile::count(params);
  if (tiles == 0) return;
  if (tiles > INT32_MAX - device.num_sms) {
    fail({"flash_attn: attn_bias: expected fewer than ", INT32_MAX - device.num_sms, " tiles of ",
          BiasTile::kRows, " rows and ", BiasTile::kKeys, " keys, got ", tiles});
  }
  const BwdBiasMaps maps = {
      make_bwd_tensor_maps(params, Traits::kBlockM, Traits::kHalfKeys, Traits::QTile::kSlabCols),
      make_bias_map(params, Traits::BiasSlab::kSlabCols, Traits::BiasSlab::kRows)};
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, device.num_sms));
  cuda::launch<bwd_bias_kernel<Traits>>(blocks, Traits::kThreads,
                                        sizeof(typename Traits::SharedStorage), stream, params,
                                        maps, static_cast<int>(tiles));
}

}  // namespace flash_attn::sm90
