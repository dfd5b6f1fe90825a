// Bytes of two registers in another order.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// prmt.b32, PTX ISA "prmt": byte i of the result is byte (selector >> 4i) & 7 of {b, a}.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

}  // namespace flash_attn::ptx
