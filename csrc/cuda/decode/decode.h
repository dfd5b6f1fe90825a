// Decode against caches of 16 bits and, as far as DecodeParams calls it plain, dense ones of 8.
#pragma once

#include "../../core/params.h"

namespace flash_attn::cuda {

// The widest head_dim or head_dim_v.
inline constexpr int kDecodeHeadDim = 256, kDecode8BitHeadDim = 128;

void run_decode(const DecodeParams& params, Stream stream);
// The last step alone: merges the results of pieces.
void run_decode_combine(const DecodeParams& params, Stream stream);

}  // namespace flash_attn::cuda
