// The forward kernel's instances, each for both dtypes and by head-dim class: plain in inst/fwd_d*.cu,
// with score terms in inst/fwd_scores_d*.cu, with the keys in pieces in inst/fwd_pieces_d*.cu.
#pragma once

#include "../core/kernels.h"

namespace flash_attn::sm90 {

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
template <DType kDType, int kHeadDim>
void launch_fwd_with_scores(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);
// head_dim_v = head_dim <= 128, params.num_splits > 1.
template <DType kDType, int kHeadDim>
void launch_fwd_in_pieces(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream);

}  // namespace flash_attn::sm90
