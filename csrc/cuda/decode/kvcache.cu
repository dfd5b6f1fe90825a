#include "kvcache.h"

#include "combine.cuh"
#include "kvcache_config.h"

namespace flash_attn::cuda {
namespace {

template <int kKeys, bool kWide>
void combine(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  const KvcacheParts parts(params, grid);
  const int sequences = parts.merged_by_cut ? grid.parts - 1 : params.batch;
  // The lengths are not known here: as many pieces as if all were alike.
  const int pieces = params.splits.count > 0 ? params.splits.count
                     : params.batch == 1     ? grid.parts
                                             : grid.parts / params.batch + 2;
  const int64_t rows = int64_t{sequences} * params.heads_q * params.seqlen_q;
  if (rows == 0) return;
  launch_combine<PiecesOfKvcache<kKeys>, kWide>(params, parts, {}, rows, pieces,
                                                params.splits.in_any_batch, stream);
}

}  // namespace

void run_kvcache(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  with_kvcache_class(params.cache_dtype, params.widest_head_dim(),
                     [&]<DType kCacheDType, int kHeadDim> {
                       launch_kvcache<kCacheDType, kHeadDim>(params, grid, stream);
                     });
  if (params.splits.count != 1) run_kvcache_combine(params, grid, stream);
}

void run_kvcache_combine(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  with_kvcache_class(
      params.cache_dtype, params.widest_head_dim(), [&]<DType kCacheDType, int kHeadDim> {
        combine<kvcache_tile_keys(kCacheDType, kHeadDim), kCacheDType == DType::kFp32>(params, grid,
                                                                                       stream);
      });
}

}  // namespace flash_attn::cuda
