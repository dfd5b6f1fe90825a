// Checked CUDA calls and kernel launches. A failure throws std::runtime_error with the place in the
// source.
#pragma once

#include <cuda_runtime.h>

#include "../core/failure.h"
#include "../core/params.h"

namespace flash_attn::cuda {

inline void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  fail({"flash_attn: ", call, " failed: ", cudaGetErrorString(status), " (", file, ":", line, ")"});
}

#define FLASH_ATTN_CUDA_CHECK(call) ::flash_attn::cuda::check((call), #call, __FILE__, __LINE__)

// What the driver said of a kernel, for each device; 0: not asked. The compiler's own atomics, as
// <atomic> is a second of the build in every file of kernels.
class Answers {
 public:
  // device: of the current thread.
  int known(int device) const {
    return device < kDevices ? __atomic_load_n(&answers_[device], __ATOMIC_ACQUIRE) : 0;
  }
  void keep(int device, int answer) {
    if (device < kDevices) __atomic_store_n(&answers_[device], answer, __ATOMIC_RELEASE);
  }

 private:
  static constexpr int kDevices = 64;
  int answers_[kDevices] = {};
};

// Lets kKernel use smem_bytes of dynamic shared memory on the current device; asks the driver once
// a kernel and device. Two threads that arrive together both ask, which does no harm.
template <auto kKernel>
void allow_smem(int smem_bytes) {
  constexpr int kDefaultLimit = 48 * 1024;
  static Answers allowed;
  if (smem_bytes <= kDefaultLimit) return;
  int device = 0;
  FLASH_ATTN_CUDA_CHECK(cudaGetDevice(&device));
  if (allowed.known(device)) return;
  FLASH_ATTN_CUDA_CHECK(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
  allowed.keep(device, true);
}

// smem_bytes: always the same for one kKernel.
template <auto kKernel, typename... Args>
void launch(dim3 grid, int threads, int smem_bytes, Stream stream, const Args&... args) {
  allow_smem<kKernel>(smem_bytes);
  kKernel<<<grid, threads, smem_bytes, stream>>>(args...);
  FLASH_ATTN_CUDA_CHECK(cudaGetLastError());
}

// The virtual architecture (80, 90, …) that the code of kKernel which runs on the current device
// was compiled for; asks the driver once a kernel and device.
template <auto kKernel>
int compiled_architecture() {
  static Answers architecture;
  int device = 0;
  FLASH_ATTN_CUDA_CHECK(cudaGetDevice(&device));
  if (const int known = architecture.known(device)) return known;
  cudaFuncAttributes attributes;
  FLASH_ATTN_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kKernel));
  architecture.keep(device, attributes.ptxVersion);
  return attributes.ptxVersion;
}

// For a kernel that waits for its prerequisites (ptx/griddepcontrol.cuh): if `overlap`, its blocks
// may come while the kernel before it on the stream ends. Code for an architecture below 90 cannot
// wait, on any GPU, and gets a plain launch.
template <auto kKernel, typename... Args>
void launch_overlapping(dim3 grid, int threads, int smem_bytes, bool overlap, Stream stream,
                        const Args&... args) {
  allow_smem<kKernel>(smem_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap && compiled_architecture<kKernel>() >= 90 ? 1 : 0;
  FLASH_ATTN_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, args...));
}

}  // namespace flash_attn::cuda
