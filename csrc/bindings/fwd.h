// The launch of a planned forward, and its results, for the op of that name, for the forward against
// a cache and for few queries.
#pragma once

#include "to_params.h"

namespace flash_attn {

// out and softmax_lse of a call with readable() arguments, not filled in.
std::pair<at::Tensor, at::Tensor> empty_results(const AttnArgs& args);
// Where the kernels leave them, laid out as FwdParams says.
void set_results(FwdParams& params, const at::Tensor& out, const at::Tensor& lse);

// Whether the forward is sm90's with the keys in pieces, one or several: keys whose page is missing
// it hides itself.
bool runs_in_pieces(const Plan& plan);

// params lack only workspace. out: the result that they have.
void launch_fwd(const Plan& plan, FwdParams& params, const at::Tensor& out);

}  // namespace flash_attn
