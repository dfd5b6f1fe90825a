// Tiles between global and shared memory by TMA. One thread starts them.
#pragma once

#include "../../cuda/tile/fragment.cuh"
#include "../../cuda/tile/smem_tile.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "tensor_map.h"

namespace flash_attn::sm90 {

// Which matrix of a tensor a tile belongs to: the rows of one sequence at one head.
struct MatrixPlace {
  SequenceBox box;
  int head, batch;
};

// Slabs of a tile that lie beyond the matrix's num_cols columns are not copied: a box without any
// element inside its map makes TMA touch the map's first byte, which nobody may own (tensor_map.h).
// They are zeroed here, once, and stay zero. thread: of num_threads.
template <typename Tile>
__device__ __forceinline__ void zero_absent_slabs(Tile& tile, int num_cols, int thread,
                                                  int num_threads) {
  for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
    if (col < num_cols) continue;
    auto* chunks = reinterpret_cast<uint4*>(&tile.data[col * Tile::kRows]);
    for (int i = thread; i < Tile::kRows * Tile::kSlabChunks; i += num_threads) chunks[i] = {};
  }
}

// Bytes that load_tile() brings.
template <typename Tile>
__device__ __forceinline__ int loaded_bytes(int num_cols) {
  return (num_cols + Tile::kSlabCols - 1) / Tile::kSlabCols * Tile::kSlabBytes;
}

// Starts the copy of rows first_row … of num_cols columns of the matrix, from first_col on, into
// the tile, one box a slab. loaded_bytes() complete on the mbarrier.
template <typename Tile>
__device__ __forceinline__ void load_tile(Tile& tile, const CUtensorMap& map,
                                          const MatrixPlace& place, int first_row, int num_cols,
                                          uint64_t& mbarrier, ptx::CacheHint hint,
                                          int first_col = 0) {
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
    if (col >= num_cols) break;
    ptx::tma_load(
        &tile.data[col * Tile::kRows], map,
        {first_col + col, place.box.first + first_row, place.box.last, place.head, place.batch},
        mbarrier, hint);
  }
}

// A warp writes columns first_col … of its 16 rows of an accumulator, rounded, to rows first_row …
// of the tile. Columns that the accumulator lacks are left as they are.
template <typename Tile, int kN>
__device__ __forceinline__ void store_rounded(Tile& tile, const Accumulator<1, kN>& C,
                                              int first_col, int first_row, int lane) {
  using Element = typename Tile::Element;
  const uint32_t address = tile.address(first_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int col = 0; col < Tile::kCols && first_col + col < kN; col += 16) {
    const auto& left = C.data[0][(first_col + col) / 8];
    const auto& right = C.data[0][(first_col + col) / 8 + 1];
    ptx::stmatrix_x4(Tile::advance(address, 0, col),
                     {flash_attn::ptx::pack<Element>(left[0], left[1]),
                      flash_attn::ptx::pack<Element>(left[2], left[3]),
                      flash_attn::ptx::pack<Element>(right[0], right[1]),
                      flash_attn::ptx::pack<Element>(right[2], right[3])});
  }
}

// The same of all columns of what an accumulator was rounded to (to_operand_a).
template <typename Tile, int kCols>
__device__ __forceinline__ void store_operand(Tile& tile, const OperandA<1, kCols>& A,
                                              int first_row, int lane) {
  static_assert(Tile::kCols == kCols);
  const uint32_t address = tile.address(first_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int col = 0; col < kCols; col += 16) {
    ptx::stmatrix_x4(Tile::advance(address, 0, col), A.data[0][col / 16]);
  }
}

// What store_operand() of the same lane wrote. It becomes columns kFirstCol … of A.
template <int kFirstCol = 0, typename Tile, int kCols>
__device__ __forceinline__ void load_operand(OperandA<1, kCols>& A, const Tile& tile, int first_row,
                                             int lane) {
  static_assert(kFirstCol + Tile::kCols <= kCols);
  const uint32_t address = tile.address(first_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += 16) {
    flash_attn::ptx::ldmatrix_x4(A.data[0][(kFirstCol + col) / 16], Tile::advance(address, 0, col));
  }
}

// Starts the copy of kRows rows of a tile of one slab, from tile_row on, to the matrix, rows
// first_row … and columns first_col …. The caller commits and waits.
template <int kRows, typename Tile>
__device__ __forceinline__ void store_tile_rows(const Tile& tile, int tile_row,
                                                const CUtensorMap& map, const MatrixPlace& place,
                                                int first_row, int first_col) {
  static_assert(Tile::kCols == Tile::kSlabCols);
  const int32_t at[5] = {first_col, place.box.first + first_row, place.box.last, place.head,
                         place.batch};
  ptx::tma_store(map, at, &tile.data[tile_row * Tile::kSlabCols]);
}

}  // namespace flash_attn::sm90
