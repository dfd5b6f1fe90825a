// A tensor in the words of kernels: the GPU that it lies on, its stream, its dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include "../core/device.h"
#include "../core/params.h"

namespace flash_attn {

// Null: not on a CUDA device. Read once a device, then cached.
const DeviceInfo* gpu_of(const at::Tensor& tensor);
// torch's current one, of a tensor on a GPU.
Stream stream_of(const at::Tensor& tensor);

inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::kFp16;
    case at::kBFloat16:
      return DType::kBf16;
    case at::kFloat:
      return DType::kFp32;
    case at::kFloat8_e4m3fn:
      return DType::kFp8E4M3;
    case at::kChar:
      return DType::kInt8;
    default:
      return DType::kFp64;
  }
}

}  // namespace flash_attn
