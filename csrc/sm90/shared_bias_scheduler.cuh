// Tiles that come in an order in which they share a bias.
#pragma once

#include <algorithm>

#include "../core/params.h"
#include "../cuda/attn/tile_scheduler.cuh"

namespace flash_attn::sm90 {

// Tiles whose sequences or heads share a bias come side by side, up to four of them: it is read from
// memory once for these, as they walk over it together. Heads are those that Scheduler counts.
template <typename Scheduler>
struct SharedBiasScheduler : Scheduler {
  bool sequences_inside = false;

  template <typename... Args>
  static SharedBiasScheduler make(const Args&... args) {
    return {Scheduler::make(args...)};
  }

  // With a bias that broadcasts sequences, all of them come before the next head.
  void share(const BiasParams& bias) {
    constexpr int kMostTogether = 4;  // what they read has room in the L2 cache beside each other
    sequences_inside = bias.batch_stride == 0 && this->batch > 1;
    const int sharing =
        (sequences_inside ? this->batch : 1) * (bias.head_stride == 0 ? int{this->heads} : 1);
    int together = std::min(sharing, kMostTogether);
    while (sharing % together != 0) --together;
    // No section may cut through those who are together.
    this->section_heads = std::max(int{this->section_heads} / together, 1) * together;
    this->last_section_heads = int{this->last_section_heads} / together * together;
  }

#ifdef __CUDACC__
  __device__ __forceinline__ TileCoordinates tile(int tile_idx) const {
    TileCoordinates tile = Scheduler::tile(tile_idx);
    if (sequences_inside) {
      const int pair = tile.batch_idx * this->heads + tile.head;
      tile.batch_idx = pair % this->batch;
      tile.head = pair / this->batch;
    }
    return tile;
  }
#endif
};

}  // namespace flash_attn::sm90
