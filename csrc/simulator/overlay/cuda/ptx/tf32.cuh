#pragma once

#include <cstdint>

namespace flash_attn::ptx {

inline uint32_t round_finite_to_tf32(uint32_t number) { return (number + 0x1000u) & 0xffffe000u; }
inline uint32_t round_to_tf32(uint32_t number) {
  return (number & 0x7fffffffu) >= 0x7f800000u ? number : round_finite_to_tf32(number);
}

}  // namespace flash_attn::ptx
