// New keys and values into a cache.
#pragma once

#include "../../core/params.h"

namespace flash_attn::cuda {

// Writes the tokens. A decode kernel with the same seqlen_new that follows on the stream overlaps
// it.
void run_append(const AppendParams& params, Stream stream);

}  // namespace flash_attn::cuda
