// A mask whose hidden tiles are passed over in the backward kernel for wide heads. The warp that
// loads LSE and delta finds the blocks of queries that see something of the keys of a pair; both
// thread blocks find the same ones. S reads what the mask's rows say from memory, while its product
// is under way, as shared memory has no room for them.
#pragma once

#include "bwd_masked_scores.cuh"
#include "bwd_pair_loads.cuh"

namespace flash_attn::sm90 {

// Which of a block's queries see the lane's two keys: the bits of find_seen() for rows in shared
// memory. state: that of the mask's tile where they meet. key: the first of the warp's 16 keys.
__device__ __forceinline__ uint32_t find_seen(uint32_t state, const TileMask& mask,
                                              const BwdWork& work, const QueryBlock& block, int key,
                                              int lane) {
  if (state == kTileSeen) return ~0u;
  if (state == kTileHidden || mask.rows == nullptr) return 0;
  const char* const rows = static_cast<const char*>(mask.rows) +
                           work.batch_idx * mask.rows_batch_stride +
                           block.head * mask.rows_head_stride;
  key += fragment_row(0, lane);
  const int first_query = block.m * kMaskTile + fragment_col(0, lane);
  // of_query gives bits 0 and 2 of one query. Eight reads are under way at once, for which there
  // are registers until S is there.
  const auto find = [&](const auto& of_query) {
    uint32_t seen = 0;
#pragma unroll 4
    for (int n = 0; n < kMaskTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = min(first_query + 8 * n + i, work.seqlen.len_q - 1);
        seen |= of_query(query) << (4 * n + i);
      }
    }
    return seen;
  };
  if (mask.has_bits) {
    const auto* const halves = reinterpret_cast<const uint32_t*>(rows) + key / 32;
    return find([&](int query) {
      const uint32_t of_keys = __ldg(halves + int64_t{query} * 2 * mask.key_tiles) >> key % 32;
      return (of_keys & 1) | (of_keys >> 8 & 1) << 2;
    });
  }
  uint32_t labels[2] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key) + 8};
  if (mask.labels != nullptr) {
    const int32_t* const of_sequence = mask.labels + work.batch_idx * mask.labels_batch_stride;
#pragma unroll
    for (uint32_t& label : labels) {
      label = __ldg(of_sequence + min(static_cast<int>(label), work.seqlen.len_k - 1));
    }
  }
  return find([&](int query) {
    const int4 ends = __ldg(reinterpret_cast<const int4*>(rows) + query);
    const auto contains = [](int first, int end, uint32_t label) {
      const auto begin = static_cast<uint32_t>(first);
      return label - begin < (end > first ? static_cast<uint32_t>(end) - begin : 0);
    };
    const auto is_seen = [&](uint32_t label) {
      return uint32_t{contains(ends.x, ends.y, label) || contains(ends.z, ends.w, label)};
    };
    return is_seen(labels[0]) | is_seen(labels[1]) << 2;
  });
}

// The warp that takes tiles, as schedule_and_load_row_values_loop(), where there is a mask. A tile
// of which no query sees anything is published as one without queries.
template <typename Traits>
__device__ __forceinline__ void schedule_and_find_queries_loop(
    const Masked<BwdParams>& params, const typename Traits::Scheduler& scheduler, int num_tiles,
    BwdPairSharedStorage<Traits>& smem, int rank) {
  const RowScales scales = row_scales<Traits>(params);
  const float log2_p = log2f(scales.p);
  const bool speaks = threadIdx.x % 32 == 0;
  TileTaker<Traits> tiles(params, smem, rank);
  WorkWriter queue(smem.queue);
  Ring<Traits::kStages> ring(smem.row_ring);
  Ring<decltype(smem.mask)::kFound> found_ring(smem.mask.ring);
  int number = tiles.take();
#pragma unroll 1
  while (number < num_tiles) {
    const TileCoordinates tile = scheduler.tile(number);
    BwdWork described = BwdWork::make<Traits::kBlockM, Traits::kPairN>(
        params, tile, SeqlenInfo(params, tile.batch_idx));
    described.first_key += rank * Traits::kBlockN;  // of the thread block; the rest is the pair's
    BwdWork& work = queue.draft(described);
    __syncwarp();
    QueryFinder<Traits::kBlockM, Traits::kPairN> finder(params, work);
    const bool more = finder.look();
    __syncwarp();
    const auto take_next_tile = [&] { number = tiles.take(); };
    if (!more) {
      if (speaks) work.range.end = work.range.begin;
      take_next_tile();
    }
    queue.publish();
    const auto load = [&](const FoundQueries& queries) {
      load_row_values<Traits::kBlockM>(params, work, queries.block(), smem.row_values, ring, scales,
                                       log2_p, [&] {
                                         if (speaks) smem.mask.of_rows[ring.stage()] = queries;
                                       });
    };
    publish_found(finder, more, smem.mask, found_ring, ring, take_next_tile, load);
  }
  queue.end();
}

}  // namespace flash_attn::sm90
