#include "gpu.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "../cuda/device.h"

namespace flash_attn {

const DeviceInfo* gpu_of(const at::Tensor& tensor) {
  return tensor.is_cuda() ? &cuda::device_info(tensor.get_device()) : nullptr;
}

Stream stream_of(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl device_type(tensor.device().type());
  return static_cast<Stream>(device_type.getStream(tensor.device()).native_handle());
}

}  // namespace flash_attn
