// Comparison of pairs of 16-bit numbers, and what depends on it.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// abs.f16x2, PTX ISA "abs": clears both signs. A modifier of the instruction that takes the result.
__device__ __forceinline__ uint32_t absolute2(uint32_t pair) {
  uint32_t result;
  asm("abs.f16x2 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// set.geu.u32.f16x2, PTX ISA "set": all bits of a half of the result where a >= b or one of them is
// NaN. Subnormal numbers count.
__device__ __forceinline__ uint32_t greater_equal_or_nan2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("set.geu.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// min.NaN.bf16x2, PTX ISA "min": of each half, NaN where one of them is.
__device__ __forceinline__ uint32_t minimum2_or_nan_bf16(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace flash_attn::ptx
