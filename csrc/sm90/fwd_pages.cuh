// Blocks of keys that lie in pages: TMA brings each in boxes that lie in one page.
#pragma once

#include <numeric>

#include "../core/divisor.h"
#include "../cuda/attn/pages.cuh"
#include "tile/copy.cuh"

namespace flash_attn::sm90 {

// How TMA brings blocks of keys that lie in pages.
struct PageBoxes {
  int rows = 0;  // of a box, a power of two; 0: no pages
  Divisor page_size{1};

  // For blocks of block_n keys. A box has as many rows as divide both a block and a page: a multiple
  // of 8 (PageTable::kMultiple), after which the swizzle of a tile begins anew. It has no more than
  // a window, so that hidden keys lie either in front of a box's others or behind them.
  static PageBoxes make(const PageTable& pages, int block_n, int window_left) {
    if (pages.entries == nullptr) return {};
    int rows = std::gcd(pages.page_size, block_n);
    rows &= -rows;
    while (window_left >= 0 && rows > window_left + 1) rows /= 2;
    return {.rows = rows, .page_size = Divisor(pages.page_size)};
  }
};

// A page is a batch entry of the map, and its keys are that entry's rows.
inline CUtensorMap make_page_map(const void* tensor, const Strides& strides, TensorShape shape,
                                 const PageTable& pages, int box_cols, int box_rows,
                                 HiddenRows hidden = HiddenRows::kBehind) {
  shape.rows = pages.page_size;
  shape.batch = pages.num_pages;
  return make_tensor_map(tensor, strides, shape, box_cols, box_rows, hidden);
}

// A box of a block of keys.
struct PageBox {
  int page;
  bool exists;       // in the table
  bool hides_front;  // by a map of HiddenRows::kInFront
  int first, last;   // of SequenceBox, where the box begins

  // Row `row` … of the block that begins with first_key. Of the sequence the keys [seen_key,
  // end_key) count, which are more than none of the block. table_row: the sequence's row of the
  // table. In the place of a box behind the last key comes the block's first one again, as TMA must
  // not be asked for a box that has nothing of the map; its scores are masked. For memory's sake a
  // number that names no page becomes one that does.
  __device__ __forceinline__ PageBox(const PageTable& pages, const PageBoxes& boxes, int table_row,
                                     int first_key, int row, int seen_key, int end_key) {
    const int key = first_key + row < end_key ? first_key + row : first_key;
    const int page_idx = boxes.page_size.divide(key), page_key = page_idx * pages.page_size;
    const int entry = entries_of_row(pages, table_row)[page_idx];
    page = min(max(entry, 0), pages.num_pages - 1);
    exists = entry == page;
    hides_front = key < seen_key;  // and then none behind (PageBoxes::make())
    const int end = min(pages.page_size, end_key - page_key);
    first = hides_front ? key - seen_key : pages.page_size - end + key - page_key;
    last = hides_front ? seen_key - page_key : end;
  }
};

// Starts the copy of a box to rows `row` … of the tile, slab by slab.
template <typename Tile>
__device__ __forceinline__ void load_box(Tile& tile, const CUtensorMap& map, const PageBox& box,
                                         int head, int row, int num_cols, uint64_t& mbarrier,
                                         ptx::CacheHint hint) {
#pragma unroll
  for (int col = 0; col < Tile::kCols; col += Tile::kSlabCols) {
    if (col >= num_cols) break;
    ptx::tma_load(&tile.data[col * Tile::kRows + row * Tile::kSlabCols], map,
                  {col, box.first, box.last, head, box.page}, mbarrier, hint);
  }
}

// A bit for each eight keys of a block, whose page is missing. A whole warp calls it, each lane with
// the box that it brings.
__device__ __forceinline__ uint32_t missing_keys(const PageBox& box, const PageBoxes& boxes,
                                                 int lane) {
  const uint32_t missing = __ballot_sync(~0u, !box.exists);
  if (missing == 0) return 0;
  const int box_bits = __ffs(boxes.rows) - 1;
  return __ballot_sync(~0u, (missing >> (lane * PageTable::kMultiple >> box_bits) & 1) != 0);
}

}  // namespace flash_attn::sm90
