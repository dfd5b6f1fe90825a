// The backward's small kernels, which serve every architecture.
#pragma once

#include "../core/params.h"

namespace flash_attn::cuda {

// delta = rowsum(dO ∘ O) - dLSE; 0 for rows without keys (LSE -inf).
void run_bwd_delta(const BwdParams& params, Stream stream);

// dq = softmax_scale · dq_accum, whose rows hold dq_accum_cols floats in the order of
// attn/dq_accum.cuh.
void run_bwd_convert_dq(const BwdParams& params, int dq_accum_cols, Stream stream);

}  // namespace flash_attn::cuda
