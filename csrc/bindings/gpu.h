// Which GPU a tensor lies on, and its stream.
#pragma once

#include <ATen/core/Tensor.h>

#include "../core/device.h"
#include "../core/params.h"

namespace flash_attn {

// Null: not on a CUDA device. Read once a device, then cached.
const DeviceInfo* gpu_of(const at::Tensor& tensor);
// torch's current one, of a tensor on a GPU.
Stream stream_of(const at::Tensor& tensor);

}  // namespace flash_attn
