// How the warps of a thread block share one matrix product's result.
#pragma once

#include <cstdint>

#include "fragment.cuh"
#include "gemm.cuh"

namespace flash_attn {

// Where a warp stands in a grid of warps, and its part of a kRows × kCols result.
template <int kWarps, int kGridRows, int kRows, int kCols>
struct WarpGrid {
  static constexpr int kGridCols = kWarps / kGridRows;
  static constexpr int kWarpRows = kRows / kGridRows, kWarpCols = kCols / kGridCols;
  static_assert(kWarpRows % 16 == 0 && kWarpCols % 16 == 0);
  using Part = Accumulator<kWarpRows / 16, kWarpCols>;

  int row = static_cast<int>(threadIdx.x) / 32 / kGridCols;
  int col = static_cast<int>(threadIdx.x) / 32 % kGridCols;
};

// Columns of a tile as B, dealt out to kWarps warps 16 at a time: warp w multiplies by 16·w … 16·w
// + 15, then by the same kWarps · 16 further on. (Neighbouring columns a warp would break
// SmemTile::advance's rule when a warp has 48.)
template <int kWarps, typename Tile>
struct DealtColumns {
  SmemOperandB<Tile, Layout::kKOuter> operand;

  __device__ __forceinline__ DealtColumns(const Tile& tile, int warp, int lane)
      : operand(tile, warp * 16, lane) {}
  __device__ __forceinline__ void load(uint32_t (&block)[4], int n, int k) const {
    operand.load(block, n * kWarps, k);
  }
  __device__ __forceinline__ void walk() { operand.walk(); }
};

}  // namespace flash_attn
