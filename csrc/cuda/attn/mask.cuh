// -inf for the scores of one tile that attention does not see (0 for probabilities); only boundary
// tiles are masked.
#pragma once

#include <cmath>

#include "../tile/fragment.cuh"
#include "block_range.cuh"

namespace flash_attn {

// Row r of the thread keeps the columns [first[r], end[r]) of the tile; the others become `unseen`.
template <int kMBlocks, int kN>
__device__ __forceinline__ void mask_outside(Accumulator<kMBlocks, kN>& S,
                                             const int (&first)[2 * kMBlocks],
                                             const int (&end)[2 * kMBlocks], int lane,
                                             float unseen = -INFINITY) {
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
    // Against the column without its lane part, a constant.
    const int row_first = first[row] - fragment_col(0, lane);
    const int row_end = end[row] - fragment_col(0, lane);
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      const int col = fragment_col(i, 0);
      if (col < row_first || col >= row_end) S.at(row, i) = unseen;
    }
  }
}

// Row r keeps the columns [0, end[r]); the others become -inf.
template <int kMBlocks, int kN>
__device__ __forceinline__ void mask_from(Accumulator<kMBlocks, kN>& S,
                                          const int (&end)[2 * kMBlocks], int lane) {
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
    const int row_end = end[row] - fragment_col(0, lane);
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      if (fragment_col(i, 0) >= row_end) S.at(row, i) = -INFINITY;
    }
  }
}

// The same with columns [first[r], kN).
template <int kMBlocks, int kN>
__device__ __forceinline__ void mask_before(Accumulator<kMBlocks, kN>& S,
                                            const int (&first)[2 * kMBlocks], int lane) {
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
    const int row_first = first[row] - fragment_col(0, lane);
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      if (fragment_col(i, 0) < row_first) S.at(row, i) = -INFINITY;
    }
  }
}

// The columns of which `hidden` has a bit for each eight become -inf.
template <int kMBlocks, int kN>
__device__ __forceinline__ void mask_eights(Accumulator<kMBlocks, kN>& S, uint32_t hidden) {
  static_assert(kN <= 32 * 8);
#pragma unroll
  for (int i = 0; i < S.kRowElements; ++i) {
    const bool is_hidden = (hidden >> fragment_col(i, 0) / 8 & 1) != 0;
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
      if (is_hidden) S.at(row, i) = -INFINITY;
    }
  }
}

// S holds queries as rows (row r of the thread is query query_of_row[r]) and keys first_key … as
// columns.
template <int kMBlocks, int kN>
__device__ __forceinline__ void mask_keys(Accumulator<kMBlocks, kN>& S,
                                          const AttentionWindow& window,
                                          const int (&query_of_row)[2 * kMBlocks], int first_key,
                                          int lane) {
  int first[2 * kMBlocks], end[2 * kMBlocks];
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
    first[row] = window.first_key(query_of_row[row]) - first_key;
    end[row] = window.end_key(query_of_row[row]) - first_key;
  }
  mask_outside(S, first, end, lane);
}

// The transpose, for probabilities: keys as rows, queries first_query … as columns; `hidden` where
// nothing is seen.
template <int kMBlocks, int kN>
__device__ __forceinline__ void mask_queries(Accumulator<kMBlocks, kN>& P,
                                             const AttentionWindow& window,
                                             const int (&key_of_row)[2 * kMBlocks], int first_query,
                                             int lane, float hidden = 0.f) {
  int first[2 * kMBlocks], end[2 * kMBlocks];
#pragma unroll
  for (int row = 0; row < P.kRows; ++row) {
    const bool exists = key_of_row[row] < window.len_k();
    first[row] = window.first_query(key_of_row[row]) - first_query;
    end[row] = exists ? window.end_query(key_of_row[row]) - first_query : 0;
  }
  mask_outside(P, first, end, lane, hidden);
}

}  // namespace flash_attn
