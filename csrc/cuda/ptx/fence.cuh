// Fences of a thread among all threads of the device, for reads and writes that order nothing
// themselves. Before PTX 8.6, which came with CUDA 12.7, one fence does both, and either takes as
// long as a release.
#pragma once

#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1207
#define FLASH_ATTN_FENCE(order) "fence." order ".gpu;"
#else
#define FLASH_ATTN_FENCE(order) "fence.acq_rel.gpu;"
#endif

namespace flash_attn::ptx {

// fence.acquire.gpu, PTX ISA "fence", sm_90 and newer: what was written before the values that this
// thread has read, behind their writers' releases, is seen by what comes behind it.
__device__ __forceinline__ void fence_acquire() {
  asm volatile(FLASH_ATTN_FENCE("acquire")::: "memory");
}

// fence.release.gpu: what comes before it, in this thread or in those that have told it so, is done
// before what the thread writes behind it. It waits for all of that.
__device__ __forceinline__ void fence_release() {
  asm volatile(FLASH_ATTN_FENCE("release")::: "memory");
}

}  // namespace flash_attn::ptx

#undef FLASH_ATTN_FENCE
