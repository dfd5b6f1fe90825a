#include "latent.h"

#include "../cuda/decode/kvcache.h"
#include "../cuda/decode/kvcache_config.h"
#include "../cuda/dispatch.h"

namespace flash_attn::sm90 {

static_assert(kLatentKeys == cuda::kvcache_tile_keys(DType::kBf16, kLatentHeadDim));

void run_latent(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  cuda::with_dtype(params.dtype,
                   [&]<DType kDType> { launch_latent<kDType>(params, grid, stream); });
  if (params.splits.count != 1) cuda::run_kvcache_combine(params, grid, stream);
}

}  // namespace flash_attn::sm90
