#pragma once

#include <cstdint>
#include <memory>

#include "ldmatrix.cuh"

namespace flash_attn::ptx {

inline void mbarrier_init(uint64_t& mbarrier, int arrivals) {
  simulator::mbarrier_init(&mbarrier, arrivals);
}
inline void mbarrier_arrive(uint64_t& mbarrier) { simulator::mbarrier_arrive(&mbarrier); }
inline void mbarrier_arrive_after_copies(uint64_t& mbarrier) {
  simulator::Thread& self = simulator::this_thread();
  auto copies = std::make_shared<simulator::CopyGroups>(std::move(self.copies));
  self.copies = {};
  simulator::start_copy([copies, &mbarrier] {
    copies->finish();
    simulator::mbarrier_arrive(&mbarrier);
  });
}
inline void mbarrier_wait(uint64_t& mbarrier, uint32_t parity) {
  simulator::wait_until([&] { return simulator::mbarrier_has_completed(&mbarrier, parity); });
}

}  // namespace flash_attn::ptx
