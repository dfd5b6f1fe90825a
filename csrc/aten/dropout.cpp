#include "aten/dropout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/lt.h>

#include <array>
#include <cmath>

namespace flash_attn::aten {

using at::Tensor;

namespace {

// Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011). Words of 32 bits are held in
// int64: the product of two fits 64 bits, which low and high read unsigned.
constexpr int64_t kWord = 0xFFFFFFFF;
constexpr int64_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

constexpr int64_t kNumbers = 1 << 15;  // that an element may draw

Tensor low(const Tensor& x) { return x.bitwise_and(kWord); }
Tensor high(const Tensor& x) { return x.bitwise_right_shift(32).bitwise_and_(kWord); }

std::array<Tensor, 4> philox4x32(std::array<Tensor, 4> word, const Tensor& key_low,
                                 const Tensor& key_high) {
  constexpr int64_t kMul0 = 0xD2511F53, kMul1 = 0xCD9E8D57;
  for (int64_t round = 0; round < 10; ++round) {
    const Tensor a = word[0] * kMul0, b = word[2] * kMul1;
    const Tensor key0 = low(key_low + round * kWeyl0), key1 = low(key_high + round * kWeyl1);
    word = {high(b).bitwise_xor(word[1]).bitwise_xor(key0), low(b),
            high(a).bitwise_xor(word[3]).bitwise_xor(key1), low(a)};
  }
  return word;
}

std::array<Tensor, 2> philox2x32(std::array<Tensor, 2> word, const Tensor& key) {
  constexpr int64_t kMul = 0xD256D193;
  for (int64_t round = 0; round < 7; ++round) {
    const Tensor product = word[0] * kMul;
    const Tensor mixed = word[1].bitwise_xor(low(key + round * kWeyl0));
    word = {high(product).bitwise_xor(mixed), low(product)};
  }
  return word;
}

// A range of positions, widened to blocks of 16.
struct Blocks16 {
  explicit Blocks16(Block range) : first(range.first / 16), last((range.last + 15) / 16) {}
  int64_t size() const { return last - first; }
  // The position of each group of two, {i, i + 8}: 8a + u.
  Tensor pairs(at::TensorOptions int64) const { return at::arange(8 * first, 8 * last, int64); }

  int64_t first, last;
};

}  // namespace

Dropout::Dropout(double probability, const Tensor& rng_state, int64_t batch, int64_t heads)
    : threshold_(std::llround(std::ldexp(probability, 15))) {
  const Tensor seed = rng_state.select(0, 0), offset = rng_state.select(0, 1);
  const Tensor number = at::arange(batch * heads, rng_state.options()).view({batch, heads, 1, 1});
  const auto words =
      philox4x32({low(number), high(number), low(offset), high(offset)}, low(seed), high(seed));
  key_ = words[0];
  row_ = words[1];
  col_ = words[2];
}

Dropout Dropout::part(Block batches, Block heads) const {
  Dropout part = *this;
  for (Tensor* words : {&part.key_, &part.row_, &part.col_}) {
    *words = words->narrow(0, batches.first, batches.size()).narrow(1, heads.first, heads.size());
  }
  return part;
}

Tensor Dropout::keep(Block rows, Block keys) const {
  const at::TensorOptions int64 = key_.options();
  const Blocks16 row_blocks(rows), key_blocks(keys);
  // Small tensors that broadcast to (batch, heads, rows / 2, keys / 2).
  const auto word = philox2x32({row_blocks.pairs(int64).unsqueeze(-1).bitwise_xor(row_),
                                key_blocks.pairs(int64).bitwise_xor(col_)},
                               key_);

  const int64_t batch = key_.size(0), heads = key_.size(1);
  const Tensor kept = at::empty({batch, heads, row_blocks.size(), 2, 8, key_blocks.size(), 2, 8},
                                int64.dtype(at::kBool));
  const bool mirrored = threshold_ > kNumbers / 2;
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t s = 0; s < 2; ++s) {
      const int64_t unit = int64_t{1} << 16 * s;
      const Tensor number = word[r]
                                .bitwise_and((kNumbers - 1) * unit)
                                .view({batch, heads, row_blocks.size(), 8, key_blocks.size(), 8});
      Tensor place = kept.select(6, s).select(3, r);
      mirrored ? at::lt_out(place, number, (kNumbers - threshold_) * unit)
               : at::ge_out(place, number, threshold_ * unit);
    }
  }
  return kept.view({batch, heads, 16 * row_blocks.size(), 16 * key_blocks.size()})
      .narrow(2, rows.first - 16 * row_blocks.first, rows.size())
      .narrow(3, keys.first - 16 * key_blocks.first, keys.size());
}

Tensor Dropout::factors(Block rows, Block keys, at::ScalarType dtype) const {
  // Where the threshold is 2^15, nothing is kept, and nothing needs a scale.
  const int64_t keeping = kNumbers - threshold_;
  const double scale = keeping > 0 ? static_cast<double>(kNumbers) / keeping : 0;
  return keep(rows, keys).to(dtype).mul_(scale);
}

}  // namespace flash_attn::aten
