#include "aten/dropout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/broadcast_tensors.h>
#include <ATen/ops/stack.h>

#include <array>
#include <cmath>

namespace flash_attn::aten {

using at::Tensor;

namespace {

constexpr int64_t kWord = 0xFFFFFFFF;

Tensor low(const Tensor& x) { return x.bitwise_and(kWord); }
Tensor high(const Tensor& x) { return x.bitwise_right_shift(32).bitwise_and_(kWord); }

}  // namespace

Dropout::Dropout(double probability, const Tensor& rng_state, const Tensor& heads)
    : probability_(probability) {
  const Tensor seed = rng_state.select(0, 0), offset = rng_state.select(0, 1);
  key_low_ = low(seed);
  key_high_ = high(seed);
  offset_ = low(offset).bitwise_xor_(high(offset));
  heads_ = low(heads);
}

Tensor Dropout::keep(Block rows, Block keys) const {
  // Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
  constexpr int64_t kMul0 = 0xD2511F53, kMul1 = 0xCD9E8D57;
  constexpr int64_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

  // The counter starts as four small tensors that broadcast to (batch, heads, rows, keys / 4).
  const Block fours = {keys.first / 4, (keys.last + 3) / 4};
  const at::TensorOptions int64 = heads_.options();
  std::array<Tensor, 4> word = {at::arange(fours.first, fours.last, int64),
                                at::arange(rows.first, rows.last, int64).unsqueeze(-1), heads_,
                                offset_};
  for (int64_t round = 0; round < 10; ++round) {
    // The product of two words fits 64 bits: int64 holds them, low and high read them unsigned.
    const Tensor a = word[0] * kMul0, b = word[2] * kMul1;
    const Tensor key0 = low(key_low_ + round * kWeyl0), key1 = low(key_high_ + round * kWeyl1);
    word = {high(b).bitwise_xor(word[1]).bitwise_xor(key0), low(b),
            high(a).bitwise_xor(word[3]).bitwise_xor(key1), low(a)};
  }

  const auto threshold = static_cast<int64_t>(std::llround(std::ldexp(probability_, 32)));
  const Tensor words = at::stack(at::broadcast_tensors({word[0], word[1], word[2], word[3]}), -1);
  return words.flatten(-2).narrow(-1, keys.first - 4 * fours.first, keys.size()).ge(threshold);
}

Tensor Dropout::factors(Block rows, Block keys, at::ScalarType dtype) const {
  return keep(rows, keys).to(dtype).mul_(1 / (1 - probability_));
}

}  // namespace flash_attn::aten
