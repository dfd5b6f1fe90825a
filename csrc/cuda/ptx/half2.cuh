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

// setp.geu.xor.f16x2, PTX ISA "setp": low and high tell the same of the two halves, or the opposite
// if `opposite`.
__device__ __forceinline__ void greater_equal_or_nan2(uint32_t a, uint32_t b, bool opposite,
                                                      bool& low, bool& high) {
  int of_low, of_high;
  asm("{\n.reg .pred low, high, opposite;\nsetp.ne.s32 opposite, %4, 0;\n"
      "setp.geu.xor.f16x2 low|high, %2, %3, opposite;\n"
      "selp.s32 %0, 1, 0, low;\nselp.s32 %1, 1, 0, high;\n}"
      : "=r"(of_low), "=r"(of_high)
      : "r"(a), "r"(b), "r"(static_cast<int>(opposite)));
  low = of_low != 0;
  high = of_high != 0;
}

// mul.f32, PTX ISA "mul", under a predicate: x becomes x · factor, unless it is kept.
__device__ __forceinline__ void multiply_unless(float& x, float factor, bool kept) {
  asm("{\n.reg .pred kept;\nsetp.ne.s32 kept, %2, 0;\n@!kept mul.f32 %0, %0, %1;\n}"
      : "+f"(x)
      : "f"(factor), "r"(static_cast<int>(kept)));
}

// min.NaN.bf16x2, PTX ISA "min": of each half, NaN where one of them is.
__device__ __forceinline__ uint32_t minimum2_or_nan_bf16(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace flash_attn::ptx
