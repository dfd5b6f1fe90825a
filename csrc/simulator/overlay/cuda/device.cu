#include "device.h"

#include <algorithm>
#include <cstdlib>

namespace flash_attn::cuda {

// A small A100 or H100.
const DeviceInfo& device_info(int) {
  static const DeviceInfo info = [] {
    const char* limit = std::getenv("FLASH_ATTN_SMEM_LIMIT");
    const int smem_bytes = (FLASH_ATTN_SIMULATE == 90 ? 227 : 163) * 1024;
    return DeviceInfo{
        .compute_capability = FLASH_ATTN_SIMULATE,
        .num_sms = 8,
        .smem_optin_bytes = limit == nullptr ? smem_bytes : std::min(smem_bytes, std::atoi(limit))};
  }();
  return info;
}

}  // namespace flash_attn::cuda
