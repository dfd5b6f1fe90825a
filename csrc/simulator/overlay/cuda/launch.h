// Kernel launches on a simulated GPU: they run to their end.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "../core/failure.h"
#include "../core/params.h"
#include "../simulator/machine.h"

#define FLASH_ATTN_CUDA_CHECK(call) static_cast<void>(call)

namespace flash_attn::cuda {

template <auto kKernel>
void allow_smem(int) {}

template <auto kKernel, typename... Args>
void launch(dim3 grid, int threads, int smem_bytes, Stream, const Args&... args) {
  simulator::run_grid(grid, threads, smem_bytes, [&] { kKernel(args...); });
}

template <auto kKernel>
int compiled_architecture() {
  return FLASH_ATTN_SIMULATE;
}

template <auto kKernel, typename... Args>
void launch_overlapping(dim3 grid, int threads, int smem_bytes, bool, Stream stream,
                        const Args&... args) {
  launch<kKernel>(grid, threads, smem_bytes, stream, args...);
}

}  // namespace flash_attn::cuda
