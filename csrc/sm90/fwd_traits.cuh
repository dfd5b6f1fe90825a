// What the roles of the forward kernel share: types of tiles, a tile of queries to work on, shared
// memory.
#pragma once

#include <type_traits>

#include "../cuda/attn/block_range.cuh"
#include "../cuda/attn/online_softmax.cuh"
#include "../cuda/attn/seqlen.cuh"
#include "config.h"
#include "fwd.h"
#include "fwd_forms.cuh"
#include "ordered_scheduler.cuh"
#include "shared_bias_scheduler.cuh"
#include "tile/copy.cuh"
#include "tile/linear_term.cuh"
#include "tile/ring.cuh"
#include "tile/work_queue.cuh"

namespace flash_attn::sm90 {

// Columns of a tile in shared memory whose first `cols` take part in products: whole slabs.
constexpr int whole_slabs(int cols) { return (cols + 31) / 32 * 32; }

template <DType kElementType, int kHeadDimClass, int kHeadDimVClass, FwdTile kTileSizes,
          FwdForm kForm>
struct FwdTraits {
  static constexpr DType kDType = kElementType;
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass, kHeadDimV = kHeadDimVClass;
  static constexpr FwdTile kTile = kTileSizes;
  static constexpr bool kPieces = kForm == FwdForm::kPieces;
  static constexpr bool kPlainScores = has_plain_scores(kForm);
  static constexpr bool kMaxLogits = kForm == FwdForm::kMaxLogits;
  static constexpr bool kMasked = kForm == FwdForm::kMasked;
  using ScorePolicy = FwdScorePolicy<kForm>;
  using Params = std::conditional_t<kMasked, Masked<FwdParams>,
                                    std::conditional_t<kPieces, FwdInPieces, FwdParams>>;
  static constexpr bool kSoftcap = kForm == FwdForm::kSoftcap, kAlibi = kForm == FwdForm::kAlibi;
  static constexpr bool kStagedBias = kForm == FwdForm::kStagedBias;
  static constexpr bool kKeyBias = kForm == FwdForm::kKeyBias;
  static constexpr bool kDropout = kForm == FwdForm::kDropout;
  // Keys may lie in pages. In other forms no warp is free to load K, and producers of a class whose
  // rows are five slabs have no registers for that.
  static constexpr bool kReadsPages =
      (kPlainScores || kSoftcap || kAlibi || kForm == FwdForm::kScores) && kHeadDim != 160;
  // The keys of a tile of queries count from a multiple of this, but in pages from one of a box.
  // Dropout's mask wants a multiple of 32, a mask of tiles one of its tiles (KeyWalk::wait_values).
  static constexpr int kKeyAlignment = kMasked ? kTile.block_n : ScorePolicy::kGeneral ? 32 : 1;
  static constexpr int kBiasStages = kKeyBias || kHeadDim <= 64 ? 2 : 1;
  // S starts as a staged bias, and Q Kᵀ joins it. Else the bias is added beside the exponentials.
  static constexpr bool kStartsWithBias = kStagedBias && kHeadDim <= 64;
  static constexpr bool kAddsBias = kStagedBias && !kStartsWithBias;
  // Q takes on the softmax_scale, where that is a power of two, so that a bias needs no factor.
  // fp16 would lose bits of small numbers.
  static constexpr bool kScalesQ = kStartsWithBias && kDType == DType::kBf16;
  static_assert(!kStartsWithBias || kBiasStages == kTile.stages);  // in step with K
  static constexpr int kBlockM = kTile.block_m(), kBlockN = kTile.block_n;
  static constexpr int kConsumers = kTile.consumers, kStages = kTile.stages;
  static constexpr int kQStages = kTile.q_stages, kOutputSlabs = kTile.output_slabs;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers();
  static constexpr int kConsumerRegisters = kTile.consumer_registers();

  using QTile = SmemTile<Element, kBlockM, whole_slabs(kHeadDim)>;
  using KTile = SmemTile<Element, kBlockN, whole_slabs(kHeadDim)>;
  using VTile = SmemTile<Element, kBlockN, whole_slabs(kHeadDimV)>;
  using OutputSlab = SmemTile<Element, kBlockM, VTile::kSlabCols>;
  static constexpr int kOutputCols = kOutputSlabs * OutputSlab::kCols;
  static_assert(VTile::kCols % kOutputCols == 0);
  // Of a consumer's queries. 96 columns are a slab of 64 and one of 32: in three of 32, TMA would
  // read half as many rows again.
  using BiasTile = SmemTile<Element, 64, kBlockN / 64 * 64>;
  static constexpr int kBiasRest = kBlockN % 64;  // columns behind these
  using BiasRestTile = SmemTile<Element, 64, 32>;
  static_assert(!kStagedBias || kBiasRest == 0 || kBiasRest == BiasRestTile::kCols);
  static constexpr int kBiasMaps = !kStagedBias ? 0 : kBiasRest == 0 ? 1 : 2;
  // With a second tile of Q, the next tile's first scores come before this one's end; else after.
  static constexpr bool kStartsEarly = kQStages > 1;
  using Scores = Accumulator<1, kBlockN>;
  using Output = Accumulator<1, kHeadDimV>;
  // Powers of two that row maxima may rise before a block is computed again. Large P round as small
  // ones do, so the type sets the limit: fp16 ends below 2¹⁶. bf16 goes further than is of use, and
  // with 2²⁰ sums of P stay far from the end of fp32.
  static constexpr int kSlackLog2 = kDType == DType::kFp16 ? 15 : 20;
  using Softmax =
      OnlineSoftmax<2, kSlackLog2, std::conditional_t<kMaxLogits, LogitRecord<2>, NoRecord>>;
  using Scheduler =
      std::conditional_t<kStagedBias, SharedBiasScheduler<TileScheduler<kBlockM>>,
                         std::conditional_t<kMasked, OrderedScheduler<TileScheduler<kBlockM>>,
                                            TileScheduler<kBlockM>>>;
  static_assert(!kMasked || kBlockM == kOrderedRows);
  static_assert(!kPieces || kBlockM == PackedHeads::kTileRows);
};

enum NamedBarrier : int {  // 0 is __syncthreads
  kTurn = 1,               // + consumer, of at most three
  kCleared = 4             // + consumer
};

// How many pieces the keys of a tile of queries are cut into.
template <typename Traits>
__host__ __device__ __forceinline__ int num_pieces(const FwdParams& params) {
  if constexpr (Traits::kPieces) return params.num_splits;
  return 1;
}

// How the rows of a tile of the call are dealt out to heads.
template <typename Traits>
__host__ __device__ __forceinline__ PackedHeads
packed_heads(const typename Traits::Params& params) {
  if constexpr (Traits::kPieces) return params.packed;
  return {};
}

// How many queries of each head a tile has.
template <typename Traits>
__device__ __forceinline__ int queries_of_tile(const typename Traits::Params& params) {
  if constexpr (Traits::kPieces) return params.packed.tokens();
  return Traits::kBlockM;
}

// Whether Q takes on the softmax_scale of the call: a power of two near enough to 1 for bf16 to
// lose nothing.
template <typename Traits>
__device__ __forceinline__ bool scales_q(const FwdParams& params) {
  const uint32_t bits = __float_as_uint(fabsf(params.softmax_scale));
  return Traits::kScalesQ && (bits & 0x7fffff) == 0 && bits >= __float_as_uint(0x1p-16f) &&
         bits <= __float_as_uint(1.f);
}
// What turns an S into a score.
template <typename Traits>
__device__ __forceinline__ float scale_of_scores(const FwdParams& params) {
  return scales_q<Traits>(params) ? 1.f : params.softmax_scale;
}

// A tile to work on; written by one warp, read by all others.
struct FwdWork {
  AttentionWindow window;  // keys count from first_key
  BlockRange range;        // of keys
  MatrixPlace q, kv;       // q: out as well
  float* lse;
  int first_row;  // of the tile's queries, within the sequence
  int segment_q;  // rows to write
  int first_key;  // within the sequence
  int batch_idx;

  __device__ __forceinline__ bool has_keys() const { return range.end > range.begin; }
};

// Blocks of keys are walked over from the last to the first. With ALiBi scores rise towards the
// diagonal, and on the way there each block would raise the maxima of its rows, which costs another
// pass over it: so the walk begins at the diagonal of the tile's last query and goes on with the
// last block behind the first one. This is how many blocks lie behind the one that it begins with.
// diagonal: the key that query 0 meets on it.
template <typename Traits>
__device__ __forceinline__ int turned_blocks(const FwdWork& work, int64_t diagonal) {
  if constexpr (!Traits::kAlibi) return 0;
  const int last = work.range.end - 1;
  const int64_t block =
      (diagonal + work.first_row + Traits::kBlockM - 1 - work.first_key) / Traits::kBlockN;
  return last - static_cast<int>(min(max(block, int64_t{work.range.begin}), int64_t{last}));
}
// The share of a thread's sum that a P may reach without being exact (OnlineSoftmax::step_ahead),
// when `done` of the walk's blocks have been summed. Sums are evened out behind the first one, so a
// thread's sum is a fourth of its row's. The share is an eighth of what the sum will be in the end,
// if each block adds as much as the first, and at least one and a half times what the first one
// added: the fewer keys a row has, the more each of them weighs in any case. (An eighth of the sum
// so far would make nearly every P above 1 of the first blocks exact, though few of those keys come
// to dominate their row, and each takes a scan of S and a rescale of O.)
__device__ __forceinline__ float share_of_sum(int done, int blocks) {
  constexpr float kOfWhole = 0.125f, kOfFirst = 1.5f;
  const float in_the_end = fmaxf(kOfWhole * static_cast<float>(blocks), kOfFirst);
  return fminf(__fdividef(in_the_end, static_cast<float>(done)), kOfFirst);
}
// The block that comes in the place of block n.
__device__ __forceinline__ int block_in_place(const FwdWork& work, int turned, int n) {
  const int block = n - turned;
  return block < work.range.begin ? block + work.range.end - work.range.begin : block;
}

// What a launch knows of its tiles, beside their order.
struct FwdTiles {
  int num_tiles;
  Count group;  // heads_q / heads_kv
};

// rows_done: of the tile's place, how many have been worked on as tiles before.
template <typename Traits>
__device__ __forceinline__ FwdWork make_work(const typename Traits::Params& params,
                                             const TileCoordinates& tile, int piece,
                                             const SeqlenInfo& seqlen, const Count& group,
                                             int key_alignment, int rows_done = 0) {
  const int first_row = tile.block * queries_of_tile<Traits>(params) + rows_done;
  int head = tile.head;  // the first of those that share it
  if constexpr (Traits::kPieces) {
    const int tiles = params.packed.tiles(group);
    head = tile.head / tiles * group + tile.head % tiles * params.packed.heads();
  }
  // Keys count from the first one that any of the tile's queries sees, and end with the last: what
  // nobody sees is not read. Its P is 0, but 0 · NaN would reach O.
  const AttentionWindow all(params, seqlen.len_q, seqlen.len_k);
  const int end_row = min(first_row + queries_of_tile<Traits>(params), seqlen.len_q);
  const int first_key = all.first_key(first_row) & -key_alignment;
  const int num_keys = first_row < end_row ? max(all.end_key(end_row - 1) - first_key, 0) : 0;
  const int64_t diagonal = seqlen.diagonal(params);
  const AttentionWindow window(seqlen.len_q, num_keys, diagonal - first_key, params.window_left,
                               params.window_right);
  const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
  BlockRange range = BlockRange::of_keys<Traits::kBlockM, Traits::kBlockN>(window, first_row);
  float* lse = params.lse + tile.batch_idx * params.lse_batch_stride +
               head * params.lse_head_stride + seqlen.q_begin;
  if (Traits::kPieces && params.num_splits > 1) {
    range = range.piece(piece, params.num_splits);
    const int sequences = varlen_q ? 1 : params.batch, sequence = varlen_q ? 0 : tile.batch_idx;
    const int64_t rows = varlen_q ? params.total_q : params.seqlen_q;
    const int64_t result = int64_t{piece} * sequences + sequence;
    lse = params.partial.lse + (result * params.heads_q + head) * rows + seqlen.q_begin;
  }
  return {
      .window = window,
      .range = range,
      .q = {.box = {varlen_q ? params.total_q : params.seqlen_q, seqlen.q_begin, seqlen.segment_q},
            .head = head,
            .batch = varlen_q ? 0 : tile.batch_idx},
      .kv = {.box = {varlen_k ? params.total_k : params.seqlen_k, seqlen.k_begin + first_key,
                     num_keys},
             .head = head / group,
             .batch = varlen_k ? 0 : SeqlenInfo::kv_row(params, tile.batch_idx)},
      .lse = lse,
      .first_row = first_row,
      .segment_q = seqlen.segment_q,
      .first_key = first_key,
      .batch_idx = tile.batch_idx};
}

// Of keys in pages: its phase ends once a tile, when the tile's last block of K is due.
template <typename Traits, bool kReadsPages = Traits::kReadsPages>
struct FwdPageStorage {};
template <typename Traits>
struct FwdPageStorage<Traits, true> {
  uint64_t last_k;
};

// rows_done: how many rows of its sequence behind the start of a tile have been worked on, where
// heads share tiles. It is here for want of registers of the warp that takes tiles.
// missing_keys: of each K in shared memory that lies in pages, a bit for each eight keys whose page
// is missing.
template <typename Traits, bool kPieces = Traits::kPieces>
struct FwdPieceStorage {};
template <typename Traits>
struct FwdPieceStorage<Traits, true> {
  int rows_done;
  uint32_t missing_keys[Traits::kStages];
};

// The queue by which tiles come to all warps. Each loop follows it with a ring of its own, not with
// a WorkReader: a consumer gives a tile back when the next one is under way, and the warp that
// writes it loads K in between.
inline constexpr int kFwdWorkStages = 3;
using FwdWorkQueue = WorkQueue<FwdWork, kFwdWorkStages>;
using FwdWorkStage = FwdWorkQueue::Stage;

// The last columns of its blocks, where they are not a multiple of 64.
template <typename Traits, bool kHasRest = (Traits::kBiasMaps > 1)>
struct FwdBiasRestStorage {};
template <typename Traits>
struct FwdBiasRestStorage<Traits, true> {
  alignas(1024) typename Traits::BiasRestTile bias_rest[Traits::kConsumers][Traits::kBiasStages];
};
// Blocks of a staged bias. Each consumer has its own, so that whoever comes first need not wait for
// the others.
template <typename Traits, bool kStaged = Traits::kStagedBias>
struct FwdBiasStorage {};
template <typename Traits>
struct FwdBiasStorage<Traits, true> : FwdBiasRestStorage<Traits> {
  alignas(1024) typename Traits::BiasTile bias[Traits::kConsumers][Traits::kBiasStages];
  RingBarriers<Traits::kBiasStages> bias_rings[Traits::kConsumers];
};

// What a bias of the keys alone adds to the scores of each block of K, in the unit of S. Behind the
// bias's end it is -inf.
template <typename Traits, bool kKeyBias = Traits::kKeyBias>
struct FwdKeyBiasStorage {};
template <typename Traits>
struct FwdKeyBiasStorage<Traits, true> {
  alignas(16) float of_keys[Traits::kBiasStages][Traits::kBlockN];
  RingBarriers<Traits::kBiasStages> ring;
};

// Dropout's words of the keys (DropoutHead::key_word) of each block of V.
template <typename Traits, bool kDropout = Traits::kDropout>
struct FwdDropoutStorage {};
template <typename Traits>
struct FwdDropoutStorage<Traits, true> {
  alignas(16) uint32_t key_words[Traits::kStages][Traits::kBlockN / 4];
};

// A block of keys that the mask does not hide from a tile of queries.
class FoundKeys {
 public:
  // What a consumer would else have to read from shared memory while the tensor cores wait.
  struct Facts {
    bool is_last;
    bool is_cut;    // windows or lengths hide some of its keys from some of the tile's queries
    bool is_ahead;  // its first keys lie in front of what any of the tile's queries sees
  };

  FoundKeys() = default;
  // n is the block's number, and states are those of the mask's tiles in it (BlockMask::states()).
  // share: share_of_sum().
  __device__ __forceinline__ FoundKeys(int n, uint32_t states, Facts facts, float share)
      : bits_(static_cast<uint32_t>(n) << 11 | states << 3 | facts.is_ahead << 2 |
              facts.is_cut << 1 | facts.is_last),
        share_(share) {}

  __device__ __forceinline__ int n() const { return static_cast<int>(bits_ >> 11); }
  __device__ __forceinline__ bool is_last() const { return (bits_ & 1) != 0; }
  __device__ __forceinline__ bool is_cut() const { return (bits_ & 2) != 0; }
  __device__ __forceinline__ bool is_ahead() const { return (bits_ & 4) != 0; }
  __device__ __forceinline__ float share() const { return share_; }
  __device__ __forceinline__ FoundKeys of_first_lane() const {
    FoundKeys keys;
    keys.bits_ = __shfl_sync(~0u, bits_, 0);
    keys.share_ = __shfl_sync(~0u, share_, 0);
    return keys;
  }
  // The states of the kTiles tiles that a consumer's queries meet in the block.
  template <int kTiles>
  __device__ __forceinline__ uint32_t states_of(int consumer) const {
    return bits_ >> (3 + 2 * kTiles * consumer) & ((1 << 2 * kTiles) - 1);
  }

 private:
  uint32_t bits_;
  float share_;
};

// `found` holds blocks on their way from the warp that finds them to those that load K and V.
// `of_k` says of each K in shared memory which block it is.
template <typename Traits, bool kMasked = Traits::kMasked>
struct FwdMaskStorage {};
template <typename Traits>
struct FwdMaskStorage<Traits, true> {
  static_assert(Traits::kBlockM == 2 * kMaskTile && Traits::kBlockN <= 2 * kMaskTile);
  // They are few, since the warp that finds blocks runs ahead by so many: where a counter deals
  // tiles out, it takes the next tile that much earlier.
  static constexpr int kFound = 2;
  FoundKeys found[kFound], of_k[Traits::kStages];
  RingBarriers<kFound> ring;
};

// The columns that add ALiBi to S where it is linear in the key. As a base class they lie in front
// of the tiles, which gives memcheck the room that it wants behind them (TermColumns).
template <typename Traits, bool kAlibi = Traits::kAlibi>
struct FwdAlibiStorage {};
template <typename Traits>
struct FwdAlibiStorage<Traits, true> {
  LinearTerm<typename Traits::Element, Traits::kBlockN> alibi;
};

template <typename Traits>
struct FwdSharedStorage : FwdBiasStorage<Traits>, FwdAlibiStorage<Traits> {
  using ScorePolicy = typename Traits::ScorePolicy;

  alignas(1024) typename Traits::QTile q[Traits::kQStages];
  alignas(1024) typename Traits::KTile k[Traits::kStages];
  alignas(1024) typename Traits::VTile v[Traits::kStages];
  alignas(1024) typename Traits::OutputSlab out[Traits::kOutputSlabs];
  [[no_unique_address]] FwdDropoutStorage<Traits> dropout;
  [[no_unique_address]] FwdKeyBiasStorage<Traits> key_bias;
  [[no_unique_address]] FwdMaskStorage<Traits> mask;
  [[no_unique_address]] FwdPageStorage<Traits> pages;
  [[no_unique_address]] FwdPieceStorage<Traits> pieces;
  FwdWorkQueue queue;
  alignas(ScorePolicy) unsigned char score_storage[kFwdWorkStages][sizeof(ScorePolicy)];
  RingBarriers<Traits::kQStages> q_ring;
  RingBarriers<Traits::kStages> k_ring, v_ring;

  // The score terms of the tile in this stage, which are there once its Q is.
  __device__ __forceinline__ const ScorePolicy& score(int stage) const {
    return *reinterpret_cast<const ScorePolicy*>(score_storage[stage]);
  }

  // Zeroes what no load ever writes. All threads call it, before a barrier among them.
  __device__ __forceinline__ void zero_absent_slabs(const FwdParams& params) {
    using QTile = typename Traits::QTile;
    using VTile = typename Traits::VTile;
    const bool none_is_absent = params.head_dim > QTile::kCols - QTile::kSlabCols &&
                                params.head_dim_v > VTile::kCols - VTile::kSlabCols;
    if (none_is_absent) return;
    const auto zero = [](auto& tile, int num_cols) {
      sm90::zero_absent_slabs(tile, num_cols, threadIdx.x, Traits::kThreads);
    };
    for (auto& tile : q) zero(tile, params.head_dim);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      zero(k[stage], params.head_dim);
      zero(v[stage], params.head_dim_v);
    }
    ptx::fence_async_shared();
  }

  __device__ __forceinline__ void init_barriers(bool in_pages) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    // Whatever threads write, each thread that reads it releases, as racecheck follows nothing
    // else. Of the loaders one thread each reads the queue for Q, for V, for a staged bias and,
    // with a mask, for K. A whole warp reads it for a key bias or for dropout's words, and may do so
    // for each of K and V that lie in pages.
    constexpr int kWarpReaders = Traits::kKeyBias || Traits::kDropout ? 32 : 0;
    constexpr int kOthers = 32 * kConsumerWarps + kWarpReaders;
    queue.init(kOthers + (Traits::kReadsPages && in_pages
                              ? 1 + 2 * 32
                              : 2 + (Traits::kStagedBias || Traits::kMasked)));
    q_ring.init(1, kConsumerWarps);
    k_ring.init(1, kConsumerWarps);
    v_ring.init(Traits::kDropout ? 1 + 32 : 1, (Traits::kDropout ? 32 : 1) * kConsumerWarps);
    if constexpr (Traits::kStagedBias) {
      for (auto& ring : this->bias_rings) ring.init(1, 4);
    }
    if constexpr (Traits::kKeyBias) key_bias.ring.init(32, 32 * kConsumerWarps);
    if constexpr (Traits::kMasked) mask.ring.init(1, 2);
    if constexpr (Traits::kReadsPages) ptx::mbarrier_init(pages.last_k, 1);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_attn::sm90
