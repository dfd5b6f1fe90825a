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
  bool
      own_output;  // O has shared memory of its own; otherwise it takes Q's, and the next Q waits until O is written
  bool ordered;  // consumers take turns at the tensor cores

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Of 64 K registers; the producers have enough with the rest.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : 40; }
  constexpr int consumer_registers() const { return consumers == 3 ? 160 : 232; }
};

template <int kHeadDim, int kHeadDimV>
inline constexpr FwdTile kFwdTile = {};
template <>
inline constexpr FwdTile kFwdTile<64, 64> = {
    .consumers = 3, .block_n = 128, .stages = 2, .own_output = true, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<96, 96> = {
    .consumers = 2, .block_n = 160, .stages = 2, .own_output = true, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<128, 128> = {
    .consumers = 2, .block_n = 128, .stages = 2, .own_output = true, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<192, 128> = {
    .consumers = 2, .block_n = 128, .stages = 2, .own_output = false, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<192, 192> = {
    .consumers = 2, .block_n = 112, .stages = 2, .own_output = false, .ordered = true};
template <>
inline constexpr FwdTile kFwdTile<256, 256> = {
    .consumers = 2, .block_n = 80, .stages = 2, .own_output = false, .ordered = false};

}  // namespace flash_attn::sm90
