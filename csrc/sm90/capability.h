// What the sm90 kernels can do, and what a call costs them.
#pragma once

#include "../core/backend.h"

namespace flash_attn::sm90 {

extern const KernelFamily kFamily;

}  // namespace flash_attn::sm90
