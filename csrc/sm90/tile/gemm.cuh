// Matrix products of one warpgroup with wgmma: C (+)= A B, A of 64 rows. The products are
// asynchronous: the caller commits and waits.
#pragma once

#include <cstdint>

#include "../../cuda/ptx/opaque.cuh"
#include "../../cuda/tile/fragment.cuh"
#include "../../cuda/tile/gemm.cuh"
#include "../../cuda/tile/smem_tile.cuh"
#include "../ptx/wgmma.cuh"

namespace flash_attn::sm90 {

// A warpgroup's view of an operand that lies in a SmemTile, which must be 1024-byte aligned: wgmma
// takes the swizzle from the address. Its descriptor (PTX ISA "Matrix descriptor") is
//
//   bits 0-13 address / 16 │ 16-29 leading offset / 16 │ 32-45 stride offset / 16 │ 62-63 swizzle
//
// Blocks of 8 rows of a slab (1024 bytes with 64 columns, 512 with 32) are what the offsets count:
//
//   kKInner: rows are m or n, columns k        kKOuter: rows are k, columns m or n
//            slab 0   slab 1                            slab 0   slab 1
//   rows 0-7  ┌──┐     ┌──┐                    rows 0-7  ┌──┐     ┌──┐
//             │  │     │  │   │ stride                   │  │     │  │   │ stride
//   rows 8-15 ├──┤     ├──┤   ▼                rows 8-15 ├──┤     ├──┤   ▼
//             k 0-63   k 64-127                         mn 0-63  mn 64-127
//                                                           ───────▶ leading
//   One product takes k … k + 15: 32 bytes further in a row, or 16 rows further. The leading offset
//   is unused in the first form.
template <Layout kLayout, typename Tile>
class WgmmaOperand {
  static constexpr int kRowBytes = Tile::kSlabCols * 2;
  static constexpr uint32_t kSwizzle = Tile::kSlabCols == 64 ? 1 : 2;  // 128 or 64 bytes
  static constexpr uint32_t kHigh = kSwizzle << 30 | 8 * kRowBytes / 16;
  static constexpr uint32_t kOwnMemory = 0x3ffff;  // in a cluster, addresses name the block above
  static constexpr uint32_t kLeading = kLayout == Layout::kKOuter ? Tile::kSlabBytes / 16 : 1;

 public:
  static constexpr ptx::Major kMajor =
      kLayout == Layout::kKInner ? ptx::Major::kK : ptx::Major::kMn;

  // From m or n = first_mn of the tile on: a row, a multiple of 8 (kKInner), or a column, a
  // multiple of Tile::kSlabCols (kKOuter).
  __device__ __forceinline__ explicit WgmmaOperand(const Tile& tile, int first_mn = 0)
      : low_(((flash_attn::ptx::smem_address(tile.data) & kOwnMemory) + mn_bytes(first_mn)) / 16 |
             kLeading << 16) {}

  // The same operand, whose descriptors are computed where they are used. The compiler would keep
  // those of an operand that stays in its place, for which registers may be too short.
  __device__ __forceinline__ WgmmaOperand opaque() const {
    WgmmaOperand operand(*this);
    operand.low_ = flash_attn::ptx::opaque(low_);
    return operand;
  }

  // Describes columns (kKInner) or rows (kKOuter) k … k + 15.
  __device__ __forceinline__ uint64_t descriptor(int k) const {
    const int bytes = kLayout == Layout::kKInner
                          ? k / Tile::kSlabCols * Tile::kSlabBytes + k % Tile::kSlabCols * 2
                          : k * kRowBytes;
    return static_cast<uint64_t>(kHigh) << 32 | (low_ + bytes / 16);
  }

 private:
  __device__ __forceinline__ static int mn_bytes(int mn) {
    return kLayout == Layout::kKInner ? mn * kRowBytes : mn / Tile::kSlabCols * Tile::kSlabBytes;
  }

  uint32_t low_;
};

// The compiler moves no access to an accumulator or operand across this point: around products
// under way.
template <int kN>
__device__ __forceinline__ void pin(Accumulator<1, kN>& C) {
#pragma unroll
  for (int row = 0; row < C.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < C.kRowElements; ++i) ptx::pin(C.at(row, i));
  }
}
template <int kK>
__device__ __forceinline__ void pin(OperandA<1, kK>& A) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
#pragma unroll
    for (int r = 0; r < 4; ++r) ptx::pin(A.data[0][k][r]);
  }
}

// Starts C (+)= A B over kK, A and B in shared memory.
template <typename Element, int kK, Into kInto, int kN, Layout kLayoutA, typename TileA,
          Layout kLayoutB, typename TileB>
__device__ __forceinline__ void gemm_ss(Accumulator<1, kN>& C,
                                        const WgmmaOperand<kLayoutA, TileA>& A,
                                        const WgmmaOperand<kLayoutB, TileB>& B) {
  pin(C);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    ptx::Wgmma<Element, kN>::template ss<A.kMajor, B.kMajor>(
        C.data[0], A.descriptor(k), B.descriptor(k), kInto == Into::kSum || k > 0);
  }
}

// The same, A in registers.
template <typename Element, Into kInto, int kN, int kK, typename TileB>
__device__ __forceinline__ void gemm_rs(Accumulator<1, kN>& C, OperandA<1, kK>& A,
                                        const WgmmaOperand<Layout::kKInner, TileB>& B) {
  pin(C);
  pin(A);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    ptx::Wgmma<Element, kN>::template rs<B.kMajor>(C.data[0], A.data[0][k / 16], B.descriptor(k),
                                                   kInto == Into::kSum || k > 0);
  }
}

// Goes on with a sum C that gemm_ss() has started: C += A B over kK columns of another A.
template <typename Element, int kK, int kN, Layout kLayoutA, typename TileA, Layout kLayoutB,
          typename TileB>
__device__ __forceinline__ void gemm_ss_more(Accumulator<1, kN>& C,
                                             const WgmmaOperand<kLayoutA, TileA>& A,
                                             const WgmmaOperand<kLayoutB, TileB>& B) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    ptx::Wgmma<Element, kN>::template ss<A.kMajor, B.kMajor>(C.data[0], A.descriptor(k),
                                                             B.descriptor(k), 1);
  }
}

// Starts C[first_col …] += A B, A in registers, B in shared memory with k in its rows: of the
// columns of C that B's tile has, over k from kFirstK to kEndK (-1: to the end).
template <typename Element, int kFirstK = 0, int kEndK = -1, int kN, int kK, typename TileB>
__device__ __forceinline__ void gemm_rs(Accumulator<1, kN>& C, OperandA<1, kK>& A,
                                        const WgmmaOperand<Layout::kKOuter, TileB>& B,
                                        int first_col = 0) {
  constexpr int kCols = TileB::kCols < kN ? TileB::kCols : kN;
  using Columns = float[kCols / 8][4];
  if constexpr (kFirstK == 0) {  // later, C may be under way
    pin(C);
    pin(A);
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int k = kFirstK; k < (kEndK < 0 ? kK : kEndK); k += 16) {
    ptx::Wgmma<Element, kCols>::template rs<B.kMajor>(
        reinterpret_cast<Columns&>(C.data[0][first_col / 8]), A.data[0][k / 16], B.descriptor(k),
        1);
  }
}

}  // namespace flash_attn::sm90
