// The facts of a GPU, from the driver.
#pragma once

#include "../core/device.h"

namespace flash_attn::cuda {

using flash_attn::DeviceInfo;

// Read once a device, then cached.
const DeviceInfo& device_info(int device);

}  // namespace flash_attn::cuda
