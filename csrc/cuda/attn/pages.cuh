// Where the keys of one sequence lie in pages.
#pragma once

#include "../../core/params.h"

namespace flash_attn {

// Of a sequence whose keys lie in row `row` of the table. It is null without pages.
__device__ __forceinline__ const int32_t* entries_of_row(const PageTable& pages, int row) {
  return pages.entries == nullptr || row < 0 ? nullptr : pages.entries + row * pages.row_stride;
}

// The page of a key, below what a row of the table has room for; -1: there is none.
__device__ __forceinline__ int page_of_key(const PageTable& pages, const int32_t* entries,
                                           int key) {
  const int page = entries[key / pages.page_size];
  return page >= 0 && page < pages.num_pages ? page : -1;
}

}  // namespace flash_attn
