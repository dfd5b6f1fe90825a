// Fences of a thread among all threads of the device, for reads and writes that order nothing
// themselves.
#pragma once

namespace flash_attn::ptx {

// fence.acquire.gpu, PTX ISA "fence": what was written before the values that this thread has read,
// behind their writers' releases, is seen by what comes behind it.
__device__ __forceinline__ void fence_acquire() { asm volatile("fence.acquire.gpu;" ::: "memory"); }

// fence.release.gpu: what comes before it, in this thread or in those that have told it so, is done
// before what the thread writes behind it. It waits for all of that.
__device__ __forceinline__ void fence_release() { asm volatile("fence.release.gpu;" ::: "memory"); }

}  // namespace flash_attn::ptx
