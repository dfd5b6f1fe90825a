// Decode of what DecodeParams calls plain, and against caches of 16 bits with softcap, slopes or a
// rotation.
#pragma once

#include "../../core/params.h"

namespace flash_attn::cuda {

// With pages, or just appended to, no head_dim above this: registers are short.
inline constexpr int kDecodeFormsHeadDim = 192;

// The same with caches of 8 bits, which are dense.
inline constexpr int kDecode8BitHeadDim = 128;

// Any head dim up to 256 (8 bits: up to 128).
void run_decode(const DecodeParams& params, Stream stream);
// The last step alone: merges the results of pieces.
void run_decode_combine(const DecodeParams& params, Stream stream);

}  // namespace flash_attn::cuda
