// What the backward of a slice reads beside its q, k and v, and what it writes.
#pragma once

#include <ATen/core/Tensor.h>

#include "aten/block_range.h"

namespace flash_attn::aten {

struct GradMask {
  bool q, k, v, bias, sink;
};

// (batch, heads, length, d_v), and lse and dlse (batch, heads, length, 1). dlse may be undefined.
struct SavedRows {
  at::Tensor dout, out, lse, dlse;
};

// The gradients of a slice as tensors to write to.
struct SliceGrads {
  at::Tensor dq, dk, dv;  // (batch, heads, length, d)
  at::Tensor dbias;       // like ScoreTerms::bias, but in the dtype computed in
  at::Tensor dsink;       // (batch, heads)
};

// dbias += dS (batch, heads, rows, keys) of these rows and keys, summed over the dimensions that the
// bias broadcasts.
void add_bias_grad(const at::Tensor& dbias, const at::Tensor& ds, Block rows, Block keys);

}  // namespace flash_attn::aten
