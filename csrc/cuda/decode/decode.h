// Decode of what DecodeParams calls plain, in three steps.
#pragma once

#include "../../core/params.h"
#include "../device.h"

namespace flash_attn::cuda {

// With pages, no head_dim above this: registers are short.
inline constexpr int kDecodePagedHeadDim = 192;
// Keys of a piece where a result may not depend on the batch, for DecodeParams::keys_per_split.
inline constexpr int kInvariantKeys = 2048;

// How the keys are cut, so that the grid fills the device, where num_splits is 0. batch_invariant:
// by what the sequence alone decides.
void plan_decode(DecodeParams& params, bool batch_invariant, const DeviceInfo& device);
// Rows of partial_o and partial_lse; 0: none.
int64_t decode_workspace_rows(const DecodeParams& params);
// Any head dim up to 256.
void run_decode(const DecodeParams& params, Stream stream);
// The last step alone: merges num_splits > 1 partial results.
void run_decode_combine(const DecodeParams& params, Stream stream);

}  // namespace flash_attn::cuda
