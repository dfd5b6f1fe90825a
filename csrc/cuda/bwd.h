// What every backward kernel needs room for.
#pragma once

#include "../core/params.h"

namespace flash_attn::cuda {

// BwdParams::dq_accum: rows of one head.
int64_t bwd_dq_accum_rows(const AttnParams& params);
// BwdParams::dq_turns: numbers of the call.
int64_t bwd_dq_turns(const BwdParams& params);
// DqPool::progress: numbers of the call.
int64_t bwd_dq_pool_progress(const BwdParams& params);

}  // namespace flash_attn::cuda
