// Tile sizes of the sm80 backward kernels, by head-dim class and shared memory.
#pragma once

#include <cstdint>

#include "config.h"

namespace flash_attn::sm80 {

// Shared memory of one backward block: 163 KB on sm_80, more on sm_90; 99 KB on sm_86, sm_89 and
// sm_120.
constexpr int bwd_smem_bytes(SmemBudget budget) {
  return (budget == SmemBudget::kLarge ? 163 : 99) * 1024;
}
constexpr SmemBudget bwd_smem_budget(int smem_optin_bytes) {
  return smem_optin_bytes >= bwd_smem_bytes(SmemBudget::kLarge) ? SmemBudget::kLarge
                                                                : SmemBudget::kSmall;
}

// The warps of a block split each product's result in a grid of their own.
struct BwdTile {
  int block_m;  // queries of an iteration
  int block_n;  // keys of a thread block
  int num_warps;
  int stages;       // buffers of Q and dO
  int score_warps;  // S, dP (queries × keys): rows of the grid
  int dkv_warps;    // dK, dV (keys × head dim): rows of the grid
  int dq_warps;     // dQ (queries × head dim): rows of the grid
  bool spread_dq;   // dQ's reductions one by one under the next products, not all at the end
};

template <int kHeadDim, SmemBudget kBudget>
inline constexpr BwdTile kBwdTile = {};

template <>
inline constexpr BwdTile kBwdTile<64, SmemBudget::kLarge> = {.block_m = 128,
                                                             .block_n = 128,
                                                             .num_warps = 8,
                                                             .stages = 2,
                                                             .score_warps = 4,
                                                             .dkv_warps = 4,
                                                             .dq_warps = 4,
                                                             .spread_dq = false};
template <>
inline constexpr BwdTile kBwdTile<64, SmemBudget::kSmall> = {.block_m = 64,
                                                             .block_n = 128,
                                                             .num_warps = 8,
                                                             .stages = 2,
                                                             .score_warps = 2,
                                                             .dkv_warps = 4,
                                                             .dq_warps = 4,
                                                             .spread_dq = false};
template <>
inline constexpr BwdTile kBwdTile<96, SmemBudget::kLarge> = {.block_m = 64,
                                                             .block_n = 128,
                                                             .num_warps = 8,
                                                             .stages = 2,
                                                             .score_warps = 2,
                                                             .dkv_warps = 4,
                                                             .dq_warps = 4,
                                                             .spread_dq = false};
template <>
inline constexpr BwdTile kBwdTile<96, SmemBudget::kSmall> = {.block_m = 64,
                                                             .block_n = 64,
                                                             .num_warps = 8,
                                                             .stages = 2,
                                                             .score_warps = 4,
                                                             .dkv_warps = 4,
                                                             .dq_warps = 4,
                                                             .spread_dq = false};
template <>
inline constexpr BwdTile kBwdTile<128, SmemBudget::kLarge> = {.block_m = 64,
                                                              .block_n = 128,
                                                              .num_warps = 8,
                                                              .stages = 2,
                                                              .score_warps = 2,
                                                              .dkv_warps = 4,
                                                              .dq_warps = 2,
                                                              .spread_dq = false};
template <>
inline constexpr BwdTile kBwdTile<128, SmemBudget::kSmall> = {.block_m = 64,
                                                              .block_n = 64,
                                                              .num_warps = 8,
                                                              .stages = 1,
                                                              .score_warps = 4,
                                                              .dkv_warps = 2,
                                                              .dq_warps = 2,
                                                              .spread_dq = false};
template <>
inline constexpr BwdTile kBwdTile<192, SmemBudget::kLarge> = {.block_m = 64,
                                                              .block_n = 64,
                                                              .num_warps = 8,
                                                              .stages = 1,
                                                              .score_warps = 4,
                                                              .dkv_warps = 2,
                                                              .dq_warps = 2,
                                                              .spread_dq = true};
template <>
inline constexpr BwdTile kBwdTile<192, SmemBudget::kSmall> = {.block_m = 32,
                                                              .block_n = 64,
                                                              .num_warps = 8,
                                                              .stages = 1,
                                                              .score_warps = 2,
                                                              .dkv_warps = 2,
                                                              .dq_warps = 2,
                                                              .spread_dq = false};
template <>
inline constexpr BwdTile kBwdTile<256, SmemBudget::kLarge> = {.block_m = 64,
                                                              .block_n = 64,
                                                              .num_warps = 8,
                                                              .stages = 1,
                                                              .score_warps = 4,
                                                              .dkv_warps = 2,
                                                              .dq_warps = 2,
                                                              .spread_dq = true};
template <>
inline constexpr BwdTile kBwdTile<256, SmemBudget::kSmall> = {.block_m = 32,
                                                              .block_n = 32,
                                                              .num_warps = 4,
                                                              .stages = 1,
                                                              .score_warps = 2,
                                                              .dkv_warps = 2,
                                                              .dq_warps = 2,
                                                              .spread_dq = false};

// fp32: three classes. Above kBwdWidePortableHeadDim only with the shared memory of sm_90: with
// less, tiles have too few warps to hold dK and dV.
inline constexpr int kBwdWidePortableHeadDim = 128;
template <int kHeadDim, SmemBudget kBudget>
inline constexpr BwdTile kBwdWideTile = {};

template <SmemBudget kBudget>
inline constexpr BwdTile kBwdWideTile<64, kBudget> = {.block_m = 64,
                                                      .block_n = 64,
                                                      .num_warps = 4,
                                                      .stages = 1,
                                                      .score_warps = 2,
                                                      .dkv_warps = 2,
                                                      .dq_warps = 2,
                                                      .spread_dq = false};
template <>
inline constexpr BwdTile kBwdWideTile<128, SmemBudget::kSmall> = {.block_m = 32,
                                                                  .block_n = 32,
                                                                  .num_warps = 4,
                                                                  .stages = 1,
                                                                  .score_warps = 2,
                                                                  .dkv_warps = 2,
                                                                  .dq_warps = 2,
                                                                  .spread_dq = false};
template <>
inline constexpr BwdTile kBwdWideTile<128, SmemBudget::kLarge> = {.block_m = 64,
                                                                  .block_n = 64,
                                                                  .num_warps = 8,
                                                                  .stages = 1,
                                                                  .score_warps = 4,
                                                                  .dkv_warps = 2,
                                                                  .dq_warps = 2,
                                                                  .spread_dq = false};
template <>
inline constexpr BwdTile kBwdWideTile<128, SmemBudget::kLargest> = {.block_m = 64,
                                                                    .block_n = 64,
                                                                    .num_warps = 8,
                                                                    .stages = 2,
                                                                    .score_warps = 4,
                                                                    .dkv_warps = 2,
                                                                    .dq_warps = 2,
                                                                    .spread_dq = false};
template <>
inline constexpr BwdTile kBwdWideTile<256, SmemBudget::kLargest> = {.block_m = 64,
                                                                    .block_n = 32,
                                                                    .num_warps = 8,
                                                                    .stages = 1,
                                                                    .score_warps = 4,
                                                                    .dkv_warps = 2,
                                                                    .dq_warps = 4,
                                                                    .spread_dq = false};

// fp32 with score terms.
template <int kHeadDim, SmemBudget kBudget>
inline constexpr BwdTile kBwdWideScoresTile =
    kBwdWideTile<kHeadDim, std::min(kBudget, SmemBudget::kLarge)>;
template <SmemBudget kBudget>
inline constexpr BwdTile kBwdWideScoresTile<64, kBudget> = {.block_m = 64,
                                                            .block_n = 64,
                                                            .num_warps = 8,
                                                            .stages = 1,
                                                            .score_warps = 4,
                                                            .dkv_warps = 2,
                                                            .dq_warps = 2,
                                                            .spread_dq = false};
template <>
inline constexpr BwdTile kBwdWideScoresTile<256, SmemBudget::kLargest> = {.block_m = 64,
                                                                          .block_n = 32,
                                                                          .num_warps = 8,
                                                                          .stages = 1,
                                                                          .score_warps = 4,
                                                                          .dkv_warps = 2,
                                                                          .dq_warps = 2,
                                                                          .spread_dq = false};

// The kernel of the deterministic dQ. col_warps warps share block_m · col_warps / num_warps
// neighbouring queries and deal out their columns.
struct BwdDqTile {
  int block_m;
  int block_n;  // keys of an iteration
  int num_warps;
  int col_warps = 1;
};

// One tile a head dim, small enough for 99 KB: Q, dO, K, V each once.
template <int kHeadDim>
inline constexpr BwdDqTile kBwdDqTile = {};

template <>
inline constexpr BwdDqTile kBwdDqTile<64> = {.block_m = 128, .block_n = 128, .num_warps = 8};
template <>
inline constexpr BwdDqTile kBwdDqTile<96> = {.block_m = 64, .block_n = 64, .num_warps = 4};
template <>
inline constexpr BwdDqTile kBwdDqTile<128> = {.block_m = 128, .block_n = 64, .num_warps = 8};
template <>
inline constexpr BwdDqTile kBwdDqTile<192> = {.block_m = 64, .block_n = 64, .num_warps = 4};
template <>
inline constexpr BwdDqTile kBwdDqTile<256> = {.block_m = 64, .block_n = 32, .num_warps = 4};

// fp32.
template <int kHeadDim>
inline constexpr BwdDqTile kBwdDqWideTile = {};
template <>
inline constexpr BwdDqTile kBwdDqWideTile<64> = {.block_m = 64, .block_n = 64, .num_warps = 4};
template <>
inline constexpr BwdDqTile kBwdDqWideTile<128> = {.block_m = 64, .block_n = 16, .num_warps = 4};
template <>
inline constexpr BwdDqTile kBwdDqWideTile<256> = {
    .block_m = 32, .block_n = 16, .num_warps = 4, .col_warps = 2};

template <int kHeadDim>
inline constexpr BwdDqTile kBwdDqWideScoresTile = kBwdDqWideTile<kHeadDim>;
template <>
inline constexpr BwdDqTile kBwdDqWideScoresTile<64> = {
    .block_m = 64, .block_n = 32, .num_warps = 4};

// Tiles with score terms, which take registers.
template <int kHeadDim>
inline constexpr BwdDqTile kBwdDqScoresTile = kBwdDqTile<kHeadDim>;
template <>
inline constexpr BwdDqTile kBwdDqScoresTile<64> = {.block_m = 128, .block_n = 64, .num_warps = 8};
template <>
inline constexpr BwdDqTile kBwdDqScoresTile<128> = {.block_m = 128, .block_n = 32, .num_warps = 8};

// The kernel of the gradient of a shared bias; block_n keys of a thread block.
template <int kHeadDim>
inline constexpr BwdDqTile kBwdBiasTile = {.block_m = 64, .block_n = 64, .num_warps = 4};
template <>
inline constexpr BwdDqTile kBwdBiasTile<256> = {.block_m = 64, .block_n = 32, .num_warps = 4};
template <int kHeadDim>
inline constexpr BwdDqTile kBwdBiasWideTile = kBwdBiasTile<kHeadDim>;
template <>
inline constexpr BwdDqTile kBwdBiasWideTile<128> = {.block_m = 64, .block_n = 32, .num_warps = 4};
template <>
inline constexpr BwdDqTile kBwdBiasWideTile<256> = {.block_m = 32, .block_n = 16, .num_warps = 2};

}  // namespace flash_attn::sm80
