// Tiles and shared memory of latent.cuh.
#pragma once

#include "../cuda/decode/kvcache_schedule.cuh"
#include "../cuda/tile/fragment.cuh"
#include "../cuda/tile/smem_tile.cuh"
#include "latent.h"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

// Named barriers of the consumers. Barrier 0 is __syncthreads.
enum LatentBarrier { kLatentQueries = 1, kLatentMaxima, kLatentProbabilities };

template <DType kDTypeOfCache>
struct LatentTraits {
  using Element = flash_attn::Element<kDTypeOfCache>;
  static constexpr int kHeadDim = kLatentHeadDim;
  static constexpr int kConsumers = 2, kProducerWarps = 4;
  static constexpr int kStages = 2;
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 32 * kProducerWarps;
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  // setmaxnreg deals out what a block is launched with, and waits for more for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumerRegisters * kConsumerThreads +
                    kProducerRegisters * (kThreads - kConsumerThreads) <=
                kLaunchRegisters * kThreads);
  // Of a consumer: keys of each tile whose scores it computes, and columns of O.
  static constexpr int kKeys = kLatentKeys / kConsumers;
  static constexpr int kOutputCols = kLatentHeadDimV / kConsumers;
  static constexpr int kWarpsOfHalf = kProducerWarps / kConsumers;  // that load such keys
  using QTile = SmemTile<Element, kLatentRows, kHeadDim>;
  using KTile = SmemTile<Element, kKeys, kHeadDim>;
  using PTile = SmemTile<Element, kLatentRows, kKeys>;
  using Scores = Accumulator<1, kKeys>;
  using Output = Accumulator<1, kOutputCols>;
  using Schedule = cuda::KvcacheSchedule<kLatentKeys>;
};

// What one producer warp brings of each tile (cuda/cache/loader.cuh).
template <typename Traits>
struct LatentShare {
  using KvTile = typename Traits::KTile;
  using KeyBits = uint16_t;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kElementBytes = sizeof(typename Traits::Element);
  static constexpr int kBlockKeys = kLatentKeys;
  static constexpr int kKeys = kBlockKeys / Traits::kProducerWarps;
  static constexpr int kTilesAhead = 1;
};

// Tiles of keys and of P come in halves, of which each consumer computes one.
template <typename Traits>
struct LatentStorage {
  typename Traits::QTile q;
  typename Traits::KTile k[Traits::kStages][Traits::kConsumers];
  typename Traits::PTile p[Traits::kConsumers];
  float row_max[Traits::kConsumers][kLatentRows], row_sum[Traits::kConsumers][kLatentRows];
  // One bit a key that exists, 32 bits a half. Set by the producers.
  alignas(4) uint16_t valid[Traits::kStages][Traits::kConsumers][Traits::kWarpsOfHalf];
  RingBarriers<Traits::kStages> ring;

  // One thread calls it. Each lane of the producers arrives when its copies are done, and one of
  // each warp once more for `valid`.
  __device__ __forceinline__ void init_barriers() {
    ring.init(Traits::kProducerWarps * (32 + 1), Traits::kConsumerThreads);
  }
};

}  // namespace flash_attn::sm90
