// Products of one warpgroup in the unit tests: the accumulator from and to memory, and where its
// numbers lie.
#pragma once

#include <cuda_runtime.h>

#include "../cuda/launch.h"
#include "../sm90/tile/gemm.cuh"

namespace flash_attn::tests {

constexpr int kThreads = 128, kRows = 64;  // of a product of one warpgroup

// Registers from and to memory: thread t's i-th lies at 128 · i + t.
template <int kN>
__device__ __forceinline__ void load(Accumulator<1, kN>& C, const float* registers) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) C.data[0][i / 4][i % 4] = registers[i * kThreads + threadIdx.x];
}
template <int kN>
__device__ __forceinline__ void finish(Accumulator<1, kN>& C, float* registers) {
  sm90::ptx::wgmma_commit();
  sm90::ptx::wgmma_wait<0>();
  sm90::pin(C);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) registers[i * kThreads + threadIdx.x] = C.data[0][i / 4][i % 4];
}

// Where thread t's i-th register of an accumulator lies (PTX ISA "wgmma.mma_async", figure of D):
// warp w holds rows 16 w …, a lane columns 2 (lane % 4) and the next of rows lane / 4 and lane / 4
// + 8 in each block of 8 columns.
struct Place {
  int row, col;
};
inline Place accumulator_place(int i, int thread) {
  const int lane = thread % 32;
  return {thread / 32 * 16 + i / 2 % 2 * 8 + lane / 4, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

template <typename Kernel, typename... Args>
void run(Kernel kernel, int smem_bytes, Args... args) {
  FLASH_ATTN_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
  kernel<<<1, kThreads, smem_bytes>>>(args...);
  FLASH_ATTN_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_attn::tests
