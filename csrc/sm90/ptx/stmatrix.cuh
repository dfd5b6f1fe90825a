// 8×8 matrices of 16-bit elements from the registers of a warp into shared memory.
#pragma once

#include <cstdint>

namespace flash_attn::sm90::ptx {

// stmatrix.sync.aligned.m8n8.x4, PTX ISA "stmatrix": lanes 8i … 8i+7 name the eight 16-byte rows of
// matrix i, whose elements (l / 4, 2·(l % 4)) and (l / 4, 2·(l % 4) + 1) are lane l's r[i].
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row_address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same with .trans: lane l's r[i] are elements (2·(l % 4), l / 4) and (2·(l % 4) + 1, l / 4).
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace flash_attn::sm90::ptx
