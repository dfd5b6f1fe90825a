// What warpgroups agree on: registers and barriers.
#pragma once

#include <cstdint>

namespace flash_attn::sm90::ptx {

// setmaxnreg.{inc,dec}, PTX ISA "setmaxnreg": each warp of a warpgroup gives registers back or asks
// for more; asking waits until they are there. kCount is a multiple of 8 from 24 to 256.
template <int kCount>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// elect.sync, PTX ISA "elect.sync": true in one lane of the warp, which must be whole. The compiler
// knows then that one thread goes on, and issues TMA without a loop over lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

// bar.sync and bar.arrive, PTX ISA "bar": barrier 1 … 15 among kThreads threads; 0 is
// __syncthreads.
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace flash_attn::sm90::ptx
