// An additive bias, or a mask, as a warp meets it: read beside its scores, and the gradient
// written.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../core/params.h"
#include "../../core/score_range.h"
#include "../ptx/half2.cuh"
#include "../ptx/math.cuh"
#include "../tile/fragment.cuh"

namespace flash_attn {

// Numbers of a bias in fp32, no more than core/score_range.h takes; of a mask, what a score takes
// on. Pairs are aligned.
inline constexpr auto kMaxBias = static_cast<float>(kMaxScore);
template <typename Number>
__device__ __forceinline__ float load_bias(const Number* number) {
  return ptx::minimum_or_nan(static_cast<float>(*number), kMaxBias);
}
template <typename Number>
__device__ __forceinline__ float2 unpack_bias(uint32_t numbers) {
  const float2 pair = ptx::unpack<Number>(numbers);
  return {ptx::minimum_or_nan(pair.x, kMaxBias), ptx::minimum_or_nan(pair.y, kMaxBias)};
}
template <>
__device__ __forceinline__ float2 unpack_bias<__nv_bfloat16>(uint32_t numbers) {
  const uint32_t largest = ptx::pack<__nv_bfloat16>(kMaxBias, kMaxBias);  // a power of two
  return ptx::unpack<__nv_bfloat16>(ptx::minimum2_or_nan_bf16(numbers, largest));
}
template <typename Number>
__device__ __forceinline__ float2 load_bias_pair(const Number* numbers) {
  return unpack_bias<Number>(*reinterpret_cast<const uint32_t*>(numbers));
}
template <>
__device__ __forceinline__ float2 load_bias_pair(const float* numbers) {
  const float2 pair = *reinterpret_cast<const float2*>(numbers);
  return {ptx::minimum_or_nan(pair.x, kMaxBias), ptx::minimum_or_nan(pair.y, kMaxBias)};
}
template <>
__device__ __forceinline__ float load_bias(const bool* seen) {
  return *reinterpret_cast<const uint8_t*>(seen) != 0 ? 0.f : -INFINITY;
}
template <>
__device__ __forceinline__ float2 load_bias_pair(const bool* seen) {
  const uchar2 pair = *reinterpret_cast<const uchar2*>(seen);
  return {pair.x != 0 ? 0.f : -INFINITY, pair.y != 0 ? 0.f : -INFINITY};
}

// Calls f(number) with a null pointer to the type that a gradient consists of: fp32, or that of q.
template <typename Element, typename F>
__device__ __forceinline__ void with_bias_gradient_type(DType dtype, F&& f) {
  if (dtype == DType::kFp32) {
    f(static_cast<const float*>(nullptr));
  } else {
    f(static_cast<const Element*>(nullptr));
  }
}
// The same with the type of a bias, which may be a mask.
template <typename Element, typename F>
__device__ __forceinline__ void with_bias_type(DType dtype, F&& f) {
  if (dtype == DType::kBool) return f(static_cast<const bool*>(nullptr));
  with_bias_gradient_type<Element>(dtype, f);
}

// S += factor · bias, queries as rows. bias: of the sequence and the head. query, key: of the
// warp's first row and column.
template <typename Number, int kMBlocks, int kN>
__device__ __forceinline__ void add_bias(Accumulator<kMBlocks, kN>& S, const BiasParams& params,
                                         const Number* bias, float factor, int query, int key,
                                         int lane) {
  const int first_key = key + fragment_col(0, lane);
  const Number* of_row[2 * kMBlocks];
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
    const int query_of_row = query + row / 2 * 16 + fragment_row(row, lane);
    of_row[row] = bias + min(query_of_row, params.rows - 1) * params.row_stride +
                  first_key * params.key_stride;
  }
  // Column by column: the offsets of all columns at once would take too many registers.
  const auto add = [&](const auto& load_pair) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; i += 2) {
      const int col = fragment_col(i, 0), keys_left = params.keys - first_key - col;
#pragma unroll
      for (int row = 0; row < S.kRows; ++row) {
        const float2 pair = load_pair(of_row[row], col, keys_left);
        S.at(row, i) = fmaf(pair.x, factor, S.at(row, i));
        S.at(row, i + 1) = fmaf(pair.y, factor, S.at(row, i + 1));
      }
    }
  };
  if (params.in_pairs) {
    add([](const Number* numbers, int col, int keys_left) -> float2 {
      return keys_left > 0 ? load_bias_pair(numbers + col) : float2{-INFINITY, -INFINITY};
    });
  } else {
    add([&](const Number* numbers, int col, int keys_left) -> float2 {
      const Number* const number = numbers + col * params.key_stride;
      return {keys_left > 0 ? load_bias(number) : -INFINITY,
              keys_left > 1 ? load_bias(number + params.key_stride) : -INFINITY};
    });
  }
}

// S becomes a bias that lies in registers as an operand does. Its numbers may be larger than a bias
// is: bound_scores() has to follow before they are compared with others.
template <typename Number, int kMBlocks, int kN>
__device__ __forceinline__ void set_bias(Accumulator<kMBlocks, kN>& S,
                                         const OperandA<kMBlocks, kN>& bias) {
#pragma unroll
  for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float2 pair = ptx::unpack<Number>(bias.data[m][n / 2][n % 2 * 2 + row]);
        S.data[m][n][2 * row] = pair.x;
        S.data[m][n][2 * row + 1] = pair.y;
      }
    }
  }
}
// Scores beyond the bound of a bias count as that: there fp32 hardly has Q Kᵀ beside it.
template <int kMBlocks, int kN>
__device__ __forceinline__ void bound_scores(Accumulator<kMBlocks, kN>& S, float bound) {
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      S.at(row, i) = ptx::minimum_or_nan(S.at(row, i), bound);
    }
  }
}

// S += a bias of the keys alone, in the unit of S. of_keys: of the keys from the first column on.
template <int kMBlocks, int kN>
__device__ __forceinline__ void add_key_bias(Accumulator<kMBlocks, kN>& S, const float* of_keys,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < S.kRowElements; i += 2) {
    const float2 pair = *reinterpret_cast<const float2*>(of_keys + fragment_col(i, lane));
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
      S.at(row, i) += pair.x;
      S.at(row, i + 1) += pair.y;
    }
  }
}

// The same with keys as rows.
template <typename Number, int kMBlocks, int kN>
__device__ __forceinline__ void add_bias_transposed(Accumulator<kMBlocks, kN>& S,
                                                    const BiasParams& params, const Number* bias,
                                                    float factor, int query, int key, int lane) {
#pragma unroll
  for (int row = 0; row < S.kRows; ++row) {
    const int key_of_row = key + row / 2 * 16 + fragment_row(row, lane);
    const Number* const numbers = bias + key_of_row * params.key_stride;
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      const int query_of_col = min(query + fragment_col(i, lane), params.rows - 1);
      const float number = key_of_row < params.keys
                               ? load_bias(numbers + query_of_col * params.row_stride)
                               : -INFINITY;
      S.at(row, i) = fmaf(number, factor, S.at(row, i));
    }
  }
}

// The gradient of a bias that broadcasts nothing: factor · dS, where it belongs. gradient: of the
// sequence and the head.
template <typename Number, int kMBlocks, int kN>
__device__ __forceinline__ void store_bias_gradient(const Accumulator<kMBlocks, kN>& dS,
                                                    const BiasGradientParams& params,
                                                    Number* gradient, float factor, int query,
                                                    int key, int lane) {
  const int first_key = key + fragment_col(0, lane);
#pragma unroll
  for (int row = 0; row < dS.kRows; ++row) {
    const int query_of_row = query + row / 2 * 16 + fragment_row(row, lane);
    if (query_of_row >= params.rows) continue;
    Number* const numbers = gradient + int64_t{query_of_row} * params.keys + first_key;
#pragma unroll
    for (int i = 0; i < dS.kRowElements; i += 2) {
      const int col = fragment_col(i, 0), keys_left = params.keys - first_key - col;
      const float2 pair = {dS.at(row, i) * factor, dS.at(row, i + 1) * factor};
      if (params.keys % 2 == 0) {
        if (keys_left <= 0) continue;
        if constexpr (sizeof(Number) == sizeof(float)) {
          *reinterpret_cast<float2*>(numbers + col) = pair;
        } else {
          *reinterpret_cast<uint32_t*>(numbers + col) = ptx::pack<Number>(pair.x, pair.y);
        }
      } else {
        if (keys_left > 0) numbers[col] = static_cast<Number>(pair.x);
        if (keys_left > 1) numbers[col + 1] = static_cast<Number>(pair.y);
      }
    }
  }
}

// Writes the sum of each column of a warp's tile to `sums`.
template <int kMBlocks, int kN>
__device__ __forceinline__ void sum_columns(const Accumulator<kMBlocks, kN>& dS, float* sums,
                                            int lane) {
#pragma unroll
  for (int i = 0; i < dS.kRowElements; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int row = 0; row < dS.kRows; ++row) sum += dS.at(row, i);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane < 4) sums[fragment_col(i, lane)] = sum;
  }
}

}  // namespace flash_attn
