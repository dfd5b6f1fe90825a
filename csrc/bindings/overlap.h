// Where caches lie in memory: what is updated in place must have one place for each element, and
// share none.
#pragma once

#include "args.h"

namespace flash_attn {

// What the append is going to write to: one place in memory for each element of both caches.
void check_writable(const KvcacheArgs& args);

}  // namespace flash_attn
