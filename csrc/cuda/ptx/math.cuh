// Approximate functions and packing, written out because the build does not use --use_fast_math.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_attn::ptx {

// ex2.approx.ftz.f32, PTX ISA "ex2": 2^x within 2 ulp; -inf → +0. Without ftz a compare and two
// multiplies guard subnormal results, per element.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz.f32, PTX ISA "lg2": log2(x); 0 → -inf.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32, PTX ISA "rcp": 1 / x within 1 ulp; inf → 0.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// min.NaN.f32, PTX ISA "min": NaN if one of them is.
__device__ __forceinline__ float minimum_or_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// cvt.rn.{f16x2,bf16x2}.f32, PTX ISA "cvt": low goes to bits 0-15, the lower address.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.rn.relu.{f16x2,bf16x2}.f32, PTX ISA "cvt": the same, and 0 for negative numbers.
template <typename Element>
__device__ __forceinline__ uint32_t pack_positive(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_positive<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack_positive<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The two elements that pack() packed.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t packed) {
  return __half22float2(reinterpret_cast<const __half2&>(packed));
}

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
}

}  // namespace flash_attn::ptx
