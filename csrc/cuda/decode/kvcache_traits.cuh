// Tiles and shared memory of kvcache.cuh.
#pragma once

#include "../ptx/mbarrier.cuh"
#include "../tile/fragment.cuh"
#include "../tile/smem_tile.cuh"
#include "kvcache_config.h"
#include "score_terms.cuh"

namespace flash_attn::cuda {

// The named barrier of the warps that compute. Barrier 0 is __syncthreads.
inline constexpr int kComputeBarrier = 1;

inline constexpr int kKvcacheProducers = 4;
// How many arrivals make a stage full: each lane of the producers arrives when its copies are done,
// and one lane of each of their warps once more for `valid`.
inline constexpr int kKvcacheArrivals = kKvcacheProducers * (32 + 1);

template <DType kCacheDTypeOfTile, int kHeadDimOfTile>
struct KvcacheTraits {
  static constexpr DType kCacheDType = kCacheDTypeOfTile;
  static constexpr bool k8Bit = is_8bit(kCacheDType);
  using Element = flash_attn::Element<k8Bit ? DType::kFp16 : kCacheDType>;
  static constexpr bool kWide = kIsWide<Element>;  // fp32
  static constexpr int kHeadDim = kHeadDimOfTile;
  static constexpr bool kLatent = kHeadDim == kKvcacheLatentHeadDim;
  static constexpr int kKeys = kvcache_tile_keys(kCacheDType, kHeadDim);
  static constexpr int kWarpKeys = kKeys / kKvcacheWarps;
  static constexpr int kThreads = 32 * kKvcacheWarps;  // that compute
  static constexpr int kAllThreads = kThreads + 32 * kKvcacheProducers;
  // How many blocks of 16 columns of O a warp has. They lie kKvcacheWarps · 16 columns apart.
  static constexpr int kColumnBlocks = kHeadDim / (16 * kKvcacheWarps);
  static constexpr int kUnits = k8Bit ? kHeadDim / 2 : kHeadDim;  // elements of a tile's row
  // Thread blocks that fit the registers of an SM. 8-bit caches are faster with some more registers
  // than that leaves, where one block has the SM.
  static constexpr int kMostBlocks = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kLeastBlocks = k8Bit ? 1 : kMostBlocks;
  static constexpr bool kQueriesInRegisters = !kWide && kHeadDim <= kKvcachePortableHeadDim;
  using KvTile = SmemTile<Element, kKeys, kUnits>;
  using QTile = SmemTile<Element, kDecodeRows, kHeadDim>;
  using PTile = SmemTile<Element, kDecodeRows, kKeys>;
  using Scores = Accumulator<1, kWarpKeys>;
  using Output = Accumulator<1, 16 * kColumnBlocks>;
};

// What one producer warp brings of each tile (cache/loader.cuh).
template <typename Traits>
struct KvcacheShare {
  using KvTile = typename Traits::KvTile;
  using KeyBits = uint32_t;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kElementBytes = Traits::k8Bit ? 1 : sizeof(typename Traits::Element);
  static constexpr int kBlockKeys = Traits::kKeys;
  static constexpr int kKeys = kBlockKeys / kKvcacheProducers;
  static constexpr int kTilesAhead = 1;
};

// What lies behind the ring of tiles, with which shared memory begins.
template <typename Traits>
struct KvcacheStorage {
  typename Traits::QTile q;
  typename Traits::PTile p;
  float row_max[kKvcacheWarps][kDecodeRows], row_sum[kKvcacheWarps][kDecodeRows];
  // One bit a key of a K tile that exists, one word a warp. Set by the producers.
  uint32_t valid[kKvcacheMaxStages][kKvcacheWarps];
  uint64_t full[kKvcacheMaxStages], empty[kKvcacheMaxStages];
  DecodeRowTerms row_terms[kDecodeRows];
};

// A stage of the ring; the parity of the visit tells one round from the next.
struct RingVisit {
  unsigned stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(unsigned stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <typename Traits>
class KvcacheTiles {
 public:
  typename Traits::KvTile* tiles;
  KvcacheStorage<Traits>& smem;
  unsigned stages;  // even: K has the even stages, V the odd ones

  __device__ __forceinline__ KvcacheTiles(char* smem_bytes, unsigned num_stages)
      : tiles(reinterpret_cast<typename Traits::KvTile*>(smem_bytes)),
        smem(*reinterpret_cast<KvcacheStorage<Traits>*>(tiles + num_stages)),
        stages(num_stages) {}

  // All threads call it, before a barrier among them.
  __device__ __forceinline__ void init(int full_arrivals, int head_dim, int head_dim_v) const {
    if (threadIdx.x % 32 == 0) {  // the lanes of a warp would take turns anyway
#pragma unroll 1
      for (unsigned stage = threadIdx.x / 32; stage < stages; stage += blockDim.x / 32) {
        ptx::mbarrier_init(smem.full[stage], full_arrivals);
        ptx::mbarrier_init(smem.empty[stage], 32 * kKvcacheWarps);
      }
    }
    if (min(head_dim, head_dim_v) <= Traits::kHeadDim - kSlabColumns) {
      zero_absent_slabs(head_dim, head_dim_v);
    }
  }

 private:
  static constexpr int kSlabColumns = Traits::KvTile::kSlabCols * (Traits::k8Bit ? 2 : 1);

  // Zeroes slabs beyond the head dim, which no copy touches: K's meet zeros of Q and must not be
  // NaN.
  __device__ __forceinline__ void zero_absent_slabs(int head_dim, int head_dim_v) const {
    using KvTile = typename Traits::KvTile;
#pragma unroll 1
    for (unsigned stage = 0; stage < stages; ++stage) {
      const int num_cols = stage % 2 == 0 ? head_dim : head_dim_v;
      const int slabs = (num_cols + kSlabColumns - 1) / kSlabColumns;
      auto* chunks = reinterpret_cast<uint4*>(tiles[stage].data);
#pragma unroll 1
      for (int i = slabs * KvTile::kSlabBytes / 16 + threadIdx.x;
           i < static_cast<int>(sizeof(KvTile) / 16); i += blockDim.x) {
        chunks[i] = {};
      }
    }
  }
};

}  // namespace flash_attn::cuda
