#include "device.h"

#include <algorithm>
#include <cstdlib>

namespace flash_attn::cuda {

// A small A100 or H100, or one of as many multiprocessors as FLASH_ATTN_SIMULATED_SMS says.
const DeviceInfo& device_info(int) {
  static const DeviceInfo info = [] {
    const char* limit = std::getenv("FLASH_ATTN_SMEM_LIMIT");
    const char* num_sms = std::getenv("FLASH_ATTN_SIMULATED_SMS");
    const int smem_bytes = (FLASH_ATTN_SIMULATE == 90 ? 227 : 163) * 1024;
    return DeviceInfo{
        .compute_capability = FLASH_ATTN_SIMULATE,
        .num_sms = num_sms == nullptr ? 8 : std::max(std::atoi(num_sms), 1),
        .smem_optin_bytes = limit == nullptr ? smem_bytes : std::min(smem_bytes, std::atoi(limit))};
  }();
  return info;
}

}  // namespace flash_attn::cuda
