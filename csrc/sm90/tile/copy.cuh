// Tiles between global and shared memory by TMA. One thread starts them.
#pragma once

#include <cuda/ptx>

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
// They are zeroed here, once, and stay zero. Rows [first_row, first_row + num_rows); thread: of num_threads.
template <typename Tile>
__device__ __forceinline__ void zero_absent_slabs(Tile& tile, int num_cols, int first_row,
                                                  int num_rows, int thread, int num_threads) {
  for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
    if (col < num_cols) continue;
    auto* chunks =
        reinterpret_cast<uint4*>(&tile.data[col * Tile::kRows + first_row * Tile::kSlabCols]);
    for (int i = thread; i < num_rows * Tile::kSlabChunks; i += num_threads) chunks[i] = {};
  }
}

// Bytes that load_tile() brings.
template <typename Tile>
__device__ __forceinline__ int loaded_bytes(int num_cols) {
  return (num_cols + Tile::kSlabCols - 1) / Tile::kSlabCols * Tile::kSlabBytes;
}

// Starts the copy of rows first_row … of the matrix, which has num_cols columns, into the tile, one
// box a slab. loaded_bytes() complete on the mbarrier.
template <typename Tile>
__device__ __forceinline__ void load_tile(Tile& tile, const CUtensorMap& map,
                                          const MatrixPlace& place, int first_row, int num_cols,
                                          uint64_t& mbarrier, ptx::CacheHint hint) {
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
    if (col >= num_cols) break;
    ptx::tma_load(&tile.data[col * Tile::kRows], map,
                  {col, place.box.first + first_row, place.box.last, place.head, place.batch},
                  mbarrier, hint);
  }
}

// A warp writes its 16 rows of an accumulator, rounded, to rows first_row … of the tile.
template <typename Tile, int kN>
__device__ __forceinline__ void store_rounded(Tile& tile, const Accumulator<1, kN>& C,
                                              int first_row, int lane) {
  const auto rounded = to_operand_a<typename Tile::Element>(C);
  const uint32_t address = tile.address(first_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int col = 0; col < kN; col += 16) {
    ptx::stmatrix_x4(Tile::advance(address, 0, col), rounded.data[0][col / 16]);
  }
}

// Starts the copy of kRows rows of the tile, from tile_row on, to rows first_row … of the matrix;
// boxes that lie beyond its num_cols columns are left out. The caller commits and waits.
template <int kRows, typename Tile>
__device__ __forceinline__ void store_tile_rows(const Tile& tile, int tile_row,
                                                const CUtensorMap& map, const MatrixPlace& place,
                                                int first_row, int num_cols) {
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
    if (col >= num_cols) break;
    const int32_t at[5] = {col, place.box.first + first_row, place.box.last, place.head,
                           place.batch};
    ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, &map,
                                      at,
                                      &tile.data[col * Tile::kRows + tile_row * Tile::kSlabCols]);
  }
}

}  // namespace flash_attn::sm90
