#pragma once

#include <cstdint>

namespace flash_attn::ptx {

inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i & 7;
    result |= static_cast<uint32_t>(bytes >> 8 * which & 0xff) << 8 * i;
  }
  return result;
}

}  // namespace flash_attn::ptx
