// Dropout's keep-mask as a pure function of (seed, offset, batch, head, query, key), so that each
// backend and each tiling draws the same: one Philox4x32-10 block gives the words of four
// neighbouring keys, and a key is kept where its word is >= round(probability · 2^32).
#pragma once

#include <ATen/core/Tensor.h>

#include "aten/block_range.h"

namespace flash_attn::aten {

class Dropout {
 public:
  Dropout() = default;
  // rng_state int64 (2): seed, offset. heads int64 (batch, heads, 1, 1): batch · heads_q + head.
  Dropout(double probability, const at::Tensor& rng_state, const at::Tensor& heads);

  explicit operator bool() const { return probability_ > 0; }
  // bool (batch, heads, rows, keys)
  at::Tensor keep(Block rows, Block keys) const;
  // The same as factors of `dtype`: 0 or 1 / (1 - probability).
  at::Tensor factors(Block rows, Block keys, at::ScalarType dtype) const;

 private:
  double probability_ = 0;
  at::Tensor key_low_, key_high_, offset_, heads_;  // int64 tensors that hold 32-bit words
};

}  // namespace flash_attn::aten
