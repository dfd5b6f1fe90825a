// Blocks of keys that lie in pages: TMA brings each in boxes that lie in one page.
#pragma once

#include <numeric>

#include "../cuda/attn/pages.cuh"
#include "../cuda/divisor.h"
#include "tile/copy.cuh"

namespace flash_attn::sm90 {

// How TMA brings blocks of keys that lie in pages.
struct PageBoxes {
  int rows = 0;  // of a box; 0: no pages
  cuda::Divisor page_size{1};

  // For blocks of block_n keys. A box has as many rows as divide both a block and a page: a multiple
  // of 8 (PageTable::kMultiple), after which the swizzle of a tile begins anew.
  static PageBoxes make(const PageTable& pages, int block_n) {
    if (pages.entries == nullptr) return {};
    return {.rows = std::gcd(pages.page_size, block_n),
            .page_size = cuda::Divisor(pages.page_size)};
  }
};

// A page is a batch entry of the map, and its keys are that entry's rows.
inline CUtensorMap make_page_map(const void* tensor, const Strides& strides, TensorShape shape,
                                 const PageTable& pages, int box_cols, int box_rows) {
  shape.rows = pages.page_size;
  shape.batch = pages.num_pages;
  return make_tensor_map(tensor, strides, shape, box_cols, box_rows);
}

// Does what load_tile() does for the keys first_key … of a sequence, of which there are end_key,
// more than first_key. table_row: its row of the table. In the place of boxes behind the last key
// comes the first one again, as TMA must not be asked for a box that has nothing of the map; their
// scores are masked. Sequences that lack a page are served elsewhere: for memory's sake alone, a
// number that names none becomes one that does.
//
// kThreads threads of a warp call it, each of which starts every kThreads-th box.
template <int kThreads, typename Tile>
__device__ __forceinline__ void load_tile_of_pages(Tile& tile, const CUtensorMap& map,
                                                   const PageTable& pages, const PageBoxes& boxes,
                                                   int table_row, int head, int first_key,
                                                   int end_key, int num_cols, uint64_t& mbarrier,
                                                   ptx::CacheHint hint) {
  const int thread = kThreads == 1 ? 0 : static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int row = thread * boxes.rows; row < Tile::kRows; row += kThreads * boxes.rows) {
    const int key = first_key + row < end_key ? first_key + row : first_key;
    const int page_idx = boxes.page_size.divide(key), page_key = page_idx * pages.page_size;
    const int entry = entries_of_row(pages, table_row)[page_idx];
    const int page = min(max(entry, 0), pages.num_pages - 1);
    const SequenceBox box(pages.page_size, 0, min(pages.page_size, end_key - page_key));
#pragma unroll
    for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
      if (col >= num_cols) break;
      ptx::tma_load(&tile.data[col * Tile::kRows + row * Tile::kSlabCols], map,
                    {col, box.first + key - page_key, box.last, head, page}, mbarrier, hint);
    }
  }
}

}  // namespace flash_attn::sm90
