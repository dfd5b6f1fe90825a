// What a warp reads of a tile in shared memory as an operand of mma.sync: blocks of 16 rows or
// columns by one step of k, four registers each.
#pragma once

#include <cstdint>

#include "../ptx/ld_shared.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/opaque.cuh"
#include "smem_tile.cuh"

namespace flash_attn {

enum class Side : uint8_t { kA, kB };
// How the operand lies in its tile: kKInner: (m or n, k), as Q and K do in Q Kᵀ. kKOuter: (k, m or
// n), as V does in P V and P does in Pᵀ dO; it is transposed on the way.
enum class Layout : uint8_t { kKInner, kKOuter };

// A warp's view of an operand in shared memory, from (mn, k) = (first_mn, 0) of the tile on.
template <Side kSide, Layout kLayout, typename Tile>
class SmemOperand {
 public:
  // first_mn is a multiple of 16. kKOuter: see SmemTile::advance about columns.
  __device__ __forceinline__ SmemOperand(const Tile& tile, int first_mn, int lane) {
    // ldmatrix takes the rows of its four 8 × 8 matrices from lanes 0-7, 8-15, 16-23, 24-31. A
    // wants them in the order (m0,k0) (m8,k0) (m0,k8) (m8,k8), B in (n0,k0) (n0,k8) (n8,k0)
    // (n8,k8): then registers 0, 1 and 2, 3 are two B blocks.
    constexpr bool kRowsFirst = (kSide == Side::kA) == (kLayout == Layout::kKInner);
    const int row = kRowsFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int col = kRowsFirst ? lane / 16 * 8 : lane / 8 % 2 * 8;
    address_ = kLayout == Layout::kKInner ? tile.address(first_mn + row, col)
                                          : tile.address(row, first_mn + col);
  }

  // The 16 × 16 block at (first_mn + mn, k). mn and k are known at compile time.
  __device__ __forceinline__ void load(uint32_t (&block)[4], int mn, int k) const {
    if constexpr (kLayout == Layout::kKInner) {
      ptx::ldmatrix_x4(block, Tile::advance(address_, mn, k));
    } else {
      ptx::ldmatrix_x4_trans(block, Tile::advance(address_, k, mn));
    }
  }

 private:
  uint32_t address_;
};

inline constexpr int kWalkK = 32;  // columns of A that walk() moves on by

// The same of fp32, in blocks of 16 × 8. mma's k t and t + 4, which are a thread's, stand for
// columns 2t and 2t + 1 of both operands: then an accumulator is an operand A as it is
// (fragment.cuh), and a thread's two numbers of a row lie side by side.
template <Side kSide, Layout kLayout, typename Tile>
  requires kIsWide<typename Tile::Element>
class SmemOperand<kSide, kLayout, Tile> {
 public:
  __device__ __forceinline__ SmemOperand(const Tile& tile, int first_mn, int lane) {
    // opaque: the addresses that follow from it would take registers throughout a kernel's loop.
    lane = static_cast<int>(ptx::opaque(lane) % 32);
    const int mn = lane / 4, k = lane % 4 * 2;
    if constexpr (kLayout == Layout::kKInner) {
      address_ = tile.address(first_mn + mn, k / 4 * 4) + k % 4 * 4;
    } else {
      address_ = tile.address(k, first_mn + mn / 4 * 4) + mn % 4 * 4;
    }
  }

  // The 16 × 8 block at (first_mn + mn, k).
  __device__ __forceinline__ void load(uint32_t (&block)[4], int mn, int k) const {
    constexpr bool kIsA = kSide == Side::kA;
    uint32_t &upper_odd = block[kIsA ? 2 : 1], &lower_even = block[kIsA ? 1 : 2];
    if constexpr (kLayout == Layout::kKInner) {
      load_half(block[0], upper_odd, mn, k);
      load_half(lower_even, block[3], mn + 8, k);
    } else {
      block[0] = ptx::load_shared(Tile::advance(address_, k, mn));
      upper_odd = ptx::load_shared(Tile::advance_to_odd(address_, k, mn));
      lower_even = ptx::load_shared(Tile::advance(address_, k, mn + 8));
      block[3] = ptx::load_shared(Tile::advance_to_odd(address_, k, mn + 8));
    }
  }

  // Loads a block of 8 × 8: the numbers of even and those of odd k.
  __device__ __forceinline__ void load_half(uint32_t& even, uint32_t& odd, int mn, int k) const {
    static_assert(kLayout == Layout::kKInner);
    ptx::load_shared_v2(even, odd, Tile::advance(address_, mn, k));
  }

  // Moves on by kWalkK, at run time.
  __device__ __forceinline__ void walk() {
    constexpr int kBytes = kLayout == Layout::kKInner ? kWalkK / Tile::kSlabCols * Tile::kSlabBytes
                                                      : Tile::advance(0, kWalkK, 0);
    address_ += kBytes;
  }

 private:
  uint32_t address_;
};

// The left operand of kMBlocks blocks of 16 rows that lie kBlockStride rows apart in a tile.
template <int kMBlocks, int kBlockStride, Layout kLayout, typename Tile>
struct SmemOperandA {
  SmemOperand<Side::kA, kLayout, Tile> operand;

  __device__ __forceinline__ SmemOperandA(const Tile& tile, int first_row, int lane)
      : operand(tile, first_row, lane) {}
  __device__ __forceinline__ void load(uint32_t (&blocks)[kMBlocks][4], int k) const {
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) operand.load(blocks[m], m * kBlockStride, k);
  }
  __device__ __forceinline__ void walk() { operand.walk(); }
};

template <typename Tile, Layout kLayout>
using SmemOperandB = SmemOperand<Side::kB, kLayout, Tile>;

// The same for a product of no more than eight columns of fp32. first_mn is a multiple of 8.
template <typename Tile>
struct EightColumns {
  SmemOperandB<Tile, Layout::kKInner> operand;

  __device__ __forceinline__ EightColumns(const Tile& tile, int first_mn, int lane)
      : operand(tile, first_mn, lane) {}
  // The block's lower columns do not exist.
  __device__ __forceinline__ void load(uint32_t (&block)[4], int /*n*/, int k) const {
    operand.load_half(block[0], block[1], 0, k);
    block[2] = block[3] = 0;
  }
  __device__ __forceinline__ void walk() { operand.walk(); }
};

}  // namespace flash_attn
