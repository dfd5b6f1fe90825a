// What happens to decode's scores between Q Kᵀ and the mask. A row of scores is a (token, query
// head) pair, so each has a slope and a diagonal of its own.
//
//   S = softmax_scale · Q Kᵀ → softcap → ALiBi → + bias
#pragma once

#include <cfloat>
#include <type_traits>

#include "../attn/bias.cuh"
#include "../attn/online_softmax.cuh"
#include "../ptx/opaque.cuh"
#include "config.h"

namespace flash_attn::cuda {

// tanh(x) = 1 - 2 / (exp(2x) + 1); near 0, where that difference has lost its digits, x - x³/3 +
// 2x⁵/15. The relative error is at most 5e-6, at 0.1, which is too much for fp32. The hardware's
// tanh is good to 11 bits only.
__device__ __forceinline__ float accurate_tanh(float x) {
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, 2.f / 15, -1.f / 3), 1.f);
  const float by_exp2 = 1.f - __fdividef(2.f, ptx::exp2(x * (2.f * kLog2E)) + 1.f);
  return fabsf(x) < 0.1f ? series : by_exp2;
}

// Where a row's maximum starts, in units of log 2: scores with terms are bounded.
__device__ __forceinline__ float least_max(const ScoreParams& score) {
  const bool bounded =
      score.softcap > 0.f || score.alibi_slopes != nullptr || score.bias.data != nullptr;
  return bounded ? kLeastScoreLog2 : -FLT_MAX;
}

// The terms of a row. They lie in shared memory: a tile needs all registers.
struct DecodeRowTerms {
  float scale;          // of Q Kᵀ, in units of log 2; with softcap, of its argument
  float slope;          // ALiBi's, in units of log 2
  int diagonal;         // the position where its distance is 0
  int bias_key;         // the position that the first number of a bias belongs to
  int64_t bias_offset;  // of the row's numbers

  // q_scale: what the row's products are multiplied with besides.
  __device__ __forceinline__ void set(const DecodeParams& params, int batch_idx, int len_k,
                                      int token, int head, float q_scale) {
    const ScoreParams& score = params.score;
    scale = params.softmax_scale * (score.softcap > 0.f ? 1.f / score.softcap : kLog2E) * q_scale;
    const float* slopes = score.alibi_slopes;
    if (slopes != nullptr) slopes += batch_idx * score.alibi_batch_stride;
    slope = slopes == nullptr ? 0.f : kLog2E * bounded_slope(slopes[head]);
    diagonal = token + len_k - params.seqlen_q;
    bias_offset = batch_idx * score.bias.batch_stride + head * score.bias.head_stride +
                  min(token, score.bias.rows - 1) * score.bias.row_stride;
    bias_key = score.bias.of_last_keys ? len_k - score.bias.keys : 0;
  }
};

template <bool kWide, int kKeys>
__device__ __forceinline__ void cap_scores(Accumulator<1, kKeys>& S, float softcap) {
  const float cap = softcap * kLog2E;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      S.at(half, i) = cap * (kWide ? tanhf(S.at(half, i)) : accurate_tanh(S.at(half, i)));
    }
  }
}

// S -= slope · |key - diagonal|. first_key: of S's first column.
template <int kKeys>
__device__ __forceinline__ void add_alibi(Accumulator<1, kKeys>& S,
                                          const DecodeRowTerms (&rows)[kDecodeRows], int first_key,
                                          int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DecodeRowTerms& row = rows[fragment_row(half, lane)];
    const float slope = row.slope;
    const auto first = static_cast<float>(first_key + fragment_col(0, lane) - row.diagonal);
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      const float distance = fabsf(first + static_cast<float>(fragment_col(i, 0)));
      S.at(half, i) = fmaf(-slope, distance, S.at(half, i));
    }
  }
}

// S += a bias of `Number`s. first_column: of it, at S's first column; negative where the keys have
// none. Several numbers are asked for before one is used, as memory answers each of them late; with
// the widest heads more than two at once would spill. Where none lies, a neighbour is read and not
// used.
template <typename Number, int kKeys>
__device__ __forceinline__ void add_bias(Accumulator<1, kKeys>& S, const BiasParams& bias,
                                         const DecodeRowTerms (&rows)[kDecodeRows],
                                         int first_column, int lane_of_thread) {
  constexpr int kAtOnce = S.kRowElements < 8 ? 2 : 8;
  static_assert(S.kRowElements % kAtOnce == 0);
  // Addresses kept from tile to tile would spill.
  const auto lane = static_cast<int>(ptx::opaque(lane_of_thread));
  const int first = first_column + fragment_col(0, lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Number* const of_row =
        static_cast<const Number*>(bias.data) + rows[fragment_row(half, lane)].bias_offset;
#pragma unroll
    for (int begin = 0; begin < S.kRowElements; begin += kAtOnce) {
      float numbers[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int column = min(max(first + fragment_col(begin + i, 0), 0), bias.keys - 1);
        numbers[i] = load_bias(of_row + column * bias.key_stride);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int column = first + fragment_col(begin + i, 0);
        const float number = column < 0 ? 0.f : column < bias.keys ? numbers[i] : -INFINITY;
        float& s = S.at(half, begin + i);
        s = fmaf(number, kLog2E, s);
      }
    }
  }
}

// The same where all columns exist and lie in pairs. first_column: even. Every pair has its place
// behind the first one of its row, so that there is hardly more to do than to load and to add.
template <typename Number, int kKeys>
__device__ __forceinline__ void add_bias_in_pairs(Accumulator<1, kKeys>& S, const BiasParams& bias,
                                                  const DecodeRowTerms (&rows)[kDecodeRows],
                                                  int first_column, int lane_of_thread) {
  const auto lane = static_cast<int>(ptx::opaque(lane_of_thread));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Number* const first = static_cast<const Number*>(bias.data) +
                                rows[fragment_row(half, lane)].bias_offset + first_column +
                                fragment_col(0, lane);
#pragma unroll
    for (int i = 0; i < S.kRowElements; i += 2) {
      const float2 pair = load_bias_pair(first + fragment_col(i, 0));
      S.at(half, i) = fmaf(pair.x, kLog2E, S.at(half, i));
      S.at(half, i + 1) = fmaf(pair.y, kLog2E, S.at(half, i + 1));
    }
  }
}

// Whether all of a tile's columns exist and lie in pairs.
template <int kKeys>
__device__ __forceinline__ bool lies_in_pairs(const BiasParams& bias, int first_column) {
  const bool whole = first_column >= 0 && first_column + kKeys <= bias.keys;
  return whole && bias.in_pairs && first_column % 2 == 0;
}

template <typename Number, int kKeys>
__device__ __forceinline__ void add_any_bias(Accumulator<1, kKeys>& S, const BiasParams& bias,
                                             const DecodeRowTerms (&rows)[kDecodeRows],
                                             int first_column, int lane) {
  if (lies_in_pairs<kKeys>(bias, first_column)) {
    add_bias_in_pairs<Number>(S, bias, rows, first_column, lane);
  } else {
    add_bias<Number>(S, bias, rows, first_column, lane);
  }
}

// A tile's pairs of a bias of 16 bits, asked for while the warp is at work on the tile before, so
// that memory answers while it waits for K and V anyway. finish_scores() reads other tiles itself,
// and other numbers, which would take more registers than there are.
template <typename Number, int kKeys>
struct BiasAhead {
  uint32_t pairs[2][kKeys / 8];

  // first_key: of the tile.
  __device__ __forceinline__ void ask(const BiasParams& bias,
                                      const DecodeRowTerms (&rows)[kDecodeRows], int first_key,
                                      int lane_of_thread) {
    if (bias.data == nullptr || bias.dtype == DType::kBool || bias.dtype == DType::kFp32) return;
    const int first_column = first_key - rows[0].bias_key;
    if (!lies_in_pairs<kKeys>(bias, first_column)) return;
    const auto lane = static_cast<int>(ptx::opaque(lane_of_thread));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Number* const first = static_cast<const Number*>(bias.data) +
                                  rows[fragment_row(half, lane)].bias_offset + first_column +
                                  fragment_col(0, lane);
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        pairs[half][i] = *reinterpret_cast<const uint32_t*>(first + fragment_col(2 * i, 0));
      }
    }
  }
  // S += what was asked for.
  __device__ __forceinline__ void add_to(Accumulator<1, kKeys>& S) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; i += 2) {
        const float2 pair = unpack_bias<Number>(pairs[half][i / 2]);
        S.at(half, i) = fmaf(pair.x, kLog2E, S.at(half, i));
        S.at(half, i + 1) = fmaf(pair.y, kLog2E, S.at(half, i + 1));
      }
    }
  }
};
struct NoBiasAhead {};

// Q Kᵀ becomes scores in units of log 2. A bias consists of fp32, of bool or of `Number`s; without
// kBias there is none. ahead: a BiasAhead that was asked for this tile, if there is one.
template <bool kWide, typename Number, bool kBias, int kKeys, typename Ahead = NoBiasAhead>
__device__ __forceinline__ void finish_scores(Accumulator<1, kKeys>& S, const DecodeParams& params,
                                              const DecodeRowTerms (&rows)[kDecodeRows],
                                              int first_key, int lane, const Ahead& ahead = {}) {
  const ScoreParams& score = params.score;
  const float scale[2] = {rows[fragment_row(0, lane)].scale, rows[fragment_row(1, lane)].scale};
  scale_rows(S, scale);
  if (score.softcap > 0.f) cap_scores<kWide>(S, score.softcap);
  if (score.alibi_slopes != nullptr) add_alibi(S, rows, first_key, lane);
  const BiasParams& bias = score.bias;
  if (!kBias || bias.data == nullptr) return;
  const int first_column = first_key - rows[0].bias_key;  // of all rows
  if (first_column + kKeys <= 0) return;  // a tree says nothing of the long rest of the cache
  if (bias.dtype == DType::kBool) {
    add_any_bias<bool>(S, bias, rows, first_column, lane);
  } else if (std::is_same_v<Number, float> || bias.dtype == DType::kFp32) {
    add_any_bias<float>(S, bias, rows, first_column, lane);
  } else if constexpr (std::is_same_v<Ahead, NoBiasAhead>) {
    add_any_bias<Number>(S, bias, rows, first_column, lane);
  } else if (lies_in_pairs<kKeys>(bias, first_column)) {
    ahead.add_to(S);
  } else {
    add_bias<Number>(S, bias, rows, first_column, lane);
  }
}

}  // namespace flash_attn::cuda
