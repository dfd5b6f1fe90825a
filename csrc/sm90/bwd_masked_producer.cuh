// The producer warps of the backward kernel where a mask's hidden tiles are passed over. One takes
// tiles, finds the blocks of queries that see something of their keys, and says so, beside LSE and
// delta. One loads.
#pragma once

#include "bwd_producer_loops.cuh"

namespace flash_attn::sm90 {

// Copies what the rows of a block of queries say of the work's keys, and notes of which form it is.
// A whole warp calls it.
template <int kBlockM>
__device__ __forceinline__ void copy_mask_rows(MaskRows<kBlockM>& to, const TileMask& mask,
                                               const BwdWork& work, FoundQueries& queries) {
  if (mask.rows == nullptr) return;
  const QueryBlock block = queries.block();
  const char* const from = static_cast<const char*>(mask.rows) +
                           work.batch_idx * mask.rows_batch_stride +
                           block.head * mask.rows_head_stride;
  bool has_labels = false, has_second = false;
#pragma unroll 2
  for (int row = threadIdx.x % 32; row < kBlockM; row += 32) {
    const int64_t query = min(block.m * kBlockM + row, work.seqlen.len_q - 1);
    if (mask.has_bits) {
      const int first_tile = work.first_key / kMaskTile;
      const uint2* const words =
          reinterpret_cast<const uint2*>(from) + query * mask.key_tiles + first_tile;
      to.parts[0][row] = __ldg(words);
      to.parts[1][row] = first_tile + 1 < mask.key_tiles ? __ldg(words + 1) : uint2{};
      continue;
    }
    const int4 ends = __ldg(reinterpret_cast<const int4*>(from) + query);
    const auto interval = [](int first, int end) -> uint2 {
      const auto begin = static_cast<uint32_t>(first);
      return {begin, end > first ? static_cast<uint32_t>(end) - begin : 0};
    };
    to.parts[0][row] = interval(ends.x, ends.y);
    to.parts[1][row] = interval(ends.z, ends.w);
    has_labels |= !BlockMask::Intervals{ends}.are_of_positions();
    has_second |= ends.w > ends.z;
  }
  queries.set_form(mask.labels != nullptr && __any_sync(~0u, has_labels),
                   __any_sync(~0u, has_second));
}

// Takes tiles, finds their blocks of queries and publishes both; loads LSE, delta and the mask's
// rows. A whole warp calls it. The next tile is taken before room for what goes with this one's
// last block is waited for.
template <typename Traits>
__device__ __forceinline__ void schedule_and_find_queries_loop(
    const Masked<BwdParams>& params, const typename Traits::Scheduler& scheduler, int num_tiles,
    BwdSharedStorage<Traits>& smem) {
  WorkWriter queue(smem.queue);
  Ring<Traits::kStages> ring(smem.q_ring);
  Ring<decltype(smem.mask)::kFound> found_ring(smem.mask.ring);
  const RowScales scales = {.scale_log2 = Traits::RowValues::scale_log2(params.softmax_scale)};
  const bool speaks = threadIdx.x % 32 == 0;
  // Tiles wait for those before them, so only thread blocks that run may take them.
  int tile_idx = 0;
  if (speaks) tile_idx = atomicAdd(params.tile_counter, 1);
  tile_idx = __shfl_sync(~0u, tile_idx, 0);
#pragma unroll 1
  while (tile_idx < num_tiles) {
    const TileCoordinates tile = scheduler.tile(tile_idx);
    BwdWork& work = queue.draft(BwdWork::make<Traits::kBlockM, Traits::kBlockN, Traits::kPools>(
        params, tile, SeqlenInfo(params, tile.batch_idx)));
    __syncwarp();
    QueryFinder<Traits::kBlockM, Traits::kBlockN> finder(params, work);
    const bool more = finder.look();
    __syncwarp();
    const auto take_next_tile = [&] {
      if (speaks) tile_idx = atomicAdd(params.tile_counter, 1);
    };
    if (!more) {
      if (speaks) work.range.end = work.range.begin;
      take_next_tile();
    }
    queue.publish();
    const auto load = [&](const FoundQueries& queries) {
      load_row_values<Traits::kBlockM>(
          params, work, queries.block(), smem.row_values, ring, scales, 0.f, [&] {
            constexpr uint32_t kLowBits = 0x55;  // of two for each tile
            static_assert(kTileMixed == 1 && kTileSeen == 2);
            FoundQueries loaded = queries;
            if ((queries.states() & kLowBits) != 0) {
              copy_mask_rows(smem.mask.rows[ring.stage()], params.mask, work, loaded);
            }
            if (speaks) smem.mask.of_q[ring.stage()] = loaded;
          });
    };
    publish_found(finder, more, smem.mask, found_ring, ring, take_next_tile, load);
    tile_idx = __shfl_sync(~0u, tile_idx, 0);
  }
  queue.end();
}

// Loads the blocks that were found. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void load_found_loop(const BwdParams& params, const BwdTensorMaps& maps,
                                                BwdSharedStorage<Traits>& smem) {
  Ring<1> k_ring(smem.k_ring);
  Ring<Traits::kStages> q_ring(smem.q_ring);
  Ring<decltype(smem.mask)::kFound> found_ring(smem.mask.ring);
  WorkReader queue(smem.queue);
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
    bool is_first = true;
#pragma unroll 1
    for (bool more = work->has_queries(); more; q_ring.advance(), found_ring.advance()) {
      found_ring.wait_full();
      const FoundQueries queries = smem.mask.found[found_ring.stage()];
      found_ring.arrive_empty();
      more = !queries.is_last();
      load_block(params, maps, *work, queries.block(), is_first, q_ring, k_ring, smem);
      is_first = false;
    }
    queue.release(true);
  }
}

}  // namespace flash_attn::sm90
