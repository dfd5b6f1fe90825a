// What a warp holds in registers: accumulators of a matrix product, and operands of the next one.
#pragma once

#include <cstdint>

#include "../ptx/math.cuh"
#include "element.cuh"

namespace flash_attn {

// A warp's fp32 accumulator of kMBlocks blocks of 16 rows by kN columns. Lane l holds, of each
// block of 16 × 8,
//
//            columns 2t, 2t+1            g = l / 4, t = l % 4
//   row g     data[m][n][0..1]
//   row g+8   data[m][n][2..3]
//
// so a thread sees 2·kMBlocks rows of kN/4 elements each, and a row lies in the four lanes of a
// quad. A warpgroup's wgmma accumulator is the same with kMBlocks = 1, one block a warp.
template <int kMBlocksOfTile, int kNOfTile>
struct Accumulator {
  static constexpr int kMBlocks = kMBlocksOfTile;
  static constexpr int kN = kNOfTile;
  static constexpr int kRows = 2 * kMBlocks;  // that a thread sees
  static constexpr int kRowElements = kN / 4;

  float data[kMBlocks][kN / 8][4];

  __device__ __forceinline__ float& at(int row, int element) {
    return data[row / 2][element / 2][row % 2 * 2 + element % 2];
  }
  __device__ __forceinline__ const float& at(int row, int element) const {
    return data[row / 2][element / 2][row % 2 * 2 + element % 2];
  }
  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kRowElements; ++i) at(row, i) = value;
    }
  }
};

// Row of the 16-row block and column of the tile that at(row, element) is in this lane. The kernel
// knows where its blocks of 16 rows (row / 2) lie.
__device__ __forceinline__ int fragment_row(int row, int lane) { return row % 2 * 8 + lane / 4; }
__device__ __forceinline__ constexpr int fragment_col(int element, int lane) {
  return element / 2 * 8 + lane % 4 * 2 + element % 2;
}

// A warp's 16-bit left operand of kMBlocks × 16 rows by kK columns, four registers of two elements
// a 16 × 16 block:
//
//             k 2t, 2t+1   k 2t+8, 2t+9
//   row g      [0]          [2]
//   row g+8    [1]          [3]
template <int kMBlocks, int kK>
struct OperandA {
  uint32_t data[kMBlocks][kK / 16][4];

  // Columns k … k + 15, as gemm() asks for them.
  __device__ __forceinline__ void load(uint32_t (&blocks)[kMBlocks][4], int k) const {
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 4; ++r) blocks[m][r] = data[m][k / 16][r];
    }
  }
};

// The same of fp32, four registers a 16 × 8 block:
//
//             k 2t   k 2t+1
//   row g      [0]    [2]
//   row g+8    [1]    [3]
template <int kMBlocks, int kK>
struct WideOperandA {
  uint32_t data[kMBlocks][kK / 8][4];

  // Columns k … k + 7.
  __device__ __forceinline__ void load(uint32_t (&blocks)[kMBlocks][4], int k) const {
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 4; ++r) blocks[m][r] = data[m][k / 8][r];
    }
  }
};

// One step's elements of a row (`row` as in Accumulator::at) become registers of the left operand.
template <typename Element, int kMBlocks>
__device__ __forceinline__ void set_operand_row(uint32_t (&blocks)[kMBlocks][4], int row,
                                                const float (&elements)[kChunkOf<Element> / 2]) {
  uint32_t &first = blocks[row / 2][row % 2], &second = blocks[row / 2][row % 2 + 2];
  if constexpr (kIsWide<Element>) {
    first = __float_as_uint(elements[0]);
    second = __float_as_uint(elements[1]);
  } else {
    first = ptx::pack<Element>(elements[0], elements[1]);
    second = ptx::pack<Element>(elements[2], elements[3]);
  }
}

// An accumulator rounded to 16 bits is the left operand of the next product without any exchange
// between lanes: two neighbouring 16 × 8 blocks make one 16 × 16 block.
template <typename Element, int kMBlocks, int kN>
__device__ __forceinline__ OperandA<kMBlocks, kN> to_operand_a(
    const Accumulator<kMBlocks, kN>& accumulator) {
  OperandA<kMBlocks, kN> operand;
#pragma unroll
  for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      const auto& left = accumulator.data[m][2 * k];
      const auto& right = accumulator.data[m][2 * k + 1];
      operand.data[m][k][0] = ptx::pack<Element>(left[0], left[1]);
      operand.data[m][k][1] = ptx::pack<Element>(left[2], left[3]);
      operand.data[m][k][2] = ptx::pack<Element>(right[0], right[1]);
      operand.data[m][k][3] = ptx::pack<Element>(right[2], right[3]);
    }
  }
  return operand;
}

// fp32 needs no rounding either.
template <typename Element, int kMBlocks, int kN>
  requires kIsWide<Element>
__device__ __forceinline__ WideOperandA<kMBlocks, kN> to_operand_a(
    const Accumulator<kMBlocks, kN>& accumulator) {
  WideOperandA<kMBlocks, kN> operand;
#pragma unroll
  for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
    for (int k = 0; k < kN / 8; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        operand.data[m][k][i % 2 * 2 + i / 2] = __float_as_uint(accumulator.data[m][k][i]);
      }
    }
  }
  return operand;
}

}  // namespace flash_attn
