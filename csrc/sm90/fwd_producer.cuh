// The producer warps of the forward kernel: one takes tiles of queries and loads K, one loads Q,
// one V.
#pragma once

#include <new>

#include "bias_hint.cuh"
#include "fwd.h"
#include "fwd_pages.cuh"
#include "fwd_tensor_maps.cuh"
#include "fwd_traits.cuh"

namespace flash_attn::sm90 {

// Loads the block of K or V that comes in the place of block n. One thread calls it.
template <typename Traits, typename Tile>
__device__ __forceinline__ void load_block(const CUtensorMap& map, const FwdWork& work, int n,
                                           int turned, int num_cols, Tile (&tiles)[Traits::kStages],
                                           Ring<Traits::kStages>& ring) {
  ring.wait_empty();
  ring.expect_bytes(loaded_bytes<Tile>(num_cols));
  const int block = Traits::kAlibi ? block_in_place(work, turned, n) : n;
  load_tile(tiles[ring.stage()], map, work.kv, block * Traits::kBlockN, num_cols, ring.full(),
            ptx::CacheHint::kEvictLast);
  ring.advance();
}

struct FoundTile {
  TileCoordinates at;
  SeqlenInfo seqlen;
};

// A tile by its number: the scheduler's, or one of a list, head after head.
template <typename Traits>
__device__ __forceinline__ FoundTile find_tile(const typename Traits::Params& params,
                                               const typename Traits::Scheduler& scheduler,
                                               int tiles_of_head, int tile_idx) {
  if constexpr (Traits::kPieces) {
    if (params.list.exists()) {
      const int head = tile_idx / tiles_of_head;
      const cuda::ListedTile tile = params.list.tiles[tile_idx - head * tiles_of_head];
      return {.at = {.batch_idx = tile.row, .head = head, .block = tile.block},
              .seqlen = {tile.q_begin, tile.segment_q, tile.len_q, tile.k_begin, tile.len_k}};
    }
  }
  TileCoordinates tile = scheduler.tile(tile_idx);
  if constexpr (Traits::kPieces) {
    if (tile.batch_idx > params.batch) tile.batch_idx = -1;  // the other end
  }
  return {.at = tile, .seqlen = SeqlenInfo(params, tile.batch_idx)};
}

// Where heads share tiles: whether a sequence has queries behind its last tile.
__device__ __forceinline__ bool has_tile_behind(const FwdInPieces& params, int block,
                                                const FwdWork& work) {
  return params.packed.share() && block + 1 == params.packed.blocks(params.seqlen_q) &&
         work.first_row + params.packed.tokens() < work.window.len_q();
}

// Takes tiles, from long to short, and publishes them; loads their K. With a counter, which all
// blocks share, the next tile is taken before this one's last K is waited for: late, so that blocks
// end together, but early enough for its first loads to hide behind the end of this one. Keys that
// lie in pages (kPages) are another warp's to load, which says when the last K is due. Where heads
// share tiles, what a sequence has behind its last tile is as many tiles more, one after the other.
// The warp finds its first tile while the others set up shared memory, and only then comes to the
// barrier among all threads: before the first K lie several hundred instructions of one warp, which
// are a good part of a short call.
template <typename Traits, bool kPages>
__device__ __forceinline__ void schedule_and_load_k_loop(
    const typename Traits::Params& params, const typename Traits::Scheduler& scheduler,
    const FwdTiles& tiles, const CUtensorMap& k_map, int key_alignment,
    FwdSharedStorage<Traits>& smem) {
  Ring<kFwdWorkStages> work_ring(smem.queue.ring);
  Ring<Traits::kStages> k_ring(smem.k_ring);
  [[maybe_unused]] uint32_t parity = 0;  // of smem.pages.last_k
  const int lane = threadIdx.x % 32;
  // Each block begins with the tile of its number, unless blocks of another launch do.
  int first_round = gridDim.x, tile_idx = blockIdx.x;
  [[maybe_unused]] int tiles_of_head = 0;  // of a list
  if constexpr (Traits::kPieces) {
    if (params.list.exists()) {
      first_round = params.list.first_sms * Traits::kTile.blocks;
      if (params.list.is_second) {
        if (lane == 0) tile_idx = first_round + atomicAdd(params.tile_counter, 1);
        tile_idx = __shfl_sync(~0u, tile_idx, 0);
      }
      tiles_of_head = *params.list.num_tiles;
    }
  }
  if constexpr (Traits::kPieces) {
    if (lane == 0) smem.pieces.rows_done = 0;
    __syncwarp();
  }
  const auto all_tiles = [&] {
    if constexpr (Traits::kPieces) {
      if (params.list.exists()) return tiles_of_head * scheduler.heads * num_pieces<Traits>(params);
    }
    return tiles.num_tiles;
  };
  bool is_set_up = false;  // shared memory
  const auto wait_for_setup = [&] {
    if (!is_set_up) __syncthreads();
    is_set_up = true;
  };
#pragma unroll 1
  while (tile_idx < all_tiles()) {
    const auto [tile, seqlen] =
        find_tile<Traits>(params, scheduler, tiles_of_head, tile_idx / num_pieces<Traits>(params));
    wait_for_setup();
    int rows_done = 0;
    if constexpr (Traits::kPieces) {
      rows_done = smem.pieces.rows_done;
      __syncwarp();
    }
    const bool has_rows =
        tile.block * queries_of_tile<Traits>(params) + rows_done < seqlen.segment_q;
    FwdWorkStage& stage = smem.queue.stages[work_ring.stage()];
    int n = 0, begin = 0, turned = 0;  // blocks of K to load
    if (has_rows && lane == 0) {
      work_ring.wait_empty();
      stage.end = false;
      const int piece = tile_idx % num_pieces<Traits>(params);
      new (stage.storage) FwdWork(
          make_work<Traits>(params, tile, piece, seqlen, tiles.group, key_alignment, rows_done));
      work_ring.arrive_full();
      n = stage.work().range.end, begin = stage.work().range.begin;
      turned = turned_blocks<Traits>(stage.work(), seqlen.diagonal(params));
    }
    if constexpr (kPages) {
      if (has_rows && lane == 0) {
        ptx::mbarrier_wait(smem.pages.last_k, parity);
        parity ^= 1;
      }
      n = begin;
    }
    const auto load_next = [&] {
      load_block<Traits>(k_map, stage.work(), --n, turned, params.head_dim, smem.k, k_ring);
    };
    while (n > begin + 1) load_next();
    bool takes_next = true;  // as lane 0 says
    if constexpr (Traits::kPieces) {
      if (lane == 0) {
        int& done = smem.pieces.rows_done;
        takes_next = !has_rows || !has_tile_behind(params, tile.block, stage.work());
        done = takes_next ? 0 : done + params.packed.tokens();
      }
      __syncwarp();
    }
    if (takes_next) {
      tile_idx += gridDim.x;
      if (params.tile_counter != nullptr && lane == 0) {
        tile_idx = first_round + atomicAdd(params.tile_counter, 1);
      }
    }
    if (n > begin) load_next();
    tile_idx = __shfl_sync(~0u, tile_idx, 0);
    if (has_rows) work_ring.advance();
  }
  wait_for_setup();
  if (lane == 0) {
    work_ring.wait_empty();
    smem.queue.stages[work_ring.stage()].end = true;
    work_ring.arrive_full();
  }
}

// Calls step(work, stage) for each tile. One thread of a loader warp calls it.
template <typename Traits, typename Step>
__device__ __forceinline__ void for_each_work(FwdSharedStorage<Traits>& smem, const Step& step) {
  Ring<kFwdWorkStages> work_ring(smem.queue.ring);
#pragma unroll 1
  for (;; work_ring.advance()) {
    work_ring.wait_full();
    const FwdWorkStage& stage = smem.queue.stages[work_ring.stage()];
    if (stage.end) break;
    step(stage.work(), work_ring.stage());
    work_ring.arrive_empty();
  }
}

// Loads Q. It also says what the score terms of a tile are, before its Q comes: this warp has the
// time and the registers. With a mask of tiles, that was said with the tile.
template <typename Traits>
__device__ __forceinline__ void load_q_loop(const typename Traits::Params& params,
                                            const CUtensorMap& map,
                                            FwdSharedStorage<Traits>& smem) {
  Ring<Traits::kQStages> ring(smem.q_ring);
  for_each_work<Traits>(smem, [&](const FwdWork& work, int stage) {
    if (!work.has_keys()) return;
    const auto start_score = [&] {
      const int64_t diagonal = SeqlenInfo(params, work.batch_idx).diagonal(params);
      [[maybe_unused]] auto* const score = new (smem.score_storage[stage])
          typename Traits::ScorePolicy(params, work.batch_idx, work.q.head, diagonal);
      if constexpr (Traits::kAlibi) score->turn(turned_blocks<Traits>(work, diagonal));
    };
    const auto load = [&] {
      load_tile(smem.q[ring.stage()], map, work.q, work.first_row, params.head_dim, ring.full(),
                ptx::CacheHint::kEvictFirst);
    };
    const auto expect = [&] {
      ring.expect_bytes(loaded_bytes<typename Traits::QTile>(params.head_dim));
    };
    if constexpr (Traits::kMaxLogits) {
      // What is known of the head comes from memory, beside Q. Without this thread's arrival the
      // stage is not full, whatever has come.
      ring.wait_empty();
      load();
      start_score();
      expect();
    } else {
      if constexpr (!Traits::kMasked) start_score();
      ring.wait_empty();
      expect();
      load();
    }
    ring.advance();
  });
}

// Loads the blocks of a staged bias, the rows of each consumer on their own.
template <typename Traits>
__device__ __forceinline__ void load_bias_loop(const FwdParams& params,
                                               const FwdTensorMaps<Traits::kBiasMaps>& maps,
                                               FwdSharedStorage<Traits>& smem) {
  using Tile = typename Traits::BiasTile;
  using RestTile = typename Traits::BiasRestTile;
  const BiasParams& bias = params.score.bias;
  const ptx::CacheHint hint = bias_hint(params, bias);
  Ring<Traits::kBiasStages> first_ring(smem.bias_rings[0]);
  for_each_work<Traits>(smem, [&](const FwdWork& work, int /*stage*/) {
    const MatrixPlace place = {.box = {bias.rows, 0, bias.rows},
                               .head = bias.head_stride == 0 ? 0 : work.q.head,
                               .batch = bias.batch_stride == 0 ? 0 : work.batch_idx};
#pragma unroll 1
    for (int n = work.range.end - 1; n >= work.range.begin; --n, first_ring.advance()) {
      const int first_key = work.first_key + n * Traits::kBlockN;
#pragma unroll 1
      for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
        const auto ring = first_ring.in(smem.bias_rings[consumer]);
        const int first_row = work.first_row + consumer * Tile::kRows;
        const int keys = first_row < bias.rows ? bias.keys - first_key : 0;
        const int cols = min(keys, Tile::kCols);
        [[maybe_unused]] const int rest = max(min(keys - cols, Traits::kBiasRest), 0);
        ring.wait_empty();
        ring.expect_bytes(loaded_bytes<Tile>(cols) + loaded_bytes<RestTile>(rest));
        load_tile(smem.bias[consumer][ring.stage()], maps.bias[0], place, first_row, cols,
                  ring.full(), hint, first_key);
        if constexpr (Traits::kBiasMaps > 1) {
          load_tile(smem.bias_rest[consumer][ring.stage()], maps.bias[1], place, first_row, rest,
                    ring.full(), hint, first_key + Tile::kCols);
        }
      }
    }
  });
}

// Brings a bias of the keys alone, block by block. A whole warp calls it.
template <typename Traits>
__device__ __forceinline__ void load_key_bias_loop(const FwdParams& params,
                                                   FwdSharedStorage<Traits>& smem) {
  constexpr int kKeys = Traits::kBlockN / 32;  // of a lane
  static_assert(kKeys * 32 == Traits::kBlockN);
  const BiasParams& bias = params.score.bias;
  const int lane = threadIdx.x % 32;
  const float factor = 1.f / params.softmax_scale;
  Ring<kFwdWorkStages> work_ring(smem.queue.ring);
  Ring<Traits::kBiasStages> ring(smem.key_bias.ring);
#pragma unroll 1
  for (;; work_ring.advance()) {
    work_ring.wait_full();
    const FwdWorkStage& stage = smem.queue.stages[work_ring.stage()];
    if (stage.end) break;
    const FwdWork& work = stage.work();
    with_bias_type<typename Traits::Element>(bias.dtype, [&]<typename Number>(const Number*) {
      const Number* const numbers = static_cast<const Number*>(bias.data) +
                                    work.batch_idx * bias.batch_stride +
                                    work.q.head * bias.head_stride;
#pragma unroll 1
      for (int n = work.range.end - 1; n >= work.range.begin; --n, ring.advance()) {
        float of_keys[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const int key = work.first_key + n * Traits::kBlockN + i * 32 + lane;
          of_keys[i] = key < bias.keys ? load_bias(numbers + key * bias.key_stride) : -INFINITY;
        }
        ring.wait_empty();
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          smem.key_bias.of_keys[ring.stage()][i * 32 + lane] = of_keys[i] * factor;
        }
        ring.arrive_full();
      }
    });
    work_ring.arrive_empty();
  }
}

// Draws dropout's words of the keys of each block of V. A whole warp calls it.
template <typename Traits>
__device__ __forceinline__ void draw_key_words_loop(const FwdParams& params,
                                                    FwdSharedStorage<Traits>& smem) {
  constexpr int kWords = Traits::kBlockN / 4;  // of a block, one for each lane
  static_assert(kWords <= 32);
  const int lane = threadIdx.x % 32;
  Ring<kFwdWorkStages> work_ring(smem.queue.ring);
  Ring<Traits::kStages> ring(smem.v_ring);
#pragma unroll 1
  for (;; work_ring.advance()) {
    work_ring.wait_full();
    const FwdWorkStage& stage = smem.queue.stages[work_ring.stage()];
    if (stage.end) break;
    const FwdWork& work = stage.work();
    const DropoutHead head =
        DropoutHead::of(params.dropout, int64_t{work.batch_idx} * params.heads_q + work.q.head);
#pragma unroll 1
    for (int n = work.range.end - 1; n >= work.range.begin; --n, ring.advance()) {
      const uint32_t word = head.key_word((work.first_key + n * Traits::kBlockN) / 4 + lane);
      ring.wait_empty();
      if (lane < kWords) smem.dropout.key_words[ring.stage()][lane] = word;
      ring.arrive_full();
    }
    work_ring.arrive_empty();
  }
}

template <typename Traits>
__device__ __forceinline__ void load_v_loop(const FwdParams& params, const CUtensorMap& map,
                                            FwdSharedStorage<Traits>& smem) {
  Ring<Traits::kStages> ring(smem.v_ring);
  for_each_work<Traits>(smem, [&](const FwdWork& work, int /*stage*/) {
    int turned = 0;
    if constexpr (Traits::kAlibi) {
      turned = turned_blocks<Traits>(work, SeqlenInfo(params, work.batch_idx).diagonal(params));
    }
#pragma unroll 1
    for (int n = work.range.end - 1; n >= work.range.begin; --n) {
      load_block<Traits>(map, work, n, turned, params.head_dim_v, smem.v, ring);
    }
  });
}

// Loads K or V that lies in pages. A whole warp calls it, each lane of which brings a box. The page
// of a box is looked up before a stage for it is waited for. With the keys in pieces, consumers are
// told which of them lie in no page.
template <typename Traits, bool kK, typename Tile>
__device__ __forceinline__ void load_pages_loop(const FwdParams& params, const CUtensorMap& map,
                                                const CUtensorMap& map_of_front,
                                                const PageBoxes& boxes, int num_cols,
                                                Tile (&tiles)[Traits::kStages],
                                                RingBarriers<Traits::kStages>& barriers,
                                                FwdSharedStorage<Traits>& smem) {
  static_assert(Traits::kBlockN <= 32 * PageTable::kMultiple);
  const int lane = threadIdx.x % 32, row = lane * boxes.rows;
  Ring<kFwdWorkStages> work_ring(smem.queue.ring);
  Ring<Traits::kStages> ring(barriers);
#pragma unroll 1
  for (;; work_ring.advance()) {
    work_ring.wait_full();
    const FwdWorkStage& stage = smem.queue.stages[work_ring.stage()];
    if (stage.end) break;
    const FwdWork& work = stage.work();
    const int seen_key = work.first_key + work.window.first_key(work.first_row);
    const int end_key = work.first_key + work.window.len_k();
    const auto say_last = [&] {
      if (kK && lane == 0) ptx::mbarrier_arrive(smem.pages.last_k);
    };
    if (!work.has_keys()) say_last();
    [[maybe_unused]] int turned = 0;
    if constexpr (Traits::kAlibi) {
      turned = turned_blocks<Traits>(work, SeqlenInfo(params, work.batch_idx).diagonal(params));
    }
#pragma unroll 1
    for (int n = work.range.end - 1; n >= work.range.begin; --n, ring.advance()) {
      if (n == work.range.begin) say_last();
      const int block = Traits::kAlibi ? block_in_place(work, turned, n) : n;
      const int first_key = work.first_key + block * Traits::kBlockN;
      const PageBox box(params.pages, boxes, work.kv.batch, first_key, row, seen_key, end_key);
      ring.wait_empty();
      if constexpr (Traits::kPieces && kK) {
        const uint32_t keys = missing_keys(box, boxes, lane);
        if (lane == 0) smem.pieces.missing_keys[ring.stage()] = keys;
      }
      if (lane == 0) ring.expect_bytes(loaded_bytes<Tile>(num_cols));
      __syncwarp();
      if (row < Traits::kBlockN) {
        load_box(tiles[ring.stage()], box.hides_front ? map_of_front : map, box, work.kv.head, row,
                 num_cols, ring.full(), ptx::CacheHint::kEvictLast);
      }
    }
    work_ring.arrive_empty();
  }
}

}  // namespace flash_attn::sm90
