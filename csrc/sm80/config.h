// Tile sizes of the sm80 forward, by head-dim class and shared memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "../cuda/dispatch.h"

namespace flash_attn::sm80 {

using cuda::with_dtype;

// The class that holds both head dims.
template <typename F>
auto with_head_dim_class(int head_dim, int head_dim_v, F&& f) {
  return cuda::with_head_dim_class(std::max(head_dim, head_dim_v), std::forward<F>(f));
}

using cuda::has_score_terms;

// Shared memory that one block may have.
enum class SmemBudget : uint8_t {
  kSmall,   // 99 KB: sm_86, sm_89, sm_120
  kLarge,   // 163 KB: sm_80
  kLargest  // 227 KB: sm_90, sm_100
};
constexpr int smem_bytes(SmemBudget budget) {
  return (budget == SmemBudget::kSmall ? 99 : budget == SmemBudget::kLarge ? 163 : 227) * 1024;
}
constexpr SmemBudget smem_budget(int smem_optin_bytes) {
  if (smem_optin_bytes >= smem_bytes(SmemBudget::kLargest)) return SmemBudget::kLargest;
  if (smem_optin_bytes >= smem_bytes(SmemBudget::kLarge)) return SmemBudget::kLarge;
  return SmemBudget::kSmall;
}

struct FwdTile {
  int block_m;  // queries of a thread block; a warp owns block_m / num_warps neighbouring rows
  int block_n;  // keys of an iteration
  int num_warps;
  int blocks_per_sm;  // that the register allocation must leave room for
};

// A warp has 32 rows where the accumulators fit into 255 registers (O 128, S 64 at d = 128): every
// fragment of K and V read from shared memory then feeds two products. From 192 on O leaves room
// for 16 rows. Two blocks of 4 warps on a multiprocessor beat one of 8 wherever shared memory
// allows it: one's softmax hides behind the other's products.
template <int kHeadDim, SmemBudget kBudget>
inline constexpr FwdTile kFwdTile = kFwdTile<kHeadDim, SmemBudget::kLarge>;

template <SmemBudget kBudget>
inline constexpr FwdTile kFwdTile<64, kBudget> = {
    .block_m = 128, .block_n = 128, .num_warps = 4, .blocks_per_sm = 2};
template <SmemBudget kBudget>
inline constexpr FwdTile kFwdTile<96, kBudget> = {
    .block_m = 128, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};

template <>
inline constexpr FwdTile kFwdTile<128, SmemBudget::kSmall> = {
    .block_m = 128, .block_n = 32, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdTile<128, SmemBudget::kLarge> = {
    .block_m = 128, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};

template <>
inline constexpr FwdTile kFwdTile<192, SmemBudget::kSmall> = {
    .block_m = 128, .block_n = 64, .num_warps = 8, .blocks_per_sm = 1};
template <>
inline constexpr FwdTile kFwdTile<192, SmemBudget::kLarge> = {
    .block_m = 64, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};

template <>
inline constexpr FwdTile kFwdTile<256, SmemBudget::kSmall> = {
    .block_m = 64, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdTile<256, SmemBudget::kLarge> = {
    .block_m = 128, .block_n = 64, .num_warps = 8, .blocks_per_sm = 1};
template <>
inline constexpr FwdTile kFwdTile<256, SmemBudget::kLargest> = kFwdTile<256, SmemBudget::kSmall>;

// fp32: three classes, one tile each that any budget holds. Operands are split into pairs of
// registers, and each product is three.
using cuda::with_scores_class;
template <int kHeadDim>
inline constexpr FwdTile kFwdWideTile = {};
template <>
inline constexpr FwdTile kFwdWideTile<64> = {
    .block_m = 128, .block_n = 32, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdWideTile<128> = {
    .block_m = 128, .block_n = 32, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdWideTile<256> = {
    .block_m = 64, .block_n = 16, .num_warps = 4, .blocks_per_sm = 2};

// fp32 with score terms.
template <int kHeadDim>
inline constexpr FwdTile kFwdWideScoresTile = kFwdWideTile<kHeadDim>;
template <>
inline constexpr FwdTile kFwdWideScoresTile<128> = {
    .block_m = 64, .block_n = 32, .num_warps = 4, .blocks_per_sm = 2};

// With score terms: one tile a class, for the time of the build, that any budget holds and that
// leaves the terms some registers.
template <int kHeadDim>
inline constexpr FwdTile kFwdScoresTile = {};
template <>
inline constexpr FwdTile kFwdScoresTile<64> = {
    .block_m = 128, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdScoresTile<128> = {
    .block_m = 128, .block_n = 48, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdScoresTile<256> = {
    .block_m = 64, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};

// With a mask whose hidden tiles are skipped: one tile a class that any budget holds, of as many
// keys as the mask's tiles and of one or two of them in queries.
template <int kHeadDim>
inline constexpr FwdTile kFwdMaskedTile = {};
template <>
inline constexpr FwdTile kFwdMaskedTile<64> = {
    .block_m = 128, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdMaskedTile<128> = {
    .block_m = 128, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};
template <>
inline constexpr FwdTile kFwdMaskedTile<256> = {
    .block_m = 64, .block_n = 64, .num_warps = 4, .blocks_per_sm = 2};

}  // namespace flash_attn::sm80
