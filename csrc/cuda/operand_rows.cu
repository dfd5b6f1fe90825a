#include "operand_rows.h"

#include <algorithm>
#include <cmath>

#include "launch.h"
#include "tensor_part.cuh"

namespace flash_attn::cuda {
namespace {

constexpr int kThreads = 128, kWarpThreads = 32;

// A warp has a row of a head, the same one of every (batch, head) that its thread block takes.
// step(batch_idx, head, position, index), where index counts all rows.
template <typename Step>
__device__ void for_each_row(const Rows& rows, const Step& step) {
  const int position = blockIdx.x * (kThreads / kWarpThreads) + threadIdx.x / kWarpThreads;
  if (position >= rows.length) return;
  for (int i = blockIdx.y; i < rows.batch * rows.heads; i += gridDim.y) {
    const int batch_idx = i / rows.heads;
    step(batch_idx, i - batch_idx * rows.heads, position, int64_t{i} * rows.length + position);
  }
}

template <typename T, typename Element>
__global__ void __launch_bounds__(kThreads)
    keep_finite_kernel(const __grid_constant__ Rows rows, Element* finite, uint8_t* bad) {
  const int lane = threadIdx.x % kWarpThreads;
  for_each_row(rows, [&](int batch_idx, int head, int position, int64_t index) {
    bool all_finite = true;
    for (int col = lane; col < rows.cols; col += kWarpThreads) {
      const auto x = number_at<const Element>(rows.x, batch_idx, head, position, col);
      const bool is_finite = isfinite(static_cast<T>(x));
      all_finite &= is_finite;
      finite[index * rows.cols + col] = is_finite ? x : static_cast<Element>(static_cast<T>(0));
    }
    const bool found = __any_sync(~0u, !all_finite);
    if (lane == 0) bad[index] = found;
  });
}

// A thread block has some rows of acc. Where no row of b is bad it ends at once.
template <typename T, typename Element>
__global__ void __launch_bounds__(kThreads)
    restore_kernel(const __grid_constant__ ScoreTile tile,
                   const __grid_constant__ Restore restore) {
  const int group = tile.heads_q / tile.heads_kv, tile_rows = group * tile.rows;
  const int matrix = blockIdx.x, batch_idx = matrix / tile.heads_kv;
  const Rows& b = restore.b;
  // Rows of b that a sum has, and of which head and position each is.
  const int inner = restore.of_keys ? tile_rows : tile.keys;
  const int of_head = restore.of_keys ? tile.rows : tile.keys;
  const int first_head = matrix % tile.heads_kv * (restore.of_keys ? group : 1);
  const int64_t first = (restore.of_keys ? tile.first_query : tile.first_key) - restore.first_row;
  const auto is_bad = [&](int j) {
    const int64_t head = int64_t{batch_idx} * b.heads + first_head + j / of_head;
    return b.bad[head * b.length + first + j % of_head] != 0;
  };
  bool any = false;
  for (int j = threadIdx.x; j < inner; j += kThreads) any |= is_bad(j);
  if (!__syncthreads_or(any)) return;

  // Where acc's rows and b's lie in a tile.
  const int rows = restore.of_keys ? tile.keys : tile_rows;
  const int of_row = restore.of_keys ? 1 : tile.keys, of_inner = restore.of_keys ? tile.keys : 1;
  const int64_t first_score = int64_t{matrix} * tile_rows * tile.keys;
  const auto* const p = static_cast<const Element*>(restore.p) + first_score;
  const auto* const a = static_cast<const Element*>(restore.a) + first_score;
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    auto* const acc =
        static_cast<T*>(restore.acc) + matrix * restore.acc_matrix + row * restore.acc_row;
    for (int col = threadIdx.x; col < b.cols; col += kThreads) {
      T sum = 0;
#pragma unroll 1
      for (int j = 0; j < inner; ++j) {
        if (!is_bad(j)) continue;
        const int64_t at = int64_t{row} * of_row + int64_t{j} * of_inner;
        const T number = static_cast<T>(number_at<const Element>(
            b.x, batch_idx, first_head + j / of_head, first + j % of_head, col));
        const bool seen = !signbit(static_cast<T>(p[at]));
        if (seen && !isfinite(number)) sum += static_cast<T>(a[at]) * number;
      }
      if (sum != 0) acc[col] += sum;  // NaN is not 0
    }
  }
}

// A thread block has some rows of one of the tiles. Where no row is bad it ends at once.
template <typename T, typename Element>
__global__ void __launch_bounds__(kThreads)
    retake_kernel(const __grid_constant__ ScoreTile tile, const __grid_constant__ Retake retake) {
  const Product& product = blockIdx.z == 0 ? retake.scores : retake.values;
  const int tile_rows = tile.heads_q / tile.heads_kv * tile.rows, matrix = blockIdx.x;
  const int batch_idx = matrix / tile.heads_kv, head_kv = matrix % tile.heads_kv;
  const auto place_of = [&](int row) { return TileRow(tile, matrix * tile_rows + row); };
  const auto is_bad_row = [&](const TileRow& row) {
    const Rows& a = product.a;
    return a.bad[(int64_t{batch_idx} * a.heads + row.head) * a.length + row.query] != 0;
  };
  const auto is_bad_key = [&](int key) {
    const Rows& b = product.b;
    const int64_t head = int64_t{batch_idx} * b.heads + head_kv;
    return b.bad != nullptr && b.bad[head * b.length + tile.first_key + key] != 0;
  };
  bool any = false;
  const int first = blockIdx.y + threadIdx.x * gridDim.y, step = kThreads * gridDim.y;
  for (int row = first; row < tile_rows; row += step) any |= is_bad_row(place_of(row));
  for (int key = threadIdx.x; key < tile.keys; key += kThreads) any |= is_bad_key(key);
  if (!__syncthreads_or(any)) return;

  for (int row = blockIdx.y; row < tile_rows; row += gridDim.y) {
    const TileRow place = place_of(row);
    const bool bad_row = is_bad_row(place);
    T* const results =
        static_cast<T*>(product.results) + (int64_t{matrix} * tile_rows + row) * tile.keys;
    for (int key = threadIdx.x; key < tile.keys; key += kThreads) {
      if (!bad_row && !is_bad_key(key)) continue;
      T sum = 0;
#pragma unroll 1
      for (int col = 0; col < product.a.cols; ++col) {
        sum += static_cast<T>(place.of<const Element>(product.a.x, col)) *
               static_cast<T>(number_at<const Element>(product.b.x, batch_idx, head_kv,
                                                       tile.first_key + key, col));
      }
      results[key] = sum;
    }
  }
}

template <typename T, typename Element>
__global__ void __launch_bounds__(kThreads)
    row_delta_kernel(const __grid_constant__ Rows dout, const __grid_constant__ TensorPart out,
                     const __grid_constant__ TensorPart dlse, T* delta) {
  const int lane = threadIdx.x % kWarpThreads;
  for_each_row(dout, [&](int batch_idx, int head, int position, int64_t index) {
    const auto number = [&](const TensorPart& x, int col) {
      return static_cast<T>(number_at<const Element>(x, batch_idx, head, position, col));
    };
    T sum = 0;
    for (int col = lane; col < dout.cols; col += kWarpThreads) {
      sum += number(dout.x, col) * number(out, col);
    }
    sum = join_warp(sum, [](T a, T b) { return a + b; });
    if (lane != 0) return;
    if (dlse.data != nullptr) sum -= number_at<const T>(dlse, batch_idx, head, position, 0);
    delta[index] = sum;
  });
}

constexpr int kMostY = 65535;  // of a grid

// Of thread blocks that have some rows of a product each.
dim3 grid_of(const ScoreTile& tile, int rows) {
  constexpr int kRowsOfBlock = 32;
  return {static_cast<unsigned>(tile.batch * tile.heads_kv),
          std::min<unsigned>(blocks_of(rows, kRowsOfBlock), kMostY)};
}

dim3 grid_of(const Rows& rows) {
  return {blocks_of(rows.length, kThreads / kWarpThreads),
          static_cast<unsigned>(std::min(rows.batch * rows.heads, kMostY))};
}

}  // namespace

void run_keep_finite(const Rows& rows, void* finite, uint8_t* bad, Stream stream) {
  with_types(rows.x.dtype, rows.x.dtype, [&]<typename T, typename Element>() {
    launch<keep_finite_kernel<T, Element>>(grid_of(rows), kThreads, 0, stream, rows,
                                           static_cast<Element*>(finite), bad);
  });
}

void run_restore(const ScoreTile& tile, const Restore& restore, Stream stream) {
  const int rows = restore.of_keys ? tile.keys : tile.heads_q / tile.heads_kv * tile.rows;
  with_types(tile.scores, tile.operands, [&]<typename T, typename Element>() {
    launch<restore_kernel<T, Element>>(grid_of(tile, rows), kThreads, 0, stream, tile, restore);
  });
}

void run_retake(const ScoreTile& tile, const Retake& retake, Stream stream) {
  dim3 grid = grid_of(tile, tile.heads_q / tile.heads_kv * tile.rows);
  grid.z = 2;
  with_types(tile.scores, tile.operands, [&]<typename T, typename Element>() {
    launch<retake_kernel<T, Element>>(grid, kThreads, 0, stream, tile, retake);
  });
}

void run_row_delta(const Rows& dout, const TensorPart& out, const TensorPart& dlse, DType scores,
                   void* delta, Stream stream) {
  with_types(scores, dout.x.dtype, [&]<typename T, typename Element>() {
    launch<row_delta_kernel<T, Element>>(grid_of(dout), kThreads, 0, stream, dout, out, dlse,
                                         static_cast<T*>(delta));
  });
}

}  // namespace flash_attn::cuda
