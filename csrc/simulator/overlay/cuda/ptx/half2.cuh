#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace flash_attn::ptx {

inline float half_of(uint32_t pair, int which) {
  return __half2float(std::bit_cast<__half>(static_cast<uint16_t>(pair >> 16 * which)));
}
inline uint32_t absolute2(uint32_t pair) { return pair & 0x7fff7fff; }
inline uint32_t greater_equal_or_nan2(uint32_t a, uint32_t b) {
  const bool low = !(half_of(a, 0) < half_of(b, 0)), high = !(half_of(a, 1) < half_of(b, 1));
  return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
}
inline uint32_t minimum2_or_nan_bf16(uint32_t a, uint32_t b) {
  const auto least = [](uint32_t x, uint32_t y) {  // the upper halves
    const float first = std::bit_cast<float>(x & 0xffff0000),
                second = std::bit_cast<float>(y & 0xffff0000);
    if (std::isnan(first) || std::isnan(second)) return 0x7fffu;
    return (first < second || (first == second && std::signbit(first)) ? x : y) >> 16;
  };
  return least(a << 16, b << 16) | least(a, b) << 16;
}

}  // namespace flash_attn::ptx
