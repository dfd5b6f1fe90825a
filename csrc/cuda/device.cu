#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "launch.h"

namespace flash_attn::cuda {
namespace {

// FLASH_ATTN_SMEM_LIMIT, in bytes: makes any GPU choose the tiles of one with less shared memory,
// so that a test on an H200 sees what an RTX card (99 KB) runs.
int limited_smem(int smem_bytes) {
  const char* limit = std::getenv("FLASH_ATTN_SMEM_LIMIT");
  return limit == nullptr ? smem_bytes : std::min(smem_bytes, std::atoi(limit));
}

}  // namespace

const DeviceInfo& device_info(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceInfo> known;  // its nodes do not move
  const std::lock_guard lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    FLASH_ATTN_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  const DeviceInfo info{
      .compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                            attribute(cudaDevAttrComputeCapabilityMinor),
      .num_sms = attribute(cudaDevAttrMultiProcessorCount),
      .smem_optin_bytes = limited_smem(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)),
  };
  return known.emplace(device, info).first->second;
}

}  // namespace flash_attn::cuda
