// Decode against caches of 8 bits and of fp32, and of 16 bits with wide heads, in every form and
// with every term of the score.
#pragma once

#include "../../core/kvcache_grid.h"
#include "../../core/params.h"

namespace flash_attn::cuda {

// Any head_dim and head_dim_v up to 576 (8-bit caches: 512, fp32: 256) that are multiples of 8
// (8-bit caches: of 16). With 16 bits the wider one should be above 256: decode.h has the others.
void run_kvcache(const DecodeParams& params, const KvcacheGrid& grid, Stream stream);
// Merges what another kernel has left in pieces. It must cut keys as kvcache.cuh does, and have as
// many in a tile.
void run_kvcache_combine(const DecodeParams& params, const KvcacheGrid& grid, Stream stream);

}  // namespace flash_attn::cuda
