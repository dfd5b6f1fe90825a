// Where tensors lie in memory: what is updated in place must have one place for each element, and
// share none.
#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn {

// Whether each stride is longer than all that the smaller ones span, so that no two elements meet.
// True of every view that torch makes but expand and unfold.
bool strides_nest(const at::Tensor& tensor);

// Whether a byte belongs to an element of both. Exact: views that interleave share none. Both
// tensors' strides nest.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

}  // namespace flash_attn
