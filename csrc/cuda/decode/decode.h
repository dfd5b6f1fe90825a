// Decode of what DecodeParams calls plain, in three steps.
#pragma once

#include "../../core/params.h"
#include "../device.h"

namespace flash_attn::cuda {

// With pages, no head_dim above this: registers are short.
inline constexpr int kDecodePagedHeadDim = 192;
// Keys of a piece where a result may not depend on the batch, by length.
inline constexpr int kInvariantKeys = 2048;

// num_splits as the caller says, 0: so that the grid fills the device. batch_invariant: by what the
// sequence alone decides.
Splits decode_splits(const DecodeParams& params, int num_splits, bool batch_invariant,
                     const DeviceInfo& device);
// Of PartialResults; 0: none.
int64_t decode_workspace_rows(const DecodeParams& params);
// Any head dim up to 256.
void run_decode(const DecodeParams& params, Stream stream);
// The last step alone: merges the results of pieces.
void run_decode_combine(const DecodeParams& params, Stream stream);

}  // namespace flash_attn::cuda
