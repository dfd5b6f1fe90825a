// 8×8 matrices of 16-bit elements from shared memory into the registers of a warp.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// A shared-memory address as the instructions take it.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ldmatrix.sync.aligned.m8n8.x4, PTX ISA "ldmatrix": lanes 8i … 8i+7 name the eight 16-byte rows of
// matrix i; lane l receives elements (l / 4, 2·(l % 4)) and (l / 4, 2·(l % 4) + 1) of matrix i in
// r[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

// The same with each matrix transposed: lane l receives (2·(l % 4), l / 4) and (2·(l % 4) + 1, l /
// 4).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

}  // namespace flash_attn::ptx
