// The producer warps of the backward kernel where a mask's hidden tiles are passed over. One takes
// tiles, finds the blocks of queries that see something of their keys, and says so, beside LSE and
// delta. One loads.
#pragma once

#include "../cuda/ptx/cp_async.cuh"
#include "../cuda/tile/smem_tile.cuh"
#include "bwd_producer_loops.cuh"

namespace flash_attn::sm90 {

// Finds those blocks for one block of keys: head after head, and within a head from the first to
// the last. A whole warp calls it, each lane of which looks at one of 32 blocks.
template <typename Traits>
class QueryFinder {
 public:
  __device__ __forceinline__ QueryFinder(const Masked<BwdParams>& params, const BwdWork& work)
      : params_(params), work_(work), at_{.head = work.q.head, .m = work.range.begin} {}

  // Looks for one that has not been taken, and says whether there is one.
  __device__ __forceinline__ bool look() {
#pragma unroll 1
    while (found_ == 0) {
      if (at_.m >= work_.range.end) at_ = {.head = at_.head + 1, .m = work_.range.begin};
      if (at_.head >= work_.end_head || !work_.has_queries()) return false;
      const int m = at_.m + static_cast<int>(threadIdx.x % 32);
      states_ = m >= work_.range.end ? 0
                                     : BlockMask(params_, work_.batch_idx, at_.head, 0)
                                           .template states<Traits::kBlockM, Traits::kBlockN>(
                                               m * Traits::kBlockM, work_.first_key);
      found_ = __ballot_sync(~0u, states_ != 0);
      at_.m += 32;
    }
    return true;
  }

  // Takes the next one, after look().
  __device__ __forceinline__ FoundQueries take() {
    const int from = __ffs(static_cast<int>(found_)) - 1;
    const QueryBlock block = {.head = at_.head, .m = at_.m - 32 + from};
    const uint32_t states = __shfl_sync(~0u, states_, from);
    found_ &= found_ - 1;
    return FoundQueries(block, states, !look());
  }

 private:
  const Masked<BwdParams>& params_;
  const BwdWork& work_;
  QueryBlock at_;        // behind the blocks that have been looked at
  uint32_t found_ = 0;   // of the last 32 of them, a bit for each lane
  uint32_t states_ = 0;  // of this lane's
};

// Copies what the rows of a block of queries say of the work's keys. A whole warp calls it.
template <int kBlockM>
__device__ __forceinline__ void copy_mask_rows(int4 (&rows)[kBlockM], const TileMask& mask,
                                               const BwdWork& work, const QueryBlock& block) {
  if (mask.rows == nullptr) return;
  const char* const from = static_cast<const char*>(mask.rows) +
                           work.batch_idx * mask.rows_batch_stride +
                           block.head * mask.rows_head_stride;
#pragma unroll
  for (int row = threadIdx.x % 32; row < kBlockM; row += 32) {
    const int64_t query = min(block.m * kBlockM + row, work.seqlen.len_q - 1);
    const uint32_t to = flash_attn::ptx::smem_address(&rows[row]);
    if (!mask.has_bits) {
      flash_attn::ptx::cp_async_16(to, from + query * sizeof(int4), sizeof(int4));
      continue;
    }
    const int first_tile = work.first_key / kMaskTile;
    const char* const words = from + (query * mask.key_tiles + first_tile) * sizeof(uint64_t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = first_tile + i / 2 < mask.key_tiles;
      flash_attn::ptx::cp_async_4(to + 4 * i, words + 4 * i, exists ? 4 : 0);
    }
  }
  flash_attn::ptx::cp_async_commit();
  flash_attn::ptx::cp_async_wait<0>();
}

// Takes tiles, finds their blocks of queries and publishes both; loads LSE, delta and the mask's
// rows. A whole warp calls it.
template <typename Traits>
__device__ __forceinline__ void schedule_and_find_queries_loop(
    const Masked<BwdParams>& params, const typename Traits::Scheduler& scheduler, int num_tiles,
    BwdSharedStorage<Traits>& smem) {
  WorkWriter queue(smem.queue);
  Ring<Traits::kStages> ring(smem.q_ring);
  Ring<decltype(smem.mask)::kFound> found_ring(smem.mask.ring);
  const RowScales scales = {.scale_log2 = Traits::RowValues::scale_log2(params.softmax_scale)};
  const bool speaks = threadIdx.x % 32 == 0;
  const auto take = [&] {
    int taken = 0;
    if (speaks) taken = atomicAdd(params.tile_counter, 1);
    return __shfl_sync(~0u, taken, 0);
  };
  // Tiles wait for those before them, so only thread blocks that run may take them.
  int tile_idx = take();
#pragma unroll 1
  while (tile_idx < num_tiles) {
    const TileCoordinates tile = scheduler.tile(tile_idx);
    BwdWork& work = queue.draft(BwdWork::make<Traits::kBlockM, Traits::kBlockN, Traits::kPools>(
        params, tile, SeqlenInfo(params, tile.batch_idx)));
    __syncwarp();
    QueryFinder<Traits> finder(params, work);
    bool more = finder.look();
    __syncwarp();
    if (speaks && !more) work.range.end = work.range.begin;
    queue.publish();
#pragma unroll 1
    for (; more; ring.advance(), found_ring.advance()) {
      const FoundQueries queries = finder.take();
      more = !queries.is_last();
      found_ring.wait_empty();
      if (speaks) {
        smem.mask.found[found_ring.stage()] = queries;
        found_ring.arrive_full();
      }
      load_row_values<Traits::kBlockM>(
          params, work, queries.block(), smem.row_values, ring, scales, 0.f, [&] {
            if (speaks) smem.mask.of_q[ring.stage()] = queries;
            constexpr uint32_t kLowBits = 0x55;  // of two for each tile
            static_assert(kTileMixed == 1 && kTileSeen == 2);
            if ((queries.states() & kLowBits) != 0) {
              copy_mask_rows(smem.mask.rows[ring.stage()], params.mask, work, queries.block());
            }
          });
    }
    tile_idx = take();
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
