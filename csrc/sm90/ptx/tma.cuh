// Copies of tiles between global and shared memory by the tensor memory accelerator: what cuda::ptx
// lacks.
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

}  // namespace flash_attn::sm90::ptx
