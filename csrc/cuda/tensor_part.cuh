// How kernels beside aten's products reach a number of a tensor, and a row of a tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "score_tile.h"

namespace flash_attn::cuda {

template <typename T>
__device__ __forceinline__ T load_number(const TensorPart& x, int64_t at) {
  switch (x.dtype) {
    case DType::kFp16:
      return static_cast<float>(static_cast<const __half*>(x.data)[at]);
    case DType::kBf16:
      return static_cast<float>(static_cast<const __nv_bfloat16*>(x.data)[at]);
    case DType::kFp64:
      return static_cast<T>(static_cast<const double*>(x.data)[at]);
    default:
      return static_cast<T>(static_cast<const float*>(x.data)[at]);
  }
}
__device__ __forceinline__ int64_t place_in(const TensorPart& x, int batch_idx, int head,
                                            int64_t row, int64_t col) {
  return batch_idx * x.batch + head * x.head + row * x.row + col * x.col;
}
// A number of a tensor whose dtype is known.
template <typename Number>
__device__ __forceinline__ Number& number_at(const TensorPart& x, int batch_idx, int head,
                                             int64_t row, int64_t col) {
  auto* const numbers = static_cast<Number*>(const_cast<void*>(x.data));
  return numbers[place_in(x, batch_idx, head, row, col)];
}

// Of all lanes of a warp.
template <typename T, typename Join>
__device__ __forceinline__ T join_warp(T value, const Join& join) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = join(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Where row `index` of a tile, among all of its rows, lies in the call.
struct TileRow {
  __device__ __forceinline__ TileRow(const ScoreTile& tile, int index) {
    const int group = tile.heads_q / tile.heads_kv, of_matrix = group * tile.rows;
    const int matrix = index / of_matrix, row = index - matrix * of_matrix;
    batch_idx = matrix / tile.heads_kv;
    head = matrix % tile.heads_kv * group + row / tile.rows;
    query = tile.first_query + row % tile.rows;
  }
  template <typename Number>
  __device__ __forceinline__ Number& of(const TensorPart& x, int64_t col = 0) const {
    return number_at<Number>(x, batch_idx, head, query, col);
  }

  int batch_idx, head;
  int64_t query;
};

// Calls f.template operator()<T, Element>() with the types of scores and of operands.
template <typename F>
void with_types(DType scores, DType operands, F&& f) {
  if (scores == DType::kFp64) return f.template operator()<double, double>();
  if (operands == DType::kFp16) return f.template operator()<float, __half>();
  if (operands == DType::kBf16) return f.template operator()<float, __nv_bfloat16>();
  f.template operator()<float, float>();
}

inline unsigned blocks_of(int64_t count, int each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace flash_attn::cuda
