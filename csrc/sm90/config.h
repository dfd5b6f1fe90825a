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
  int consumers;  // warpgroups that compute, 64 queries each
  int block_n;    // keys of an iteration
  int stages;     // tiles of K, and of V, in shared memory
  // O has shared memory of its own, and Q a second tile; otherwise O takes Q's, and the next Q waits
  // until O is written.
  bool own_output;
  bool ordered;  // consumers take turns at the tensor cores
  // The next P is made while the tensor cores still read this one: block_n / 4 more registers. With
  // more than about 195 of 232 (130 of 160) taken by S, O and two P, ptxas serialises wgmma.
  bool ahead;

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Of 64 K registers; the producers have enough with the rest.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 40; }
  constexpr int consumer_registers() const { return consumers == 3 ? 160 : 232; }
};

template <int kHeadDim, int kHeadDimV>
inline constexpr FwdTile kFwdTile = {};

// TFLOP/s on an H200, bf16, full / causal, s = 16k unless said otherwise, ± 5 %.
//
// 3 consumers × 96 keys ahead 532 / 520; 3 × 128 not ahead 505 / 488; 2 × 128 ahead 450 / 450.
template <>
inline constexpr FwdTile kFwdTile<64, 64> = {
    .consumers = 3, .block_n = 96, .stages = 2, .own_output = true, .ordered = true, .ahead = true};
// s = 8k: 128 keys ahead 553 / 525; 160 not ahead 520 / 449.
template <>
inline constexpr FwdTile kFwdTile<96, 96> = {.consumers = 2,
                                             .block_n = 128,
                                             .stages = 2,
                                             .own_output = true,
                                             .ordered = true,
                                             .ahead = true};
// 128 keys ahead 667 / 664, without turns 619 / 643; not ahead 624 / 622; 176 not ahead 619 / 618.
template <>
inline constexpr FwdTile kFwdTile<128, 128> = kFwdTile<96, 96>;
template <>
inline constexpr FwdTile kFwdTile<192, 128> = {.consumers = 2,
                                               .block_n = 128,
                                               .stages = 2,
                                               .own_output = false,
                                               .ordered = true,
                                               .ahead = true};
// s = 8k: 96 keys ahead 672 / 650; 112 not ahead 677 / 633.
template <>
inline constexpr FwdTile kFwdTile<192, 192> = {.consumers = 2,
                                               .block_n = 96,
                                               .stages = 2,
                                               .own_output = false,
                                               .ordered = true,
                                               .ahead = true};
// No registers for a second P. 722 / 706; with turns 713 / - .
template <>
inline constexpr FwdTile kFwdTile<256, 256> = {.consumers = 2,
                                               .block_n = 80,
                                               .stages = 2,
                                               .own_output = false,
                                               .ordered = false,
                                               .ahead = false};

}  // namespace flash_attn::sm90
