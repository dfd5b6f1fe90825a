// A forward of few queries beside many keys, as in generation, on decode's kernels: they cut the keys
// into pieces, and query heads that share a kv head are rows of one product.
#pragma once

#include "to_params.h"

namespace flash_attn {

// Whether fwd_of_few_queries() serves the call.
bool has_few_queries(const FwdArgs& args);
// Of checked arguments; none: the call is not of that kind.
std::optional<FwdResult> fwd_of_few_queries(const FwdArgs& args);

}  // namespace flash_attn
