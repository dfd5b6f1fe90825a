// Tiles of kvcache.cuh, and its instances, in inst/kvcache_*.cu: one a head-dim class for each
// dtype of 8 bits and for fp32. Caches of 16 bits have the widest class alone, as decode.cuh serves
// the others.
#pragma once

#include "../../core/failure.h"
#include "../dispatch.h"
#include "kvcache.h"
#include "workspace.h"

namespace flash_attn::cuda {

inline constexpr int kKvcacheWarps = 4;       // that compute
inline constexpr int kKvcacheMaxStages = 16;  // tiles of K and V in shared memory

// The widest class. Above 256 columns two tiles alone take 128 KB.
inline constexpr int kKvcacheHeadDim = 512;
inline constexpr int kKvcachePortableHeadDim = 256, kKvcacheLargeSmemBytes = 163 * 1024;
inline constexpr int kKvcacheWideHeadDim = 256;  // of fp32

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
  if (cache_dtype == DType::kFp32) {
    if (head_dim > kKvcacheWideHeadDim) {
      refuse({"flash_attn: head_dim: expected at most 256 in float32"});
    }
    return with_scores_class(head_dim, head_dim, [&]<int kHeadDim> {
      return f.template operator()<DType::kFp32, kHeadDim>();
    });
  }
  if (head_dim > kKvcacheHeadDim) {
    refuse({"flash_attn: head_dim: expected at most 512"});
  }
  const auto of_8bit = [&]<DType kCacheDType> {
    if (head_dim <= 64) return f.template operator()<kCacheDType, 64>();
    if (head_dim <= 128) return f.template operator()<kCacheDType, 128>();
    if (head_dim <= 192) return f.template operator()<kCacheDType, 192>();
    if (head_dim <= 256) return f.template operator()<kCacheDType, 256>();
    return f.template operator()<kCacheDType, kKvcacheHeadDim>();
  };
  switch (cache_dtype) {
    case DType::kFp16:
      return f.template operator()<DType::kFp16, kKvcacheHeadDim>();
    case DType::kBf16:
      return f.template operator()<DType::kBf16, kKvcacheHeadDim>();
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
