// Four elements of 8 bits to four of fp16, exactly.
#pragma once

#include <cstdint>

#include "permute.cuh"

namespace flash_attn::ptx {

// cvt.rn.f16x2.e4m3x2, PTX ISA "cvt", sm_89 and newer: NaN stays NaN. Never called before, where
// the instruction is missing.
__device__ __forceinline__ void widen_e4m3(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 "
      "%1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  low = high = bytes;
#endif
}

// int8: with its sign bit flipped a byte is value + 128, and below the exponent byte 0x64 that is
// 1024 + value + 128 in fp16. sub.f16x2, PTX ISA "sub", takes the rest away. kAlternate: bytes 0, 2
// and 1, 3 instead of 0, 1 and 2, 3.
template <bool kAlternate>
__device__ __forceinline__ void widen_int8(uint32_t bytes, uint32_t& low, uint32_t& high) {
  constexpr uint32_t kBias = 0x64806480;  // 1152, twice
  constexpr uint32_t kLow = kAlternate ? 0x4240 : 0x4140, kHigh = kAlternate ? 0x4341 : 0x4342;
  const uint32_t flipped = bytes ^ 0x80808080;
  asm("sub.f16x2 %0, %1, %2;"
      : "=r"(low)
      : "r"(permute_bytes(flipped, 0x64646464, kLow)), "r"(kBias));
  asm("sub.f16x2 %0, %1, %2;"
      : "=r"(high)
      : "r"(permute_bytes(flipped, 0x64646464, kHigh)), "r"(kBias));
}

}  // namespace flash_attn::ptx
