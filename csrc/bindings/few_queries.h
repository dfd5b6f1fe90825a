// A forward of few queries beside many keys, as in generation, on decode's kernels: they cut the keys
// into pieces, and query heads that share a kv head are rows of one product.
#pragma once

#include "to_params.h"

namespace flash_attn {

// The call as one of decode, and its results, both of checked arguments; none: it is not of that kind.
std::optional<CallShape> shape_of_few_queries(const FwdArgs& args);
std::optional<FwdResult> fwd_of_few_queries(const FwdArgs& args);

}  // namespace flash_attn
