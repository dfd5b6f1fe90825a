// Blocks of keys that lie in pages, some of which may be missing. It is for the few sequences that
// kernels which read whole pages leave (cuda/key_mask.h), so it need not be fast.
#pragma once

#include <cmath>

#include "../cuda/attn/pages.cuh"
#include "../cuda/ptx/cp_async.cuh"
#include "../cuda/tile/fragment.cuh"

namespace flash_attn::sm80 {

// What TileLoader does for the keys first_key … of a sequence. matrix: page 0 at the head. Keys
// outside [seen_key, end_key) and those of missing pages become 0 and are not read.
template <int kThreads, typename Tile, typename Element>
__device__ __forceinline__ void load_tile_of_pages(const Tile& tile, const Element* matrix,
                                                   const Strides& strides, const PageTable& pages,
                                                   const int32_t* entries, int num_cols,
                                                   unsigned thread, int first_key, int seen_key,
                                                   int end_key) {
  const int col = static_cast<int>(thread % Tile::kSlabChunks) * Tile::kChunk;
#pragma unroll 1
  for (int row = static_cast<int>(thread / Tile::kSlabChunks); row < Tile::kRows;
       row += kThreads / Tile::kSlabChunks) {
    const int key = first_key + row;
    const bool counts = key >= seen_key && key < end_key;
    const int page = counts ? page_of_key(pages, entries, key) : -1;
    const Element* const source =
        matrix + max(page, 0) * strides.batch + key % pages.page_size * strides.row + col;
#pragma unroll
    for (int slab_col = 0; slab_col < Tile::kCols; slab_col += Tile::kSlabCols) {
      const bool valid = page >= 0 && slab_col + col < num_cols;
      ptx::cp_async_16(tile.address(row, slab_col + col), source + slab_col, valid ? 16 : 0);
    }
  }
}

// S = -inf where a key's page is missing. A page has whole eights of keys (PageTable::kMultiple), as the
// columns of a fragment come.
template <int kMBlocks, int kN>
__device__ __forceinline__ void mask_missing_pages(Accumulator<kMBlocks, kN>& S,
                                                   const PageTable& pages, const int32_t* entries,
                                                   int first_key, int end_key) {
#pragma unroll
  for (int i = 0; i < S.kRowElements; i += 2) {
    const int key = first_key + fragment_col(i, 0);
    if (key >= end_key || page_of_key(pages, entries, key) >= 0) continue;
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) S.at(row, i) = S.at(row, i + 1) = -INFINITY;
  }
}

}  // namespace flash_attn::sm80
