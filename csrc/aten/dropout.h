// Dropout's keep-mask as a pure function of (seed, offset, batch, head, query, key), so that each
// backend and each tiling draws the same. Once for each head, with number = batch · heads_q + head,
//
//   (K, X, Y, ·) = Philox4x32-10(counter (number, offset), key seed)      64 bits are two words
//
// and for the four elements that query i = 16a + 8r + u and key j = 16b + 8s + v take with r and s
// in {0, 1}, where u and v are below 8,
//
//   (w₀, w₁) = Philox2x32-7(counter ((8a + u) xor X, (8b + v) xor Y), key K)
//   number(i, j) = the 15 bits of w_r from bit 16s on
//   kept iff number ≥ T, where T = round(probability · 2^15) ≤ 2^14; else iff number < 2^15 − T
//
// The keep probability is 1 − T / 2^15: kept weights are scaled by the inverse of that.
#pragma once

#include <ATen/core/Tensor.h>

#include "aten/block_range.h"

namespace flash_attn::aten {

class Dropout {
 public:
  Dropout() = default;
  // rng_state int64 (2): seed, offset.
  Dropout(double probability, const at::Tensor& rng_state, int64_t batch, int64_t heads);

  explicit operator bool() const { return threshold_ > 0; }
  // That of some batches and heads.
  Dropout part(Block batches, Block heads) const;
  // bool (batch, heads, rows, keys)
  at::Tensor keep(Block rows, Block keys) const;
  // The same as factors of `dtype`: 0 or the inverse of the keep probability.
  at::Tensor factors(Block rows, Block keys, at::ScalarType dtype) const;

 private:
  int64_t threshold_ = 0;       // T
  at::Tensor key_, row_, col_;  // K, X and Y: int64 (batch, heads, 1, 1)
};

}  // namespace flash_attn::aten
