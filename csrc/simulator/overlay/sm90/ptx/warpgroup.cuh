#pragma once

#include <cstdint>

namespace flash_attn::sm90::ptx {

template <int kCount>
void lower_registers() {
  simulator::set_registers(kCount);
}
template <int kCount>
void raise_registers() {
  simulator::set_registers(kCount);
}

inline bool elect_one() { return simulator::this_thread().lane == 0; }

template <int kThreads>
void barrier_sync(int barrier) {
  simulator::barrier_arrive(barrier, kThreads, true);
}
template <int kThreads>
void barrier_arrive(int barrier) {
  simulator::barrier_arrive(barrier, kThreads, false);
}

}  // namespace flash_attn::sm90::ptx
