#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cstdint>

#include "permute.cuh"

namespace flash_attn::ptx {

template <typename Widen>
void widen(uint32_t bytes, uint32_t& low, uint32_t& high, const Widen& of_byte) {
  const auto pair = [&](int first) {
    const auto half = [&](int i) {
      const auto byte = static_cast<uint8_t>(bytes >> 8 * i);
      return static_cast<uint32_t>(std::bit_cast<uint16_t>(of_byte(byte)));
    };
    return half(first) | half(first + 1) << 16;
  };
  low = pair(0);
  high = pair(2);
}

inline void widen_e4m3(uint32_t bytes, uint32_t& low, uint32_t& high) {
  widen(bytes, low, high,
        [](uint8_t byte) { return __half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)); });
}
template <bool kAlternate>
void widen_int8(uint32_t bytes, uint32_t& low, uint32_t& high) {
  if (kAlternate) bytes = permute_bytes(bytes, 0, 0x3120);
  widen(bytes, low, high, [](uint8_t byte) { return __float2half_rn(static_cast<int8_t>(byte)); });
}

}  // namespace flash_attn::ptx
