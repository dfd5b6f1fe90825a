// Barriers in shared memory that asynchronous copies arrive at.
#pragma once

#include <cstdint>

#include "ldmatrix.cuh"

namespace flash_attn::ptx {

// mbarrier.init, PTX ISA "mbarrier.init": a phase completes after so many arrivals.
__device__ __forceinline__ void mbarrier_init(uint64_t& mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(&mbarrier)), "r"(arrivals)
               : "memory");
}

// mbarrier.arrive: this thread's reads and writes of shared memory so far come before the phase.
__device__ __forceinline__ void mbarrier_arrive(uint64_t& mbarrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   smem_address(&mbarrier))
               : "memory");
}

// cp.async.mbarrier.arrive.noinc, PTX ISA "cp.async.mbarrier.arrive": an arrival, counted by
// mbarrier_init, that happens when all earlier cp.async of this thread are done. Does not wait.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t& mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(&mbarrier))
               : "memory");
}

// Until the phase of this parity is complete. try_wait, sm_90 and newer, sleeps in hardware;
// test_wait before.
__device__ __forceinline__ void mbarrier_wait(uint64_t& mbarrier, uint32_t parity) {
  uint32_t complete;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(complete)
        : "r"(smem_address(&mbarrier)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(complete)
        : "r"(smem_address(&mbarrier)), "r"(parity)
        : "memory");
#endif
  } while (complete == 0);
}

}  // namespace flash_attn::ptx
