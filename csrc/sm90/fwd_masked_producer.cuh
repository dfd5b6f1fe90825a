// The producer warps of the forward kernel where a mask's hidden tiles are passed over: one takes
// tiles of queries and finds the blocks of keys that they see something of, one loads Q, one V, one
// K.
#pragma once

#include <new>

#include "fwd_producer.cuh"

namespace flash_attn::sm90 {

// Finds those blocks of one tile of queries, from the last to the first. A whole warp uses it, each
// lane of which looks at one of 32 blocks.
template <typename Traits>
class KeyFinder {
 public:
  __device__ __forceinline__ KeyFinder(const FwdWork& work, const BlockMask& mask)
      : work_(work), mask_(mask), end_(work.range.end) {}

  // Whether there is one that has not been taken.
  __device__ __forceinline__ bool look() {
#pragma unroll 1
    while (found_ == 0 && end_ > work_.range.begin) {
      const int n = end_ - 1 - static_cast<int>(threadIdx.x % 32);
      states_ = n < work_.range.begin ? 0
                                      : mask_.template states<Traits::kBlockM, Traits::kBlockN>(
                                            work_.first_row, work_.first_key + n * Traits::kBlockN);
      found_ = __ballot_sync(~0u, states_ != 0);
      end_ -= 32;
    }
    return found_ != 0;
  }

  // The next one, after look().
  __device__ __forceinline__ FoundKeys take() {
    const int from = __ffs(static_cast<int>(found_)) - 1, n = end_ + 31 - from;
    const uint32_t states = __shfl_sync(~0u, states_, from);
    const float share = share_of_sum(taken_, taken_ + __popc(found_));  // as far as has been looked
    ++taken_;
    found_ &= found_ - 1;
    const BlockRange& blocks = work_.range;
    const bool is_cut = n < blocks.full_begin || n >= blocks.full_end;
    const bool is_ahead = n * Traits::kBlockN < work_.window.first_key(work_.first_row);
    return FoundKeys(n, states, {.is_last = !look(), .is_cut = is_cut, .is_ahead = is_ahead},
                     share);
  }

 private:
  const FwdWork& work_;
  const BlockMask& mask_;
  int end_;  // of the blocks that have not been looked at
  int taken_ = 0;
  uint32_t found_ = 0;   // of the last 32 that have been, a bit for each lane
  uint32_t states_ = 0;  // of this lane's
};

// Takes tiles, finds their blocks of keys and publishes both. A whole warp calls it.
template <typename Traits>
__device__ __forceinline__ void schedule_and_find_keys_loop(
    const typename Traits::Params& params, const typename Traits::Scheduler& scheduler,
    const FwdTiles& tiles, FwdSharedStorage<Traits>& smem) {
  Ring<kFwdWorkStages> work_ring(smem.queue.ring);
  Ring<decltype(smem.mask)::kFound> found_ring(smem.mask.ring);
  const bool speaks = threadIdx.x % 32 == 0;
  int tile_idx = blockIdx.x;
#pragma unroll 1
  while (tile_idx < tiles.num_tiles) {
    const TileCoordinates tile = scheduler.tile(tile_idx);
    FwdWorkStage& stage = smem.queue.stages[work_ring.stage()];
    work_ring.wait_empty();
    if (speaks) {
      stage.end = false;
      new (stage.storage) FwdWork(make_work<Traits>(params, tile, 0, {params, tile.batch_idx},
                                                    tiles.group, Traits::kKeyAlignment));
      new (smem.score_storage[work_ring.stage()]) BlockMask(params, tile.batch_idx, tile.head, 0);
    }
    __syncwarp();
    KeyFinder<Traits> finder(stage.work(), smem.score(work_ring.stage()));
    bool more = finder.look();
    __syncwarp();
    if (speaks) {
      if (!more) stage.work().range.end = stage.work().range.begin;
      work_ring.arrive_full();
    }
#pragma unroll 1
    while (more) {
      const FoundKeys keys = finder.take();
      more = !keys.is_last();
      found_ring.wait_empty();
      if (speaks) {
        smem.mask.found[found_ring.stage()] = keys;
        found_ring.arrive_full();
      }
      __syncwarp();
      found_ring.advance();
    }
    work_ring.advance();
    tile_idx += gridDim.x;
    if (params.tile_counter != nullptr) {
      if (speaks) tile_idx = gridDim.x + atomicAdd(params.tile_counter, 1);
      tile_idx = __shfl_sync(~0u, tile_idx, 0);
    }
  }
  work_ring.wait_empty();
  if (speaks) {
    smem.queue.stages[work_ring.stage()].end = true;
    work_ring.arrive_full();
  }
}

// Calls step(work, keys) for each block that was found. One thread of a loader warp.
template <typename Traits, typename Step>
__device__ __forceinline__ void for_each_found(FwdSharedStorage<Traits>& smem, const Step& step) {
  Ring<decltype(smem.mask)::kFound> ring(smem.mask.ring);
  for_each_work<Traits>(smem, [&](const FwdWork& work, int /*stage*/) {
#pragma unroll 1
    for (bool more = work.has_keys(); more; ring.advance()) {
      ring.wait_full();
      const FoundKeys keys = smem.mask.found[ring.stage()];
      ring.arrive_empty();
      more = !keys.is_last();
      step(work, keys);
    }
  });
}

template <typename Traits>
__device__ __forceinline__ void load_found_k_loop(const FwdParams& params, const CUtensorMap& map,
                                                  FwdSharedStorage<Traits>& smem) {
  Ring<Traits::kStages> ring(smem.k_ring);
  for_each_found<Traits>(smem, [&](const FwdWork& work, FoundKeys keys) {
    ring.wait_empty();
    smem.mask.of_k[ring.stage()] = keys;
    load_block<Traits>(map, work, keys.n(), 0, params.head_dim, smem.k, ring);
  });
}

template <typename Traits>
__device__ __forceinline__ void load_found_v_loop(const FwdParams& params, const CUtensorMap& map,
                                                  FwdSharedStorage<Traits>& smem) {
  Ring<Traits::kStages> ring(smem.v_ring);
  for_each_found<Traits>(smem, [&](const FwdWork& work, FoundKeys keys) {
    load_block<Traits>(map, work, keys.n(), 0, params.head_dim_v, smem.v, ring);
  });
}

}  // namespace flash_attn::sm90
