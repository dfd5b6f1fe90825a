// What the launches need to know of a device.
#pragma once

namespace flash_attn::cuda {

struct DeviceInfo {
  int compute_capability = 0;  // 10 · major + minor
  int num_sms = 0;
  int smem_optin_bytes = 0;  // the most shared memory a block can ask for
};

// Read once a device, then cached.
const DeviceInfo& device_info(int device);

}  // namespace flash_attn::cuda
