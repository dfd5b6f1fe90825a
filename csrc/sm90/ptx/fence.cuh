// Fences between what threads do themselves and what they tell the asynchronous units to do.
#pragma once

namespace flash_attn::sm90::ptx {

// fence.proxy.async, PTX ISA "membar/fence": this thread's reads and writes of shared, or global,
// memory come before the copies, and the products of wgmma, that are told to start behind it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// fence.mbarrier_init, PTX ISA "membar/fence": the barriers that this thread has initialized are so
// for the other thread blocks of the cluster, and for copies, behind a barrier among all threads.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace flash_attn::sm90::ptx
