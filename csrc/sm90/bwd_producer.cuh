// The producer warps of the backward kernel: one loads K and Q, one V and dO, one LSE and delta.
#pragma once

#include "../cuda/attn/softmax_bwd.cuh"
#include "bwd_traits.cuh"

namespace flash_attn::sm90 {

// K and then Q, or V and then dO. One thread.
template <typename Traits>
__device__ __forceinline__ void load_keys_and_queries_loop(
    const CUtensorMap& key_map, const CUtensorMap& query_map, int num_cols, const BwdWork& work,
    typename Traits::KTile& key_tile, RingBarriers<1>& key_barriers,
    typename Traits::QTile (&query_tiles)[Traits::kStages],
    RingBarriers<Traits::kStages>& query_barriers) {
  const Ring<1> key_ring(key_barriers);
  Ring<Traits::kStages> ring(query_barriers);
  QueryBlocks block(work);
  if (!block.more()) return;
  key_ring.expect_bytes(loaded_bytes<typename Traits::KTile>(num_cols));
  load_tile(key_tile, key_map, work.kv, work.first_key, num_cols, key_ring.full(),
            ptx::CacheHint::kEvictFirst);
#pragma unroll 1
  for (; block.more(); block.advance(), ring.advance()) {
    ring.wait_empty();
    ring.expect_bytes(loaded_bytes<typename Traits::QTile>(num_cols));
    const MatrixPlace place = {.box = work.q.box, .head = block.head, .batch = work.q.batch};
    load_tile(query_tiles[ring.stage()], query_map, place, block.m * Traits::kBlockM, num_cols,
              ring.full(), ptx::CacheHint::kEvictLast);
  }
}

// LSE and delta of each block of queries, which start at any address in varlen: no bulk copy. A whole
// warp. The loads are under way while the slot is waited for.
template <typename Traits>
__device__ __forceinline__ void load_row_values_loop(const BwdParams& params,
                                                     BwdSharedStorage<Traits>& smem) {
  constexpr int kRows = Traits::kBlockM / 32;  // of a lane
  const BwdWork& work = smem.work();
  const int lane = threadIdx.x % 32;
  Ring<Traits::kStages> ring(smem.q_ring);
#pragma unroll 1
  for (QueryBlocks block(work); block.more(); block.advance(), ring.advance()) {
    const int64_t first = work.batch_idx * params.lse_batch_stride +
                          block.head * params.lse_head_stride + work.seqlen.q_begin;
    float lse[kRows], delta[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int query = block.m * Traits::kBlockM + i * 32 + lane;
      const bool exists = query < work.seqlen.len_q;
      lse[i] = exists ? params.lse[first + query] : -INFINITY;
      delta[i] = exists ? params.delta[first + query] : 0.f;
    }
    ring.wait_empty();
    auto& values = smem.row_values[ring.stage()];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      values.lse_log2[i * 32 + lane] = to_lse_log2(lse[i]);
      values.delta[i * 32 + lane] = delta[i];
    }
    __syncwarp();
    if (lane == 0) ring.arrive_full();
  }
}

}  // namespace flash_attn::sm90
