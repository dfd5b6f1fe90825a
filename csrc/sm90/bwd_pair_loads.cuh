// What the producer warps of the backward kernel for wide heads load.
#pragma once

#include "bwd_pair_traits.cuh"
#include "bwd_producer.cuh"

namespace flash_attn::sm90 {

// Loads the slabs of a block of keys that have num_cols columns from first_col on. One thread calls
// it, which has announced slab_bytes().
template <typename Slab, int kSlabs>
__device__ __forceinline__ void load_slabs(Slab (&slabs)[kSlabs], const CUtensorMap& map,
                                           const BwdWork& work, int first_key, int first_col,
                                           int num_cols, uint64_t& mbarrier) {
  for (int s = 0; s * Slab::kCols < num_cols && s < kSlabs; ++s) {
    load_tile(slabs[s], map, work.kv, first_key, Slab::kCols, mbarrier, ptx::CacheHint::kEvictFirst,
              first_col + s * Slab::kCols);
  }
}
template <typename Slab, int kSlabs>
__device__ __forceinline__ uint32_t slab_bytes(const Slab (&)[kSlabs], int num_cols) {
  return min((num_cols + Slab::kCols - 1) / Slab::kCols, kSlabs) * sizeof(Slab);
}

// Loads Q or dO, kSlabs slabs of each block. Where the matrix lacks a slab, its first one comes
// once more, to be multiplied with the zeros of K or V. One thread calls it.
template <int kSlabs, int kStages, typename Slab>
__device__ __forceinline__ void load_query_slabs_loop(Slab (&slabs)[kStages],
                                                      const CUtensorMap& map, const BwdWork& work,
                                                      int num_cols,
                                                      RingBarriers<kStages>& barriers) {
  Ring<kStages> ring(barriers);
#pragma unroll 1
  for (QueryBlocks block(work); block.more(); block.advance()) {
    const MatrixPlace place = {.box = work.q.box, .head = block.head, .batch = work.q.batch};
#pragma unroll 1
    for (int col = 0; col < kSlabs * Slab::kCols; col += Slab::kCols, ring.advance()) {
      ring.wait_empty();
      ring.expect_bytes(sizeof(Slab));
      load_tile(slabs[ring.stage()], map, place, block.m * Slab::kRows, Slab::kCols, ring.full(),
                ptx::CacheHint::kEvictLast, col < num_cols ? col : 0);
    }
  }
}

}  // namespace flash_attn::sm90
