// What every backward kernel needs room for.
#pragma once

#include "../core/params.h"

namespace flash_attn::cuda {

// BwdParams::dq_accum: rows of one sequence, which a dense call has to say before it asks for the
// next number; rows of one head.
int64_t bwd_dq_accum_sequence_rows(const AttnParams& params);
int64_t bwd_dq_accum_rows(const BwdParams& params);
// BwdParams::dq_turns: numbers of the call.
int64_t bwd_dq_turns(const BwdParams& params);
// DqPool::progress: numbers of the call.
int64_t bwd_dq_pool_progress(const BwdParams& params);

// delta = rowsum(dO ∘ O) - dLSE; 0 for rows without keys (LSE -inf). Zeroes the workspace; of a part
// (BwdParams::is_part) it does so alone, but for dq_accum.
void run_bwd_delta(const BwdParams& params, Stream stream);

}  // namespace flash_attn::cuda
