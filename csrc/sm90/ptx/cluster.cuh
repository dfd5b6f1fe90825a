// What the thread blocks of a cluster do in each other's shared memory.
#pragma once

#include <cstdint>

#include "../../cuda/ptx/ldmatrix.cuh"

namespace flash_attn::sm90::ptx {

using flash_attn::ptx::smem_address;

// %cluster_ctarank: number of this thread block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster, PTX ISA "barrier.cluster": among all threads of all blocks, whose writes before
// it are seen behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// mapa.shared::cluster, PTX ISA "mapa": where block `rank` has what lies at `address` here.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// mbarrier.arrive on another block's mbarrier, PTX ISA "mbarrier.arrive": relaxed, it orders
// nothing but products that have been waited for. A release would wait for this thread's reductions
// in global memory.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(mbarrier)
               : "memory");
}

// cp.async.bulk from shared memory here to another block's, PTX ISA "cp.async.bulk": the bytes
// complete on an mbarrier there. Addresses and sizes are multiples of 16.
__device__ __forceinline__ void copy_to_block(uint32_t destination, const void* source,
                                              uint32_t bytes, uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(destination), "r"(smem_address(source)), "r"(bytes), "r"(mbarrier)
      : "memory");
}

}  // namespace flash_attn::sm90::ptx
