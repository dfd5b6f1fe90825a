#include "kvcache.h"

#include "kvcache_combine.cuh"
#include "kvcache_config.h"

namespace flash_attn::cuda {

void run_kvcache_combine(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  if (params.splits.count == 1) return;
  with_kvcache_class(params.cache_dtype, kvcache_head_dim(params),
                     [&]<DType kCacheDType, int kHeadDim> {
                       constexpr int kKeys = kvcache_tile_keys(kCacheDType, kHeadDim);
                       launch_kvcache_combine<kKeys, (kHeadDim + 127) / 128>(params, grid, stream);
                     });
}

void run_kvcache(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  with_kvcache_class(params.cache_dtype, kvcache_head_dim(params),
                     [&]<DType kCacheDType, int kHeadDim> {
                       launch_kvcache<kCacheDType, kHeadDim>(params, grid, stream);
                     });
  run_kvcache_combine(params, grid, stream);
}

}  // namespace flash_attn::cuda
