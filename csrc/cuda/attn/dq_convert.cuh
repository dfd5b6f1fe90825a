// dQ = scale · the sums of dq_accum, from their order to rows.
#pragma once

#include "../ptx/math.cuh"
#include "../tile/fragment.cuh"
#include "dq_accum.cuh"

namespace flash_attn {

inline constexpr int kDqConvertBlocks =
    4;  // of dq_accum, side by side, that a warp converts at a time
inline constexpr int kDqConvertCols = 8 * kDqConvertBlocks;

// Lane t of each quad holds pairs[b] of block b; then it holds block t, pairs[s] that of lane s.
__device__ __forceinline__ void transpose_quad(uint32_t (&pairs)[kDqConvertBlocks], int lane) {
#pragma unroll
  for (int step = 1; step < kDqConvertBlocks; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < kDqConvertBlocks; ++i) {
      if ((i & step) != 0) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? pairs[i] : pairs[i + step], step);
      (upper ? pairs[i] : pairs[i + step]) = received;
    }
  }
}

// A lane's fragment of a block: x and y in row fragment_row(0, lane), z and w in row
// fragment_row(1, lane). By lane they are one load.
__device__ __forceinline__ float4 dq_values(const float* block, DqAccumOrder order, int lane) {
  if (order == DqAccumOrder::kByLane) {
    return *reinterpret_cast<const float4*>(block + dq_accum_position(order, lane, 0));
  }
  return {block[dq_accum_position(order, lane, 0)], block[dq_accum_position(order, lane, 1)],
          block[dq_accum_position(order, lane, 2)], block[dq_accum_position(order, lane, 3)]};
}

// Stores such pairs of kDqConvertBlocks blocks to the 16 rows and kDqConvertCols columns that begin
// at `dq`. dq has `rows` rows and `cols` columns from there on. The first `len` rows count, and the
// others get 0. A whole warp calls it.
template <typename Element>
__device__ __forceinline__ void store_dq(Element* dq, int64_t row_stride,
                                         uint32_t (&pairs)[kDqConvertBlocks], int half, int rows,
                                         int len, int cols, int lane) {
  transpose_quad(pairs, lane);
  const int row = fragment_row(half, lane), col = lane % 4 * 8;
  if (row >= rows || col >= cols) return;
  uint4 chunk = {};
  if (row < len) chunk = {pairs[0], pairs[1], pairs[2], pairs[3]};
  *reinterpret_cast<uint4*>(dq + row * row_stride + col) = chunk;
}

}  // namespace flash_attn
