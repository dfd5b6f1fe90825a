// What decode's kernels can do, and what a call costs them.
#pragma once

#include "../../core/backend.h"

namespace flash_attn::cuda {

extern const KernelFamily kDecodeFamily;

}  // namespace flash_attn::cuda
