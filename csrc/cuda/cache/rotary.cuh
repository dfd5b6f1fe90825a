// Rotary position embedding (Su et al. 2021), for queries on their way to the matrix product and
// keys on their way to the cache.
#pragma once

#include "../../core/params.h"
#include "../ptx/math.cuh"
#include "../tile/element.cuh"
#include "rows.cuh"

namespace flash_attn::cuda {

// Eight neighbouring columns of a row.
template <typename Element>
__device__ __forceinline__ void load_chunk(float (&x)[kChunk], const void* source) {
  constexpr int kCopied = kChunkOf<Element>;
#pragma unroll
  for (int first = 0; first < kChunk; first += kCopied) {
    const uint4 raw = static_cast<const uint4*>(source)[first / kCopied];
    const auto* elements = reinterpret_cast<const Element*>(&raw);
#pragma unroll
    for (int i = 0; i < kCopied; ++i) x[first + i] = static_cast<float>(elements[i]);
  }
}

template <typename Element>
__device__ __forceinline__ void store_chunk(void* target, const float (&x)[kChunk]) {
  if constexpr (kIsWide<Element>) {
    static_cast<float4*>(target)[0] = {x[0], x[1], x[2], x[3]};
    static_cast<float4*>(target)[1] = {x[4], x[5], x[6], x[7]};
  } else {
    *static_cast<uint4*>(target) = {ptx::pack<Element>(x[0], x[1]), ptx::pack<Element>(x[2], x[3]),
                                    ptx::pack<Element>(x[4], x[5]), ptx::pack<Element>(x[6], x[7])};
  }
}

// Turns eight columns of a row, of which `row` points to column 0, by its position:
//
//   x₁' = x₁ cos - x₂ sin      x₂' = x₁ sin + x₂ cos
//
// in fp32. Positions are clamped to the table, columns from rotary_dim on stay.
//
// Out of line: most calls rotate nothing, and a launch has to fetch what it jumps over.
template <typename Element>
__device__ __noinline__ void rotate_chunk(float (&x)[kChunk], const Element* row, int col,
                                          int64_t position, const CacheParams& params) {
  const int half = params.rotary_dim / 2;
  const int64_t table_row = min(max(position, int64_t{0}), int64_t{params.rotary_rows} - 1);
  const auto* cos = static_cast<const Element*>(params.rotary_cos) + table_row * half;
  const auto* sin = static_cast<const Element*>(params.rotary_sin) + table_row * half;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int c = col + i;
    if (c >= params.rotary_dim) continue;
    const bool first = params.rotary_interleaved ? c % 2 == 0 : c < half;
    const int pair = params.rotary_interleaved ? c / 2 : (first ? c : c - half);
    const int partner = params.rotary_interleaved ? c ^ 1 : (first ? c + half : c - half);
    const float other = static_cast<float>(row[partner]);
    const float cosine = static_cast<float>(cos[pair]), sine = static_cast<float>(sin[pair]);
    const float mine = static_cast<float>(row[c]);
    if constexpr (kIsWide<Element>) {
      // Products are rounded by themselves, as ATen's: the cache has the same bits, whoever writes
      // it.
      const float own = __fmul_rn(mine, cosine), others = __fmul_rn(other, sine);
      x[i] = first ? __fsub_rn(own, others) : __fadd_rn(others, own);
    } else {
      x[i] = first ? mine * cosine - other * sine : other * sine + mine * cosine;
    }
  }
}

template <typename Element>
__device__ __forceinline__ const Element* query_row(const DecodeParams& params, int batch_idx,
                                                    int token, int head) {
  const Strides& strides = params.q_strides;
  return static_cast<const Element*>(params.q) + batch_idx * strides.batch + token * strides.row +
         head * strides.head;
}

// Eight columns of a query, of which `row` points to column 0, turned to its position in the cache
// if the call rotates, and rounded as q is.
template <typename Element>
__device__ __forceinline__ void load_query_chunk(float (&x)[kChunk], const Element* row, int col,
                                                 const DecodeParams& params, int batch_idx,
                                                 int token) {
  load_chunk<Element>(x, row + col);
  if (params.rotary_cos == nullptr || col >= params.rotary_dim) return;
  const int64_t position =
      first_new_position(params, batch_idx) + (params.rotate_by_row ? token : 0);
  rotate_chunk(x, row, col, position, params);
#pragma unroll
  for (float& number : x) number = static_cast<float>(static_cast<Element>(number));
}

}  // namespace flash_attn::cuda
