// What the roles of the backward kernel for wide heads share: types of tiles, shared memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "bwd_config.h"
#include "bwd_found_queries.cuh"
#include "bwd_pair_scores.cuh"
#include "bwd_row_terms.cuh"
#include "bwd_work.cuh"
#include "ordered_scheduler.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "tile/ring.cuh"
#include "tile/work_queue.cuh"

namespace flash_attn::sm90 {

// The forms, each an instance of its own: dQ's sums come in any order; they come in the same order
// every time (bwd_dq_order.cuh); another kernel computes dQ (bwd_wide_dq.cuh), and a thread block is
// alone; or a mask's hidden tiles are passed over (bwd_pair_masked.cuh).
enum class BwdPairForm { kPlain, kOrdered, kWithoutDq, kMasked };

template <DType kElementType, int kHeadDimClass, int kHeadDimVClass, BwdPairForm kForm>
struct BwdPairTraits {
  static constexpr bool kOrders = kForm == BwdPairForm::kOrdered,
                        kHasDq = kForm != BwdPairForm::kWithoutDq,
                        kMasked = kForm == BwdPairForm::kMasked;
  static constexpr bool kDqHasClassCols = kOrders;  // as BwdTraits's
  using Params = std::conditional_t<kMasked, Masked<BwdParams>, BwdParams>;
  static constexpr DType kDType = kElementType;
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass, kHeadDimV = kHeadDimVClass;
  static constexpr BwdPairTile kTile = kHasDq ? kBwdPairTile<kHeadDim> : kBwdDqApartTile;
  static constexpr int kBlocks = kHasDq ? 2 : 1;  // of a cluster
  static constexpr int kBlockM = 64, kBlockN = 64, kPairN = kBlocks * kBlockN;
  static constexpr int kConsumerThreads = kHasDq ? 384 : 256, kThreads = 128 + kConsumerThreads;
  static constexpr int kProducerRegisters = 24, kDqRegisters = kTile.dq_registers,
                       kSRegisters = kTile.s_registers, kDRegisters = kTile.d_registers;
  static_assert(kProducerRegisters + kDqRegisters + kSRegisters + kDRegisters <= 512);
  static_assert(kHasDq || kPairN == kBwdDqApartBlockN);

  // All operands lie in slabs of 64 rows and 64 columns, each in a stage of its own of its ring.
  static constexpr int kSlabCols = 64;
  using Slab = SmemTile<Element, 64, kSlabCols>;
  static constexpr int kSlabs = kHeadDim / kSlabCols, kSlabsV = kHeadDimV / kSlabCols;
  static constexpr int kQStages = kTile.q_stages, kDoutStages = kTile.dout_stages;
  static constexpr int kStages = 2;      // of what a block of queries has one of
  static constexpr int kTurnStages = 4;  // blocks of queries whose turn may have come
  static constexpr bool kFoldsRows = kTile.folds_rows && kDType == DType::kBf16;
  using Rows =
      std::conditional_t<kFoldsRows, RowColumns<Element, kBlockM, true>, RowNumbers<kBlockM>>;
  using RowValues = RowTerms<Rows, Rows>;

  // S and D hold slabs of K and of V as operands in registers: as many as they have room for beside
  // dV or dK, the scores, the same rounded, and what else a thread keeps. A product of 64 columns
  // whose left operand lies in shared memory takes all that can be read there, and beside it nobody
  // else loads or stores.
  static constexpr int held_slabs(int slabs, int gradient_cols, int registers, int others) {
    constexpr int kScores = kBlockM / 2 + kBlockM / 4;
    const int left = registers - kScores - gradient_cols / 2 - others;
    return std::min(slabs, std::max(left, 0) / (kSlabCols / 4));
  }
  static constexpr int kHeldSlabsK = held_slabs(kSlabs, kHeadDimV, kSRegisters, 36),
                       kHeldSlabsV = held_slabs(kSlabsV, kHeadDim, kDRegisters, 28);
  // dQ goes to the two blocks of a cluster by slabs. With an odd number of them the one in the
  // middle goes to either in turn; each block has the columns of the other's keys that it may need.
  // A block that is alone has one slab of each, which nobody touches.
  static constexpr int kPeerSlabs = kHasDq ? (kSlabs + 1) / 2 : 1;
  static constexpr int kPeerStages = kHasDq ? kStages : 1;

  using ProbabilityTile = SmemTile<__half, kBlockN, kBlockM>;  // in the place of dS
  using Exact = std::conditional_t<kDType == DType::kFp16, UnsignedHalfScores, HalfScores>;
  using Scores = Accumulator<1, kBlockM>;           // Sᵀ, dPᵀ
  using ScoresOperand = OperandA<1, kBlockM>;       // the same, rounded: Pᵀ, dSᵀ
  using QueryGradient = Accumulator<1, kSlabCols>;  // a slab of dQ

  using TilesAsTold = TileScheduler<kPairN, TileOrder::kAsTold>;
  using Scheduler = std::conditional_t<kMasked, OrderedScheduler<TilesAsTold>, TilesAsTold>;
  static_assert(!kMasked || kPairN == kOrderedRows);
};

// Which keys a thread block of a cluster loads for a tile, and how many columns of them. A block
// that has none of the sequence's keys loads nothing, as a box beyond the sequence must not be
// asked for. Neither block does where no query sees the keys of the pair.
template <typename Traits>
struct BwdPairKeys {
  int first_key, peer_first_key;
  int k_cols, v_cols, peer_k_cols;

  // The first of the peer's columns that thread block `rank` may need.
  __device__ __forceinline__ static int first_peer_col(int rank) {
    return rank * (Traits::kSlabs - Traits::kPeerSlabs) * Traits::kSlabCols;
  }
  // How many columns it needs of the peer's keys.
  __device__ __forceinline__ static int peer_cols(const BwdParams& params, int rank) {
    return Traits::kHasDq ? max(params.head_dim - first_peer_col(rank), 0) : 0;
  }

  __device__ __forceinline__ BwdPairKeys(const BwdParams& params, const BwdWork& work, int rank)
      : first_key(work.first_key),
        peer_first_key(first_key + (1 - 2 * rank) * Traits::kBlockN),
        k_cols(loads(work, first_key) ? params.head_dim : 0),
        v_cols(loads(work, first_key) ? params.head_dim_v : 0),
        peer_k_cols(loads(work, peer_first_key) ? peer_cols(params, rank) : 0) {}

 private:
  __device__ __forceinline__ static bool loads(const BwdWork& work, int key) {
    return work.has_queries() && key < work.seqlen.len_k;
  }
};

// The number of a tile, as the smallest copy to another thread block.
struct alignas(16) TileNumber {
  int number;
};

// Holds the blocks of queries that were found, on their way to those who load them and to dQ; and
// those that were loaded, beside row_values.
template <typename Traits, bool kMasked = Traits::kMasked>
struct BwdPairMaskStorage {};
template <typename Traits>
struct BwdPairMaskStorage<Traits, true> {
  // dQ reads a block once S and D are done with it, which may be two further on by then.
  static constexpr int kFound = 4;
  FoundQueries found[kFound], of_rows[Traits::kStages];
  RingBarriers<kFound> ring;
};

// Sets the slabs behind num_cols columns to 0. Thread `thread` of kThreads calls it.
template <int kThreads, typename Slab, int kSlabs>
__device__ __forceinline__ void zero_slabs(Slab (&slabs)[kSlabs], int num_cols, int thread) {
  int col = 0;
  for (Slab& slab : slabs) {
    zero_absent_slabs(slab, num_cols - col, thread, kThreads);
    col += Slab::kCols;
  }
}

template <typename Traits>
struct BwdPairSharedStorage {
  using Slab = typename Traits::Slab;

  alignas(1024) Slab k[Traits::kSlabs];
  alignas(1024) Slab v[Traits::kSlabsV];
  alignas(1024) Slab peer_k[Traits::kPeerSlabs];
  alignas(1024) Slab q[Traits::kQStages];
  alignas(1024) Slab dout[Traits::kDoutStages];
  alignas(1024) Slab scores[Traits::kStages];  // P, in its place dS; keys are rows
  alignas(1024) Slab peer_ds[Traits::kPeerStages];
  typename Traits::RowValues row_values[Traits::kStages];
  [[no_unique_address]] BehindRows<typename Traits::RowValues> behind_rows;
  RingBarriers<Traits::kQStages> q_ring;
  RingBarriers<Traits::kDoutStages> dout_ring;
  RingBarriers<Traits::kStages> row_ring;
  // A stage of scores and peer_ds is full of P, and then of dS; p_ring says when it is empty again.
  RingBarriers<Traits::kStages> p_ring, ds_ring;
  RingBarriers<1> k_ring, v_ring;
  // Where dQ is added in order, a full stage of turn_ring says that it is this block's turn, and
  // one of added_ring that its sums have been added. As there, no stage is said to be empty.
  RingBarriers<Traits::kTurnStages> turn_ring, added_ring;
  // The numbers of tiles, as the first thread block of the cluster tells them to the second one.
  RingBarriers<Traits::kStages> number_ring;
  TileNumber numbers[Traits::kStages];
  WorkQueue<BwdWork, Traits::kStages> queue;
  [[no_unique_address]] BwdPairMaskStorage<Traits> mask;

  __device__ __forceinline__ auto& p(int stage) {
    return reinterpret_cast<typename Traits::ProbabilityTile&>(scores[stage]);
  }

  // Sets to 0 what no load ever writes. All threads call it, before a barrier among them.
  __device__ __forceinline__ void zero_absent_slabs(const BwdParams& params, int rank) {
    zero_slabs<Traits::kThreads>(k, params.head_dim, threadIdx.x);
    zero_slabs<Traits::kThreads>(v, params.head_dim_v, threadIdx.x);
    // With a mask these columns, kept from here on, would take a register that K's loader lacks.
    const int peer_cols = Traits::kMasked ? 0 : BwdPairKeys<Traits>::peer_cols(params, rank);
    zero_slabs<Traits::kThreads>(peer_k, peer_cols, threadIdx.x);
    ptx::fence_async_shared();
  }

  __device__ __forceinline__ void init_barriers() {
    constexpr int kWarps = 4;  // of a warpgroup
    q_ring.init(1, 2 * kWarps);
    dout_ring.init(1, 2 * kWarps);
    row_ring.init(32, 32 * 2 * kWarps);             // each thread writes or reads LSE or delta
    p_ring.init(kWarps, Traits::kBlocks * kWarps);  // both read dS; or D alone reads P
    ds_ring.init(kWarps, 1);
    // Each lane of a loading warp may write zeros. Each thread of D, who comes last to K, or of S,
    // who does to V, reads what it stores. Each of the other role has read the slabs that it holds:
    // both have met in a barrier since, but racecheck follows no chain of a barrier and an arrival.
    k_ring.init(32, 32 * kWarps * (1 + (Traits::kHeldSlabsK > 0)));
    v_ring.init(32, 32 * kWarps * (1 + (Traits::kHeldSlabsV > 0)));
    turn_ring.init(1, 1);
    added_ring.init(kWarps, 1);
    number_ring.init(1, 1);
    // Two threads load, and a lane of each warp of dQ reads for the others.
    if constexpr (Traits::kMasked) mask.ring.init(1, 2 + kWarps);
    // The two warps that load, who waits for turns, and the consumers.
    queue.init(2 * 32 + 32 * Traits::kOrders + Traits::kConsumerThreads);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_attn::sm90
