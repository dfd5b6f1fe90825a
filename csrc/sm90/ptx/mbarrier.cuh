// Barriers in shared memory of which asynchronous copies of whole boxes tell their bytes.
#pragma once

#include <cstdint>

#include "../../cuda/ptx/mbarrier.cuh"

namespace flash_attn::sm90::ptx {

using flash_attn::ptx::mbarrier_arrive;
using flash_attn::ptx::mbarrier_init;
using flash_attn::ptx::mbarrier_wait;
using flash_attn::ptx::smem_address;

// mbarrier.test_wait.parity, PTX ISA "mbarrier.test_wait": whether the phase of this parity is
// complete.
__device__ __forceinline__ bool mbarrier_is_complete(uint64_t& mbarrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, "
      "p;\n}"
      : "=r"(complete)
      : "r"(smem_address(&mbarrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// mbarrier.arrive.expect_tx, PTX ISA "mbarrier.arrive": an arrival, after which the phase waits for
// so many bytes more.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t& mbarrier, uint32_t bytes) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.release.cta.shared::cta.b64 state, [%0], "
      "%1;\n}" ::"r"(smem_address(&mbarrier)),
      "r"(bytes)
      : "memory");
}

}  // namespace flash_attn::sm90::ptx
