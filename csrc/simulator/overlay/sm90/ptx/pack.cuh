#pragma once

#include <cuda_fp16.h>

#include <bit>
#include <cstdint>

#include "../../cuda/ptx/math.cuh"

namespace flash_attn::sm90::ptx {

inline uint32_t pack_toward_zero(float low, float high) {
  return flash_attn::ptx::pair_of(std::bit_cast<uint16_t>(__float2half_rz(low)),
                                  std::bit_cast<uint16_t>(__float2half_rz(high)));
}

}  // namespace flash_attn::sm90::ptx
