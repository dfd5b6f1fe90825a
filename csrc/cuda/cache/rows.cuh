// Where a sequence's tokens lie in a cache, dense or paged.
#pragma once

#include "../../core/params.h"

namespace flash_attn::cuda {

// Where the appended tokens of a sequence begin. This may be anywhere, as anything may stand in
// cache_seqlens.
__device__ __forceinline__ int64_t first_new_position(const CacheParams& params, int batch_idx) {
  return params.cache_seqlens == nullptr ? int64_t{params.capacity} - params.seqlen_new
                                         : int64_t{params.cache_seqlens[batch_idx]};
}

// What the stored numbers of a kv head are multiplied with: 1 where there is no tensor of them.
__device__ __forceinline__ float descale_of(const float* descale, int64_t batch_stride,
                                            int64_t head_stride, int batch_idx, int kv_head) {
  return descale == nullptr ? 1.f : descale[batch_idx * batch_stride + kv_head * head_stride];
}

// A row of one cache row (dense), or of one page; page -1: nowhere.
struct CachePlace {
  int page, row;
};

class CacheSequence {
 public:
  CacheSequence() = default;
  __device__ __forceinline__ CacheSequence(const CacheParams& params, int batch_idx) {
    const int row =
        params.cache_batch_idx == nullptr ? batch_idx : params.cache_batch_idx[batch_idx];
    const int rows = params.block_table == nullptr ? params.cache_rows : params.table_rows;
    row_ = row >= 0 && row < rows ? row : -1;
    pages_ = params.block_table == nullptr || row_ < 0
                 ? nullptr
                 : params.block_table + row_ * params.table_stride;
  }

  // position: from 0 to capacity - 1. The page that the table names for it may be anything.
  __device__ __forceinline__ int page_number(const CacheParams& params, int position) const {
    if (pages_ == nullptr) return params.block_table == nullptr ? row_ : -1;
    return pages_[static_cast<unsigned>(position) / static_cast<unsigned>(params.page_size)];
  }
  // Where the token at a position lies, by what page_number() said of it.
  __device__ __forceinline__ static CachePlace place(const CacheParams& params, int position,
                                                     int page) {
    if (params.block_table == nullptr) return {page, position};
    const unsigned row = static_cast<unsigned>(position) % static_cast<unsigned>(params.page_size);
    return {page >= 0 && page < params.cache_rows ? page : -1, static_cast<int>(row)};
  }
  __device__ __forceinline__ CachePlace place(const CacheParams& params, int position) const {
    return place(params, position, page_number(params, position));
  }

 private:
  int row_;
  const int32_t* pages_;
};

}  // namespace flash_attn::cuda
