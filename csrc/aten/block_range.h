// Which keys a block of query rows sees: plain integers, no tensors.
//
//            keys 0 1 2 3 4 5 6 7      offset = len_k - len_q = 2 (bottom-right), left = 3,
//   query 0    1 1 1 0 0 0 0 0         right = 0 (causal). The block of rows {2, 3, 4}:
//         1    1 1 1 1 0 0 0 0
//         2    0 1 1 1 1 0 0 0         visible_keys = [1, 7)  what any of its rows sees:
//         3    0 0 1 1 1 1 0 0                                the rest is skipped
//         4    0 0 0 1 1 1 1 0         full_keys    = [3, 5)  what all of its rows see:
//         5    0 0 0 0 1 1 1 1                                needs no mask
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_attn::aten {

// The positions [first, last) of one dimension.
struct Block {
  int64_t first, last;

  int64_t size() const { return std::max<int64_t>(last - first, 0); }
  Block operator&(Block other) const {
    return {std::max(first, other.first), std::min(last, other.last)};
  }
  bool contains(Block other) const {
    return other.size() == 0 || (first <= other.first && other.last <= last);
  }
};

// Query i sees the keys i + offset - left .. i + offset + right.
struct Band {
  static constexpr int64_t kNoLimit = int64_t{1} << 40;  // beyond any length, far from overflow

  int64_t offset = 0;
  int64_t left = kNoLimit, right = kNoLimit;

  bool limited() const { return left < kNoLimit || right < kNoLimit; }

  Block visible_keys(Block rows) const {
    return {rows.first + offset - left, rows.last + offset + right};
  }
  Block full_keys(Block rows) const {
    return {rows.last - 1 + offset - left, rows.first + 1 + offset + right};
  }
};

}  // namespace flash_attn::aten
