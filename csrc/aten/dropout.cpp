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

constexpr int64_t kNumbers = 1 << 8;  // that an element may draw

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

constexpr int64_t kMul2 = 0xD256D193;

// The first word.
Tensor philox2x32(Tensor first, Tensor second, const Tensor& key) {
  for (int64_t round = 0; round < 7; ++round) {
    const Tensor product = first * kMul2;
    const Tensor mixed = second.bitwise_xor(low(key + round * kWeyl0));
    first = high(product).bitwise_xor(mixed);
    second = low(product);
  }
  return first;
}

// A range of positions, widened to blocks.
struct WholeBlocks {
  WholeBlocks(Block range, int64_t block)
      : block(block), first(range.first / block), last((range.last + block - 1) / block) {}
  int64_t size() const { return last - first; }
  // The numbers of the groups that share a word, eight to a block.
  Tensor groups(at::TensorOptions int64) const { return at::arange(8 * first, 8 * last, int64); }

  int64_t block, first, last;
};

}  // namespace

Dropout::Dropout(double probability, const Tensor& rng_state, int64_t batch, int64_t heads,
                 const DropoutPlace& place)
    : threshold_(std::llround(std::ldexp(probability, 8))), place_(place) {
  const Tensor seed = rng_state.select(0, 0), offset = rng_state.select(0, 1);
  const auto numbers = [&](int64_t first, int64_t count) {
    return at::arange(first, first + count, rng_state.options());
  };
  const int64_t all_heads = place.heads == 0 ? heads : place.heads;
  const Tensor number = numbers(place.sequence, batch).mul_(all_heads).view({batch, 1, 1, 1}) +
                        numbers(place.head, heads).view({heads, 1, 1});
  const auto words =
      philox4x32({low(number), high(number), low(offset), high(offset)}, low(seed), high(seed));
  key_ = words[0];
  row_ = words[1];
  col_ = words[2];
  last_ = words[3];
}

Dropout Dropout::part(Block batches, Block heads) const {
  Dropout part = *this;
  for (Tensor* words : {&part.key_, &part.row_, &part.col_, &part.last_}) {
    *words = words->narrow(0, batches.first, batches.size()).narrow(1, heads.first, heads.size());
  }
  return part;
}

Tensor Dropout::keep(Block rows, Block keys) const {
  return keep_there({rows.first + place_.query, rows.last + place_.query},
                    {keys.first + place_.key, keys.last + place_.key});
}

Tensor Dropout::keep_there(Block rows, Block keys) const {
  const at::TensorOptions int64 = key_.options();
  const WholeBlocks row_blocks(rows, 16), key_blocks(keys, 32);
  // (batch, heads, groups of rows, 1) and (batch, heads, 1, groups of keys)
  const Tensor of_rows = philox2x32(row_blocks.groups(int64).unsqueeze(-1), row_, key_);
  const Tensor of_keys = philox2x32(key_blocks.groups(int64), col_, key_);
  const Tensor first = of_rows.bitwise_xor(of_keys).mul_(kMul2);
  const Tensor second = high(first).bitwise_xor_(of_keys).mul_(kMul2);
  const Tensor word[2] = {high(second).bitwise_xor_(low(first)).bitwise_xor_(last_), low(second)};

  const int64_t batch = key_.size(0), heads = key_.size(1);
  const Tensor kept = at::empty({batch, heads, row_blocks.size(), 2, 8, key_blocks.size(), 4, 8},
                                int64.dtype(at::kBool));
  const bool mirrored = threshold_ > kNumbers / 2;
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t s = 0; s < 4; ++s) {
      const Tensor upper = word[r].bitwise_right_shift(8 * s).bitwise_and_(127).mul_(2);
      const Tensor lowest = word[r].bitwise_right_shift(8 * (s ^ 1) + 7).bitwise_and_(1);
      const Tensor number =
          upper.add_(lowest).view({batch, heads, row_blocks.size(), 8, key_blocks.size(), 8});
      Tensor place = kept.select(6, s).select(3, r);
      mirrored ? at::lt_out(place, number, kNumbers - threshold_)
               : at::ge_out(place, number, threshold_);
    }
  }
  return kept.view({batch, heads, 16 * row_blocks.size(), 32 * key_blocks.size()})
      .narrow(2, rows.first - 16 * row_blocks.first, rows.size())
      .narrow(3, keys.first - 32 * key_blocks.first, keys.size());
}

Tensor Dropout::factors(Block rows, Block keys, at::ScalarType dtype) const {
  // Where the threshold is 2^15, nothing is kept, and nothing needs a scale.
  const int64_t keeping = kNumbers - threshold_;
  const double scale = keeping > 0 ? static_cast<double>(kNumbers) / keeping : 0;
  return keep(rows, keys).to(dtype).mul_(scale);
}

}  // namespace flash_attn::aten
