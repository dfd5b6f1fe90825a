// Matrix products of one warp with mma.sync: C (+)= A B, A of kMBlocks × 16 rows from shared memory
// or registers, B from shared memory, 16 × 16 blocks at a time (fp32: 16 × 8).
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/mma.cuh"
#include "../ptx/tf32.cuh"
#include "fragment.cuh"
#include "smem_operand.cuh"

namespace flash_attn {

enum class Into : uint8_t { kZero, kSum };  // C = A B, or C += A B

// Columns of A that one step multiplies: 32 bytes.
template <typename Element>
inline constexpr int kStepK = 2 * kChunkOf<Element>;

template <typename Element>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1, const float (&c)[4]) {
  if constexpr (kIsWide<Element>) {
    ptx::mma_m16n8k8_tf32(d, a, b0, b1, c);
  } else {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1, c);
  }
}

// C (+)= A[:, k … k + kStepK - 1] B[k … k + kStepK - 1, n … n + 15]
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
        multiply<Element>(c, a[m], b[2 * half], b[2 * half + 1], kZeros);
      } else {
        multiply<Element>(c, a[m], b[2 * half], b[2 * half + 1], c);
      }
    }
  }
}

// Four registers of an operand, as mma takes them.
template <typename Element>
__device__ __forceinline__ void round_operand(uint32_t (&block)[4]) {
  if constexpr (std::is_same_v<Element, Tf32>) {
#pragma unroll
    for (uint32_t& number : block) number = ptx::round_to_tf32(number);
  }
}

// C (+)= A B over kK. The fragments of the next block are loaded while this one multiplies. A:
// anything with load(blocks, k), which fills the registers of columns k … k + kStepK - 1; what it
// computes there runs under the products of the columns before.
template <typename Element, int kK, Into kInto, int kMBlocks, int kN, typename OperandAView,
          typename OperandBView>
__device__ __forceinline__ void gemm(Accumulator<kMBlocks, kN>& C, OperandAView&& A,
                                     const OperandBView& B) {
  constexpr int kStep = kStepK<Element>;
  uint32_t a[2][kMBlocks][4], b[2][4];
  constexpr int kNBlocks = kN / 16, kBlocks = kNBlocks * (kK / kStep);
  A.load(a[0], 0);
  B.load(b[0], 0, 0);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int k = i / kNBlocks, n = i % kNBlocks, next = i + 1;
    if (n == 0) {
#pragma unroll
      for (int m = 0; m < kMBlocks; ++m) round_operand<Element>(a[k % 2][m]);
      if ((k + 1) * kStep < kK) A.load(a[(k + 1) % 2], (k + 1) * kStep);
    }
    if (next < kBlocks) B.load(b[next % 2], next % kNBlocks * 16, next / kNBlocks * kStep);
    round_operand<Element>(b[i % 2]);
    if (kInto == Into::kZero && k == 0) {
      multiply_block<Element, Into::kZero>(C, a[k % 2], b[i % 2], n * 16);
    } else {
      multiply_block<Element, Into::kSum>(C, a[k % 2], b[i % 2], n * 16);
    }
  }
}

// Four registers of an operand as sums of two TF32 numbers: high + low has 22 significant bits at
// least.
struct SplitBlock {
  uint32_t high[4], low[4];

  __device__ __forceinline__ void split(const uint32_t (&block)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = ptx::round_finite_to_tf32(block[i]);
      low[i] = __float_as_uint(__uint_as_float(block[i]) - __uint_as_float(high[i]));
    }
  }
};

// gemm() of fp32: A B = high(A) high(B) + high(A) low(B) + low(A) high(B); what is left out is 2⁻²⁴
// of a product at most.
//
// mma adds to its accumulator without rounding to nearest, so that the errors of a long sum point
// one way. It sums 8 or 16 columns, the small products first, and fp32 additions do the rest. kN
// may be 8: then B has the upper half of each block.
template <typename Element, int kK, Into kInto, int kMBlocks, int kN, typename OperandAView,
          typename OperandBView>
  requires std::is_same_v<Element, float>
__device__ __forceinline__ void gemm(Accumulator<kMBlocks, kN>& C, OperandAView&& A,
                                     const OperandBView& B) {
  // Beside a large C there are registers for one step of A only.
  constexpr int kSteps = kMBlocks > 1 && kMBlocks * kN >= 128 ? 1 : 2;
  constexpr int kSumK = kSteps * kStepK<float>;
  constexpr int kBlockN = kN < 16 ? kN : 16;
  constexpr int kNBlocks = kN / kBlockN, kBlocks = kNBlocks * (kK / kSumK);
  SplitBlock a[kSteps][kMBlocks], b[kSteps];
  uint32_t raw_b[2][kSteps][4];
  const auto load_b = [&](int i) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      B.load(raw_b[i % 2][step], i % kNBlocks * 16, i / kNBlocks * kSumK + step * kStepK<float>);
    }
  };
  load_b(0);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int k = i / kNBlocks, n = i % kNBlocks;
    if (n == 0) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t raw_a[kMBlocks][4];
        A.load(raw_a, k * kSumK + step * kStepK<float>);
#pragma unroll
        for (int m = 0; m < kMBlocks; ++m) a[step][m].split(raw_a[m]);
      }
    }
    if (i + 1 < kBlocks) load_b(i + 1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) b[step].split(raw_b[i % 2][step]);
    Accumulator<kMBlocks, kBlockN> sum;
    sum.fill(0.f);
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int m = 0; m < kMBlocks; ++m) {
          const auto& of_a = product == 0 ? a[step][m].low : a[step][m].high;
          const auto& of_b = product == 1 ? b[step].low : b[step].high;
#pragma unroll
          for (int half = 0; half < kBlockN / 8; ++half) {
            float (&c)[4] = sum.data[m][half];
            multiply<float>(c, of_a, of_b[2 * half], of_b[2 * half + 1], c);
          }
        }
      }
    }
#pragma unroll
    for (int row = 0; row < C.kRows; ++row) {
#pragma unroll
      for (int j = 0; j < sum.kRowElements; ++j) {
        float& c = C.at(row, n * sum.kRowElements + j);
        c = kInto == Into::kZero && k == 0 ? sum.at(row, j) : c + sum.at(row, j);
      }
    }
  }
}

// A and B from shared memory.
template <typename Element, int kK, Into kInto, int kMBlocks, int kN, typename OperandAView,
          typename OperandBView>
  requires(!kIsWide<Element>)
__device__ __forceinline__ void gemm_smem(Accumulator<kMBlocks, kN>& C, const OperandAView& A,
                                          const OperandBView& B) {
  gemm<Element, kK, kInto>(C, A, B);
}

// fp32: a loop that stays one. Unrolled, ptxas keeps more in flight than there are registers.
template <typename Element, int kK, Into kInto, int kMBlocks, int kN, typename OperandAView,
          typename OperandBView>
  requires kIsWide<Element>
__device__ __forceinline__ void gemm_smem(Accumulator<kMBlocks, kN>& C, OperandAView A,
                                          OperandBView B) {
  static_assert(kK % kWalkK == 0);
  if constexpr (kInto == Into::kZero) C.fill(0.f);
#pragma unroll 1
  for (int k = 0; k < kK; k += kWalkK) {
    gemm<Element, kWalkK, Into::kSum>(C, A, B);
    A.walk();
    B.walk();
  }
}

// C += A B, A in registers.
template <typename Element, int kMBlocks, int kK, int kN, typename OperandBView>
__device__ __forceinline__ void gemm_register(Accumulator<kMBlocks, kN>& C,
                                              const OperandA<kMBlocks, kK>& A,
                                              const OperandBView& B) {
  gemm<Element, kK, Into::kSum>(C, A, B);
}
template <typename Element, int kMBlocks, int kK, int kN, typename OperandBView>
__device__ __forceinline__ void gemm_register(Accumulator<kMBlocks, kN>& C,
                                              const WideOperandA<kMBlocks, kK>& A,
                                              const OperandBView& B) {
  gemm<Element, kK, Into::kSum>(C, A, B);
}

}  // namespace flash_attn
