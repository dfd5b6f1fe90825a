// Dropout's keep-mask as a pure function of (seed, offset, batch, head, query, key), so that each
// backend and each tiling draws the same. Once for each head, with number = batch · heads_q + head,
//
//   (K, X, Y, Z) = Philox4x32-10(counter (number, offset), key seed)      64 bits are two words
//
// Query i = 16a + 8r + u and key j = 32b + 8s + v, where u and v are below 8, r in {0, 1} and s in
// {0, 1, 2, 3}, draw a word each, the first one of
//
//   R = Philox2x32-7(counter (8a + u, X), key K)      C = Philox2x32-7(counter (8b + v, Y), key K)
//
// and for the eight elements of all r and s, with M the multiplier of Philox2x32 and h and l the
// high and the low word of a product,
//
//   p = M · (R xor C)      q = M · (h(p) xor C)      w₀ = h(q) xor l(p) xor Z      w₁ = l(q)
//   number(i, j) = 8 bits: the low seven of byte s of w_r, then the highest one of byte s xor 1
//   kept iff number ≥ T, where T = round(probability · 2^8) ≤ 2^7; else iff number < 2^8 − T
//
// The keep probability is 1 − T / 2^8: kept weights are scaled by the inverse of that.
//
// A call that is a part of a larger one (core/params.h, DropoutPlace) counts batch, head, query and
// key as they lie there.
#pragma once

#include <ATen/core/Tensor.h>

#include "aten/block_range.h"
#include "core/params.h"

namespace flash_attn::aten {

class Dropout {
 public:
  Dropout() = default;
  // rng_state int64 (2): seed, offset.
  Dropout(double probability, const at::Tensor& rng_state, int64_t batch, int64_t heads,
          const DropoutPlace& place);

  explicit operator bool() const { return threshold_ > 0; }
  // That of some batches and heads.
  Dropout part(Block batches, Block heads) const;
  // bool (batch, heads, rows, keys)
  at::Tensor keep(Block rows, Block keys) const;
  // The same as factors of `dtype`: 0 or the inverse of the keep probability.
  at::Tensor factors(Block rows, Block keys, at::ScalarType dtype) const;

 private:
  // bool (batch, heads, rows, keys), of positions in the larger call
  at::Tensor keep_there(Block rows, Block keys) const;

  int64_t threshold_ = 0;  // T
  DropoutPlace place_;
  at::Tensor key_, row_, col_, last_;  // K, X, Y and Z: int64 (batch, heads, 1, 1)
};

}  // namespace flash_attn::aten
