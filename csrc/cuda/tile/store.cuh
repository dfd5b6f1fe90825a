// Accumulators, rounded to 16 bits, into shared memory.
#pragma once

#include <cstdint>

#include "fragment.cuh"
#include "smem_tile.cuh"

namespace flash_attn {

// Writes a warp's accumulator times `factor` to (first_row, first_col) of the tile; neighbouring
// blocks of 16 columns lie kColStep columns apart. first_row is a multiple of 8, first_col as
// SmemTile::advance wants it. The eight rows of one store lie in eight different places of the
// line: no bank conflict.
template <int kColStep = 16, typename Tile, int kMBlocks, int kN>
__device__ __forceinline__ void store_rounded(Tile& tile, const Accumulator<kMBlocks, kN>& C,
                                              int first_row, int first_col, int lane,
                                              float factor = 1.f) {
  using Element = typename Tile::Element;
  char* bytes = reinterpret_cast<char*>(tile.data);
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) {
    const uint32_t first =
        Tile::byte_offset(first_row + fragment_row(0, lane), first_col + n % 2 * 8) +
        lane % 4 * sizeof(uint32_t);
#pragma unroll
    for (int row = 0; row < C.kRows; ++row) {
      const float* c = C.data[row / 2][n] + row % 2 * 2;
      *reinterpret_cast<uint32_t*>(bytes + Tile::advance(first, row * 8, n / 2 * kColStep)) =
          ptx::pack<Element>(c[0] * factor, c[1] * factor);
    }
  }
}

}  // namespace flash_attn
