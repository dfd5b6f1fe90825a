// Rows of K and V on their way into tiles of shared memory, wherever they lie.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../tile/smem_tile.cuh"
#include "rows.cuh"

namespace flash_attn::cuda {

struct RowSource {
  const char* column;  // the lane's first
  bool exists;         // else the row becomes 0 unread
};

// One warp starts the copies of kRows rows: eight lanes copy 128 neighbouring bytes (four copy 64).
// destination: the place of the lane's row and byte among the first rows that are copied at once.
// source_of(row) says where the row lies that is so many below the lane's. Columns from num_bytes
// on become 0. Of rows that are copied four at a time, the swizzle of row r + 4 is that of r XOR
// that of 4.
template <typename Tile, int kRows, typename SourceOf>
__device__ __forceinline__ void copy_rows(uint32_t destination, int lane_byte, int num_bytes,
                                          const SourceOf& source_of) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Tile::Element));
#pragma unroll
  for (int row = 0; row < kRows; row += 32 / Tile::kSlabChunks) {
    const RowSource source = source_of(row);
#pragma unroll
    for (int slab_col = 0; slab_col < Tile::kCols; slab_col += Tile::kSlabCols) {
      const bool valid = source.exists && lane_byte + slab_col * kElementBytes < num_bytes;
      ptx::cp_async_16(Tile::advance(destination ^ Tile::swizzle(row % 8) * 16, row, slab_col),
                       source.column + slab_col * kElementBytes, valid ? 16 : 0);
    }
  }
}

// Loads the tiles of one warp from a dense cache, from first_key on. Stored: the cache's element,
// of 16 bits as the tile's, or of 8.
template <typename Tile, typename Stored>
class DenseTileLoader {
  static constexpr int kStoredBytes = static_cast<int>(sizeof(Stored));
  static constexpr int kRowsAtOnce = 32 / Tile::kSlabChunks;  // 4, or 8 with slabs of 32 columns

 public:
  __device__ __forceinline__ DenseTileLoader(const void* cache, const Strides& strides,
                                             int64_t cache_row, int kv_head, int first_key,
                                             int end_key, int num_cols, int lane)
      : row_(lane / Tile::kSlabChunks),
        col_(lane % Tile::kSlabChunks * kChunk),
        num_cols_(num_cols),
        num_rows_(end_key - first_key - row_),
        row_stride_(strides.row),
        source_(static_cast<const Stored*>(cache) + cache_row * strides.batch +
                kv_head * strides.head + (first_key + row_) * strides.row +
                col_ * (2 / kStoredBytes)) {}

  // Starts the copy of keys first_key + key_offset …; those at or beyond end_key become 0 unread.
  __device__ __forceinline__ void load(const Tile& tile, int key_offset) const {
    const Stored* source = source_ + key_offset * row_stride_;
    const int rows_left = num_rows_ - key_offset;
    copy_rows<Tile, Tile::kRows>(tile.address(row_, col_), col_ * 2, num_cols_ * kStoredBytes,
                                 [&](int row) -> RowSource {
                                   const auto* column = reinterpret_cast<const char*>(source);
                                   source += kRowsAtOnce * row_stride_;
                                   return {column, row < rows_left};
                                 });
  }

 private:
  int row_, col_, num_cols_, num_rows_;
  int64_t row_stride_;
  const Stored* source_;
};

// One warp's tiles of any cache. Lane i knows where row i lies (and row i + 32 of wide tiles); the
// rows' addresses go round by shuffle. Page numbers are asked for kTilesAhead tiles ahead: they
// come from memory, too, and one tile takes a warp less than that. Traits: kTilesAhead,
// kElementBytes, kHeadDim, KvTile, kKeys of a tile, kBlockKeys from one tile of the warp to the
// next, KeyBits with a bit for each key of a tile.
template <typename Traits>
class CacheLoader {
  using KvTile = typename Traits::KvTile;
  using KeyBits = typename Traits::KeyBits;
  static constexpr int kElementBytes = Traits::kElementBytes;
  static constexpr int kTileBytes = sizeof(typename KvTile::Element);  // two of 8 bits are one
  // Rows of a tile that a lane locates, one a step; and those that the warp locates in a step.
  static constexpr int kLaneRows = (Traits::kKeys + 31) / 32;
  static constexpr int kStepRows = Traits::kKeys / kLaneRows;
  static constexpr int kTilesAhead = Traits::kTilesAhead;

 public:
  // Loads from the keys [first_key, end_key), which lie below capacity. tile_key is where the
  // warp's first tile begins, a multiple of kKeys. The next one begins behind first_key, which so
  // matters to the first one alone. first_row is the row of KvTile where the warp's tiles go, a
  // multiple of 8.
  __device__ __forceinline__ CacheLoader(const DecodeParams& params, int batch_idx, int kv_head,
                                         int first_key, int end_key, int tile_key, int lane,
                                         int first_row = 0)
      : params_(params),
        lane_(lane),
        first_row_(first_row),
        kv_head_(kv_head),
        end_key_(end_key),
        sequence_(params, batch_idx) {
#pragma unroll
    for (int tile = 0; tile < kTilesAhead; ++tile) {
      look_up(tile, tile_key + tile * Traits::kBlockKeys, first_key);
    }
  }

  // Finds where the rows of the next tile lie, whose page numbers were asked for before. It begins
  // at tile_key.
  __device__ __forceinline__ void locate(int tile_key) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const CachePlace place = sequence_.place(params_, tile_key + row_of(i), page_[0][i]);
      const bool exists = place.page >= 0;
      const int64_t page = exists ? place.page : 0, row = exists ? place.row : 0;
      k_row_[i] = address(params_.k_cache, params_.k_strides, page, row);
      v_row_[i] = address(params_.v_cache, params_.v_strides, page, row);
      valid_[i] = __ballot_sync(~0u, exists) & ~0u >> (32 - kStepRows);
    }
#pragma unroll
    for (int ahead = 1; ahead < kTilesAhead; ++ahead) {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) page_[ahead - 1][i] = page_[ahead][i];
    }
    const int ahead_key = tile_key + kTilesAhead * Traits::kBlockKeys;
    look_up(kTilesAhead - 1, ahead_key, ahead_key);
  }
  // Starts the copies of the located tile of K. Rows that do not exist become 0 unread, and their
  // bits of `valid` 0.
  __device__ __forceinline__ void keys(const KvTile& tile, KeyBits& valid) const {
    if (lane_ == 0) {
      valid = valid_[0];
      if constexpr (kLaneRows > 1) valid |= KeyBits{valid_[1]} << 32;
    }
    load(tile, k_row_, params_.head_dim);
  }
  // Starts the copies of the tile of V that goes with it.
  __device__ __forceinline__ void values(const KvTile& tile) const {
    load(tile, v_row_, params_.head_dim_v);
  }

 private:
  __device__ __forceinline__ const char* address(const void* cache, const Strides& strides,
                                                 int64_t page, int64_t row) const {
    return static_cast<const char*>(cache) +
           (page * strides.batch + row * strides.row + int64_t{kv_head_} * strides.head) *
               kElementBytes;
  }

  // The lane's i-th row of a tile. Lanes beyond kStepRows repeat the first ones.
  __device__ __forceinline__ int row_of(int i) const { return i * kStepRows + lane_ % kStepRows; }
  __device__ __forceinline__ void look_up(int ahead, int tile_key, int first_key) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int key = tile_key + row_of(i);
      page_[ahead][i] =
          key >= first_key && key < end_key_ ? sequence_.page_number(params_, key) : -1;
    }
  }

  __device__ __forceinline__ void load(const KvTile& tile, const char* const (&rows)[kLaneRows],
                                       int num_cols) const {
    const int lane_row = lane_ / KvTile::kSlabChunks, lane_byte = lane_ % KvTile::kSlabChunks * 16;
    copy_rows<KvTile, Traits::kKeys>(
        tile.address(first_row_ + lane_row, lane_byte / kTileBytes), lane_byte,
        num_cols * kElementBytes, [&](int row) -> RowSource {
          const int step = row / kStepRows, from = row % kStepRows + lane_row;
          const auto at = __shfl_sync(~0u, reinterpret_cast<uint64_t>(rows[step]), from);
          return {reinterpret_cast<const char*>(at) + lane_byte, (valid_[step] >> from & 1) != 0};
        });
  }

  const DecodeParams& params_;
  int lane_, first_row_, kv_head_, end_key_;
  CacheSequence sequence_;
  int page_[kTilesAhead][kLaneRows];  // of the lane's rows in the next tiles
  const char *k_row_[kLaneRows], *v_row_[kLaneRows];
  uint32_t valid_[kLaneRows];
};

}  // namespace flash_attn::cuda
