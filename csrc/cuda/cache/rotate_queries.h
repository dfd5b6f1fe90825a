// Queries rotated to their positions in a cache.
#pragma once

#include "../../core/params.h"

namespace flash_attn::cuda {

// rotated: (batch, seqlen_q, heads_q, head_dim) contiguous.
void run_rotate_queries(const DecodeParams& params, void* rotated, Stream stream);

}  // namespace flash_attn::cuda
