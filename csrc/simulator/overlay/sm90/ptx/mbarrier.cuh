#pragma once

#include <cstdint>

#include "../../cuda/ptx/mbarrier.cuh"

namespace flash_attn::sm90::ptx {

using flash_attn::ptx::mbarrier_arrive;
using flash_attn::ptx::mbarrier_init;
using flash_attn::ptx::mbarrier_wait;
using flash_attn::ptx::smem_address;

inline bool mbarrier_is_complete(uint64_t& mbarrier, uint32_t parity) {
  simulator::poll();
  return simulator::mbarrier_has_completed(&mbarrier, parity);
}
inline void mbarrier_arrive_expect(uint64_t& mbarrier, uint32_t bytes) {
  simulator::mbarrier_arrive(&mbarrier, static_cast<int>(bytes));
}

}  // namespace flash_attn::sm90::ptx
