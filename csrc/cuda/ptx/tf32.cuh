// fp32 numbers with the 11 significant bits that TF32 operands have.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// cvt.rna.tf32.f32, PTX ISA "cvt": to nearest, halves away from 0; NaN stays NaN.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t number) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(number)));
  return rounded;
}

// The same in two instructions instead of three. A NaN may become another number.
__device__ __forceinline__ uint32_t round_finite_to_tf32(uint32_t number) {
  return (number + 0x1000u) & 0xffffe000u;
}

}  // namespace flash_attn::ptx
