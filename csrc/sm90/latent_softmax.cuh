// Turns Q Kᵀ into P, between the two consumers of latent.cuh that have half of the keys each.
#pragma once

#include <cfloat>

#include "../cuda/attn/constants.cuh"
#include "../cuda/attn/mask.cuh"
#include "../cuda/cache/absent_keys.cuh"
#include "../cuda/ptx/math.cuh"
#include "latent_traits.cuh"
#include "ptx/warpgroup.cuh"

namespace flash_attn::sm90 {

// The keys that the thread's two rows of a tile see.
struct LatentRows {
  int first_key[2], end_key[2];

  // first_row: of the warp, among the rows of the kv head.
  __device__ __forceinline__ LatentRows(const DecodeParams& params, const cuda::KvcachePiece& piece,
                                        int first_row, int lane) {
    const int len_k = cuda::kvcache_len_k(params, piece.batch_idx);
    const int last_row = cuda::decode_group_rows(params) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first_row + fragment_row(half, lane), last_row);
      const cuda::KvcacheRow at(params, blockIdx.y, row);
      const cuda::SequenceKeys seen(params, piece.batch_idx, len_k, at.token, at.token);
      first_key[half] = seen.first;
      end_key[half] = seen.end;
    }
  }

  // Scores of keys that a row does not see, or that do not exist, become -inf. key: of S's first
  // column.
  template <int kKeys>
  __device__ __forceinline__ void mask(Accumulator<1, kKeys>& S, uint32_t valid, int key,
                                       int lane) const {
    const bool inside =
        max(first_key[0], first_key[1]) <= key && min(end_key[0], end_key[1]) >= key + kKeys;
    if (!__all_sync(~0u, inside)) {
      mask_outside(S, {first_key[0] - key, first_key[1] - key},
                   {end_key[0] - key, end_key[1] - key}, lane);
    }
    cuda::mask_absent(S, valid, lane);
  }
};

// The running softmax of the thread's two rows, of scores in units of log 2. Each consumer has the
// maxima of all keys, and sums over its own half, in this lane.
struct LatentSoftmax {
  float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0.f, 0.f};

  // S becomes P. Returns whether O, by `correction`, has to follow a new maximum. warp_row: of the
  // warp, in the tile.
  template <typename Traits>
  __device__ __forceinline__ bool step(typename Traits::Scores& S, float (&correction)[2],
                                       LatentStorage<Traits>& smem, int consumer, int warp_row,
                                       int lane) {
    float maximum[2] = {S.at(0, 0), S.at(1, 0)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 1; i < S.kRowElements; ++i) maximum[half] = fmaxf(maximum[half], S.at(half, i));
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 1));
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 2));
      const int row = warp_row + fragment_row(half, lane);
      if (lane % 4 == 0) smem.row_max[consumer][row] = maximum[half];
    }
    ptx::barrier_sync<Traits::kConsumerThreads>(kLatentMaxima);
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float others = smem.row_max[1 - consumer][warp_row + fragment_row(half, lane)];
      const float new_max = fmaxf(row_max[half], fmaxf(maximum[half], others));
      moved |= new_max != row_max[half];
      correction[half] = flash_attn::ptx::exp2(row_max[half] - new_max);
      row_max[half] = new_max;
      row_sum[half] *= correction[half];
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(half, i) = flash_attn::ptx::exp2(S.at(half, i) - new_max);
        row_sum[half] += S.at(half, i);
      }
    }
    return __any_sync(~0u, moved);
  }

  // Makes row_sum the sum over all keys of the piece.
  template <typename Traits>
  __device__ __forceinline__ void finish(LatentStorage<Traits>& smem, int consumer, int warp_row,
                                         int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
      row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
      const int row = warp_row + fragment_row(half, lane);
      if (lane % 4 == 0) smem.row_sum[consumer][row] = row_sum[half];
    }
    ptx::barrier_sync<Traits::kConsumerThreads>(kLatentMaxima);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] += smem.row_sum[1 - consumer][warp_row + fragment_row(half, lane)];
    }
  }
};

}  // namespace flash_attn::sm90
