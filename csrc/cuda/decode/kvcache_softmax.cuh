// Turns Q Kᵀ into P, among the four warps of kvcache.cuh that share the rows.
#pragma once

#include "../ptx/barrier.cuh"
#include "../tile/store.cuh"
#include "kvcache_schedule.cuh"
#include "kvcache_traits.cuh"
#include "score_terms.cuh"

namespace flash_attn::cuda {

// What this thread knows of its rows, g and g + 8 of the tile.
struct KvcacheRows {
  int first_key[2], end_key[2];  // seen by the row

  __device__ __forceinline__ KvcacheRows(const DecodeParams& params, const KvcachePiece& piece,
                                         int lane) {
    const int len_k = kvcache_len_k(params, piece.batch_idx);
    const int last_row = decode_group_rows(params) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(half, lane);
      const KvcacheRow at(params, blockIdx.y,
                          min(static_cast<int>(blockIdx.x * kDecodeRows) + row, last_row));
      const SequenceKeys seen(params, piece.batch_idx, len_k, at.token, at.token);
      first_key[half] = seen.first;
      end_key[half] = seen.end;
    }
  }
};

// Q Kᵀ becomes scores in units of log 2, which are -inf where masked. first_key is that of the
// warp's columns.
template <typename Traits, bool kBias>
__device__ __forceinline__ void finish_and_mask(typename Traits::Scores& S,
                                                const KvcacheStorage<Traits>& smem,
                                                const DecodeParams& params, const KvcacheRows& rows,
                                                uint32_t valid, int first_key, int lane) {
  // Beside 8 bits, where the products' type is not q's, a bias is fp32.
  using Number = std::conditional_t<Traits::k8Bit, float, typename Traits::Element>;
  finish_scores<Traits::kWide, Number, kBias>(S, params, smem.row_terms, first_key, lane);
  constexpr uint32_t kAll = ~0u >> (32 - S.kN);
  const bool inside = max(rows.first_key[0], rows.first_key[1]) <= first_key &&
                      min(rows.end_key[0], rows.end_key[1]) >= first_key + S.kN;
  if (__all_sync(~0u, inside && valid == kAll)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) {
      const int col = fragment_col(i, lane), key = first_key + col;
      const bool seen =
          (valid >> col & 1) != 0 && key >= rows.first_key[half] && key < rows.end_key[half];
      if (!seen) S.at(half, i) = -INFINITY;
    }
  }
}

// The running softmax of the thread's two rows; sums over the warp's keys in this lane.
struct KvcacheSoftmax {
  float row_max[2], row_sum[2] = {0.f, 0.f};

  __device__ __forceinline__ explicit KvcacheSoftmax(const ScoreParams& score) {
    row_max[0] = row_max[1] = least_max(score);
  }

  // S becomes P. Returns whether O, by `correction`, and the sums have to follow a new maximum.
  template <typename Traits>
  __device__ __forceinline__ bool step(typename Traits::Scores& S, float (&correction)[2],
                                       KvcacheStorage<Traits>& smem, int warp, int lane) {
    using Element = typename Traits::Element;
    float maximum[2] = {S.at(0, 0), S.at(1, 0)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 1; i < S.kRowElements; ++i) maximum[half] = fmaxf(maximum[half], S.at(half, i));
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 1));
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 2));
      if (lane % 4 == 0) smem.row_max[warp][fragment_row(half, lane)] = maximum[half];
    }
    ptx::barrier_sync<Traits::kThreads>(kComputeBarrier);
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = row_max[half];
#pragma unroll
      for (int w = 0; w < kKvcacheWarps; ++w) {
        new_max = fmaxf(new_max, smem.row_max[w][fragment_row(half, lane)]);
      }
      moved |= new_max != row_max[half];
      correction[half] = ptx::exp2(row_max[half] - new_max);
      row_max[half] = new_max;
      row_sum[half] *= correction[half];
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(half, i) = ptx::exp2(S.at(half, i) - new_max);
        row_sum[half] += S.at(half, i);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; i += 2) {
        const int col = warp * Traits::kWarpKeys + fragment_col(i, lane);
        *reinterpret_cast<PairOf<Element>*>(smem.p.pointer(fragment_row(half, lane), col)) =
            rounded_pair<Element>(S.at(half, i), S.at(half, i + 1));
      }
    }
    ptx::barrier_sync<Traits::kThreads>(kComputeBarrier);
    return __any_sync(~0u, moved);
  }

  // Makes row_sum the sum over all keys of the piece.
  template <typename Traits>
  __device__ __forceinline__ void finish(KvcacheStorage<Traits>& smem, int warp, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
      row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
      if (lane % 4 == 0) smem.row_sum[warp][fragment_row(half, lane)] = row_sum[half];
    }
    ptx::barrier_sync<Traits::kThreads>(kComputeBarrier);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] = 0.f;
#pragma unroll
      for (int w = 0; w < kKvcacheWarps; ++w) {
        row_sum[half] += smem.row_sum[w][fragment_row(half, lane)];
      }
    }
  }
};

}  // namespace flash_attn::cuda
