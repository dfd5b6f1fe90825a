// Tiles and shared memory of latent.cuh.
#pragma once

#include "../cuda/decode/kvcache_schedule.cuh"
#include "../cuda/tile/fragment.cuh"
#include "../cuda/tile/smem_tile.cuh"
#include "latent.h"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

// Named barriers of the consumers; barrier 0 is __syncthreads. Of the last one each consumer has
// its own, by its number.
enum LatentBarrier { kLatentQueries = 1, kLatentAbsentKeys };

template <DType kDTypeOfCache>
struct LatentTraits {
  static constexpr DType kDType = kDTypeOfCache;
  using Element = flash_attn::Element<kDType>;
  static constexpr int kConsumers = 2;
  static constexpr int kStages = kConsumers;  // each consumer has the tiles of one of them
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 128;  // setmaxnreg is for whole warpgroups
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  // setmaxnreg deals out what a block is launched with, and waits for more for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumerRegisters * kConsumerThreads +
                    kProducerRegisters * (kThreads - kConsumerThreads) <=
                kLaunchRegisters * kThreads);
  // The columns of V, and of O, come in parts, which each consumer has so many of. K has others
  // behind them.
  static constexpr int kParts = 2;
  static constexpr int kPartCols = kLatentHeadDimV / kConsumers / kParts;
  static constexpr int kRestCols = kLatentHeadDim - kLatentHeadDimV;
  using PartTile = SmemTile<Element, kLatentKeys, kPartCols>;
  using RestTile = SmemTile<Element, kLatentKeys, kRestCols>;
  static_assert(kLatentRows == kLatentKeys);  // Q has tiles like those of K
  using PTile = SmemTile<Element, kLatentRows, kLatentKeys>;
  using Scores = Accumulator<1, kLatentKeys>;
  using Output = Accumulator<1, kPartCols>[kParts];
  using Schedule = cuda::KvcacheSchedule<kLatentKeys>;
};

// All columns of 64 rows of Q, or of as many keys.
template <typename Traits>
struct LatentTile {
  typename Traits::PartTile part[Traits::kConsumers * Traits::kParts];
  typename Traits::RestTile rest;

  // col is a multiple of 8.
  __device__ __forceinline__ uint4& chunk(int row, int col) {
    constexpr int kPartCols = Traits::kPartCols;
    return *reinterpret_cast<uint4*>(col < kLatentHeadDimV
                                         ? part[col / kPartCols].pointer(row, col % kPartCols)
                                         : rest.pointer(row, col - kLatentHeadDimV));
  }
};

template <typename Traits>
struct LatentStorage {
  LatentTile<Traits> q, k[Traits::kStages];
  typename Traits::PTile p;
  float row_max[kLatentRows], row_sum[Traits::kConsumers][kLatentRows];
  uint64_t exists[Traits::kStages];  // a bit for each key
  // The stage's consumer computes S from the whole tile, and adds V's own parts to O. The other one
  // reads nothing but the other parts. What is none of V belongs to the last own part.
  RingBarriers<Traits::kStages> own_parts[Traits::kParts], other_parts[Traits::kParts];

  RingBarriers<Traits::kStages> probabilities;  // in p and row_max, of a stage's tile; never empty
  RingBarriers<Traits::kStages> sums;           // in row_sum, of each consumer; never empty

  // One thread calls it.
  __device__ __forceinline__ void init_barriers() {
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part) {
      own_parts[part].init(1, 128);
      other_parts[part].init(1, 128);
    }
    probabilities.init(128, 1);
    sums.init(128, 1);
  }
};

}  // namespace flash_attn::sm90
