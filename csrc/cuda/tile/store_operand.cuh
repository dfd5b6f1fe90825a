// Operands in registers, into shared memory.
#pragma once

#include <cstdint>

#include "fragment.cuh"
#include "smem_tile.cuh"

namespace flash_attn {

// Writes a warp's 16-bit left operand to (first_row, first_col) of the tile, for other warps to
// read. first_row is a multiple of 8, first_col as SmemTile::advance wants it.
template <typename Tile, int kMBlocks, int kK>
__device__ __forceinline__ void store_operand(Tile& tile, const OperandA<kMBlocks, kK>& A,
                                              int first_row, int first_col, int lane) {
  char* const bytes = reinterpret_cast<char*>(tile.data);
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of 8 columns
    const uint32_t first =
        Tile::byte_offset(first_row + fragment_row(0, lane), first_col + half * 8) +
        fragment_col(0, lane) * static_cast<int>(sizeof(typename Tile::Element));
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
#pragma unroll
      for (int row = 0; row < 2 * kMBlocks; ++row) {
        *reinterpret_cast<uint32_t*>(bytes + Tile::advance(first, row * 8, k * 16)) =
            A.data[row / 2][k][half * 2 + row % 2];
      }
    }
  }
}

}  // namespace flash_attn
