// A thread block copies tiles of a row-major matrix in global memory into shared memory,
// asynchronously.
#pragma once

#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "smem_tile.cuh"

namespace flash_attn {

// One matrix, seen by one of kThreads threads. Neighbouring threads copy neighbouring chunks of 16
// bytes, a slab's width a row, so that each row of global memory is read in whole 128-byte
// (64-byte) lines.
template <typename Tile, int kThreads>
class TileLoader {
  using Element = typename Tile::Element;
  static constexpr int kRowsAtOnce = kThreads / Tile::kSlabChunks;
  static_assert(Tile::kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
  static_assert(Tile::kRows / kRowsAtOnce < 32);

 public:
  // matrix: element (0, 0); 16-byte aligned, row_stride and num_cols multiples of 8.
  __device__ __forceinline__ TileLoader(const Element* matrix, int64_t row_stride, int num_cols,
                                        unsigned thread)
      : row_(thread / Tile::kSlabChunks),
        col_(thread % Tile::kSlabChunks * Tile::kChunk),
        num_cols_(num_cols),
        row_stride_(row_stride),
        source_(matrix + row_ * row_stride + col_) {}

  // Starts the copy of rows first_row … first_row + kRows - 1 into the tile. Elements in rows from
  // num_rows and in columns from num_cols on become 0 and are not read. The caller commits and
  // waits.
  __device__ __forceinline__ void load(const Tile& tile, int first_row, int num_rows) const {
    const int rows_left = num_rows - first_row - static_cast<int>(row_);
    load_if(tile, first_row, [&](int row) { return row < rows_left; });
  }

  // The same, with zeros for the rows before skipped_rows too.
  __device__ __forceinline__ void load(const Tile& tile, int first_row, int num_rows,
                                       int skipped_rows) const {
    // One bit for each of the thread's rows: a register for both limits.
    const int before = first_row + static_cast<int>(row_);
    const uint32_t end_bit = 1u << rows_up_to(num_rows - before);
    const uint32_t valid_rows = end_bit - min(1u << rows_up_to(skipped_rows - before), end_bit);
    load_if(tile, first_row, [&](int row) { return (valid_rows >> row / kRowsAtOnce & 1) != 0; });
  }

 private:
  template <typename Predicate>
  __device__ __forceinline__ void load_if(const Tile& tile, int first_row,
                                          const Predicate& is_valid) const {
    const Element* source = source_ + first_row * row_stride_;
    const uint32_t destination = tile.address(row_, col_);
#pragma unroll
    for (int row = 0; row < Tile::kRows; row += kRowsAtOnce) {
#pragma unroll
      for (int slab_col = 0; slab_col < Tile::kCols; slab_col += Tile::kSlabCols) {
        const bool valid = is_valid(row) && static_cast<int>(slab_col + col_) < num_cols_;
        ptx::cp_async_16(Tile::advance(destination, row, slab_col), source + slab_col,
                         valid ? 16 : 0);
      }
      source += kRowsAtOnce * row_stride_;
    }
  }

  // How many of the rows 0, kRowsAtOnce, 2 · kRowsAtOnce … of a tile are less than limit.
  __device__ __forceinline__ static int rows_up_to(int limit) {
    return min(max(limit + kRowsAtOnce - 1, 0) / kRowsAtOnce, Tile::kRows / kRowsAtOnce);
  }

  unsigned row_, col_;  // this thread's chunk in the first rows of a tile
  int num_cols_;
  int64_t row_stride_;
  const Element* source_;
};

}  // namespace flash_attn
