// Matrix products of one warp with mma.sync: C (+)= A B, A of kMBlocks × 16 rows from shared memory
// or registers, B from shared memory, 16 × 16 blocks at a time.
#pragma once

#include <cstdint>

#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "fragment.cuh"
#include "smem_tile.cuh"

namespace flash_attn {

enum class Side : uint8_t { kA, kB };
// How the operand lies in its tile: kKInner: (m or n, k), as Q and K do in Q Kᵀ. kKOuter: (k, m or
// n), as V does in P V and P does in Pᵀ dO; ldmatrix transposes it on the way.
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
};

template <typename Tile, Layout kLayout>
using SmemOperandB = SmemOperand<Side::kB, kLayout, Tile>;

enum class Into : uint8_t { kZero, kSum };  // C = A B, or C += A B

// C (+)= A[:, k … k + 15] B[k … k + 15, n … n + 15]
template <typename Element, Into kInto, int kMBlocks, int kN>
__device__ __forceinline__ void multiply_block(Accumulator<kMBlocks, kN>& C,
                                               const uint32_t (&a)[kMBlocks][4],
                                               const uint32_t (&b)[4], int n) {
  constexpr float kZeros[4] = {};
#pragma unroll
  for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float (&c)[4] = C.data[m][n / 8 + half];
      if constexpr (kInto == Into::kZero) {
        ptx::mma_m16n8k16<Element>(c, a[m], b[2 * half], b[2 * half + 1], kZeros);
      } else {
        ptx::mma_m16n8k16<Element>(c, a[m], b[2 * half], b[2 * half + 1], c);
      }
    }
  }
}

// C (+)= A B over kK. The fragments of the next block are loaded while this one multiplies. A: anything with
// load(blocks, k), which fills the registers of columns k … k + 15; what it computes there runs under the products of the
// columns before.
template <typename Element, int kK, Into kInto, int kMBlocks, int kN, typename OperandAView,
          typename OperandBView>
__device__ __forceinline__ void gemm(Accumulator<kMBlocks, kN>& C, OperandAView&& A,
                                     const OperandBView& B) {
  uint32_t a[2][kMBlocks][4], b[2][4];
  constexpr int kNBlocks = kN / 16, kBlocks = kNBlocks * (kK / 16);
  A.load(a[0], 0);
  B.load(b[0], 0, 0);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int k = i / kNBlocks, n = i % kNBlocks, next = i + 1;
    if (n == 0 && (k + 1) * 16 < kK) A.load(a[(k + 1) % 2], (k + 1) * 16);
    if (next < kBlocks) B.load(b[next % 2], next % kNBlocks * 16, next / kNBlocks * 16);
    if (kInto == Into::kZero && k == 0) {
      multiply_block<Element, Into::kZero>(C, a[k % 2], b[i % 2], n * 16);
    } else {
      multiply_block<Element, Into::kSum>(C, a[k % 2], b[i % 2], n * 16);
    }
  }
}

// A and B from shared memory.
template <typename Element, int kK, Into kInto, int kMBlocks, int kN, typename OperandAView,
          typename OperandBView>
__device__ __forceinline__ void gemm_smem(Accumulator<kMBlocks, kN>& C, const OperandAView& A,
                                          const OperandBView& B) {
  gemm<Element, kK, kInto>(C, A, B);
}

// C += A B, A in registers.
template <typename Element, int kMBlocks, int kK, int kN, typename OperandBView>
__device__ __forceinline__ void gemm_register(Accumulator<kMBlocks, kN>& C,
                                              const OperandA<kMBlocks, kK>& A,
                                              const OperandBView& B) {
  gemm<Element, kK, Into::kSum>(C, A, B);
}

}  // namespace flash_attn
