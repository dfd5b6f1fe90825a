// Tile sizes of the sm90 forward, by head-dim class.
#pragma once

#include <cstdint>

#include "../cuda/dispatch.h"

namespace flash_attn::sm90 {

using cuda::with_dtype;

// Calls f.template operator()<class of q and k, class of v>(). Beside the classes of all kernels
// there are 48, 80 and 160: on head dims of these that models use, the next class would spend a
// sixth to a quarter of its products on zeros. 192 has one with a narrower v of 128. Any other v is
// filled up with zeros.
template <typename F>
auto with_head_dim_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest <= 48) return f.template operator()<48, 48>();
  if (widest > 64 && widest <= 80) return f.template operator()<80, 80>();
  if (head_dim > 128 && head_dim <= 192 && head_dim_v <= 128) {
    return f.template operator()<192, 128>();
  }
  if (widest > 128 && widest <= 160) return f.template operator()<160, 160>();
  return cuda::with_head_dim_class(
      widest, [&]<int kClass> { return f.template operator()<kClass, kClass>(); });
}

struct FwdTile {
  int consumers;  // warpgroups that compute, 64 queries each
  int block_n;    // keys of an iteration
  int stages;     // tiles of K, and of V, in shared memory
  int q_stages;   // tiles of Q; with two, a tile begins before the one before has ended
  // Slabs of O on its way out, of 64 columns each (of 32 for d = 80, 96 and 160). Together their
  // columns divide those of O.
  int output_slabs;
  bool ordered;  // consumers take turns at the tensor cores
  // How many thread blocks share a multiprocessor. With one, the next P is made while the tensor
  // cores still read this one. Then ptxas serialises wgmma if S, O and two P take more than about
  // four fifths of a thread's registers: 195 of 240. With two, one's products run beside the
  // other's softmax and tile ends, so a consumer does one thing after the other and `ordered` is
  // false.
  int blocks = 1;

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // A multiprocessor has 64 K registers, and the producers have enough with the rest. setmaxnreg
  // deals with what the block got at the start, the same for each thread in eights: asking for more
  // hangs.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const {
    return blocks == 2 ? 104 : consumers == 3 ? 160 : 240;
  }
};

template <int kHeadDim, int kHeadDimV>
inline constexpr FwdTile kFwdTile = {};

// docs/kernels/sm90-forward.md has the speed of each tile, and of what was tried beside it.
//
// Four consumers would be a little faster for few queries, but have no registers for exponentials
// ahead of the maxima, which keep dominant keys exact (OnlineSoftmax::step_ahead).
template <>
inline constexpr FwdTile kFwdTile<48, 48> = {
    .consumers = 3, .block_n = 96, .stages = 3, .q_stages = 2, .output_slabs = 1, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<64, 64> = {
    .consumers = 3, .block_n = 96, .stages = 2, .q_stages = 2, .output_slabs = 1, .ordered = true};
// With few queries, classes of three consumers take two, as 192 rows do not divide short sequences.
inline constexpr int kFewQueries = 1024;
template <int kHeadDim>
inline constexpr FwdTile kFewQueriesTile = {.consumers = 2,
                                            .block_n = 128,
                                            .stages = 2,
                                            .q_stages = 2,
                                            .output_slabs = kHeadDim < 64 ? 1 : 3,
                                            .ordered = true};
// At d = 64 two thread blocks share a multiprocessor: at the end of a tile both consumers of a
// block stand still at once, but another block's do not.
inline constexpr int kFewMaskedQueries = 2048;
template <>
inline constexpr FwdTile kFewQueriesTile<64> = {.consumers = 2,
                                                .block_n = 64,
                                                .stages = 3,
                                                .q_stages = 2,
                                                .output_slabs = 1,
                                                .ordered = false,
                                                .blocks = 2};
// With 128 rows to a tile of K and V, TMA seems to bound these two, as a row is three boxes, which
// cross sectors at d = 72. So 192 rows share each of them.
template <>
inline constexpr FwdTile kFwdTile<80, 80> = {
    .consumers = 3, .block_n = 80, .stages = 3, .q_stages = 2, .output_slabs = 3, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<96, 96> = {
    .consumers = 3, .block_n = 80, .stages = 3, .q_stages = 2, .output_slabs = 3, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<128, 128> = {
    .consumers = 2, .block_n = 128, .stages = 2, .q_stages = 2, .output_slabs = 2, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<192, 128> = {
    .consumers = 2, .block_n = 128, .stages = 2, .q_stages = 1, .output_slabs = 1, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<160, 160> = {
    .consumers = 2, .block_n = 112, .stages = 2, .q_stages = 1, .output_slabs = 5, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<192, 192> = {
    .consumers = 2, .block_n = 96, .stages = 2, .q_stages = 1, .output_slabs = 1, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<256, 256> = {
    .consumers = 2, .block_n = 64, .stages = 2, .q_stages = 1, .output_slabs = 2, .ordered = true};

// With several score terms a block has as many keys as leave room for the terms in registers, and
// for dropout a multiple of 32.
using cuda::has_score_terms;
template <typename F>
auto with_scores_class(int head_dim, int head_dim_v, F&& f) {
  if (head_dim <= 128 && head_dim_v <= 128) return f.template operator()<128>();
  return f.template operator()<256>();
}
template <int kHeadDim>
inline constexpr FwdTile kScoresTile = {};
template <>
inline constexpr FwdTile kScoresTile<128> = {
    .consumers = 2, .block_n = 96, .stages = 2, .q_stages = 2, .output_slabs = 2, .ordered = true};
template <>
inline constexpr FwdTile kScoresTile<256> = {
    .consumers = 2, .block_n = 32, .stages = 3, .q_stages = 1, .output_slabs = 2, .ordered = true};

// A staged bias takes the place of a tile of Q at d = 128. A softcap, ALiBi or dropout alone runs
// in the tiles of plain calls. Head dims up to 128.
template <int kHeadDim>
inline constexpr FwdTile kStagedBiasTile = {
    .consumers = 2, .block_n = 128, .stages = 2, .q_stages = 1, .output_slabs = 1, .ordered = true};
template <>
inline constexpr FwdTile kStagedBiasTile<64> = kFwdTile<64, 64>;
inline constexpr int kOneTermHeadDim = 128;
template <typename F>
auto with_one_term_class(int head_dim, int head_dim_v, F&& f) {
  if (head_dim <= 64 && head_dim_v <= 64) return f.template operator()<64>();
  return f.template operator()<128>();
}

// Calls whose keys are cut into pieces have few queries. There are three classes, as each is one more
// kernel.
template <int kHeadDim>
inline constexpr FwdTile kPiecesTile = kFwdTile<kHeadDim, kHeadDim>;
template <>
inline constexpr FwdTile kPiecesTile<64> = kFewQueriesTile<64>;
template <typename F>
auto with_pieces_class(int head_dim, F&& f) {
  if (head_dim <= 64) return f.template operator()<64>();
  if (head_dim <= 128) return f.template operator()<128>();
  return f.template operator()<256>();
}

// With max_logits there are four classes, as each is one more kernel. Among them is that of
// multi-head latent attention.
template <typename F>
auto with_max_logits_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest <= 64) return f.template operator()<64, 64>();
  if (widest <= 128) return f.template operator()<128, 128>();
  if (head_dim <= 192 && head_dim_v <= 128) return f.template operator()<192, 128>();
  return f.template operator()<256, 256>();
}

// With a mask whose hidden tiles are passed over, a block has two by two of its tiles. Above a head
// dim of 128 it has two by one, as S and P of more keys leave no registers beside O.
template <int kHeadDim>
inline constexpr FwdTile kMaskedTile = {.consumers = 2,
                                        .block_n = 128,
                                        .stages = kHeadDim <= 64 ? 4 : 2,
                                        .q_stages = 2,
                                        .output_slabs = kHeadDim / 64,
                                        .ordered = true};
template <>
inline constexpr FwdTile kMaskedTile<192> = {
    .consumers = 2, .block_n = 64, .stages = 3, .q_stages = 1, .output_slabs = 1, .ordered = true};
template <>
inline constexpr FwdTile kMaskedTile<256> = kFwdTile<256, 256>;
template <typename F>
auto with_masked_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest <= 64) return f.template operator()<64>();
  if (widest <= 128) return f.template operator()<128>();
  if (widest <= 192) return f.template operator()<192>();
  return f.template operator()<256>();
}

// Calls f.template operator()<FwdTile>(). masked: not every query sees all keys.
template <int kHeadDim, int kHeadDimV, typename F>
auto with_fwd_tile(int seqlen_q, bool masked, F&& f) {
  if constexpr (kFwdTile<kHeadDim, kHeadDimV>.consumers == 3) {
    const int few = kHeadDim == 64 && masked ? kFewMaskedQueries : kFewQueries;
    if (seqlen_q <= few) return f.template operator()<kFewQueriesTile<kHeadDim>>();
  }
  return f.template operator()<kFwdTile<kHeadDim, kHeadDimV>>();
}

}  // namespace flash_attn::sm90
