// 16 more columns of the operands of a product, for what is added to all rows or columns alike:
// beside a busy tensor core an instruction for each score costs more than such a step of the
// product.
#pragma once

#include <cstdint>

#include "../../cuda/ptx/math.cuh"
#include "../ptx/wgmma.cuh"
#include "gemm.cuh"

namespace flash_attn::sm90 {

// An fp32 number as the sum of three of 16 bits, which keep its bits. The first and the second lie
// in x, the third and 0 in y.
template <typename Element>
__device__ __forceinline__ uint2 as_three_numbers(float value) {
  const auto rounded = [](float x) {
    return flash_attn::ptx::unpack<Element>(flash_attn::ptx::pack<Element>(x, 0.f)).x;
  };
  const float first = rounded(value), second = rounded(value - first);
  return {flash_attn::ptx::pack<Element>(first, second),
          flash_attn::ptx::pack<Element>(value - first - second, 0.f)};
}

// Describes an operand without a swizzle all of whose blocks of 8 × 8 are the first one.
__device__ __forceinline__ uint64_t unswizzled_descriptor(const void* first_block) {
  constexpr uint32_t kOwnMemory = 0x3ffff;
  return (flash_attn::ptx::smem_address(first_block) & kOwnMemory) / 16;
}

// A left operand of ones, for where four registers are too many. All of its blocks are this one.
template <typename Element>
struct TermOnes {
  alignas(128) uint4 rows[8];

  __device__ __forceinline__ void write(int row) {
    const uint32_t two = flash_attn::ptx::pack<Element>(1.f, 1.f);
    rows[row] = {two, two, two, two};
  }
  __device__ __forceinline__ uint64_t descriptor() const { return unswizzled_descriptor(rows); }
};

// `columns` is the right operand, with a row for each of kN columns of the product. It lies there
// without a swizzle, in blocks of 8 × 8. The second eight columns are the first eight once more;
// those of the left operand are 0. memcheck seems to heed no strides: it takes the 16 columns to
// lie side by side from the descriptor's address on. So as many bytes again must follow within the
// block's shared memory, and 64 × 16 numbers from where TermOnes begin.
template <typename Element, int kN>
struct TermColumns {
  // The columns of the left operand are the same in all rows. They are made from the first four, as
  // as_three_numbers() gives them.
  using Left = OperandA<1, 16>;

  alignas(128) Element columns[kN][8];

  __device__ __forceinline__ static Left left(uint2 first_four, int lane) {
    const uint32_t of_lane = lane % 4 == 0 ? first_four.x : lane % 4 == 1 ? first_four.y : 0;
    return {{{{of_lane, of_lane, 0, 0}}}};
  }

  // Starts the product in the batch of the products of C. These come first, and their fence is that
  // of `left`, too.
  __device__ __forceinline__ void start(Accumulator<1, kN>& C, const Left& left) const {
    ptx::Wgmma<Element, kN>::template rs<ptx::Major::kK>(C.data[0], left.data[0][0], descriptor(),
                                                         1);
  }
  // The left operand's are ones, and lie in shared memory.
  __device__ __forceinline__ void start(Accumulator<1, kN>& C,
                                        const TermOnes<Element>& left) const {
    ptx::Wgmma<Element, kN>::template ss<ptx::Major::kK, ptx::Major::kK>(
        C.data[0], left.descriptor(), descriptor(), 1);
  }

 private:
  __device__ __forceinline__ uint64_t descriptor() const {
    constexpr uint64_t kNextBlock = sizeof(Element[8][8]) / 16;  // of 8 rows
    return kNextBlock << 32 | unswizzled_descriptor(columns);
  }
};

}  // namespace flash_attn::sm90
