// The compiled choices of the Hopper forward, what its thread block shares, and the tensor maps it
// reads through.
#pragma once

#include <new>

#include "../cuda/attn/mask.cuh"
#include "../cuda/attn/online_softmax.cuh"
#include "../cuda/attn/seqlen.cuh"
#include "../cuda/attn/tile_scheduler.cuh"
#include "config.h"
#include "ptx/warpgroup.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

template <DType kDType, int kHeadDimClass, int kHeadDimVClass>
struct FwdTraits {
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass, kHeadDimV = kHeadDimVClass;
  static constexpr FwdTile kTile = kFwdTile<kHeadDim, kHeadDimV>;
  static constexpr int kBlockM = kTile.block_m(), kBlockN = kTile.block_n;
  static constexpr int kConsumers = kTile.consumers, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers();
  static constexpr int kConsumerRegisters = kTile.consumer_registers();

  using QTile = SmemTile<Element, kBlockM, kHeadDim>;
  using KTile = SmemTile<Element, kBlockN, kHeadDim>;
  using VTile = SmemTile<Element, kBlockN, kHeadDimV>;
  using OTile = SmemTile<Element, kBlockM, kHeadDimV>;
  using Scores = Accumulator<1, kBlockN>;
  using Output = Accumulator<1, kHeadDimV>;
  // Powers of two that row maxima may rise before O is rescaled: P up to 2⁸ costs no accuracy.
  static constexpr int kSlackLog2 = 8;
  using Softmax = OnlineSoftmax<2, kSlackLog2>;
  using Scheduler = TileScheduler<kBlockM>;
};

enum NamedBarrier : int {  // 0 is __syncthreads
  kTurn = 1,               // + consumer
  kOutput = 4              // + consumer
};

// A tile to work on; written by one warp, read by all others.
struct FwdWork {
  AttentionWindow window;
  BlockRange range;   // of keys
  MatrixPlace q, kv;  // q: out as well
  float* lse;
  int first_row;  // of the tile's queries, within the sequence
  int segment_q;  // rows to write
};

struct FwdWorkSlot {
  bool end;  // no tile: all is done
  alignas(FwdWork) unsigned char storage[sizeof(FwdWork)];

  __device__ __forceinline__ const FwdWork& work() const {
    return *reinterpret_cast<const FwdWork*>(storage);
  }
};

template <typename Traits>
struct FwdSharedStorage {
  static constexpr int kWorkSlots = 2;

  alignas(1024) typename Traits::QTile q;
  alignas(1024) typename Traits::KTile k[Traits::kStages];
  alignas(1024) typename Traits::VTile v[Traits::kStages];
  // Without its own tile O takes Q's: a consumer is done with its 64 rows of Q by then.
  alignas(1024) typename Traits::OTile own_o[Traits::kTile.own_output ? 1 : 0];
  FwdWorkSlot work[kWorkSlots];
  RingBarriers<kWorkSlots> work_ring;
  RingBarriers<1> q_ring;
  RingBarriers<Traits::kStages> k_ring, v_ring;

  __device__ __forceinline__ typename Traits::OTile& o() {
    if constexpr (Traits::kTile.own_output) {
      return own_o[0];
    } else {
      static_assert(sizeof(typename Traits::OTile) <= sizeof(typename Traits::QTile));
      return reinterpret_cast<typename Traits::OTile&>(q);
    }
  }

  // What no load ever writes. By all threads, before a barrier among them.
  __device__ __forceinline__ void zero_absent_slabs(const FwdParams& params) {
    const auto zero = [](auto& tile, int num_cols) {
      sm90::zero_absent_slabs(tile, num_cols, 0, tile.kRows, threadIdx.x, Traits::kThreads);
    };
    zero(q, params.head_dim);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      zero(k[stage], params.head_dim);
      zero(v[stage], params.head_dim_v);
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  __device__ __forceinline__ void init_barriers() {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers, kLoaders = 2;  // of Q and V
    work_ring.init(1, kLoaders + kConsumerWarps);
    q_ring.init(1, kConsumerWarps);
    k_ring.init(1, kConsumerWarps);
    v_ring.init(1, kConsumerWarps);
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }
};

struct FwdTensorMaps {
  CUtensorMap q, k, v, out;
};

}  // namespace flash_attn::sm90
