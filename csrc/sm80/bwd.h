// The backward kernels' instances: one a dtype and head-dim class, in inst/bwd_d*.cu.
#pragma once

#include "../core/kernels.h"

namespace flash_attn::sm80 {

// dK, dV, and either the sums in dq_accum or, if that is null, dQ itself.
template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm80
