// The mask of cuda/attn/tile_mask.cuh for blocks of several of its tiles, whose states are read once, by who
// finds the blocks, and handed to who computes them.
#pragma once

#include "../cuda/attn/tile_mask.cuh"

namespace flash_attn::sm90 {

class BlockMask : public MaskedScores {
 public:
  using MaskedScores::Intervals;
  using MaskedScores::MaskedScores;

  // The states of the tiles of kBlockM queries by kBlockN keys, two bits each, row after row; 0: nothing
  // is seen.
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ uint32_t states(int first_row, int first_key) const {
    static_assert(kBlockM % kMaskTile == 0 && kBlockN % kMaskTile == 0);
    constexpr int kCols = kBlockN / kMaskTile;
    uint32_t states = 0;
#pragma unroll
    for (int i = 0; i < kBlockM / kMaskTile * kCols; ++i) {
      const TileState of_tile =
          state(first_row / kMaskTile + i / kCols, first_key / kMaskTile + i % kCols);
      states |= static_cast<uint32_t>(of_tile) << 2 * i;
    }
    return states;
  }

  // Of kTiles neighbouring tiles of keys, whose states these are: a bit for each key that the lane's two
  // queries in 16 rows see, shifted to its first column. place: of the rows.
  template <int kTiles>
  __device__ __forceinline__ void find_keys(uint64_t (&seen)[2][kTiles], uint32_t states,
                                            ScorePlace place, int lane) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) seen[row][tile] = 0;
    }
    const int query = place.query + fragment_row(0, lane);
    const int queries[2] = {min(query, last_query_), min(query + 8, last_query_)};
    const int first_key = place.key + fragment_col(0, lane);
    if (has_bits_) {
      find_keys_by_bits(seen, queries, first_key);
    } else if (rows_ != nullptr) {
      find_keys_by_intervals(seen, queries, first_key);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t of_tile = states >> 2 * tile & 3;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (of_tile == kTileHidden) seen[row][tile] = 0;
        if (of_tile == kTileSeen) seen[row][tile] = ~uint64_t{0};
      }
    }
  }

 private:
  template <int kTiles>
  __device__ __forceinline__ void find_keys_by_bits(uint64_t (&seen)[2][kTiles],
                                                    const int (&queries)[2], int first_key) const {
    const int first_tile = first_key / kMaskTile;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const auto* const words = static_cast<const unsigned long long*>(rows_) +
                                int64_t{queries[row]} * key_tiles_ + first_tile;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (first_tile + tile < key_tiles_) {
          seen[row][tile] = __ldg(words + tile) >> first_key % kMaskTile;
        }
      }
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void find_keys_by_intervals(uint64_t (&seen)[2][kTiles],
                                                         const int (&queries)[2],
                                                         int first_key) const {
    Intervals rows[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows[row] = {__ldg(static_cast<const int4*>(rows_) + queries[row])};
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (labels_ == nullptr) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          seen[row][tile] = rows[row].bits(first_key + tile * kMaskTile);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < kMaskTile / 4; ++i) {
        const int col = fragment_col(i, 0);
        const int label = __ldg(labels_ + min(first_key + tile * kMaskTile + col, last_key_));
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          seen[row][tile] |= uint64_t{rows[row].contain(label)} << col;
        }
      }
    }
  }
};

}  // namespace flash_attn::sm90
