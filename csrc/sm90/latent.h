// Decode of multi-head latent attention, where a cache has one row a token that all query heads
// share, and values are the first columns of their keys. Its instances are in inst/latent_d576.cu.
#pragma once

#include "../core/kvcache_grid.h"
#include "../core/params.h"

namespace flash_attn::sm90 {

// Rows of Q that a thread block has, keys of a tile, columns of a key and of a value at most.
inline constexpr int kLatentRows = 64, kLatentKeys = 64;
inline constexpr int kLatentHeadDim = 576, kLatentHeadDimV = 512;

// Compute capability 9.0 only, fp16 and bf16, without softcap, ALiBi, bias, rotary and append.
// Pages have whole eights of keys (PageTable::kMultiple). The values are the first columns of
// k_cache, wherever v_cache points.
void run_latent(const DecodeParams& params, const KvcacheGrid& grid, Stream stream);

template <DType kDType>
void launch_latent(const DecodeParams& params, const KvcacheGrid& grid, Stream stream);

}  // namespace flash_attn::sm90
