// Decode of every form of cache and with every term of the score.
#pragma once

#include "../../core/params.h"
#include "../device.h"

namespace flash_attn::cuda {

// How a call is spread over the device.
struct KvcacheGrid {
  int parts;  // that all keys are cut into, for each kv head
  int blocks_per_sm;
  int smem_bytes;        // that a block may use
  int smem_optin_bytes;  // of DeviceInfo
};
KvcacheGrid kvcache_grid(const DecodeParams& params, const DeviceInfo& device);

// num_splits as the caller says, 0: as is best. batch_invariant: by what the sequence alone decides.
Splits kvcache_splits(const DecodeParams& params, int num_splits, bool batch_invariant);
// Of PartialResults; 0: none.
int64_t kvcache_workspace_rows(const DecodeParams& params, const KvcacheGrid& grid);

// Any head_dim and head_dim_v up to 256 that are multiples of 8 (8-bit caches: of 16).
void run_kvcache(const DecodeParams& params, const KvcacheGrid& grid, Stream stream);

}  // namespace flash_attn::cuda
