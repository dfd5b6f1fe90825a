// Rounding to 16 bits in other ways than cuda/ptx/math.cuh.
#pragma once

#include <cstdint>

namespace flash_attn::sm90::ptx {

// cvt.rz.f16x2.f32, PTX ISA "cvt": low goes to bits 0-15; what fp16 has no bits for is cut off.
__device__ __forceinline__ uint32_t pack_toward_zero(float low, float high) {
  uint32_t packed;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace flash_attn::sm90::ptx
