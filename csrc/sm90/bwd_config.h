// Tile sizes of the sm90 backward, by head-dim class.
#pragma once

#include "../cuda/dispatch.h"

namespace flash_attn::sm90 {

// A thread block has two consumer warpgroups of 64 keys each.
inline constexpr int kBwdConsumers = 2;
inline constexpr int kBwdBlockN = 64 * kBwdConsumers;

// Head dims above this have no sm90 backward.
inline constexpr int kBwdMaxHeadDim = 128;

struct BwdTile {
  int block_m;  // queries of an iteration
  int stages;   // blocks of Q, and of dO, in shared memory
};

// dK and dV take kHeadDim registers of a thread, S and dP block_m: together at most 192 of 240.
template <int kHeadDim>
inline constexpr BwdTile kBwdTile = {};
template <>
inline constexpr BwdTile kBwdTile<64> = {.block_m = 128, .stages = 2};
template <>
inline constexpr BwdTile kBwdTile<128> = {.block_m = 64, .stages = 2};

// Calls f.template operator()<class of q, k and v>().
template <typename F>
auto with_bwd_class(int head_dim, int head_dim_v, F&& f) {
  const int widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (widest <= 64) return f.template operator()<64>();
  return f.template operator()<128>();
}

}  // namespace flash_attn::sm90
