// Keys of pages that do not exist.
#pragma once

#include <cmath>

#include "../tile/fragment.cuh"

namespace flash_attn::cuda {

struct AllKeys {};  // of a tile exist

// Sets the scores of keys whose bit in `valid` is 0 to -inf.
template <int kKeys>
__device__ __forceinline__ void mask_absent(Accumulator<1, kKeys>&, AllKeys, int) {}
template <int kMBlocks, int kKeys, typename KeyBits>
__device__ __forceinline__ void mask_absent(Accumulator<kMBlocks, kKeys>& S, KeyBits valid,
                                            int lane) {
  constexpr KeyBits kAll = ~KeyBits{0} >> (8 * sizeof(KeyBits) - kKeys);
  if (valid == kAll) return;
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      if ((valid >> fragment_col(i, lane) & 1) == 0) S.at(row, i) = -INFINITY;
    }
  }
}

}  // namespace flash_attn::cuda
