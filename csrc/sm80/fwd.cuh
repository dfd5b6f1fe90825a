// Forward attention with mma.sync and cp.async, for sm_80 and everything newer.
//
//   O = softmax(softmax_scale · Q Kᵀ, masked) V        LSE = log Σ exp(…)
//
// A thread block owns kBlockM queries of one head and walks over their keys in blocks of kBlockN,
// from the last to the first, so that the masked blocks of a causal row come first. All warps have
// one role: each loads its share of every tile, and owns kBlockM / kNumWarps neighbouring rows of
// S, P and O in registers.
//
// The plain loop:
//
//   for n:  load K(n), V(n); wait; sync
//           S = Q K(n)ᵀ; score terms; mask; P, m, l = online_softmax(S)
//           O = O · exp(m_old - m) + P V(n)
//           sync                                            // all warps are done with the tiles
//
// The loop here hides the loads: V(n) comes in during S = Q K(n)ᵀ, K(n - 1) during the softmax and
// P V(n). The exponentials of 16 keys run under the products of the 16 before. Two blocks a
// multiprocessor hide what remains of one's softmax behind the other's products. O is rescaled only
// when a maximum of the warp moved.
//
//   loads     │ Q K(n) │ V(n)       │ K(n-1)            │ V(n-1)      │ …
//   compute   │        │ Q K(n)ᵀ    │ max   exp, P V(n) │ Q K(n-1)ᵀ   │ …
//   sync              ▲            ▲                   ▲
//
// Compiled without score terms, with them (cuda/attn/score_policy.cuh), and without them for masks
// whose hidden tiles are passed over (cuda/attn/tile_mask.cuh); for 16 bits, for fp32 by three
// products of TF32, and by one (cuda/tile/gemm.cuh).
//
// Shared memory: │ Q, in the end O │ K │ V │
#pragma once

#include <new>
#include <type_traits>

#include "../cuda/attn/mask.cuh"
#include "../cuda/attn/online_softmax.cuh"
#include "../cuda/attn/score_policy.cuh"
#include "../cuda/attn/seqlen.cuh"
#include "../cuda/attn/sequences.cuh"
#include "../cuda/attn/tile_mask.cuh"
#include "../cuda/attn/tile_scheduler.cuh"
#include "../cuda/launch.h"
#include "../cuda/ptx/opaque.cuh"
#include "../cuda/tile/copy.cuh"
#include "../cuda/tile/gemm.cuh"
#include "../cuda/tile/store.cuh"
#include "config.h"
#include "fwd.h"
#include "fwd_pages.cuh"

namespace flash_attn::sm80 {

// kTile is a value, so that a class with the same tile for several budgets is compiled once.
template <DType kDType, int kHeadDimClass, FwdTile kTile, typename ScorePolicyType>
struct FwdTraits {
  using Element = flash_attn::Element<kDType>;
  using ScorePolicy = ScorePolicyType;
  using Params = ParamsOf<FwdParams, ScorePolicy>;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.num_warps;
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kWarpRows = kBlockM / kTile.num_warps;
  static constexpr int kMBlocks = kWarpRows / 16;
  static_assert(kWarpRows % 16 == 0);

  using QTile = SmemTile<Element, kBlockM, kHeadDim>;
  using KTile = SmemTile<Element, kBlockN, kHeadDim>;
  using VTile = SmemTile<Element, kBlockN, kHeadDim>;
  using Scores = Accumulator<kMBlocks, kBlockN>;
  using Output = Accumulator<kMBlocks, kHeadDim>;
  using Softmax = OnlineSoftmax<Scores::kRows>;
  using Scheduler = TileScheduler<kBlockM>;
  // Those that run_fwd_of_sequences() launches.
  static constexpr bool kReadsPages = ScorePolicy::kGeneral && !kIsWide<Element>;
};

// Where a kernel that reads no pages has no memory for their place: for plain fp32 another layout of
// FwdWork spills registers.
template <bool kReadsPages>
struct FwdPages {};
template <>
struct FwdPages<true> {
  const int32_t* entries;  // of the sequence; null: no pages
};

// What a thread block works on. It lives in shared memory because in registers it would cost 20 of
// a thread's 255.
template <typename Traits>
struct FwdWork {
  using Element = typename Traits::Element;

  const Element *q, *k, *v;  // row 0 of the sequence, at this head
  Element* out;
  float* lse;
  // Here, as nvcc 13.0 lays such a member out by the bytes before it, not by its alignment.
  [[no_unique_address]] typename Traits::ScorePolicy score;
  AttentionWindow window;
  BlockRange range;        // of keys
  int first_key, end_key;  // what the block's queries see together
  float sink;              // -inf: none
  int first_row;           // of the block's queries, within the sequence
  int segment_q;           // rows to write
  int head;
  [[no_unique_address]] FwdPages<Traits::kReadsPages> pages;

  __device__ __forceinline__ FwdWork(const typename Traits::Params& params,
                                     const TileCoordinates& tile, const SeqlenInfo& seqlen)
      : score(params, tile.batch_idx, tile.head, seqlen.diagonal(params)),
        window(params, seqlen.len_q, seqlen.len_k),
        first_row(tile.block * Traits::kBlockM),
        segment_q(is_chosen(params, tile.batch_idx) ? seqlen.segment_q : 0),
        head(tile.head) {
    const int head_kv = tile.head / (params.heads_q / params.heads_kv);
    const auto of_q = [&](const Strides& strides) {
      return SeqlenInfo::offset(strides, tile.batch_idx, tile.head, seqlen.q_begin);
    };
    int kv_row = SeqlenInfo::kv_row(params, tile.batch_idx);
    if constexpr (Traits::kReadsPages) {
      pages.entries = entries_of_row(params.pages, kv_row);
      if (pages.entries != nullptr) kv_row = 0;  // of page 0
    }
    const auto of_k = [&](const Strides& strides) {
      return SeqlenInfo::offset(strides, kv_row, head_kv, seqlen.k_begin);
    };
    q = static_cast<const Element*>(params.q) + of_q(params.q_strides);
    k = static_cast<const Element*>(params.k) + of_k(params.k_strides);
    v = static_cast<const Element*>(params.v) + of_k(params.v_strides);
    out = static_cast<Element*>(params.out) + of_q(params.out_strides);
    lse = params.lse + tile.batch_idx * params.lse_batch_stride +
          tile.head * params.lse_head_stride + seqlen.q_begin;
    range = BlockRange::of_keys<Traits::kBlockM, Traits::kBlockN>(window, first_row);
    first_key = window.first_key(first_row);
    end_key = window.end_key(min(first_row + Traits::kBlockM, window.len_q()) - 1);
    const float* const sinks = params.score.learnable_sink;
    sink = sinks == nullptr ? -INFINITY : sinks[tile.head];
  }
};

template <typename Traits>
struct FwdSharedStorage {
  union {  // a warp writes its rows of O over its rows of Q, which no other warp reads
    typename Traits::QTile q;
    typename Traits::QTile o;
  };
  typename Traits::KTile k;
  typename Traits::VTile v;
  alignas(FwdWork<Traits>) unsigned char work[sizeof(FwdWork<Traits>)];
};

// P = exp(S - m) as the left operand of P V, computed a step's columns at a time when gemm() asks
// for them. place: of the warp's S. of_query: dropout's words of the lane's rows.
template <typename Traits>
struct Probabilities {
  typename Traits::Softmax& softmax;
  const typename Traits::Scores& S;
  const typename Traits::ScorePolicy& score;
  const DropoutParams& dropout;
  ScorePlace place;
  int lane;
  uint32_t of_query[Traits::kMBlocks], of_keys[2];

  __device__ __forceinline__ void draw() {
#pragma unroll
    for (int m = 0; m < Traits::kMBlocks; ++m) {
      of_query[m] = score.draw_query_word(dropout, place.query + 16 * m, lane);
    }
  }

  __device__ __forceinline__ void load(uint32_t (&blocks)[Traits::kMBlocks][4], int k) {
    using Element = typename Traits::Element;
    constexpr int kRowElements = kStepK<Element> / 4;
#pragma unroll
    for (int row = 0; row < 2 * Traits::kMBlocks; ++row) {
      float p[kRowElements];
#pragma unroll
      for (int i = 0; i < kRowElements; ++i) {
        p[i] = softmax.exponentiate(row, S.at(row, k / 4 + i));
      }
      float sum = p[0] + p[1];
      if constexpr (kRowElements == 4) sum += p[2] + p[3];
      softmax.add(row, sum);
      set_operand_row<Element>(blocks, row, p);
    }
    if constexpr (Traits::ScorePolicy::kGeneral) drop(blocks, k);
  }

 private:
  __device__ __forceinline__ void drop(uint32_t (&blocks)[Traits::kMBlocks][4], int k) {
    if constexpr (kIsWide<typename Traits::Element>) {
      if (k % 32 == 0) score.draw_key_words(of_keys, dropout, place.key + k, lane);
      score.drop(blocks, dropout, of_query, of_keys, place.key, k);
    } else {
      score.drop(blocks, dropout, of_query, place.key + k, lane);
    }
  }
};

// Walks over the keys; returns O (not yet normalised) and the softmax state of the warp's rows.
template <typename Traits>
__device__ __forceinline__ void compute_loop(const FwdParams& params,
                                             const FwdSharedStorage<Traits>& smem,
                                             const FwdWork<Traits>& work,
                                             typename Traits::Output& O,
                                             typename Traits::Softmax& softmax) {
  using Element = typename Traits::Element;
  constexpr int kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Traits::kWarpRows;
  // opaque() and V's reversed order of threads keep the threads' addresses from living across the
  // products, in registers that the accumulators need.
  const auto load = [&](const auto& tile, const Element* matrix, int64_t row_stride, int num_cols,
                        unsigned thread, int first_row, int num_rows, int skipped_rows) {
    using Tile = std::remove_cvref_t<decltype(tile)>;
    TileLoader<Tile, Traits::kThreads>(matrix, row_stride, num_cols, ptx::opaque(thread))
        .load(tile, first_row, num_rows, skipped_rows);
  };
  const auto load_keys = [&](const auto& tile, const Element* matrix, const Strides& strides,
                             int num_cols, unsigned thread, int n, int skipped_keys) {
    if constexpr (Traits::kReadsPages) {
      if (work.pages.entries != nullptr) {
        return load_tile_of_pages<Traits::kThreads>(tile, matrix, strides, params.pages,
                                                    work.pages.entries, num_cols, thread,
                                                    n * kBlockN, skipped_keys, work.end_key);
      }
    }
    load(tile, matrix, strides.row, num_cols, thread, n * kBlockN, work.end_key, skipped_keys);
  };
  const auto load_k = [&](int n) {
    load_keys(smem.k, work.k, params.k_strides, params.head_dim, threadIdx.x, n, 0);
  };
  // What nobody sees is not read: its P is 0, but 0 · NaN would reach O.
  const auto load_v = [&](int n) {
    load_keys(smem.v, work.v, params.v_strides, params.head_dim_v,
              Traits::kThreads - 1 - threadIdx.x, n, work.first_key);
  };

  // `n`, or less where the blocks before it are hidden.
  const auto skip_hidden = [&](int n) {
    if constexpr (kSkipsTiles<typename Traits::ScorePolicy>) {
      n = work.score.template last_key_block<Traits::kBlockM, kBlockN>(work.first_row,
                                                                       work.range.begin, n) +
          1;
    }
    return n;
  };

  int n = skip_hidden(work.range.end) - 1;
  if (n < work.range.begin) return;
  load(smem.q, work.q, params.q_strides.row, params.head_dim, threadIdx.x, work.first_row,
       work.window.len_q(), 0);
  load_k(n);
  ptx::cp_async_commit();
#pragma unroll 1
  for (int end; n >= work.range.begin; n = end - 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K(n) is there, all warps are done with V(n + 1)
    load_v(n);
    ptx::cp_async_commit();
    end = skip_hidden(n);

    const SmemOperandA<Traits::kMBlocks, 16, Layout::kKInner, typename Traits::QTile> Q(
        smem.q, warp_row, lane);
    const SmemOperandB<typename Traits::KTile, Layout::kKInner> K(smem.k, 0, lane);
    typename Traits::Scores S;
    gemm_smem<Element, kHeadDim, Into::kZero>(S, Q, K);  // S = Q K(n)ᵀ
    const ScorePlace place = {work.first_row + warp_row, n * kBlockN};
    work.score.finish(S, place, lane);
    work.score.template add_bias<BiasElement<Element>>(S, params.score.bias, place, lane);
    if (n < work.range.full_begin || n >= work.range.full_end) {  // S = -inf where nothing is seen
      int query[Traits::Scores::kRows];
#pragma unroll
      for (int row = 0; row < S.kRows; ++row) {
        query[row] = work.first_row + warp_row + row / 2 * 16 + fragment_row(row, lane);
      }
      mask_keys(S, work.window, query, n * kBlockN, lane);
    }
    if constexpr (kSkipsTiles<typename Traits::ScorePolicy>) {
      work.score.mask(S, place, lane);
    }
    if constexpr (Traits::kReadsPages) {
      if (work.pages.entries != nullptr) {
        mask_missing_pages(S, params.pages, work.pages.entries, n * kBlockN, work.end_key);
      }
    }

    ptx::cp_async_wait<0>();
    __syncthreads();  // V(n) is there, all warps are done with K(n)
    if (end > work.range.begin) load_k(end - 1);
    ptx::cp_async_commit();

    float correction[Traits::Scores::kRows];
    if (softmax.update_max(S, correction)) scale_rows(O, correction);  // O = O · exp(m_old - m)
    const SmemOperandB<typename Traits::VTile, Layout::kKOuter> V(smem.v, 0, lane);
    // O += exp(S - m) V(n)
    Probabilities<Traits> P{softmax, S, work.score, params.dropout, place, lane};
    // Plain fp32 has no register to spare, not even for words that nobody reads.
    if constexpr (!kIsWide<Element> || Traits::ScorePolicy::kGeneral) P.draw();
    gemm<Element, kBlockN, Into::kSum>(O, P, V);
  }
}

// Normalises O and writes it and LSE; rows of the segment that do not count get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void store_tile(const FwdParams& params, FwdSharedStorage<Traits>& smem,
                                           const FwdWork<Traits>& work, typename Traits::Output& O,
                                           typename Traits::Softmax& softmax) {
  using Element = typename Traits::Element;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Traits::kWarpRows;
  softmax.finish();
  if (params.max_logits != nullptr) {
    float largest = -INFINITY;
#pragma unroll
    for (int row = 0; row < O.kRows; ++row) {
      const int query = work.first_row + warp_row + row / 2 * 16 + fragment_row(row, lane);
      if (query < work.window.len_q()) largest = fmaxf(largest, softmax.largest_score(row));
    }
    raise_to_largest(params.max_logits + work.head, largest, lane);
  }
  if (work.sink != -INFINITY) softmax.add_sink(O, bounded_sink(work.sink));
  float inverse_sum[Traits::Output::kRows];
#pragma unroll
  for (int row = 0; row < O.kRows; ++row) {
    const int query = work.first_row + warp_row + row / 2 * 16 + fragment_row(row, lane);
    if (lane % 4 == 0 && query < work.segment_q) {
      work.lse[query] = query < work.window.len_q() ? softmax.log_sum_exp(row) : -INFINITY;
    }
    inverse_sum[row] = softmax.inverse_sum(row) * Traits::ScorePolicy::output_scale(params.dropout);
  }
  scale_rows(O, inverse_sum);
  store_rounded(smem.o, O, warp_row, 0, lane);
  __syncwarp();

  // Whole rows in chunks of 16 bytes, as TileLoader reads them.
  constexpr int kChunk = kChunkOf<Element>, kRowChunks = Traits::kHeadDim / kChunk;
#pragma unroll
  for (int i = lane; i < Traits::kWarpRows * kRowChunks; i += 32) {
    const int row = warp_row + i / kRowChunks, col = i % kRowChunks * kChunk;
    const int query = work.first_row + row;
    if (query >= work.segment_q || col >= params.head_dim_v) continue;
    uint4 chunk = {};
    if (query < work.window.len_q()) {
      chunk = *reinterpret_cast<const uint4*>(smem.o.pointer(row, col));
    }
    *reinterpret_cast<uint4*>(work.out + query * params.out_strides.row + col) = chunk;
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    fwd_kernel(const __grid_constant__ typename Traits::Params params,
               const __grid_constant__ typename Traits::Scheduler scheduler) {
  if (!has_chosen(params)) return;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<FwdSharedStorage<Traits>*>(dynamic_smem);
  auto& work = *reinterpret_cast<FwdWork<Traits>*>(smem.work);
  if (threadIdx.x < 32) {
    const TileCoordinates tile = scheduler.tile(blockIdx.x);
    if (threadIdx.x == 0) new (&work) FwdWork<Traits>(params, tile, {params, tile.batch_idx});
  }
  __syncthreads();
  if (work.first_row >= work.segment_q) return;

  typename Traits::Output O;
  typename Traits::Softmax softmax(params.softmax_scale, Traits::ScorePolicy::kLeastMax);
  O.fill(0.f);
  compute_loop<Traits>(params, smem, work, O, softmax);
  store_tile<Traits>(params, smem, work, O, softmax);
}

template <typename Traits, SmemBudget kBudget>
void launch_fwd_kernel(const typename Traits::Params& params, Stream stream) {
  static_assert(sizeof(FwdSharedStorage<Traits>) <= smem_bytes(kBudget));
  const int64_t group = params.heads_q / params.heads_kv;
  const auto scheduler = Traits::Scheduler::make(
      params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch, params.heads_q,
      int64_t{params.seqlen_k} * (params.head_dim + params.head_dim_v) *
          static_cast<int64_t>(sizeof(typename Traits::Element)) / group);
  if (scheduler.num_tiles() == 0) return;
  cuda::launch<fwd_kernel<Traits>>(scheduler.num_tiles(), Traits::kThreads,
                                   sizeof(FwdSharedStorage<Traits>), stream, params, scheduler);
}

template <DType kDType, int kHeadDim>
void launch_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  const auto launch = [&]<SmemBudget kBudget> {
    using Traits = FwdTraits<kDType, kHeadDim, kFwdTile<kHeadDim, kBudget>, PlainScores>;
    launch_fwd_kernel<Traits, kBudget>(params, stream);
  };
  switch (smem_budget(device.smem_optin_bytes)) {
    case SmemBudget::kSmall:
      return launch.template operator()<SmemBudget::kSmall>();
    case SmemBudget::kLarge:
      return launch.template operator()<SmemBudget::kLarge>();
    case SmemBudget::kLargest:
      return launch.template operator()<SmemBudget::kLargest>();
  }
}

template <DType kDType, int kHeadDim, bool kScoreTerms>
void launch_fwd_wide(const FwdParams& params, Stream stream) {
  constexpr FwdTile kTile = kScoreTerms ? kFwdWideScoresTile<kHeadDim> : kFwdWideTile<kHeadDim>;
  using Traits = FwdTraits<kDType, kHeadDim, kTile,
                           std::conditional_t<kScoreTerms, GeneralScores, PlainScores>>;
  launch_fwd_kernel<Traits, SmemBudget::kSmall>(params, stream);
}

template <DType kDType, int kHeadDim>
void launch_fwd_with_scores(const OfSequences<FwdParams>& params, Stream stream) {
  using Traits = FwdTraits<kDType, kHeadDim, kFwdScoresTile<kHeadDim>, GeneralScores>;
  launch_fwd_kernel<Traits, SmemBudget::kSmall>(params, stream);
}

template <DType kDType, int kHeadDim>
void launch_fwd_masked(const Masked<FwdParams>& params, Stream stream) {
  using Traits = FwdTraits<kDType, kHeadDim, kFwdMaskedTile<kHeadDim>, MaskedScores>;
  launch_fwd_kernel<Traits, SmemBudget::kSmall>(params, stream);
}

}  // namespace flash_attn::sm80
