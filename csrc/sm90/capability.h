// What the sm90 kernels can do, and what a call costs them.
#pragma once

#include "../core/backend.h"

namespace flash_attn::sm90 {

extern const KernelFamily kFamily;

// Of a decode call: pieces that each tile's keys are cut into, as there are fewer tiles than
// multiprocessors; 1: not cut.
int decode_splits(const CallShape& call);

}  // namespace flash_attn::sm90
