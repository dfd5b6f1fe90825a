// Tiles that come in the order of a mask.
#pragma once

#include "../cuda/attn/tile_scheduler.cuh"
#include "mask_order.h"

namespace flash_attn::sm90 {

// Deals the tiles of each head in their order. Which heads come together is up to Scheduler.
template <typename Scheduler>
struct OrderedScheduler : Scheduler {
  MaskOrder order;

  template <typename... Args>
  static OrderedScheduler make(const Args&... args) {
    return {Scheduler::make(args...)};
  }

#ifdef __CUDACC__
  __device__ __forceinline__ TileCoordinates tile(int tile_idx) const {
    TileCoordinates tile = Scheduler::tile(tile_idx);
    if (order.tiles != nullptr) {
      const int place =
          this->last_blocks_first ? this->blocks_per_head - 1 - tile.block : tile.block;
      tile.block =
          order.tiles[tile.batch_idx * order.batch_stride + tile.head * order.head_stride + place];
    }
    return tile;
  }
#endif
};

}  // namespace flash_attn::sm90
