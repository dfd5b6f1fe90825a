// Tile sizes of the sm90 backward, by head-dim class.
#pragma once

#include "../cuda/dispatch.h"

namespace flash_attn::sm90 {

// A thread block has two consumer warpgroups of 64 keys each.
inline constexpr int kBwdConsumers = 2;
inline constexpr int kBwdBlockN = 64 * kBwdConsumers;

// Head dims above this belong to pairs of thread blocks (bwd_pair.cuh).
inline constexpr int kBwdMaxSingleHeadDim = 128;

struct BwdTile {
  int block_m;  // queries of an iteration
  int stages;   // blocks of Q, and of dO, in shared memory
  // Where a query sees at most pooled_keys in the mean, the sums of dQ may be a pool with places for
  // so many times the tiles that run at a time: for those that run, those that are converted, and
  // those whose thread blocks are late. More places would not stay in the L2 cache. 0: there is no
  // pool.
  double pool_rounds = 0;
  int pooled_keys = 0;
  double largest_causal_pool = 0;  // as kBwdLargestPool, where a causal mask lowers it
  bool pools_stretches = false;    // longer heads have a pool as well if windows are short
  // The same where the sums come in the same order every time; kBwdMostSeenInOrder as well.
  int queries_pooled_in_order = 0;
  // Where sums come in order, a causal mask has the last blocks of keys come first; but where so
  // many query heads or more share a kv head, the first ones. 0: never.
  int group_first_first = 0;
  bool folds_rows = false;  // LSE and delta are columns of the products (bwd_row_terms.cuh)
  // The sums of dQ have the columns of the class, where some could be left out: the branches between
  // reductions would hold up the products.
  bool keeps_dq_cols = false;
  // K, or V, of a consumer's keys is an operand in registers.
  bool holds_k = false, holds_v = false;
};

// dK and dV take kHeadDim registers of a thread, and S and dP take block_m. Together these are at
// most 192 of the 240 registers that a thread has, or of 232 with dropout.
template <int kHeadDim>
inline constexpr BwdTile kBwdTile = {};
template <>
inline constexpr BwdTile kBwdTile<48> = {.block_m = 128,
                                         .stages = 2,
                                         .pool_rounds = 3,
                                         .pooled_keys = 4096,
                                         .largest_causal_pool = 0.55,
                                         .folds_rows = true,
                                         .holds_k = true};
template <>
inline constexpr BwdTile kBwdTile<64> = {.block_m = 128,
                                         .stages = 2,
                                         .pool_rounds = 3,
                                         .pooled_keys = 3072,
                                         .largest_causal_pool = 0.55,
                                         .pools_stretches = true,
                                         .group_first_first = 8,
                                         .folds_rows = true};
template <>
inline constexpr BwdTile kBwdTile<80> = {.block_m = 64,
                                         .stages = 2,
                                         .pool_rounds = 2.5,
                                         .pooled_keys = 4096,
                                         .largest_causal_pool = 0.5,
                                         .pools_stretches = true,
                                         .folds_rows = true,
                                         .holds_k = true,
                                         .holds_v = true};
template <>
inline constexpr BwdTile kBwdTile<96> = {.block_m = 64,
                                         .stages = 2,
                                         .pool_rounds = 2.5,
                                         .pooled_keys = 4096,
                                         .largest_causal_pool = 0.4,
                                         .pools_stretches = true,
                                         .group_first_first = 4,
                                         .folds_rows = true,
                                         .keeps_dq_cols = true,
                                         .holds_k = true};
template <>
inline constexpr BwdTile kBwdTile<128> = {.block_m = 64,
                                          .stages = 2,
                                          .pool_rounds = 2.5,
                                          .pooled_keys = 4096,
                                          .largest_causal_pool = 0.3,
                                          .pools_stretches = true,
                                          .queries_pooled_in_order = 1024,
                                          .group_first_first = 4,
                                          .folds_rows = true,
                                          .keeps_dq_cols = true};

// A class's tiles in shared memory have so many columns.
constexpr int bwd_tile_cols(int head_dim_class) { return (head_dim_class + 31) / 32 * 32; }

// Where sequences are short, a pool of dQ's sums (bwd_dq_pool.cuh) spares memory traffic that
// counts: at most so many queries of a head see a tile, and the longest sequence of a varlen call
// has at most so many. A head has a multiple of kBwdPoolRows rows there, which is a multiple of
// every band's.
inline constexpr int kBwdPooledQueries = 4096, kBwdPooledVarlenQueries = 2048, kBwdPoolRows = 64;
// A pool's sums have the columns of the class. Heads of at most kBwdNarrowHeadDim have half of them
// or fewer, and a pool only where a query sees so many keys in the mean, or no varlen sequence has
// more queries.
inline constexpr int kBwdNarrowHeadDim = 32, kBwdNarrowPooledKeys = 1024;
// A pool that would have more than this of the rows that all sums take spares too little. Heads
// that share keys, and ones of more than kBwdLongCausalQueries with a causal mask in a dense call
// (BwdTile::largest_causal_pool), have lower limits.
inline constexpr double kBwdLargestPool = 0.7, kBwdLargestPoolOfGroup = 0.5;
inline constexpr int kBwdLongCausalQueries = 512;
// In a varlen call all sequences count as the longest. Together they may count as so many times the
// rows that there are: what is empty takes time, too.
inline constexpr double kBwdMostCountedRows = 2.5;
// Where heads share keys, a pool serves dense calls with at most so many query heads of a kv head,
// and so many queries. Otherwise sections of heads are better.
inline constexpr int kBwdLargestPooledGroup = 2, kBwdMostPooledOfGroup = 1024;
// Heads are long if sequences have so many queries in the mean, times the query heads that share
// keys.
inline constexpr int kBwdLongPooledQueries = 512;
// Where sums come in order, the tiles of a head wait for each other, and with a pool they run all
// at once. So there may be few: a query sees at most so many keys in the mean, and a key so many
// queries, as with full masks over 512 tokens or causal ones over 1,024, and a block more.
inline constexpr int kBwdMostSeenInOrder = 576;
// With a short window a head may be longer: its queries come in stretches of so many, whose sums
// are complete one after the other.
inline constexpr int kBwdStretchRows = 1024;

// The heads that come last may together read and add to so much, which is two to three times what
// the L2 cache has.
inline constexpr int64_t kBwdLastSectionBytes = 128 << 20;
// Where sums come in order and query heads share kv heads, so many kv heads run together at least,
// so that few blocks of one head wait for each other: with full masks; and where the first blocks
// of keys come first with causal ones.
inline constexpr int kBwdGroupsInOrder = 8, kBwdHeadsFirstFirst = 32;
// With fewer queries more is lost at the diagonals.
inline constexpr int kBwdLeastQueriesFirstFirst = 1536;

// Tiles may be split in two classes (bwd_split.cuh). kBwdSplitCost is what a split costs beside its
// queries, in queries: K and V are loaded once more, and its sums go to memory and back.
// kBwdMaxSplits is how many splits there may be for each multiprocessor, as they take memory.
inline constexpr int kBwdSplitClass = 128, kBwdNarrowSplitClass = 64;
inline constexpr int kBwdSplitWarps = 4 * kBwdConsumers;  // of a tile
inline constexpr int kBwdSplitCost = 256, kBwdMaxSplits = 4;

// Wider heads have two thread blocks of 64 keys each, and 64 queries an iteration. Their tiles go
// by the class of q and k.
struct BwdPairTile {
  int q_stages, dout_stages;  // slabs of 64 columns of Q, and of dO, in shared memory
  // dV and dK of a block are queued behind the products of the next block's scores and computed
  // beside their arithmetic, not in front of them. Q and dO stay for longer then.
  bool late_products;
  bool folds_rows;  // as BwdTile's; wider heads leave no room in shared memory
  // How many registers a thread has that computes dQ; P and dV; or dS and dK. What the last two
  // leave free holds slabs of K and V.
  int dq_registers, s_registers, d_registers;
  int group_first_first = 0;  // as BwdTile's
};
template <int kHeadDim>
inline constexpr BwdPairTile kBwdPairTile = {};
// Q is needed longer than dO: from S to dK.
template <>
inline constexpr BwdPairTile kBwdPairTile<192> = {.q_stages = 9,
                                                  .dout_stages = 6,
                                                  .late_products = true,
                                                  .folds_rows = true,
                                                  .dq_registers = 64,
                                                  .s_registers = 216,
                                                  .d_registers = 208,
                                                  .group_first_first = 8};
template <>
inline constexpr BwdPairTile kBwdPairTile<256> = {.q_stages = 8,
                                                  .dout_stages = 6,
                                                  .late_products = false,
                                                  .folds_rows = false,
                                                  .dq_registers = 72,
                                                  .s_registers = 208,
                                                  .d_registers = 208,
                                                  .group_first_first = 4};

// The widest class has a second form, in which a kernel of its own computes dQ (bwd_wide_dq.cuh).
// Then thread blocks are no pairs, and what dQ would take of registers and shared memory is free.
inline constexpr int kBwdDqApartClass = 256;
inline constexpr BwdPairTile kBwdDqApartTile = {.q_stages = 8,
                                                .dout_stages = 8,
                                                .late_products = false,
                                                .folds_rows = false,
                                                .dq_registers = 0,
                                                .s_registers = 240,
                                                .d_registers = 240};
// Its tiles have so many queries of dQ, and so many keys of dK and dV.
inline constexpr int kBwdDqApartBlockM = 128, kBwdDqApartBlockN = 64;
// This form computes the scores twice, which takes time for each key that a query sees. It spares
// what each query costs whatever it sees: sums of dQ that are zeroed, go to memory and back, and
// are converted. So it serves calls whose queries see at most so many keys in the mean: full masks
// over 512 keys, or causal ones over 1,024, and a block more. Where the bits shall be the same
// every time, sums in memory would have to come in order, which takes time for each key as well.
inline constexpr int kBwdDqApartKeys = 576, kBwdDqApartKeysInOrder = 1088;
// At the end of each of its kernels some multiprocessors have no work left. So the tiles of dK and
// dV come in at least so many rounds, or there is a multiprocessor for each tile of both kernels.
inline constexpr int kBwdDqApartRounds = 4;

// The gradient of a shared bias (bwd_bias.cuh) has so many blocks of Q and dO, and of K and V, in
// shared memory.
struct BwdBiasStages {
  int rows, keys;
};
template <int kHeadDim>
inline constexpr BwdBiasStages kBwdBiasStages = {};
template <>
inline constexpr BwdBiasStages kBwdBiasStages<64> = {.rows = 3, .keys = 5};
template <>
inline constexpr BwdBiasStages kBwdBiasStages<128> = {.rows = 2, .keys = 3};

// Calls with several score terms have one class, for head dims up to kBwdMaxSingleHeadDim. Terms
// that have kernels of their own have two classes, this one and a narrow one.
inline constexpr int kBwdScoresClass = 128, kBwdNarrowTermsClass = 64;

// Calls f.template operator()<class of q and k, class of v>(), for a call without score terms.
template <typename F>
auto with_bwd_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest > 32 && widest <= 48) return f.template operator()<48, 48>();
  if (widest <= 64) return f.template operator()<64, 64>();
  if (widest <= 80) return f.template operator()<80, 80>();
  if (widest <= 96) return f.template operator()<96, 96>();
  if (widest <= 128) return f.template operator()<128, 128>();
  if (widest <= 192 && head_dim_v <= 128) return f.template operator()<192, 128>();
  if (widest <= 192) return f.template operator()<192, 192>();
  return f.template operator()<256, 256>();
}

}  // namespace flash_attn::sm90
