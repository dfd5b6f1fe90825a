// The forward kernel's instances: one a dtype and head-dim class, in inst/fwd_d*.cu; with score terms
// in inst/fwd_scores_d*.cu.
#pragma once

#include "../core/kernels.h"

namespace flash_attn::sm90 {

template <DType kDType, int kHeadDim, int kHeadDimV, bool kPlain>
void launch_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm90
