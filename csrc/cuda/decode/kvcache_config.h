// Tiles of kvcache.cuh, and its instances: one a cache dtype and head-dim class, in
// inst/kvcache_d*.cu.
#pragma once

#include <stdexcept>

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

// Keys of a tile. It has 16 KB of K or V at head_dim 64 and 128, enough for one barrier a tile not
// to be felt. 8-bit tiles have twice the keys, as the work a key is the same. Those of fp32 have
// 32 KB, so that a warp splits its operand of Q for many keys, and two tiles fit the least shared
// memory in every class.
constexpr int kvcache_tile_keys(DType cache_dtype, int head_dim_class) {
  if (cache_dtype == DType::kFp32 && head_dim_class > 128) return 32;
  return head_dim_class <= 64 || is_8bit(cache_dtype) ? 128 : 64;
}

// K and V share the class of the wider one.
inline int kvcache_head_dim(const DecodeParams& params) {
  return params.head_dim > params.head_dim_v ? params.head_dim : params.head_dim_v;
}

// Calls f.template operator()<cache dtype, class>().
template <typename F>
auto with_kvcache_class(DType cache_dtype, int head_dim, F&& f) {
  if (cache_dtype == DType::kFp32) {
    if (head_dim > kKvcacheWideHeadDim) {
      throw std::invalid_argument("flash_attn: head_dim: expected at most 256 in float32");
    }
    return with_scores_class(head_dim, head_dim, [&]<int kHeadDim> {
      return f.template operator()<DType::kFp32, kHeadDim>();
    });
  }
  const auto with_dtype = [&]<int kHeadDim> {
    switch (cache_dtype) {
      case DType::kFp16:
        return f.template operator()<DType::kFp16, kHeadDim>();
      case DType::kBf16:
        return f.template operator()<DType::kBf16, kHeadDim>();
      case DType::kFp8E4M3:
        return f.template operator()<DType::kFp8E4M3, kHeadDim>();
      case DType::kInt8:
        return f.template operator()<DType::kInt8, kHeadDim>();
      default:
        throw std::invalid_argument(
            "flash_attn: k_cache: expected fp32, or a dtype of 16 or 8 bits");
    }
  };
  if (head_dim <= 64) return with_dtype.template operator()<64>();
  if (head_dim <= 128) return with_dtype.template operator()<128>();
  if (head_dim <= 192) return with_dtype.template operator()<192>();
  if (head_dim <= 256) return with_dtype.template operator()<256>();
  if (head_dim <= kKvcacheHeadDim) return with_dtype.template operator()<kKvcacheHeadDim>();
  throw std::invalid_argument("flash_attn: head_dim: expected at most 512");
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
