// Barriers among some warps of a thread block.
#pragma once

namespace flash_attn::ptx {

// bar.sync, PTX ISA "bar": barrier 1 … 15 among kThreads threads; 0 is __syncthreads.
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace flash_attn::ptx
