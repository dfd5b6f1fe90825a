// What the roles of the backward kernel share: types of tiles, shared memory.
#pragma once

#include <bit>
#include <type_traits>

#include "../cuda/attn/score_policy.cuh"
#include "bwd_config.h"
#include "bwd_found_queries.cuh"
#include "bwd_row_terms.cuh"
#include "bwd_work.cuh"
#include "ordered_scheduler.cuh"
#include "ptx/fence.cuh"
#include "shared_bias_scheduler.cuh"
#include "tile/ring.cuh"
#include "tile/work_queue.cuh"

namespace flash_attn::sm90 {

// How the consumers share a block's dQ: each takes some of the queries, or some of the columns.
enum class DqShare { kRows, kCols };

// The instances of the loop; the code of each would cost the plain loop. Without score terms there
// are kPlain; kPooled, where the sums of dQ are a pool (bwd_dq_pool.cuh), kPooledLong, the same for
// long heads, and kStretched, where heads come stretch by stretch in it; kOrdered, where these sums
// come in the same order every time (bwd_dq_order.cuh), and kPooledInOrder, where they do so in a
// pool; kSplit, where tiles are split (bwd_split.cuh) or dK and dV are fp32; and kMasked, with a
// mask whose hidden tiles are passed over, always with a pool: with few tiles to compute, zeros and
// conversions would be a large share of the time. kScores serves all score terms, each decided by a
// branch that all threads take alike. Some terms have forms for when there are no others. kAdditive
// is for those that are added to S and leave the rest as it is: ALiBi, a bias that TMA can read or
// that broadcasts the queries, or ALiBi and such a bias. kSoftcap and kDropout are for one term
// each.
enum class BwdForm {
  kPlain,
  kPooled,
  kPooledLong,
  kStretched,
  kOrdered,
  kPooledInOrder,
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
  static constexpr bool kSplits = kForm == BwdForm::kSplit, kMasked = kForm == BwdForm::kMasked;
  static constexpr bool kStretches = kForm == BwdForm::kStretched;
  static constexpr bool kPoolsLong = kForm == BwdForm::kPooledLong;
  static constexpr bool kPoolsInOrder = kForm == BwdForm::kPooledInOrder;
  static constexpr bool kPools =
      kForm == BwdForm::kPooled || kPoolsLong || kStretches || kPoolsInOrder || kMasked;
  // The forms whose calls may be varlen ones.
  static constexpr bool kPoolsVarlen = kForm == BwdForm::kPooled || kPoolsLong;
  static constexpr bool kOrders = kForm == BwdForm::kOrdered || kPoolsInOrder;
  // With a pool whose sums come in any order, tiles are let in and counted as a whole. In order,
  // what lets in a block of queries and counts it is its turn.
  static constexpr bool kCountsTiles = kPools && !kOrders;
  static constexpr bool kPlainScores = kForm == BwdForm::kPlain || kPools || kOrders || kSplits;
  using Params = std::conditional_t<kMasked, Masked<BwdParams>, BwdParams>;
  // Sums that are a pool, come in order, or are those of score terms have the columns of the class:
  // these forms lack the registers to leave columns out. Plain ones may keep them, too (BwdTile).
  static constexpr bool kDqHasClassCols =
      kPools || kOrders || !kPlainScores ||
      (kForm == BwdForm::kPlain && kBwdTile<kHeadDimClass>.keeps_dq_cols);
  using ScorePolicy = std::conditional_t<kPlainScores, PlainScores, TermScores<terms_of(kForm)>>;
  static constexpr bool kAdditive = kForm == BwdForm::kAdditive;
  // Here dS is not P ∘ (dP - delta), and what it consists of beside dP and delta waits for them in
  // shared memory, not in registers.
  static constexpr bool kStashesWeights = kForm == BwdForm::kScores;
  // Here dS comes from what stands in the place of P: P times the softcap's slope, or P with a sign
  // by which dV leaves out what is dropped.
  static constexpr bool kCaps = kForm == BwdForm::kSoftcap, kDrops = kForm == BwdForm::kDropout;
  static constexpr bool kWeighted = kCaps || kDrops;
  static constexpr float kScaleOfP = kStashesWeights ? kExactScale : 1.f;
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr BwdTile kTile = kBwdTile<kHeadDim>;
  static constexpr int kConsumers = kBwdConsumers;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kBwdBlockN, kStages = kTile.stages;
  // dV may begin with so many queries: their P is rounded beside the P from which dS comes.
  // With dropout there are fewer registers, and dV goes on with so many at a time.
  static constexpr int kEarly = kDrops ? 32 : kBlockM / 2;
  static constexpr int kConsumerThreads = 128 * kConsumers;
  // With dropout a second warpgroup of producers stands behind the consumers.
  static constexpr int kProducers = kDrops ? 2 : 1;
  static constexpr int kThreads = 128 * kProducers + kConsumerThreads;
  // LSE and delta are columns in bf16 alone, as three numbers of fp16 would not have their bits.
  // With 128 queries a pool has shared memory for these columns or for large bands. Short heads are
  // faster with the latter.
  static constexpr bool kMayFold = kTile.folds_rows && kDType == DType::kBf16;
  static constexpr bool kFoldsRows =
      kMayFold && kPlainScores && (kTile.block_m == 64 || !(kForm == BwdForm::kPooled || kMasked));
  // Where P is dropped, dS has delta alone, without dP, so with dropout only LSE is a column.
  static constexpr bool kFoldsLse = kFoldsRows || (kMayFold && kDrops);
  // A cap comes between Q Kᵀ and LSE, so with a softcap only delta is a column. With 128 queries
  // there is no room for it.
  static constexpr bool kFoldsDelta = kFoldsRows || (kMayFold && kTile.block_m == 64 && kCaps);
  // The ones that multiply these columns lie in registers, where there are any left.
  static constexpr bool kHoldsOnes = kTile.block_m == 64 || !(kSplits || kWeighted || kStretches);
  template <bool kFolds>
  using RowsOf =
      std::conditional_t<kFolds, RowColumns<Element, kBlockM, kHoldsOnes>, RowNumbers<kBlockM>>;
  using RowValues = RowTerms<RowsOf<kFoldsLse>, RowsOf<kFoldsDelta>>;
  struct Nothing {};
  template <bool kHolds>
  using HeldRows = std::conditional_t<kHolds && kPlainScores, OperandA<1, kHeadDim>, Nothing>;
  using HeldK = HeldRows<kTile.holds_k>;
  using HeldV = HeldRows<kTile.holds_v>;
  // The 64 K registers of a multiprocessor are dealt out as in the forward.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = kProducers == 2 ? 232 : 240;

  static constexpr int kTileCols = bwd_tile_cols(kHeadDim);
  using QTile = SmemTile<Element, kBlockM, kTileCols>;  // dO too
  using KTile = SmemTile<Element, kBlockN, kTileCols>;  // V too
  // It holds dSᵀ, with keys as rows; or dS, with queries as rows, as it leaves for the gradient of
  // a bias.
  using ScoreTile = std::conditional_t<kAdditive, SmemTile<Element, kBlockM, kBlockN>,
                                       SmemTile<Element, kBlockN, kBlockM>>;
  using Scores = Accumulator<1, kBlockM>;        // Sᵀ, dPᵀ of a consumer's 64 keys
  using ScoresOperand = OperandA<1, kBlockM>;    // the same, rounded: Pᵀ, dSᵀ
  using KeyGradient = Accumulator<1, kHeadDim>;  // dK, dV of a consumer's 64 keys

  static constexpr DqShare kDqShare = kBlockM == 64 * kConsumers ? DqShare::kRows : DqShare::kCols;
  static constexpr int kDqCols = kDqShare == DqShare::kRows ? kHeadDim : kHeadDim / kConsumers;
  // The columns of an operand start with a slab. Where half of K's columns do not, the second
  // consumer finds its half in a tile of its own.
  static constexpr bool kRepeatsKeys =
      kDqShare == DqShare::kCols && kDqCols % KTile::kSlabCols != 0;
  using QueryGradient = Accumulator<1, kDqCols>;  // a consumer's share of dQ: 64 queries
  static_assert(kDqShare == DqShare::kRows || kBlockM == 64);

  static constexpr int kTurnStages = 4;  // blocks of queries whose turn may have come
  // A band of the pool of dQ's sums has at most 16 KiB, or 8 KiB where columns or a mask take shared
  // memory.
  static constexpr bool kSmallBands = kBlockM == 128 && (kFoldsRows || kMasked);
  static constexpr int kBandRows =
      static_cast<int>(std::bit_floor((kSmallBands ? 2048u : 4096u) / kHeadDim));
  static constexpr int kBandStages = 2;
  // A warp takes on so many at a time.
  static constexpr int kBands = kSmallBands && kStretches ? 8 : 4;
  static constexpr int kShareRows = kBands * kBandRows;
  static_assert(!kStretches || kBwdStretchRows % kShareRows == 0);
  static_assert(!kStretches || kBwdStretchRows % kBlockM == 0);
  // Rounded sums take the place of those that have been read, from the start of the band. A second
  // slab with half of a step's 32 columns would come before its place has been read, so it lies
  // behind the sums.
  using BandSlab = SmemTile<Element, kBandRows, 64>;
  static constexpr int kBandBytes = kBandRows * kHeadDim * static_cast<int>(sizeof(float));
  static constexpr bool kSlabBehind = kHeadDim > 64 && kHeadDim % 32 != 0;
  static constexpr int kBandSlabStride = kSlabBehind ? kBandBytes : sizeof(BandSlab);
  using BiasTile = SmemTile<Element, kBlockM, kBlockN>;

  // A consumer that stores dS(i) has seen all dS(i - 1). Whoever stored that had finished
  // dQ(i - 3).
  static constexpr int kScoreStages = 3;
  // Of a bias; or of what dropout keeps, which is visited in step with dS.
  static constexpr int kTermStages = kDrops ? kScoreStages : kHeadDim <= 64 ? 1 : 2;
  // It holds some columns of dK or dV on their way out, in an empty stage of dS.
  using GradientTile = SmemTile<Element, kBlockN, 64>;
  static_assert(sizeof(GradientTile) <= sizeof(ScoreTile));

  using AnyScheduler = TileScheduler<kBlockN, TileOrder::kAsTold>;
  using Scheduler = std::conditional_t<
      kMasked, OrderedScheduler<AnyScheduler>,
      std::conditional_t<kAdditive, SharedBiasScheduler<AnyScheduler>, AnyScheduler>>;
  static_assert(!kMasked || kBlockN == kOrderedRows);
};

// Holds K from column kDqCols on, for the second consumer's share of dQ.
template <typename Traits, bool kRepeatsKeys = Traits::kRepeatsKeys>
struct BwdKeyStorage {};
template <typename Traits>
struct BwdKeyStorage<Traits, true> {
  alignas(1024) typename Traits::KTile right_k;
};

// Holds blocks of a bias, and what threads stash.
template <typename Traits, BwdForm kForm = Traits::kForm>
struct BwdTermStorage {};
template <typename Traits>
struct BwdTermStorage<Traits, BwdForm::kAdditive> {
  union {
    alignas(1024) typename Traits::BiasTile bias[Traits::kTermStages];
    // If the bias broadcasts the queries, this is what it adds to the scores of each consumer
    // thread's two keys.
    float2 key_bias[Traits::kConsumerThreads];
  };
};
template <typename Traits>
struct BwdTermStorage<Traits, BwdForm::kScores> {
  float4 stash[Traits::kBlockM / 8][Traits::kConsumerThreads];
};
template <typename Traits>
struct BwdTermStorage<Traits, BwdForm::kSoftcap> {
  // The rounded P of the queries with which dV does not begin.
  uint4 late_p[(Traits::kBlockM - Traits::kEarly) / 16][Traits::kConsumerThreads];
};

// Holds the blocks that were found, on their way to the loader; those that were loaded, beside
// row_values; and what the mask's rows say.
template <typename Traits, bool kMasked = Traits::kMasked>
struct BwdMaskStorage {};
template <typename Traits>
struct BwdMaskStorage<Traits, true> {
  static_assert(Traits::kBlockM <= 2 * kMaskTile && Traits::kBlockN == 2 * kMaskTile);
  static constexpr int kFound = 2;
  MaskRows<Traits::kBlockM> rows[Traits::kStages];
  FoundQueries found[kFound], of_q[Traits::kStages];
  RingBarriers<kFound> ring;
};

// Holds bands of dQ's sums on their way to dq.
template <typename Traits, bool kPools = Traits::kPools>
struct BwdPoolStorage {};
template <typename Traits>
struct BwdPoolStorage<Traits, true> {
  static constexpr int kBytes =
      Traits::kBandBytes + (Traits::kSlabBehind ? sizeof(typename Traits::BandSlab) : 0);
  alignas(1024) float bands[Traits::kBandStages][kBytes / sizeof(float)];
};

template <bool kAdditive>
struct BwdTermMaps : BwdTensorMaps {
  CUtensorMap dq;  // if its sums lie in a pool
};
template <>
struct BwdTermMaps<true> : BwdTensorMaps {
  CUtensorMap bias, dbias;  // if there is one, and its gradient is to be stored
};

// Holds what dropout keeps of the scores of each consumer thread (KeptBits::of_keys), and the words
// (DropoutHead::query_word) from which each of the warps that find it out comes to it.
template <typename Traits, bool kDrops = Traits::kDrops>
struct BwdDropoutStorage {};
template <typename Traits>
struct BwdDropoutStorage<Traits, true> {
  alignas(8) uint2 kept[Traits::kTermStages][Traits::kBlockM / 64][Traits::kConsumerThreads];
  alignas(16) uint32_t query_words[4][32];
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
  // Where dQ is added in order, a full stage of turn_ring says that it is a block's turn, and one
  // of added_ring that the block has been added. Nobody needs to say that a stage is empty: the
  // turn of a block comes once that of the stage's block before has been passed on.
  RingBarriers<Traits::kTurnStages> turn_ring, added_ring;
  RingBarriers<1> k_ring, v_ring;
  WorkQueue<BwdWork, 2> queue;
  // The score terms of a head and of the next one.
  alignas(ScorePolicy) unsigned char score_storage[2][sizeof(ScorePolicy)];
  RingBarriers<Traits::kTermStages> term_ring;  // of a bias, or of what is kept
  // With a pool of sums, a full stage of band_ring says that a band has come, and one of
  // summed_ring that the consumers have issued all reductions of a tile.
  RingBarriers<Traits::kBandStages> band_ring;
  RingBarriers<2> summed_ring;  // in step with the queue

  // Where the score terms of a query head of the work lie, once its first Q is there.
  __device__ __forceinline__ void* score_place(const BwdWork& work, int head) {
    return score_storage[(work.first_score + head - work.q.head) % 2];
  }
  __device__ __forceinline__ const ScorePolicy& score(const BwdWork& work, int head) {
    return *reinterpret_cast<const ScorePolicy*>(score_place(work, head));
  }

  // Sets to 0 what no load ever writes. All threads call it, before a barrier among them.
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
    ptx::fence_async_shared();
  }

  // helpers: how many threads read the queue beside the loader's and the consumers'.
  __device__ __forceinline__ void init_barriers(int helpers) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    // A stage is full when Q's bytes and row_values have come. Each thread of a warp writes
    // row_values, and each of the consumers' reads them.
    q_ring.init(1 + 32, 32 * kConsumerWarps);
    dout_ring.init(1, kConsumerWarps);
    // Whoever waits for all dS to be full knows which stage is empty. Only the copies that leave
    // for dbias have to say so.
    ds_ring.init(kConsumerWarps, 1);
    // With a pool, somebody may also have to say that there is a place in it.
    k_ring.init(1 + Traits::kCountsTiles, kConsumerWarps);
    v_ring.init(1, kConsumerWarps);
    turn_ring.init(1, 1);
    added_ring.init(kConsumerWarps, 1);
    queue.init(1 + helpers + 32 * kConsumerWarps);
    if constexpr (Traits::kAdditive) term_ring.init(1, kConsumerWarps);
    // Each thread of a warpgroup writes what is kept, and each of the consumers' reads it.
    if constexpr (Traits::kDrops) term_ring.init(128, 32 * kConsumerWarps);
    if constexpr (Traits::kMasked) mask.ring.init(1, 1);
    band_ring.init(1, 1);
    summed_ring.init(kConsumerWarps, 1);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_attn::sm90
