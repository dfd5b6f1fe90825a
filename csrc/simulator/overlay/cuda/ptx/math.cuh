#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace flash_attn::ptx {

// .ftz: subnormal operands and results are zeros of their sign.
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}
inline float exp2(float x) { return flushed(std::exp2(flushed(x))); }
inline float log2(float x) { return flushed(std::log2(flushed(x))); }
inline float reciprocal(float x) { return flushed(1.f / flushed(x)); }
inline float minimum_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b);
}

inline uint32_t pair_of(uint16_t low, uint16_t high) {
  return low | static_cast<uint32_t>(high) << 16;
}

template <typename Element>
uint32_t pack(float low, float high);
template <>
inline uint32_t pack<__half>(float low, float high) {
  return pair_of(std::bit_cast<uint16_t>(__float2half_rn(low)),
                 std::bit_cast<uint16_t>(__float2half_rn(high)));
}
template <>
inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  return pair_of(std::bit_cast<uint16_t>(__float2bfloat16_rn(low)),
                 std::bit_cast<uint16_t>(__float2bfloat16_rn(high)));
}

template <typename Element>
uint32_t pack_positive(float low, float high) {
  const auto positive = [](float x) { return x < 0 ? 0.f : x; };
  return pack<Element>(positive(low), positive(high));
}

template <typename Element>
float2 unpack(uint32_t packed);
template <>
inline float2 unpack<__half>(uint32_t packed) {
  return __half22float2(reinterpret_cast<const __half2&>(packed));
}
template <>
inline float2 unpack<__nv_bfloat16>(uint32_t packed) {
  return {std::bit_cast<float>(packed << 16), std::bit_cast<float>(packed & 0xffff0000)};
}

}  // namespace flash_attn::ptx
