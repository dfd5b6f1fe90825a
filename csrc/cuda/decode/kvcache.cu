#include "kvcache.h"

#include <algorithm>

#include "decode.h"
#include "kvcache_combine.cuh"
#include "kvcache_config.h"

namespace flash_attn::cuda {

KvcacheGrid kvcache_grid(const DecodeParams& params, const DeviceInfo& device) {
  // 16 bits: one block an SM reads as fast as two and leaves half as many pieces; two fill the device
  // better where there are many heads. 8 bits: four warps that compute wait for one another more than
  // for memory, so two blocks, unless the call is short. 1 KiB a block is the system's, and the blocks
  // that merge want to be there early.
  constexpr int kSystemBytes = 1024, kCombineBytes = 16 * 1024, kTwoBlocksBytes = 160 * 1024;
  constexpr int64_t kLongElements = int64_t{64} << 20;
  const int items = params.heads_kv * kvcache_row_tiles(params);
  const int head_dim = kvcache_head_dim(params);
  const int64_t elements = int64_t{params.batch} * params.capacity * params.heads_kv * head_dim;
  const bool profits =
      is_8bit(params.cache_dtype) ? elements > kLongElements : items > device.num_sms / 5;
  const bool two = profits && head_dim <= 128 && device.smem_optin_bytes >= kTwoBlocksBytes;
  const int smem_bytes = device.smem_optin_bytes - kCombineBytes;
  return {.parts = std::max(device.num_sms * (two ? 2 : 1) / items, 1),
          .blocks_per_sm = two ? 2 : 1,
          .smem_bytes = two ? smem_bytes / 2 - kSystemBytes : smem_bytes,
          .smem_optin_bytes = device.smem_optin_bytes};
}

Splits kvcache_splits(const DecodeParams& params, int num_splits, bool batch_invariant) {
  if (num_splits > 0) return Splits::alike(num_splits);
  if (!batch_invariant) return Splits::dealt_out();
  // leftpad may add one.
  return Splits::by_length(kInvariantKeys, params.capacity / kInvariantKeys + 2);
}

int64_t kvcache_workspace_rows(const DecodeParams& params, const KvcacheGrid& grid) {
  if (params.splits.count == 1) return 0;
  const int64_t pieces = params.splits.count == 0
                             ? 2 * int64_t{grid.parts}
                             : static_cast<int64_t>(params.batch) * params.splits.count;
  return RowsByTile::rows(pieces, params.heads_kv, kvcache_row_tiles(params));
}

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
