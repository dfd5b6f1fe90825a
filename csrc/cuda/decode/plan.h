// How decode's kernels serve a call: which of them, how the keys are cut, the room for pieces.
#pragma once

#include "../../core/plan.h"

namespace flash_attn::cuda {

Plan plan_decode(const CallShape& call);
// Of a kernel that cuts keys as kvcache.cuh does, with a grid of its own.
Plan plan_kvcache(const CallShape& call, Kernel kernel, const KvcacheGrid& grid);
// Decode's kernels are the fastest, whatever the estimates say: of few tokens, unless several thread
// blocks read the same keys and sm90's forward, in whose tiles heads share rows, may read them once.
bool is_for_decode(const CallShape& call);
// Estimated, as in ../capability.h.
double decode_time(const CallShape& call);

// Of a forward kernel against a cache, its keys in so many pieces: what decode's kernels do for it.
Plan plan_forward_on_cache(const CallShape& call, int pieces);

}  // namespace flash_attn::cuda
