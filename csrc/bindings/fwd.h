// The launch of a planned forward, for the op of that name and for the forward against a cache.
#pragma once

#include "to_params.h"

namespace flash_attn {

// params lack only the results and workspace. out and lse: new tensors, laid out as FwdParams says.
void launch_fwd(const Plan& plan, FwdParams& params, const at::Tensor& out, const at::Tensor& lse);

}  // namespace flash_attn
