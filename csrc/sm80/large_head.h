// Tile sizes of the sm80 kernels for head dims above 256, and what they need.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bwd_config.h"

namespace flash_attn::sm80 {

// Head dims above kMaxHeadDim run as 512, with zeros in the columns that they lack; in the forward
// without score terms those up to 384 as 384.
inline constexpr int kMaxHeadDim = 256, kMiddleHeadDim = 384, kLargeHeadDim = 512;
constexpr bool is_large_head(int64_t head_dim, int64_t head_dim_v) {
  return std::max(head_dim, head_dim_v) > kMaxHeadDim;
}

// Eight warps share 64 queries; only the keys of an iteration change with the budget. Queries of
// 512 columns, keys and values leave no room in 99 KB.
inline constexpr int kFwdLargeHeadBlockM = 64;
template <SmemBudget kBudget>
inline constexpr int kFwdLargeHeadBlockN = kBudget == SmemBudget::kLargest ? 64 : 32;

// K, V, Q and dO of 512 columns fill the shared memory of sm_90: there is no smaller tile.
template <bool kScoreTerms>
inline constexpr BwdTile kBwdLargeHeadTile = {.block_m = 64,
                                              .block_n = 32,
                                              .num_warps = 8,
                                              .stages = 1,
                                              .score_warps = 4,
                                              .dkv_warps = 1,
                                              .dq_warps = 1,
                                              .spread_dq = !kScoreTerms};
// dK and dV take 128 registers a thread: beside them dQ is computed so many columns at a time.
template <bool kScoreTerms>
inline constexpr int kBwdLargeHeadDqCols = kScoreTerms ? 128 : 256;

template <>
inline constexpr BwdDqTile kBwdBiasTile<kLargeHeadDim> = {
    .block_m = 64, .block_n = 32, .num_warps = 4};

}  // namespace flash_attn::sm80
