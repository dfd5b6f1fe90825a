// Asynchronous copies from global to shared memory.
#pragma once

#include <cstdint>

namespace flash_attn::ptx {

// cp.async.cg with src-size, PTX ISA "cp.async": copies source_bytes (0 or 16) and fills the rest
// of the 16 bytes with zeros. With 0 the source is not read, whatever it points to. cg: through L2
// only, the data is used once.
__device__ __forceinline__ void cp_async_16(uint32_t smem_destination, const void* source,
                                            int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(smem_destination), "l"(source), "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group: closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: until at most kPending of this thread's youngest groups are still under way.
// Other threads' copies are visible only after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.ca with src-size, 4 bytes: copies source_bytes (0 or 4), else a zero. With 0 the source
// is not read.
__device__ __forceinline__ void cp_async_4(uint32_t smem_destination, const void* source,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(smem_destination), "l"(source), "r"(source_bytes)
               : "memory");
}

}  // namespace flash_attn::ptx
