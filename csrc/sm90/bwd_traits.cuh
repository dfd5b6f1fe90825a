// What the roles of the backward kernel share: types of tiles, shared memory.
#pragma once

#include <type_traits>

#include "../cuda/attn/score_policy.cuh"
#include "bwd_config.h"
#include "bwd_row_terms.cuh"
#include "bwd_work.cuh"
#include "masked_scores.cuh"
#include "tile/ring.cuh"
#include "tile/work_queue.cuh"

namespace flash_attn::sm90 {

// How the consumers share a block's part of dQ: each takes some of the queries, or of the columns.
enum class DqShare { kRows, kCols };

// The loop's instances. Without score terms: kPlain; kPooled, with the sums of dQ as a pool
// (bwd_dq_pool.cuh), for which other forms have no room; kOrdered, with these sums in the same order
// every time (bwd_dq_order.cuh); kSplit, with tiles that are split (bwd_split.cuh), or dK and dV in fp32. The
// code of each would cost the plain loop. kScores: with score
// terms, each decided by a branch that all threads take alike. With no other terms: kAdditive (ALiBi, a
// bias that TMA can read, or both), which are added to S and leave the rest as it is; kSoftcap; kDropout.
// kMasked: without terms, and with a mask whose hidden tiles are passed over.
enum class BwdForm {
  kPlain,
  kPooled,
  kOrdered,
  kSplit,
  kScores,
  kAdditive,
  kSoftcap,
  kDropout,
  kMasked
};

constexpr ScoreTerms terms_of(BwdForm form) {
  if (form == BwdForm::kAdditive) return {.alibi = true, .bias = true};
  if (form == BwdForm::kSoftcap) return {.softcap = true};
  if (form == BwdForm::kDropout) return {.dropout = true};
  return kAllTerms;
}

template <DType kElementType, int kHeadDimClass, BwdForm kFormOfLoop>
struct BwdTraits {
  static constexpr BwdForm kForm = kFormOfLoop;
  static constexpr DType kDType = kElementType;
  static constexpr bool kPools = kForm == BwdForm::kPooled, kOrders = kForm == BwdForm::kOrdered;
  static constexpr bool kSplits = kForm == BwdForm::kSplit, kMasked = kForm == BwdForm::kMasked;
  static constexpr bool kPlainScores =
      kForm == BwdForm::kPlain || kPools || kOrders || kSplits || kMasked;
  using Params = std::conditional_t<kMasked, Masked<BwdParams>, BwdParams>;
  using ScorePolicy = std::conditional_t<kPlainScores, PlainScores, TermScores<terms_of(kForm)>>;
  static constexpr bool kAdditive = kForm == BwdForm::kAdditive;
  // dS is not P ∘ (dP - delta), and what it consists of beside dP and delta waits for them in shared
  // memory, not in registers.
  static constexpr bool kStashesWeights = kForm == BwdForm::kScores;
  // dS comes from what stands in the place of P: P times the softcap's slope, or P with a sign that
  // tells what is dropped. Dropout's words of queries are shared.
  static constexpr bool kCaps = kForm == BwdForm::kSoftcap, kDrops = kForm == BwdForm::kDropout;
  static constexpr bool kWeighted = kCaps || kDrops;
  // And P is half of it there (differentiate_kept). In fp16 it would lose a bit of its smallest numbers.
  static constexpr bool kHalvesP = kDrops && kDType == DType::kBf16;
  static constexpr float kScaleOfP = kStashesWeights ? kExactScale : kHalvesP ? 0.5f : 1.f;
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr BwdTile kTile = kBwdTile<kHeadDim>;
  static constexpr int kConsumers = kBwdConsumers;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kBwdBlockN, kStages = kTile.stages;
  // Of how many queries P is rounded beside the P from which dS comes, so that dV may begin with them.
  static constexpr int kEarly = kBlockM / 2;
  static constexpr int kConsumerThreads = 128 * kConsumers, kThreads = 128 + kConsumerThreads;
  // In fp16 three parts of a number would not have its bits. A pool takes the shared memory that this needs with
  // 128 queries.
  static constexpr bool kMayFold = kTile.folds_rows && kDType == DType::kBf16;
  static constexpr bool kFoldsRows = kMayFold && kPlainScores && (kTile.block_m == 64 || !kPools);
  // Of what dropout drops, dS has delta alone, without dP.
  static constexpr bool kMayFoldOne = kMayFold && kTile.block_m == 64;
  static constexpr bool kFoldsLse = kFoldsRows || (kMayFold && kDrops);
  // A cap comes between Q Kᵀ and LSE.
  static constexpr bool kFoldsDelta = kFoldsRows || (kMayFoldOne && kCaps);
  // The ones beside them are registers, where there are any.
  static constexpr bool kHoldsOnes = kTile.block_m == 64 || !(kSplits || kMasked || kWeighted);
  template <bool kFolds>
  using RowsOf =
      std::conditional_t<kFolds, RowColumns<Element, kBlockM, kHoldsOnes>, RowNumbers<kBlockM>>;
  using RowValues = RowTerms<RowsOf<kFoldsLse>, RowsOf<kFoldsDelta>>;
  struct Nothing {};
  static constexpr bool kIsOfFew = kFoldsRows && (kForm == BwdForm::kPlain || kPools);
  static constexpr bool kHolds = kPlainScores && (kIsOfFew || !kTile.held_by_few);
  template <int kCols>
  using HeldRows = std::conditional_t<kHolds && (kCols > 0), OperandA<1, kCols>, Nothing>;
  using HeldK = HeldRows<kTile.held_k>;
  using HeldV = HeldRows<kTile.held_v>;
  // Of 64 K registers, as the forward deals them out.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  static constexpr int kTileCols = bwd_tile_cols(kHeadDim);
  using QTile = SmemTile<Element, kBlockM, kTileCols>;  // dO too
  using KTile = SmemTile<Element, kBlockN, kTileCols>;  // V too
  // dSᵀ, keys as rows; or dS, queries as rows, as it leaves for the gradient of a bias.
  using ScoreTile = std::conditional_t<kAdditive, SmemTile<Element, kBlockM, kBlockN>,
                                       SmemTile<Element, kBlockN, kBlockM>>;
  using Scores = Accumulator<1, kBlockM>;        // Sᵀ, dPᵀ of a consumer's 64 keys
  using ScoresOperand = OperandA<1, kBlockM>;    // the same, rounded: Pᵀ, dSᵀ
  using KeyGradient = Accumulator<1, kHeadDim>;  // dK, dV of a consumer's 64 keys

  static constexpr DqShare kDqShare = kBlockM == 64 * kConsumers ? DqShare::kRows : DqShare::kCols;
  static constexpr int kDqCols = kDqShare == DqShare::kRows ? kHeadDim : kHeadDim / kConsumers;
  // Columns of an operand start with a slab. Where half of K does not, the second consumer finds its half
  // in a tile of its own.
  static constexpr bool kRepeatsKeys =
      kDqShare == DqShare::kCols && kDqCols % KTile::kSlabCols != 0;
  using QueryGradient = Accumulator<1, kDqCols>;  // a consumer's share of dQ: 64 queries
  static_assert(kDqShare == DqShare::kRows || kBlockM == 64);

  static constexpr int kTurnStages = 4;  // blocks of queries whose turn may have come
  // A piece of the pool of dQ's sums: 16 KiB.
  static constexpr int kPieceRows = 4096 / kHeadDim, kPieceStages = 2;
  static constexpr int kPieces = 4;  // that a warp takes on at a time
  using PieceSlab =
      SmemTile<Element, kPieceRows, 64>;  // of rounded sums, at the start of the piece
  using BiasTile = SmemTile<Element, kBlockM, kBlockN>;
  static constexpr int kTermStages = kDrops ? kStages : kHeadDim <= 64 ? 1 : 2;

  // A consumer that stores dS(i) has seen all dS(i - 1); whoever stored that had finished dQ(i - 3).
  static constexpr int kScoreStages = 3;
  // Some columns of dK or dV on their way out, in an empty place of dS.
  using GradientTile = SmemTile<Element, kBlockN, 64>;
  static_assert(sizeof(GradientTile) <= sizeof(ScoreTile));

  using Scheduler = TileScheduler<kBlockN, TileOrder::kAsTold>;
};

// K from column kDqCols on, for the second consumer's share of dQ.
template <typename Traits, bool kRepeatsKeys = Traits::kRepeatsKeys>
struct BwdKeyStorage {};
template <typename Traits>
struct BwdKeyStorage<Traits, true> {
  alignas(1024) typename Traits::KTile right_k;
};

// Blocks of a bias, and what threads stash.
template <typename Traits, BwdForm kForm = Traits::kForm>
struct BwdTermStorage {};
template <typename Traits>
struct BwdTermStorage<Traits, BwdForm::kAdditive> {
  union {
    alignas(1024) typename Traits::BiasTile bias[Traits::kTermStages];
    // Of one that broadcasts the queries, what it adds to the scores of each consumer thread's two keys.
    float2 key_bias[Traits::kConsumerThreads];
  };
};
template <typename Traits>
struct BwdTermStorage<Traits, BwdForm::kScores> {
  float4 stash[Traits::kBlockM / 8][Traits::kConsumerThreads];
};
// Rounded P of the queries with which dV does not begin.
template <typename Traits>
struct BwdLateStorage {
  uint4 late_p[(Traits::kBlockM - Traits::kEarly) / 16][Traits::kConsumerThreads];
};
template <typename Traits>
struct BwdTermStorage<Traits, BwdForm::kSoftcap> : BwdLateStorage<Traits> {};
template <typename Traits>
struct BwdTermStorage<Traits, BwdForm::kDropout> : BwdLateStorage<Traits> {};

// A block of queries that the mask does not hide from a block of keys.
class FoundQueries {
 public:
  FoundQueries() = default;
  // states: of the mask's tiles, as BlockMask::states().
  __device__ __forceinline__ FoundQueries(const QueryBlock& block, uint32_t states, bool is_last)
      : head_(block.head), bits_(static_cast<uint32_t>(block.m) << 9 | states << 1 | is_last) {}

  __device__ __forceinline__ QueryBlock block() const {
    return {.head = head_, .m = static_cast<int>(bits_ >> 9)};
  }
  __device__ __forceinline__ bool is_last() const { return (bits_ & 1) != 0; }
  __device__ __forceinline__ uint32_t states() const { return bits_ >> 1 & 0xff; }

 private:
  int head_;
  uint32_t bits_;
};

// The blocks that were found, on their way to the loader; of those loaded, beside row_values; and what the
// mask's rows say of the block's keys: two intervals, or two words of bits.
template <typename Traits, bool kMasked = Traits::kMasked>
struct BwdMaskStorage {};
template <typename Traits>
struct BwdMaskStorage<Traits, true> {
  static_assert(Traits::kBlockM <= 2 * kMaskTile && Traits::kBlockN == 2 * kMaskTile);
  static constexpr int kFound = 2;
  alignas(16) int4 rows[Traits::kStages][Traits::kBlockM];
  FoundQueries found[kFound], of_q[Traits::kStages];
  RingBarriers<kFound> ring;
};

// Pieces of dQ's sums on their way to dq.
template <typename Traits, bool kPools = Traits::kPools>
struct BwdPoolStorage {};
template <typename Traits>
struct BwdPoolStorage<Traits, true> {
  alignas(1024) float pieces[Traits::kPieceStages][Traits::kPieceRows * Traits::kTileCols];
};

template <bool kAdditive>
struct BwdTermMaps : BwdTensorMaps {
  CUtensorMap dq;  // if its sums lie in a pool
};
template <>
struct BwdTermMaps<true> : BwdTensorMaps {
  CUtensorMap bias, dbias;  // if there is one, and its gradient is to be stored
};

// Dropout's words (DropoutHead::query_word) of each block of queries.
template <typename Traits, bool kDrops = Traits::kDrops>
struct BwdDropoutStorage {};
template <typename Traits>
struct BwdDropoutStorage<Traits, true> {
  alignas(8) uint32_t query_words[Traits::kTermStages][Traits::kBlockM / 2];
  // Of each consumer thread what it draws once a head: the word of its keys, and what all words of the head
  // are mixed with.
  alignas(8) uint2 of_keys[Traits::kConsumerThreads];
};

template <typename Traits>
struct BwdSharedStorage : BwdKeyStorage<Traits>, BwdTermStorage<Traits>, BwdPoolStorage<Traits> {
  using ScorePolicy = typename Traits::ScorePolicy;

  alignas(1024) typename Traits::KTile k;
  alignas(1024) typename Traits::KTile v;
  alignas(1024) typename Traits::QTile q[Traits::kStages];
  alignas(1024) typename Traits::QTile dout[Traits::kStages];
  alignas(1024) typename Traits::ScoreTile ds[Traits::kScoreStages];
  typename Traits::RowValues row_values[Traits::kStages];
  [[no_unique_address]] BehindRows<typename Traits::RowValues> behind_rows;
  [[no_unique_address]] BwdDropoutStorage<Traits> dropout;
  [[no_unique_address]] BwdMaskStorage<Traits> mask;
  RingBarriers<Traits::kStages> q_ring;  // with row_values
  RingBarriers<Traits::kStages> dout_ring;
  RingBarriers<Traits::kScoreStages> ds_ring;
  // Where dQ is added in order. full: it is a block's turn; it has been added.
  RingBarriers<Traits::kTurnStages> turn_ring, added_ring;
  RingBarriers<1> k_ring, v_ring;
  WorkQueue<BwdWork, 2> queue;
  // Of a head and the next one.
  alignas(ScorePolicy) unsigned char score_storage[2][sizeof(ScorePolicy)];
  RingBarriers<Traits::kTermStages> term_ring;  // of a bias, or of query_words
  // Of a pool of sums. full: pieces have come; the consumers have issued all reductions of a tile.
  RingBarriers<Traits::kPieceStages> piece_ring;
  RingBarriers<2> summed_ring;  // in step with the queue

  // Of a query head of the work, once its first Q is there.
  __device__ __forceinline__ void* score_place(const BwdWork& work, int head) {
    return score_storage[(work.first_score + head - work.q.head) % 2];
  }
  __device__ __forceinline__ const ScorePolicy& score(const BwdWork& work, int head) {
    return *reinterpret_cast<const ScorePolicy*>(score_place(work, head));
  }

  // What no load ever writes. By all threads, before a barrier among them.
  __device__ __forceinline__ void zero_absent_slabs(const BwdParams& params) {
    const auto zero = [](auto& tile, int num_cols) {
      sm90::zero_absent_slabs(tile, num_cols, threadIdx.x, Traits::kThreads);
    };
    zero(k, params.head_dim);
    zero(v, params.head_dim_v);
    if constexpr (Traits::kRepeatsKeys) zero(this->right_k, params.head_dim - Traits::kDqCols);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      zero(q[stage], params.head_dim);
      zero(dout[stage], params.head_dim_v);
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  // helpers: threads beside the loader's and the consumers' that read the queue.
  __device__ __forceinline__ void init_barriers(int helpers) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    // Q's bytes, and row_values, which each thread of a warp has written and each consumer reads.
    q_ring.init(1 + 32, 32 * kConsumerWarps);
    dout_ring.init(1, kConsumerWarps);
    // Who waits for all to be full knows what is empty, but for copies of it that leave (dbias).
    ds_ring.init(kConsumerWarps, 1);
    k_ring.init(1 + Traits::kPools,
                kConsumerWarps);  // with a pool also who says that there is a place in it
    v_ring.init(1, kConsumerWarps);
    turn_ring.init(1, 1);
    added_ring.init(kConsumerWarps, 1);
    queue.init(1 + helpers + 32 * kConsumerWarps);
    if constexpr (Traits::kAdditive) term_ring.init(1, kConsumerWarps);
    // Words, which each thread of a warp has written and each of the consumers' reads.
    if constexpr (Traits::kDrops) term_ring.init(32, 32 * kConsumerWarps);
    if constexpr (Traits::kMasked) mask.ring.init(1, 1);
    piece_ring.init(1, 1);
    summed_ring.init(kConsumerWarps, 1);
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }
};

}  // namespace flash_attn::sm90
