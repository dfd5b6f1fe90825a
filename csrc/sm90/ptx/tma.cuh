// Copies between global and shared memory by the tensor memory accelerator: of boxes of a tensor,
// and of bytes that lie side by side. <cuda/ptx> has most of this, and takes nvcc more than a second
// in each file.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../cuda/ptx/ldmatrix.cuh"

namespace flash_attn::sm90::ptx {

using flash_attn::ptx::smem_address;

// What the L2 cache keeps, as createpolicy encodes it for whole accesses.
enum class CacheHint : uint64_t {
  kEvictFirst = 0x12f0000000000000,   // read once
  kEvictNormal = 0x1000000000000000,  // read by a few thread blocks that run together
  kEvictLast = 0x14f0000000000000     // read by many thread blocks
};

// cp.async.bulk.tensor.5d with an L2 policy, PTX ISA "cp.async.bulk.tensor": starts the copy of one
// box; its bytes, those filled with zeros too, complete on the mbarrier.
__device__ __forceinline__ void tma_load(void* smem_box, const CUtensorMap& map,
                                         const int32_t (&at)[5], uint64_t& mbarrier,
                                         CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
      :
      : "r"(smem_address(smem_box)), "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
        "r"(at[4]), "r"(smem_address(&mbarrier)), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

// cp.async.bulk.tensor.5d: starts the copy of a box to global memory, as part of this thread's
// group.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const int32_t (&at)[5],
                                          const void* smem_box) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
      :
      : "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
        "r"(smem_address(smem_box))
      : "memory");
}

// cp.async.bulk, PTX ISA "cp.async.bulk": starts the copy of bytes, a multiple of 16 between
// addresses that are multiples of 16, which complete on the mbarrier.
__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes,
                                          uint64_t& mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(smem_address(smem)), "l"(__cvta_generic_to_global(global)), "r"(bytes),
        "r"(smem_address(&mbarrier))
      : "memory");
}

// cp.async.bulk.commit_group and .wait_group: this thread's stores since the last one are a group;
// all groups are done, or have at least read shared memory.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;"); }
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace flash_attn::sm90::ptx
