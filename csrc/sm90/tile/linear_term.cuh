// A term of the scores that grows by the same from a key to the next, as a product of its own.
#pragma once

#include "../ptx/fence.cuh"
#include "term_columns.cuh"

namespace flash_attn::sm90 {

// S[i][j] += slope · j, for kN columns. Q's 16 columns are the slope as three numbers, which
// together have the bits of fp32, and zeros; they lie in registers. Those of K have j in each.
template <typename Element, int kN>
struct LinearTerm : TermColumns<Element, kN> {
  // Both dtypes hold this number. With a steeper slope S would lose too many of its bits beside the
  // term.
  static constexpr float kLargestSlope = 64.f;
  using Slope = typename TermColumns<Element, kN>::Left;

  // All threads of the block call it, before a barrier among them.
  __device__ __forceinline__ void init(int thread, int num_threads) {
    for (int j = thread; j < kN; j += num_threads) {
      const uint32_t pair = flash_attn::ptx::pack<Element>(j, j);
      *reinterpret_cast<uint4*>(this->columns[j]) = {pair, pair, pair, pair};
    }
    ptx::fence_async_shared();
  }

  // The left operand of a slope, which is the same in all rows.
  __device__ __forceinline__ static Slope operand_of(float slope, int lane) {
    return LinearTerm::left(as_three_numbers<Element>(slope), lane);
  }
};

}  // namespace flash_attn::sm90
