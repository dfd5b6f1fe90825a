// Turns Q Kᵀ into P, in the two consumers of latent.cuh that have every other tile of keys.
#pragma once

#include <cfloat>

#include "../cuda/attn/constants.cuh"
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

  // Scores of keys that a row does not see, or that do not exist, become -inf. exists: a bit for
  // each key. key: of S's first column.
  __device__ __forceinline__ void mask(Accumulator<1, kLatentKeys>& S, uint64_t exists, int key,
                                       int lane) const {
    const bool inside =
        max(first_key[0], first_key[1]) <= key && min(end_key[0], end_key[1]) >= key + kLatentKeys;
    if (__all_sync(~0u, inside) && exists == ~uint64_t{0}) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t visible = exists & ~below(first_key[half] - key) & below(end_key[half] - key);
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        // Column fragment_col(i, 0) of this lane.
        const uint32_t bits = static_cast<uint32_t>(visible >> 32 * word) >> fragment_col(0, lane);
#pragma unroll
        for (int i = 0; i < S.kRowElements / 2; ++i) {
          float& score = S.at(half, word * S.kRowElements / 2 + i);
          if ((bits >> fragment_col(i, 0) & 1) == 0) score = -INFINITY;
        }
      }
    }
  }

 private:
  // The bits below `end`, which may be anything.
  __device__ __forceinline__ static uint64_t below(int end) {
    return end <= 0 ? 0 : ~uint64_t{0} >> max(64 - end, 0);
  }
};

// The running softmax of the thread's two rows, with row_max in units of log 2. Tiles of keys go to
// the consumers in turns. Both know the maxima of all keys so far, and each sums over its own tiles
// alone, in this lane.
struct LatentSoftmax {
  float scale_log2;
  float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0.f, 0.f};

  // S, of a tile of this consumer, becomes P. What was accumulated with earlier P must be
  // multiplied by `correction`.
  template <int kKeys>
  __device__ __forceinline__ void step(Accumulator<1, kKeys>& S, float (&correction)[2]) {
    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = S.at(half, 0);
#pragma unroll
      for (int i = 1; i < S.kRowElements; ++i) maximum[half] = fmaxf(maximum[half], S.at(half, i));
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 1));
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(~0u, maximum[half], 2));
      maximum[half] = fmaxf(row_max[half], maximum[half] * scale_log2);
    }
    raise(maximum, correction);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(half, i) = flash_attn::ptx::exp2(fmaf(S.at(half, i), scale_log2, -row_max[half]));
        row_sum[half] += S.at(half, i);
      }
    }
  }

  // Goes on from the maxima that the other consumer has found, of rows warp_row ….
  __device__ __forceinline__ void follow(const float* row_maxima, float (&correction)[2],
                                         int warp_row, int lane) {
    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = row_maxima[warp_row + fragment_row(half, lane)];
    }
    raise(maximum, correction);
  }

  // Makes row_sum the sum over all keys of a piece. number: of the pieces that the thread block had
  // before. When the next one's queries have come, both consumers have read what they exchange here.
  template <typename Traits>
  __device__ __forceinline__ void finish(LatentStorage<Traits>& smem, unsigned number, int consumer,
                                         int warp_row, int lane) {
    const unsigned visit = number * Traits::kStages;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
      row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
      const int row = warp_row + fragment_row(half, lane);
      if (lane % 4 == 0) smem.row_sum[consumer][row] = row_sum[half];
    }
    Ring<Traits::kStages>(smem.sums, visit + consumer).arrive_full();
    Ring<Traits::kStages>(smem.sums, visit + 1 - consumer).wait_full();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] += smem.row_sum[1 - consumer][warp_row + fragment_row(half, lane)];
    }
  }

 private:
  __device__ __forceinline__ void raise(const float (&maximum)[2], float (&correction)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      correction[half] = flash_attn::ptx::exp2(row_max[half] - maximum[half]);
      row_max[half] = maximum[half];
      row_sum[half] *= correction[half];
    }
  }
};

// O[row] *= correction[row]. Most maxima stay where they are, and then nothing is to do.
template <int kParts, int kCols>
__device__ __forceinline__ void correct(Accumulator<1, kCols> (&O)[kParts],
                                        const float (&correction)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!__any_sync(~0u, correction[half] != 1.f)) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < O[part].kRowElements; ++i) O[part].at(half, i) *= correction[half];
    }
  }
}

}  // namespace flash_attn::sm90
