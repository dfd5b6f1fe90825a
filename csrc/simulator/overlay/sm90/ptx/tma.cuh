#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "../../cuda/ptx/ldmatrix.cuh"
#include "../../simulator/tensor_map.h"

namespace flash_attn::sm90::ptx {

using flash_attn::ptx::smem_address;

enum class CacheHint : uint64_t { kEvictFirst, kEvictNormal, kEvictLast };

inline void tma_load(void* smem_box, const CUtensorMap& opaque, const int32_t (&at)[5],
                     uint64_t& mbarrier, CacheHint) {
  const auto map = reinterpret_cast<const simulator::TensorMap&>(opaque);
  struct Place {
    int32_t at[5];
  } place;
  std::memcpy(place.at, at, sizeof(at));
  const uint32_t address = smem_address(smem_box);
  if (address % 128 != 0) simulator::fault("TMA: expected a multiple of 128 as address");
  simulator::start_copy([=, to = static_cast<char*>(smem_box), &mbarrier] {
    uint32_t bytes = 0;
    simulator::for_each_element(map, place.at, [&](const char* element, uint32_t byte) {
      char* const there = to + simulator::swizzled(address + byte, map.swizzle_bits) - address;
      if (element != nullptr) {
        std::memcpy(there, element, simulator::kElementBytes);
      } else {
        std::memset(there, 0, simulator::kElementBytes);
      }
      bytes += simulator::kElementBytes;
    });
    simulator::mbarrier_complete(&mbarrier, static_cast<int>(bytes));
  });
}

}  // namespace flash_attn::sm90::ptx
