// The producer warps of the backward kernel, from tile to tile.
#pragma once

#include <new>

#include "../cuda/ptx/opaque.cuh"
#include "bwd_dq_pool.cuh"
#include "bwd_producer.cuh"
#include "bwd_scores.cuh"
#include "bwd_split.cuh"
#include "bwd_traits.cuh"

namespace flash_attn::sm90 {

// Takes tiles and publishes them; loads LSE and delta, and says what the score terms of a head are.
// A whole warp calls it. With a counter, which all thread blocks share, the next tile is taken
// before this one's last block is waited for: late, so that thread blocks end together, but early
// enough for its first loads to hide behind the end of this one.
template <typename Traits>
__device__ __forceinline__ void schedule_and_load_row_values_loop(
    const BwdParams& params, const typename Traits::Scheduler& scheduler, int num_tiles,
    BwdSharedStorage<Traits>& smem) {
  using ScorePolicy = typename Traits::ScorePolicy;
  constexpr bool kDrops = Traits::kStashesWeights || Traits::kDrops;
  constexpr float kScale = Traits::kScaleOfP;
  const auto make_scales = [&](float softmax_scale) -> RowScales {
    return {.p = kScale,
            .delta = (kDrops ? params.dropout.keep : 1.f) / kScale,
            .scale_log2 = Traits::RowValues::scale_log2(softmax_scale)};
  };
  RowScales scales = make_scales(params.softmax_scale);
  WorkWriter queue(smem.queue);
  Ring<Traits::kStages> ring(smem.q_ring);
  // Where tiles wait for those before them, only thread blocks that run may take them.
  constexpr bool takes_all = Traits::kPools || Traits::kOrders;
  const auto take = [&] {
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(params.tile_counter, 1);
    return __shfl_sync(~0u, taken, 0) + (takes_all ? 0 : gridDim.x);
  };
  int heads = 0;  // walked over so far
  const int splits = Traits::kSplits ? params.splits.count : 1;
  int number = takes_all ? take() : blockIdx.x;  // of a tile, or of a split of one
#pragma unroll 1
  while (number < num_tiles * splits) {
    const TileCoordinates tile = scheduler.tile(number / splits);
    const SeqlenInfo seqlen(params, tile.batch_idx);
    int next = 0;  // not taken yet
    const auto take_next = [&] {
      next = params.tile_counter == nullptr ? number + gridDim.x : take();
    };
    if (tile.block * Traits::kBlockN < seqlen.segment_k) {
      BwdWork described =
          BwdWork::make<Traits::kBlockM, Traits::kBlockN, Traits::kPools, Traits::kStretches>(
              params, tile, seqlen);
      if constexpr (Traits::kSplits)
        take_split(described, params, number / splits, number % splits);
      if constexpr (ScorePolicy::kGeneral) described.first_score = heads % 2;
      const BwdWork& work = queue.push(described);
      if (work.has_queries()) heads += work.end_head - work.q.head;
      const auto before = [&](const QueryBlocks& block, bool new_head, const auto& ring) {
        if (block.is_last()) take_next();
        if constexpr (ScorePolicy::kGeneral) {
          if (!new_head) return;
          // A stage of the ring is empty, so the head before the last is done with, whose terms lay
          // here.
          ring.wait_empty();
          if (threadIdx.x % 32 == 0) {
            new (smem.score_place(work, block.head))
                ScorePolicy(params, work.batch_idx, block.head, work.seqlen.diagonal(params));
          }
        }
      };
      // With dropout there are no registers to keep them from tile to tile.
      if constexpr (Traits::kDrops) {
        scales = make_scales(
            __uint_as_float(flash_attn::ptx::opaque(__float_as_uint(params.softmax_scale))));
      }
      load_row_values<Traits::kBlockM>(params, work, smem.row_values, ring, scales, before);
    }
    if (next == 0) take_next();
    number = next;
  }
  queue.end();
}

// Loads Q and dO of a block of queries, and with a tile's first also K and V. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void load_block(const BwdParams& params, const BwdTensorMaps& maps,
                                           const BwdWork& work, const QueryBlock& block,
                                           bool is_first, const Ring<Traits::kStages>& q_ring,
                                           Ring<1>& k_ring, BwdSharedStorage<Traits>& smem) {
  load_queries(smem.q, maps.q, work, block, params.head_dim, q_ring);
  load_queries(smem.dout, maps.dout, work, block, params.head_dim_v, q_ring.in(smem.dout_ring));
  // The stages of the first block of queries are empty earlier than those of K and V, and V's
  // before K's.
  if (!is_first) return;
  using KTile = typename Traits::KTile;
  const Ring<1> v_ring = k_ring.in(smem.v_ring);
  v_ring.wait_empty();
  v_ring.expect_bytes(loaded_bytes<KTile>(params.head_dim_v));
  load_keys(smem.v, maps.v, work, params.head_dim_v, v_ring.full());
  k_ring.wait_empty();
  const int right_cols = Traits::kRepeatsKeys ? params.head_dim - Traits::kDqCols : 0;
  k_ring.expect_bytes(loaded_bytes<KTile>(params.head_dim) + loaded_bytes<KTile>(right_cols));
  load_keys(smem.k, maps.k, work, params.head_dim, k_ring.full());
  if constexpr (Traits::kRepeatsKeys) {
    load_keys(smem.right_k, maps.k, work, right_cols, k_ring.full(), Traits::kDqCols);
  }
  k_ring.advance();
}

// Loads what the products of all tiles need. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void load_loop(const BwdParams& params, const BwdTensorMaps& maps,
                                          BwdSharedStorage<Traits>& smem) {
  Ring<1> k_ring(smem.k_ring);
  Ring<Traits::kStages> q_ring(smem.q_ring);
  WorkReader queue(smem.queue);
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
#pragma unroll 1
    for (QueryBlocks block(*work); block.more(); block.advance(), q_ring.advance()) {
      load_block(params, maps, *work, block, block.is_first(), q_ring, k_ring, smem);
    }
    queue.release(true);
  }
}

// Loads the blocks of a bias. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void load_bias_loop(const BwdParams& params, const CUtensorMap& map,
                                               BwdSharedStorage<Traits>& smem) {
  Ring<Traits::kTermStages> ring(smem.term_ring);
  WorkReader queue(smem.queue);
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
#pragma unroll 1
    for (QueryBlocks block(*work); block.more(); block.advance(), ring.advance()) {
      load_bias(smem.bias, map, *work, block, params, ring);
    }
    queue.release(true);
  }
}

// Stores the gradient of a bias that broadcasts nothing, from dS as it lies there for dQ. One
// thread calls it.
template <typename Traits>
__device__ __forceinline__ void store_bias_gradient_loop(const BwdParams& params,
                                                         const CUtensorMap& map,
                                                         BwdSharedStorage<Traits>& smem) {
  Ring<Traits::kScoreStages> ring(smem.ds_ring);
  WorkReader queue(smem.queue);
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
#pragma unroll 1
    for (QueryBlocks block(*work); block.more(); block.advance(), ring.advance()) {
      ring.wait_full();
      store_bias_gradient(smem.ds[ring.stage()], map, *work, block, params.dbias);
      ptx::bulk_commit();
      ptx::bulk_wait_read();
      ring.arrive_empty();
    }
    queue.release(true);
  }
}

// Finds out what dropout keeps of each block of queries. The four warps of a warpgroup call it, one
// on each partition of the multiprocessor, where it takes turns with two warps of consumers. Each
// has 64 of the queries, and half of the keys or a quarter of them. A lane has the pairs of queries
// and the fours of keys that a consumer's lane has.
template <typename Traits>
__device__ __forceinline__ void find_kept_loop(const BwdParams& params, int warp,
                                               BwdSharedStorage<Traits>& smem) {
  constexpr int kParts = Traits::kBlockM / 64;
  constexpr int kFours = Traits::kBlockN / 32 * kParts / 4;  // of a lane
  static_assert(kFours > 0);
  const int lane = threadIdx.x % 32, part = warp % kParts, first_eight = warp / kParts * kFours;
  const DropoutParams& dropout = params.dropout;
  auto& words = smem.dropout.query_words[warp];
  // The lane draws the word of this pair. Then what a lane reads lies side by side.
  const int pair_of_block = part * 32 + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
  Ring<Traits::kTermStages> ring(smem.term_ring);
  WorkReader queue(smem.queue);
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
    DropoutHead head;
    uint32_t of_keys[kFours];
    bool new_head = true;
#pragma unroll 1
    for (QueryBlocks block(*work); block.more(); new_head = block.advance(), ring.advance()) {
      if (new_head) {
        head = DropoutHead::of(dropout, int64_t{work->batch_idx} * params.heads_q + block.head);
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          of_keys[i] = head.key_word(work->first_key / 4 + (first_eight + i) * 8 + lane / 4);
        }
      }
      __syncwarp();
      words[lane] = head.query_word(block.m * (Traits::kBlockM / 2) + pair_of_block);
      __syncwarp();
      ring.wait_empty();
      auto& of_threads = smem.dropout.kept[ring.stage()][part];
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        KeptBits kept(dropout.mirror);
#pragma unroll
        for (int pair = 0; pair < 8; pair += 4) {
          const uint4 of_queries = *reinterpret_cast<const uint4*>(&words[lane % 4 * 8 + pair]);
          const auto add = [&](int index, uint32_t of_query) {
            kept.add(index, of_query, of_keys[i], head.words.last, dropout.bound);
          };
          add(pair, of_queries.x);
          add(pair + 1, of_queries.y);
          add(pair + 2, of_queries.z);
          add(pair + 3, of_queries.w);
        }
        const int thread = (first_eight + i) * 64 + lane;
        of_threads[thread] = kept.of_keys(false);
        of_threads[thread + 32] = kept.of_keys(true);
      }
      ring.arrive_full();
    }
    queue.release(true);
  }
}

}  // namespace flash_attn::sm90
