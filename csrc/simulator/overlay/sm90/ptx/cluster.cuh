#pragma once

#include <cstdint>
#include <cstring>

#include "../../cuda/ptx/ldmatrix.cuh"

namespace flash_attn::sm90::ptx {

using flash_attn::ptx::smem_address;

inline uint32_t cluster_rank() { return static_cast<uint32_t>(simulator::cluster_rank()); }
inline void cluster_sync() { simulator::cluster_sync(); }

inline uint32_t address_in_block(uint32_t address, uint32_t rank) {
  return (address & ((1u << simulator::kRankShift) - 1)) | (rank + 1) << simulator::kRankShift;
}
inline void mbarrier_arrive_remote(uint32_t mbarrier) {
  simulator::mbarrier_arrive(static_cast<uint64_t*>(simulator::shared_pointer(mbarrier)));
}
inline void copy_to_block(uint32_t destination, const void* source, uint32_t bytes,
                          uint32_t mbarrier) {
  void* const to = simulator::shared_pointer(destination);
  auto* const signal = static_cast<uint64_t*>(simulator::shared_pointer(mbarrier));
  simulator::start_copy([=] {
    std::memcpy(to, source, bytes);
    simulator::mbarrier_complete(signal, static_cast<int>(bytes));
  });
}

}  // namespace flash_attn::sm90::ptx
