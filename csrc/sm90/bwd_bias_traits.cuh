// Tiles, warps and shared memory of the shared bias's kernel (bwd_bias.cuh).
//
// Shared memory   │ Q, dO, or a bias × stages │ half of K, V × stages │
//                 │ visits × stages of Q │ barriers │
#pragma once

#include "../cuda/tile/fragment.cuh"
#include "bwd_bias_work.cuh"
#include "bwd_config.h"
#include "tile/copy.cuh"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

template <DType kDType, int kHeadDimClass>
struct BwdBiasTraits {
  using Element = flash_attn::Element<kDType>;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr BwdBiasStages kStages = kBwdBiasStages<kHeadDim>;
  static constexpr int kConsumers = 2, kBlockM = BiasTile::kRows, kBlockN = BiasTile::kKeys;
  static_assert(kBlockM == 64 * kConsumers);
  static constexpr int kHalves = 2;  // of the keys of a tile
  static constexpr int kHalfKeys = kBlockN / kHalves;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;

  using QTile = SmemTile<Element, kBlockM, kHeadDim>;    // dO too
  using KTile = SmemTile<Element, kHalfKeys, kHeadDim>;  // V too
  using Scores = Accumulator<1, kHalfKeys>;
  using Bias = OperandA<1, kHalfKeys>;                     // in registers as an operand would be
  using BiasSlab = SmemTile<Element, kBlockM, kHalfKeys>;  // the same, or a sum, of all rows

  struct SharedStorage {
    struct Rows {
      QTile q, dout;
    };
    struct Keys {
      KTile k, v;
    };
    alignas(1024) Rows rows[kStages.rows];
    alignas(1024) Keys keys[kStages.keys];
    BiasVisit visits[kStages.rows];
    RingBarriers<kStages.rows> row_ring;
    RingBarriers<kStages.keys> key_ring;

    __device__ __forceinline__ BiasSlab& bias(int stage, int half) {
      static_assert(kHalves * sizeof(BiasSlab) <= sizeof(Rows));
      return reinterpret_cast<BiasSlab*>(&rows[stage])[half];
    }
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace flash_attn::sm90
