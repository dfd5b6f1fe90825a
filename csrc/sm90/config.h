// Tile sizes of the sm90 forward, by head-dim class.
#pragma once

#include <cstdint>

#include "../cuda/dispatch.h"

namespace flash_attn::sm90 {

using cuda::with_dtype;

// Calls f.template operator()<class of q and k, class of v>(). Only 192 has a narrower class of v,
// 128, which models use; other v are filled up with zeros.
template <typename F>
auto with_head_dim_class(int head_dim, int head_dim_v, F&& f) {
  if (head_dim > 128 && head_dim <= 192 && head_dim_v <= 128) {
    return f.template operator()<192, 128>();
  }
  return cuda::with_head_dim_class(head_dim > head_dim_v ? head_dim : head_dim_v, [&]<int kClass> {
    return f.template operator()<kClass, kClass>();
  });
}

struct FwdTile {
  int consumers;     // warpgroups that compute, 64 queries each
  int block_n;       // keys of an iteration
  int stages;        // tiles of K, and of V, in shared memory
  int q_stages;      // tiles of Q; with two, a tile begins before the one before has ended
  int output_slabs;  // 64 (d = 96: 32) columns each of O, on its way out; a divisor of those of O
  bool ordered;      // consumers take turns at the tensor cores
  // The next P is made while the tensor cores still read this one: block_n / 4 more registers. With
  // more than about 195 of 240 (130 of 160) taken by S, O and two P, ptxas serialises wgmma.
  bool ahead;

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Of 64 K registers; the producers have enough with the rest.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  constexpr int consumer_registers() const { return consumers == 3 ? 160 : 240; }
};

template <int kHeadDim, int kHeadDimV>
inline constexpr FwdTile kFwdTile = {};

// TFLOP/s on an H200, bf16, full / causal, ± 5 %; the figures of one line are of one run.
//
// 3 consumers × 96 keys: s = 16k 542 / 525, 2k 450 / 372, 1k 376 / 267, 512 302 / 185; turns passed on
// after S instead of at once 540 / 518 (16k).
template <>
inline constexpr FwdTile kFwdTile<64, 64> = {.consumers = 3,
                                             .block_n = 96,
                                             .stages = 2,
                                             .q_stages = 2,
                                             .output_slabs = 1,
                                             .ordered = true,
                                             .ahead = true};
// d = 64, few queries: 192 do not divide short sequences, and a third consumer has less to hide.
// 2 consumers × 128 keys: s = 16k 479 / 466, 2k 445 / 366, 1k 410 / 293, 512 357 / 212; without turns
// 335 / 213 (345 / 209 in that run); 160 keys 267 / 177.
inline constexpr int kFewQueries = 1024;
inline constexpr FwdTile kFewQueriesTile = {.consumers = 2,
                                            .block_n = 128,
                                            .stages = 2,
                                            .q_stages = 2,
                                            .output_slabs = 1,
                                            .ordered = true,
                                            .ahead = true};
// s = 8k, an earlier form: 128 keys ahead 553 / 525; 160 not ahead 520 / 449.
template <>
inline constexpr FwdTile kFwdTile<96, 96> = {.consumers = 2,
                                             .block_n = 128,
                                             .stages = 2,
                                             .q_stages = 2,
                                             .output_slabs = 3,
                                             .ordered = true,
                                             .ahead = true};
// s = 16k 705 / 678, 512 489 / 307; turns passed on after S 697 / 664; without turns 658 / 637 (658 / 648
// in that run) and 1k 524 / 394 (544 / 401). An earlier form, not ahead: 128 keys 624 / 622, 176 619 / 618.
template <>
inline constexpr FwdTile kFwdTile<128, 128> = {.consumers = 2,
                                               .block_n = 128,
                                               .stages = 2,
                                               .q_stages = 2,
                                               .output_slabs = 2,
                                               .ordered = true,
                                               .ahead = true};
template <>
inline constexpr FwdTile kFwdTile<192, 128> = {.consumers = 2,
                                               .block_n = 128,
                                               .stages = 2,
                                               .q_stages = 1,
                                               .output_slabs = 1,
                                               .ordered = true,
                                               .ahead = true};
// s = 8k, an earlier form: 96 keys ahead 672 / 650; 112 not ahead 677 / 633.
template <>
inline constexpr FwdTile kFwdTile<192, 192> = {.consumers = 2,
                                               .block_n = 96,
                                               .stages = 2,
                                               .q_stages = 1,
                                               .output_slabs = 1,
                                               .ordered = true,
                                               .ahead = true};
// 64 keys ahead: s = 16k 760 / 697, 512 502 / 326; without turns 740 / 706, 501 / 323. 80 keys not ahead, O
// in Q's place: 707 / 684, 410 / 294. 64 keys not ahead, without turns: 724 / 683 (724 / 691 in that run).
template <>
inline constexpr FwdTile kFwdTile<256, 256> = {.consumers = 2,
                                               .block_n = 64,
                                               .stages = 2,
                                               .q_stages = 1,
                                               .output_slabs = 2,
                                               .ordered = true,
                                               .ahead = true};

// Calls f.template operator()<FwdTile>().
template <int kHeadDim, int kHeadDimV, typename F>
auto with_fwd_tile(int seqlen_q, F&& f) {
  if constexpr (kHeadDim == 64) {
    if (seqlen_q <= kFewQueries) return f.template operator()<kFewQueriesTile>();
  }
  return f.template operator()<kFwdTile<kHeadDim, kHeadDimV>>();
}

}  // namespace flash_attn::sm90
