// The 16-bit element types of the kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../core/params.h"

namespace flash_attn {

template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::kFp16> {
  using type = __half;
};
template <>
struct ElementOf<DType::kBf16> {
  using type = __nv_bfloat16;
};

template <DType kDType>
using Element = typename ElementOf<kDType>::type;

inline constexpr int kChunk = 8;  // 16-bit elements in 16 bytes, the unit of every copy

}  // namespace flash_attn
