// Tiles of kvcache.cuh, and its instances, in inst/kvcache_*.cu: one a head-dim class for each
// dtype of 8 bits and for fp32. Caches of 16 bits have the two widest classes alone, as decode.cuh
// serves the others.
#pragma once

#include "../../core/failure.h"
#include "../dispatch.h"
#include "kvcache.h"
#include "workspace.h"

namespace flash_attn::cuda {

inline constexpr int kKvcacheWarps = 4;       // that compute
inline constexpr int kKvcacheMaxStages = 16;  // tiles of K and V in shared memory

// The widest classes: of 8 bits, of 16 and of fp32. Multi-head latent attention, in the form where
// all query heads share one row a token, has keys of 512 columns and 64 rotated ones, and values of
// the 512 alone.
inline constexpr int kKvcacheHeadDim = 512, kKvcacheLatentHeadDim = 576;
inline constexpr int kKvcacheWideHeadDim = 256;

constexpr int kvcache_most_head_dim(DType cache_dtype) {
  if (cache_dtype == DType::kFp32) return kKvcacheWideHeadDim;
  return is_8bit(cache_dtype) ? kKvcacheHeadDim : kKvcacheLatentHeadDim;
}

// Above 256 columns two tiles alone take 128 KB, and above 512 they take 144 KB.
inline constexpr int kKvcachePortableHeadDim = 256;
constexpr int kvcache_smem_kib(int64_t head_dim) {
  if (head_dim <= kKvcachePortableHeadDim) return 99;
  return head_dim <= kKvcacheHeadDim ? 163 : 227;
}

// Keys of a tile. Those of 8 bits have so many that one barrier a tile is not felt: 16 KB of K or V
// at head_dim 128. Those of fp32 have 32 KB, so that a warp splits its operand of Q for many keys,
// and two tiles fit the least shared memory in every class.
constexpr int kvcache_tile_keys(DType cache_dtype, int head_dim_class) {
  if (cache_dtype == DType::kFp32 && head_dim_class > 128) return 32;
  return head_dim_class <= 64 || is_8bit(cache_dtype) ? 128 : 64;
}

// Calls f.template operator()<cache dtype, class>().
template <typename F>
auto with_kvcache_class(DType cache_dtype, int head_dim, F&& f) {
  if (head_dim > kvcache_most_head_dim(cache_dtype)) {
    refuse({"flash_attn: head_dim: a cache of this dtype has no kernel for as many columns"});
  }
  if (cache_dtype == DType::kFp32) {
    return with_scores_class(head_dim, head_dim, [&]<int kHeadDim> {
      return f.template operator()<DType::kFp32, kHeadDim>();
    });
  }
  const auto of_16bit = [&]<DType kCacheDType> {
    if (head_dim <= kKvcacheHeadDim) return f.template operator()<kCacheDType, kKvcacheHeadDim>();
    return f.template operator()<kCacheDType, kKvcacheLatentHeadDim>();
  };
  const auto of_8bit = [&]<DType kCacheDType> {
    if (head_dim <= 64) return f.template operator()<kCacheDType, 64>();
    if (head_dim <= 128) return f.template operator()<kCacheDType, 128>();
    if (head_dim <= 192) return f.template operator()<kCacheDType, 192>();
    if (head_dim <= 256) return f.template operator()<kCacheDType, 256>();
    return f.template operator()<kCacheDType, kKvcacheHeadDim>();
  };
  switch (cache_dtype) {
    case DType::kFp16:
      return of_16bit.template operator()<DType::kFp16>();
    case DType::kBf16:
      return of_16bit.template operator()<DType::kBf16>();
    case DType::kFp8E4M3:
      return of_8bit.template operator()<DType::kFp8E4M3>();
    case DType::kInt8:
      return of_8bit.template operator()<DType::kInt8>();
    default:
      refuse({"flash_attn: k_cache: expected fp32, or a dtype of 16 or 8 bits"});
  }
}

// What the merge has to know of KvcacheGrid.
struct KvcacheParts {
  unsigned count = 0;
  bool merged_by_cut = false;  // fewer cuts between parts than sequences

  KvcacheParts() = default;
  KvcacheParts(const DecodeParams& params, const KvcacheGrid& grid)
      : count(grid.parts),
        merged_by_cut(params.splits.count == 0 && grid.parts - 1 < params.batch) {}
};

template <DType kCacheDType, int kHeadDim>
void launch_kvcache(const DecodeParams& params, const KvcacheGrid& grid, Stream stream);

}  // namespace flash_attn::cuda
