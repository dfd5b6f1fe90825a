// Decode's tiles, and the split-KV kernel's instances: one a dtype of the cache and head-dim class,
// in inst/decode_d*.cu.
#pragma once

#include <algorithm>

#include "../../core/divisor.h"
#include "decode.h"
#include "workspace.h"

namespace flash_attn::cuda {

inline constexpr int kDecodeWarps = 4;

// Where sequences are cut by length, pieces are made of so many keys, which begin at multiples of
// it.
inline constexpr int kLineKeys = 256;

struct DecodeTile {
  int keys;    // that a warp takes at once
  int stages;  // tiles of K or V that it holds or has under way
};

// 96 KiB a block in every class. One block keeps more under way than an SM needs to saturate the
// memory of an H200 (docs/kernels/decode.md). Two blocks fit an SM of sm_90, and one fits the
// others. Wide tiles wait and reduce less often.
template <int kHeadDim>
inline constexpr DecodeTile kDecodeTile = {};
template <>
inline constexpr DecodeTile kDecodeTile<64> = {.keys = 64, .stages = 3};
template <>
inline constexpr DecodeTile kDecodeTile<96> = {.keys = 32, .stages = 4};
template <>
inline constexpr DecodeTile kDecodeTile<128> = {.keys = 32, .stages = 3};
template <>
inline constexpr DecodeTile kDecodeTile<192> = {.keys = 16, .stages = 4};
template <>
inline constexpr DecodeTile kDecodeTile<256> = {.keys = 16, .stages = 3};

// Caches of 8 bits have as many keys a tile, so half the bytes: more keys would be more code, and a
// launch finds the instruction cache cold. 64 KiB a block in both classes.
inline constexpr int kDecode8BitStages = 4;

// Whether there may be several pieces of a sequence: with most_pieces, shorter ones than asked for.
inline bool is_cut(const Splits& splits) { return splits.count > 1 || splits.most_pieces > 0; }

// Pieces of all sequences together. Where sequences are cut by length, there are at most so many.
inline int64_t decode_pieces(int batch, const Splits& splits) {
  const int64_t pieces = int64_t{batch} * splits.count;
  if (splits.most_pieces == 0) return pieces;
  // How many pieces there may be beyond the first one of each sequence.
  const int64_t more = std::max<int64_t>(pieces - batch, splits.least_pieces);
  return batch + std::min<int64_t>(more, splits.most_pieces);
}
// How many of these have thread blocks of their own: least_pieces fill the device once.
inline int64_t decode_grid_pieces(const DecodeParams& params) {
  const int64_t pieces = decode_pieces(params.batch, params.splits);
  const int64_t waves = params.sequence_mask == nullptr ? 4 : 1;  // most that it masks have no work
  return params.splits.keys == 0 ? pieces : std::min(pieces, waves * params.splits.least_pieces);
}

// Turns the index of a thread block into what it reads.
struct DecodeGrid {
  Divisor row_tiles, heads_kv, splits, group;
  int num_row_tiles;  // of one kv head of a sequence
  int pieces;         // that have thread blocks of their own

  explicit DecodeGrid(const DecodeParams& params)
      : row_tiles(decode_row_tiles(params)),
        heads_kv(params.heads_kv),
        splits(std::max(params.splits.count, 1)),
        group(params.group),
        num_row_tiles(decode_row_tiles(params)),
        pieces(static_cast<int>(decode_grid_pieces(params))) {}

  int64_t blocks(const DecodeParams& params) const {
    return int64_t{num_row_tiles} * params.heads_kv * pieces;
  }
};

// It serves any head_dim and head_dim_v up to kHeadDim that are multiples of 8 (8 bits: of 16).
// Calls that are not plain have 16 bits.
template <DType kCacheDType, int kHeadDim, bool kPlain>
void launch_decode(const DecodeParams& params, Stream stream);

}  // namespace flash_attn::cuda
