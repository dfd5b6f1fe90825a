#pragma once

namespace flash_attn::ptx {

template <int kThreads>
void barrier_sync(int barrier) {
  simulator::barrier_arrive(barrier, kThreads, true);
}

}  // namespace flash_attn::ptx
