// The keys of a paged cache side by side.
#pragma once

#include "../../core/params.h"
#include "../device.h"

namespace flash_attn::cuda {

// Copies the keys that any query of a paged call sees, of 16 bits or fp32. What it leaves out,
// decode's kernels serve by sequence_mask.
void run_gather_pages(const DecodeParams& params, const PackedCache& packed,
                      const DeviceInfo& device, Stream stream);

}  // namespace flash_attn::cuda
