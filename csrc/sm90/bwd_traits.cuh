// What the roles of the backward kernel share: types of tiles, a block of keys to work on, shared
// memory.
#pragma once

#include "../cuda/attn/block_range.cuh"
#include "../cuda/attn/seqlen.cuh"
#include "../cuda/attn/tile_scheduler.cuh"
#include "bwd_config.h"
#include "tile/copy.cuh"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

// How the consumers share a block's part of dQ: each takes some of the queries, or of the columns.
enum class DqShare { kRows, kCols };

template <DType kElementType, int kHeadDimClass>
struct BwdTraits {
  static constexpr DType kDType = kElementType;
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr BwdTile kTile = kBwdTile<kHeadDim>;
  static constexpr int kConsumers = kBwdConsumers;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kBwdBlockN, kStages = kTile.stages;
  static constexpr int kConsumerThreads = 128 * kConsumers, kThreads = 128 + kConsumerThreads;
  // Of 64 K registers, as the forward deals them out.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  using QTile = SmemTile<Element, kBlockM, kHeadDim>;     // dO too
  using KTile = SmemTile<Element, kBlockN, kHeadDim>;     // V too; in the end dK and dV
  using ScoreTile = SmemTile<Element, kBlockN, kBlockM>;  // dSᵀ: keys are rows
  using Scores = Accumulator<1, kBlockM>;                 // Sᵀ, dPᵀ of a consumer's 64 keys
  using ScoresOperand = OperandA<1, kBlockM>;             // the same, rounded: Pᵀ, dSᵀ
  using KeyGradient = Accumulator<1, kHeadDim>;           // dK, dV of a consumer's 64 keys

  static constexpr DqShare kDqShare = kBlockM == 64 * kConsumers ? DqShare::kRows : DqShare::kCols;
  static constexpr int kDqCols = kDqShare == DqShare::kCols ? kHeadDim / kConsumers : kHeadDim;
  using QueryGradient = Accumulator<1, kDqCols>;  // a consumer's share of dQ: 64 queries
  static_assert(kDqShare == DqShare::kRows || (kBlockM == 64 && kDqCols % QTile::kSlabCols == 0));

  // A consumer that stores dS(i) has seen all dS(i - 1); whoever stored that had finished dQ(i - 3).
  static constexpr int kScoreStages = 3;

  using Scheduler = TileScheduler<kBlockN, TileOrder::kFirstBlocksFirst>;
};

// One block of keys of one kv head: what a thread block works on.
struct BwdWork {
  AttentionWindow window;
  SeqlenInfo seqlen;
  BlockRange range;   // of queries
  MatrixPlace q, kv;  // q: dO as well; its head is the first of the group
  int end_head;       // behind the group's last query head
  int batch_idx, first_key;
};

template <typename Traits>
__device__ __forceinline__ BwdWork make_bwd_work(const BwdParams& params,
                                                 const TileCoordinates& tile,
                                                 const SeqlenInfo& seqlen) {
  const int first_key = tile.block * Traits::kBlockN, group = params.heads_q / params.heads_kv;
  const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
  const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
  return {.window = window,
          .seqlen = seqlen,
          .range = BlockRange::of_queries<Traits::kBlockM, Traits::kBlockN>(window, first_key),
          .q = {.box = {varlen_q ? params.total_q : params.seqlen_q, seqlen.q_begin, seqlen.len_q},
                .head = tile.head * group,
                .batch = varlen_q ? 0 : tile.batch_idx},
          .kv = {.box = {varlen_k ? params.total_k : params.seqlen_k, seqlen.k_begin, seqlen.len_k},
                 .head = tile.head,
                 .batch = varlen_k ? 0 : tile.batch_idx},
          .end_head = (tile.head + 1) * group,
          .batch_idx = tile.batch_idx,
          .first_key = first_key};
}

// A walk over the blocks of queries that a block of keys meets: head after head of the group, and
// within a head from the first to the last. All roles walk alike.
class QueryBlocks {
 public:
  int head, m;  // the block: queries m · kBlockM … of query head `head`

  __device__ __forceinline__ explicit QueryBlocks(const BwdWork& work)
      : head(work.range.begin < work.range.end ? work.q.head : work.end_head),
        m(work.range.begin),
        begin_(work.range.begin),
        end_(work.range.end),
        end_head_(work.end_head) {}
  __device__ __forceinline__ bool more() const { return head < end_head_; }
  // Whether the head is a new one.
  __device__ __forceinline__ bool advance() {
    if (++m < end_) return false;
    m = begin_;
    ++head;
    return true;
  }

 private:
  int begin_, end_, end_head_;
};

template <typename Traits>
struct BwdSharedStorage {
  // Of a block of queries, once a query; P = exp2(scale_log2 · S - lse_log2).
  struct RowValues {
    float lse_log2[Traits::kBlockM], delta[Traits::kBlockM];
  };

  alignas(1024) typename Traits::KTile k;
  alignas(1024) typename Traits::KTile v;
  alignas(1024) typename Traits::QTile q[Traits::kStages];
  alignas(1024) typename Traits::QTile dout[Traits::kStages];
  alignas(1024) typename Traits::ScoreTile ds[Traits::kScoreStages];
  alignas(16) RowValues row_values[Traits::kStages];
  RingBarriers<Traits::kStages> q_ring;  // with row_values
  RingBarriers<Traits::kStages> dout_ring;
  RingBarriers<Traits::kScoreStages> ds_ring;
  RingBarriers<1> k_ring, v_ring;
  alignas(BwdWork) unsigned char work_storage[sizeof(BwdWork)];

  __device__ __forceinline__ const BwdWork& work() const {
    return *reinterpret_cast<const BwdWork*>(work_storage);
  }

  // What no load ever writes. By all threads, before a barrier among them.
  __device__ __forceinline__ void zero_absent_slabs(const BwdParams& params) {
    const auto zero = [](auto& tile, int num_cols) {
      sm90::zero_absent_slabs(tile, num_cols, threadIdx.x, Traits::kThreads);
    };
    zero(k, params.head_dim);
    zero(v, params.head_dim_v);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      zero(q[stage], params.head_dim);
      zero(dout[stage], params.head_dim_v);
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  __device__ __forceinline__ void init_barriers() {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    q_ring.init(2, kConsumerWarps);  // Q's bytes, and the warp that brings row_values
    dout_ring.init(1, kConsumerWarps);
    ds_ring.init(kConsumerWarps, 1);  // who waits for all to be full knows what is empty
    k_ring.init(1, kConsumerWarps);
    v_ring.init(1, kConsumerWarps);
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }
};

struct BwdTensorMaps {
  CUtensorMap q, k, v, dout;
};

}  // namespace flash_attn::sm90
