// Single words from shared memory, by address.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// ld.shared.b32, PTX ISA "ld".
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// ld.shared.v2.b32: two neighbouring words; the address is a multiple of 8.
__device__ __forceinline__ void load_shared_v2(uint32_t& first, uint32_t& second,
                                               uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
               : "=r"(first), "=r"(second)
               : "r"(address)
               : "memory");
}

}  // namespace flash_attn::ptx
