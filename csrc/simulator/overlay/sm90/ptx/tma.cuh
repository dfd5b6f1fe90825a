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

inline void tma_store(const CUtensorMap& opaque, const int32_t (&at)[5], const void* smem_box) {
  const auto map = reinterpret_cast<const simulator::TensorMap&>(opaque);
  struct Place {
    int32_t at[5];
  } place;
  std::memcpy(place.at, at, sizeof(at));
  const auto* from = static_cast<const char*>(smem_box);
  const uint32_t address = smem_address(smem_box);
  simulator::this_thread().bulk_copies.start([=] {
    simulator::for_each_element(map, place.at, [&](char* element, uint32_t byte) {
      if (element == nullptr) return;
      const uint32_t at_byte = simulator::swizzled(address + byte, map.swizzle_bits) - address;
      std::memcpy(element, from + at_byte, simulator::kElementBytes);
    });
  });
}

inline void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t& mbarrier) {
  simulator::start_copy([=, &mbarrier] {
    std::memcpy(smem, global, bytes);
    simulator::mbarrier_complete(&mbarrier, static_cast<int>(bytes));
  });
}

inline void bulk_commit() { simulator::this_thread().bulk_copies.commit(); }
inline void bulk_wait() { simulator::this_thread().bulk_copies.wait(0); }
inline void bulk_wait_read() { simulator::this_thread().bulk_copies.wait(0); }

}  // namespace flash_attn::sm90::ptx
