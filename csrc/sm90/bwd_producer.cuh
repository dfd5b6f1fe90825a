// What the producer warps of the backward kernels load.
#pragma once

#include "../cuda/attn/softmax_bwd.cuh"
#include "bias_hint.cuh"
#include "bwd_work.cuh"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

// Loads a block of K or V, num_cols columns from first_col on. One thread calls it, once the tile
// is empty and the bytes are expected.
template <typename Tile>
__device__ __forceinline__ void load_keys(Tile& tile, const CUtensorMap& map, const BwdWork& work,
                                          int num_cols, uint64_t& mbarrier, int first_col = 0) {
  load_tile(tile, map, work.kv, work.first_key, num_cols, mbarrier, ptx::CacheHint::kEvictFirst,
            first_col);
}

// Loads a block of Q or dO. One thread calls it.
template <int kStages, typename Tile>
__device__ __forceinline__ void load_queries(Tile (&tiles)[kStages], const CUtensorMap& map,
                                             const BwdWork& work, const QueryBlock& block,
                                             int num_cols, const Ring<kStages>& ring) {
  ring.wait_empty();
  ring.expect_bytes(loaded_bytes<Tile>(num_cols));
  const MatrixPlace place = {.box = work.q.box, .head = block.head, .batch = work.q.batch};
  load_tile(tiles[ring.stage()], map, place, block.m * Tile::kRows, num_cols, ring.full(),
            ptx::CacheHint::kEvictLast);
}

// What a kernel multiplies P and delta by; and what it multiplies S by, where LSE is subtracted
// from it.
struct RowScales {
  float p = 1, delta = 1, scale_log2 = 1;
};

// Loads LSE and delta of a block of queries, and scales them. In varlen they start at any address,
// so there is no bulk copy. A whole warp calls it, each thread of which says what it has written.
// The loads are under way while the stage is waited for. write_more() writes what else belongs into
// the stage.
template <int kBlockM, int kStages, typename Values, typename WriteMore>
__device__ __forceinline__ void load_row_values(const BwdParams& params, const BwdWork& work,
                                                const QueryBlock& block,
                                                Values (&row_values)[kStages],
                                                const Ring<kStages>& ring, const RowScales& scales,
                                                float log2_p, const WriteMore& write_more) {
  constexpr int kRows = kBlockM / 32;  // of a lane
  const int lane = threadIdx.x % 32;
  const int64_t first = work.batch_idx * params.lse_batch_stride +
                        block.head * params.lse_head_stride + work.seqlen.q_begin;
  float lse[kRows], delta[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int query = block.m * kBlockM + i * 32 + lane;
    const bool exists = query < work.seqlen.len_q;
    lse[i] = exists ? params.lse[first + query] : -INFINITY;
    delta[i] = exists ? params.delta[first + query] : 0.f;
  }
  ring.wait_empty();
  Values& values = row_values[ring.stage()];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    values.write(i * 32 + lane, to_lse_log2(lse[i]) - log2_p, delta[i] * scales.delta,
                 scales.scale_log2);
  }
  values.publish();
  write_more();
  ring.arrive_full();
}

// Loads those of each block of queries of a work. before(block, new_head, ring) is called before
// each block.
template <int kBlockM, int kStages, typename Values, typename Before>
__device__ __forceinline__ void load_row_values(const BwdParams& params, const BwdWork& work,
                                                Values (&row_values)[kStages], Ring<kStages>& ring,
                                                const RowScales& scales, const Before& before) {
  const float log2_p = log2f(scales.p);
  bool new_head = true;
#pragma unroll 1
  for (QueryBlocks block(work); block.more(); new_head = block.advance(), ring.advance()) {
    before(block, new_head, ring);
    load_row_values<kBlockM>(params, work, block, row_values, ring, scales, log2_p, [] {});
  }
}

// Loads a block of a bias, for all keys of the thread block. One thread calls it.
template <int kStages, typename Tile>
__device__ __forceinline__ void load_bias(Tile (&tiles)[kStages], const CUtensorMap& map,
                                          const BwdWork& work, const QueryBlocks& block,
                                          const BwdParams& params, const Ring<kStages>& ring) {
  const BiasParams& bias = params.score.bias;
  const int cols = min(bias.keys - work.first_key, Tile::kCols);
  ring.wait_empty();
  ring.expect_bytes(loaded_bytes<Tile>(cols));
  const MatrixPlace place = {.box = {bias.rows, 0, bias.rows},
                             .head = bias.head_stride == 0 ? 0 : block.head,
                             .batch = bias.batch_stride == 0 ? 0 : work.batch_idx};
  load_tile(tiles[ring.stage()], map, place, block.m * Tile::kRows, cols, ring.full(),
            bias_hint(params, bias), work.first_key);
}

// Starts the copy of a block of dS to where the gradient of the bias lies. One thread calls it.
template <typename Tile>
__device__ __forceinline__ void store_bias_gradient(const Tile& tile, const CUtensorMap& map,
                                                    const BwdWork& work, const QueryBlocks& block,
                                                    const BiasGradientParams& gradient) {
  const SequenceBox rows(gradient.rows, 0, gradient.rows);
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
    if (work.first_key + col >= gradient.keys) break;
    const int32_t at[5] = {work.first_key + col, rows.first + block.m * Tile::kRows, rows.last,
                           block.head, work.batch_idx};
    ptx::tma_store(map, at, &tile.data[col * Tile::kRows]);
  }
}

}  // namespace flash_attn::sm90
