// Turns Q Kᵀ into P, among the four warps of kvcache.cuh that share the rows.
#pragma once

#include <cfloat>

#include "../attn/online_softmax.cuh"
#include "../ptx/barrier.cuh"
#include "../tile/store.cuh"
#include "kvcache_schedule.cuh"
#include "kvcache_traits.cuh"

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

// What this thread knows of its rows, g and g + 8 of the tile.
struct KvcacheRows {
  int first_key[2], end_key[2];  // seen by the row
  float scale[2];                // of Q Kᵀ, in units of log 2; with softcap, of its argument
  float slope[2];                // ALiBi's, in units of log 2
  int diagonal[2];

  __device__ __forceinline__ KvcacheRows(const DecodeParams& params, const KvcachePiece& piece,
                                         const float (&q_scale)[kDecodeRows], int lane) {
    const int len_k = kvcache_len_k(params, piece.batch_idx);
    const int last_row = kvcache_group_rows(params) - 1;
    const ScoreParams& score = params.score;
    const float unit = score.softcap > 0.f ? 1.f / score.softcap : kLog2E;
    const float* slopes = score.alibi_slopes;
    if (slopes != nullptr) slopes += piece.batch_idx * score.alibi_batch_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(half, lane);
      const KvcacheRow at(params, blockIdx.y,
                          min(static_cast<int>(blockIdx.x * kDecodeRows) + row, last_row));
      const SequenceKeys seen(params, piece.batch_idx, len_k, at.token, at.token);
      first_key[half] = seen.first;
      end_key[half] = seen.end;
      diagonal[half] = at.token + len_k - params.seqlen_q;
      scale[half] = params.softmax_scale * unit * q_scale[row];
      slope[half] = slopes == nullptr ? 0.f : kLog2E * bounded_slope(slopes[at.head]);
    }
  }
};

// Q Kᵀ becomes scores in units of log 2, which are -inf where masked. first_key is that of the
// warp's columns.
template <typename Traits>
__device__ __forceinline__ void finish_scores(typename Traits::Scores& S,
                                              const DecodeParams& params, const KvcacheRows& rows,
                                              uint32_t valid, int first_key, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < S.kRowElements; ++i) S.at(half, i) *= rows.scale[half];
  }
  if (params.score.softcap > 0.f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        const float tanh = Traits::kWide ? tanhf(S.at(half, i)) : accurate_tanh(S.at(half, i));
        S.at(half, i) = params.score.softcap * kLog2E * tanh;
      }
    }
  }
  if (params.score.alibi_slopes != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        const int distance = abs(first_key + fragment_col(i, lane) - rows.diagonal[half]);
        S.at(half, i) -= rows.slope[half] * static_cast<float>(distance);
      }
    }
  }
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
    const bool bounded = score.softcap > 0.f || score.alibi_slopes != nullptr;
    row_max[0] = row_max[1] = bounded ? kLeastScoreLog2 : -FLT_MAX;  // attn/online_softmax.cuh
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
