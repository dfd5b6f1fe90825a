// A tile in shared memory, swizzled so that the loads of operands meet no bank conflict in either
// direction.
#pragma once

#include <cstdint>

#include "../ptx/ldmatrix.cuh"
#include "element.cuh"

namespace flash_attn {

// 16 bits: columns lie in slabs of 64 (128 bytes a row) where kCols is a multiple of 64, else in
// slabs of 32 (64 bytes a row): the layouts that TMA's 128-byte and 64-byte swizzles write and
// wgmma reads. Inside a slab, 16-byte chunk c of row r lies at chunk c XOR s(r). Numbers are
// logical chunks, one line is the 128 bytes that the 32 banks serve at once:
//
//   slab of 64 columns, s = r & 7          slab of 32 columns, s = (r >> 1) & 3
//   row 0   0 1 2 3 4 5 6 7                rows 0, 1    0 1 2 3 | 0 1 2 3
//   row 1   1 0 3 2 5 4 7 6                rows 2, 3    1 0 3 2 | 1 0 3 2
//   row 2   2 3 0 1 6 7 4 5                rows 4, 5    2 3 0 1 | 2 3 0 1
//   row 3   3 2 1 0 7 6 5 4                rows 6, 7    3 2 1 0 | 3 2 1 0
//   …
// Any one logical chunk of eight consecutive rows occupies eight different places of the line.
//
// fp32: slabs of 32 columns (128 bytes a row). A warp reads two neighbouring chunks, which must not
// meet, of four rows at a time: of 0 to 3, 4 to 7, or of the even or the odd ones of eight.
//
//   row     0    1    2    3    4    5    6    7
//   s       0    2    4    6    3    1    7    5
template <typename ElementType, int kRowsOfTile, int kColsOfTile>
struct alignas(128) SmemTile {
  using Element = ElementType;
  static constexpr int kRows = kRowsOfTile;
  static constexpr int kCols = kColsOfTile;
  static constexpr int kChunk = kChunkOf<Element>;
  static constexpr int kSlabCols = !kIsWide<Element> && kCols % 64 == 0 ? 64 : 32;
  static constexpr int kSlabChunks = kSlabCols / kChunk;
  static constexpr int kSlabBytes = kRows * kSlabCols * static_cast<int>(sizeof(Element));
  static_assert(kCols % 32 == 0 && kRows % 8 == 0);

  Element data[kRows * kCols];

  __device__ __forceinline__ static constexpr int swizzle(int row) {
    if constexpr (kIsWide<Element>) {
      const int upper = row >> 2 & 1;
      return ((row & 3) ^ upper) << 1 | upper;
    }
    return kSlabCols == 64 ? row & 7 : (row >> 1) & 3;
  }

  // Byte offset of (row, col); col is a multiple of kChunk.
  __device__ __forceinline__ static constexpr int byte_offset(int row, int col) {
    const int chunk = (col % kSlabCols / kChunk) ^ swizzle(row);
    return col / kSlabCols * kSlabBytes + (row * kSlabChunks + chunk) * 16;
  }

  __device__ __forceinline__ uint32_t address(int row, int col) const {
    return ptx::smem_address(data) + byte_offset(row, col);
  }

  __device__ __forceinline__ Element* pointer(int row, int col) {
    return reinterpret_cast<Element*>(reinterpret_cast<char*>(data) + byte_offset(row, col)) +
           col % kChunk;
  }

  // From the address of (row, col) to that of (row + rows, col + cols), for compile-time rows % 8
  // == 0 and cols % 16 == 0 (fp32: % 8): one XOR of a constant and one immediate, instead of the
  // whole formula. XOR adds only where no bit carries: col - col % 16 is a multiple of the power of
  // two that all cols stay under (or of kSlabCols), and col % 16 is 0 or 8 (fp32: less than 8).
  __device__ __forceinline__ static constexpr uint32_t advance(uint32_t address, int rows,
                                                               int cols) {
    return (address ^ (cols % kSlabCols / kChunk * 16)) + cols / kSlabCols * kSlabBytes +
           rows * kSlabChunks * 16;
  }

  // fp32: from (row, col), row even, to (row + 1 + rows, col + cols).
  __device__ __forceinline__ static constexpr uint32_t advance_to_odd(uint32_t address, int rows,
                                                                      int cols) {
    static_assert(kIsWide<Element>);
    return advance(address ^ (swizzle(1) * 16), rows, cols) + kSlabChunks * 16;
  }
};

}  // namespace flash_attn
