// A number in global memory that thread blocks count up and look at. <cuda/atomic> has the same,
// and takes nvcc three seconds in each file.
#pragma once

#include <cstdint>

namespace flash_attn::sm90::ptx {

// ld.relaxed, PTX ISA "ld": some value that the number had.
__device__ __forceinline__ int ld_relaxed(const int32_t* number) {
  int value;
  asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(value) : "l"(number) : "memory");
  return value;
}

// ld.acquire: what was written before the value, behind its writer's release, is seen by what comes
// behind the load.
__device__ __forceinline__ int ld_acquire(const int32_t* number) {
  int value;
  asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(value) : "l"(number) : "memory");
  return value;
}

// st.relaxed, PTX ISA "st".
__device__ __forceinline__ void st_relaxed(int32_t* number, int value) {
  asm volatile("st.relaxed.gpu.b32 [%0], %1;" ::"l"(number), "r"(value) : "memory");
}

// atom.add.release, PTX ISA "atom": what this thread has written, or those that have told it so, is
// done before the addition.
__device__ __forceinline__ int add_release(int32_t* number, int addend) {
  int before;
  asm volatile("atom.add.release.gpu.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(number), "r"(addend)
               : "memory");
  return before;
}

}  // namespace flash_attn::sm90::ptx
