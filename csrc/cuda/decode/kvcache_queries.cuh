// A piece's rows of Q on their way to the matrix product: rotated, and for 8-bit caches in fp16.
#pragma once

#include "../cache/rotary.cuh"
#include "../tile/smem_tile.cuh"
#include "../tile/store.cuh"
#include "kvcache_schedule.cuh"
#include "score_terms.cuh"
#include "widened_gemm.cuh"

namespace flash_attn::cuda {

// Loads the 16 rows as the left operand of Q Kᵀ, with zeros beyond rows and columns, and sets their
// terms, what the products are to be multiplied with among them. With kTo8Bit the columns stand in
// the order in which keys of 8 bits come out of ldmatrix: each four neighbours k are two pairs, at
// k / 2 of 16 columns and 8 further on. kKvcacheWarps warps call it, with eight lanes a row.
template <typename Element, bool kTo8Bit, int kHeadDim>
__device__ __forceinline__ void load_queries(SmemTile<Element, kDecodeRows, kHeadDim>& tile,
                                             DecodeRowTerms (&row_terms)[kDecodeRows],
                                             const DecodeParams& params,
                                             const KvcachePiece& piece) {
  constexpr int kLanes = 32 * kKvcacheWarps / kDecodeRows, kChunks = kHeadDim / kChunk / kLanes;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int first_row = blockIdx.x * kDecodeRows, kv_head = blockIdx.y;
  const bool exists = first_row + row < decode_group_rows(params);
  const KvcacheRow at(params, kv_head, first_row + row);
  float x[kChunks][kChunk];
  const auto load = [&]<typename Source> {
    const auto* source = query_row<Source>(params, piece.batch_idx, at.token, at.head);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int col = (i * kLanes + lane) * kChunk;
#pragma unroll
      for (int c = 0; c < kChunk; ++c) x[i][c] = 0.f;
      if (!exists || col >= params.head_dim) continue;
      load_query_chunk(x[i], source, col, params, piece.batch_idx, at.token);
    }
  };
  if constexpr (kIsWide<Element>) {
    load.template operator()<float>();
  } else if (params.dtype == DType::kFp16) {
    load.template operator()<__half>();
  } else {
    load.template operator()<__nv_bfloat16>();
  }

  float scale = 1.f;
  if constexpr (kTo8Bit) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int c = 0; c < kChunk; ++c) largest = fmaxf(largest, fabsf(x[i][c]));
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    }
    if (params.dtype == DType::kBf16) scale = fp16_scale(largest);
  }
  if (lane == 0) {
    const float descale = descale_of(params.k_descale, params.k_descale_batch_stride,
                                     params.k_descale_head_stride, piece.batch_idx, kv_head);
    row_terms[row].set(params, piece.batch_idx, kvcache_len_k(params, piece.batch_idx), at.token,
                       at.head, descale / scale);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = (i * kLanes + lane) * kChunk;
#pragma unroll
    for (int pair = 0; pair < kChunk / 2; ++pair) {
      const PairOf<Element> rounded =
          rounded_pair<Element>(x[i][2 * pair] * scale, x[i][2 * pair + 1] * scale);
      const int k = col + 2 * pair;
      const int to = kTo8Bit ? k / 16 * 16 + k % 4 / 2 * 8 + k % 16 / 4 * 2 : k;
      *reinterpret_cast<PairOf<Element>*>(tile.pointer(row, to)) = rounded;
    }
  }
}

}  // namespace flash_attn::cuda
