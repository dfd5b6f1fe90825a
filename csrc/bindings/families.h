// The backends, best first.
#pragma once

#include "../core/backend.h"

namespace flash_attn {

Families families();

}  // namespace flash_attn
