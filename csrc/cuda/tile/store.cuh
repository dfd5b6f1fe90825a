// Accumulators, rounded to the tile's type, into shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fragment.cuh"
#include "smem_tile.cuh"

namespace flash_attn {

// Two neighbouring numbers of a row.
template <typename Element>
using PairOf = std::conditional_t<kIsWide<Element>, float2, uint32_t>;
template <typename Element>
__device__ __forceinline__ PairOf<Element> rounded_pair(float first, float second) {
  if constexpr (kIsWide<Element>) {
    return {first, second};
  } else {
    return ptx::pack<Element>(first, second);
  }
}

// Writes a warp's accumulator times `factor` to (first_row, first_col) of the tile; neighbouring
// blocks of 16 columns lie kColStep columns apart. first_row is a multiple of 8, first_col as
// SmemTile::advance wants it. The rows of one store lie in different places of the line: no bank
// conflict.
template <int kColStep = 16, typename Tile, int kMBlocks, int kN>
__device__ __forceinline__ void store_rounded(Tile& tile, const Accumulator<kMBlocks, kN>& C,
                                              int first_row, int first_col, int lane,
                                              float factor = 1.f) {
  using Element = typename Tile::Element;
  char* bytes = reinterpret_cast<char*>(tile.data);
  const int col = fragment_col(0, lane) / Tile::kChunk * Tile::kChunk;
  const int byte = fragment_col(0, lane) % Tile::kChunk * static_cast<int>(sizeof(Element));
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) {
    const uint32_t first =
        Tile::byte_offset(first_row + fragment_row(0, lane), first_col + n % 2 * 8 + col) + byte;
#pragma unroll
    for (int row = 0; row < C.kRows; ++row) {
      const float* c = C.data[row / 2][n] + row % 2 * 2;
      char* const pair = bytes + Tile::advance(first, row * 8, n / 2 * kColStep);
      *reinterpret_cast<PairOf<Element>*>(pair) =
          rounded_pair<Element>(c[0] * factor, c[1] * factor);
    }
  }
}

}  // namespace flash_attn
