#include "fwd.h"

#include <algorithm>

#include "large_head.h"

namespace flash_attn::sm80 {

void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  if (params.heads_q == 0) return;
  if (cuda::is_wide(params.dtype)) {
    return cuda::with_wide_dtype(params.dtype, [&]<DType kDType> {
      with_scores_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
        return has_score_terms(params) ? launch_fwd_wide<kDType, kHeadDim, true>(params, stream)
                                       : launch_fwd_wide<kDType, kHeadDim, false>(params, stream);
      });
    });
  }
  with_dtype(params.dtype, [&]<DType kDType> {
    if (is_large_head(params.head_dim, params.head_dim_v)) {
      if (has_score_terms(params)) {
        return launch_fwd_large_head<kDType, kLargeHeadDim, true>(params, device, stream);
      }
      return std::max(params.head_dim, params.head_dim_v) <= kMiddleHeadDim
                 ? launch_fwd_large_head<kDType, kMiddleHeadDim, false>(params, device, stream)
                 : launch_fwd_large_head<kDType, kLargeHeadDim, false>(params, device, stream);
    }
    if (has_score_terms(params)) return run_fwd_of_sequences(params, stream);
    with_head_dim_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
      launch_fwd<kDType, kHeadDim>(params, device, stream);
    });
  });
}

void run_fwd_masked(const Masked<FwdParams>& params, Stream stream) {
  if (params.heads_q == 0) return;
  with_dtype(params.dtype, [&]<DType kDType> {
    with_scores_class(params.head_dim, params.head_dim_v,
                      [&]<int kHeadDim> { launch_fwd_masked<kDType, kHeadDim>(params, stream); });
  });
}

void run_fwd_of_sequences(const OfSequences<FwdParams>& params, Stream stream) {
  if (params.heads_q == 0) return;
  with_dtype(params.dtype, [&]<DType kDType> {
    with_scores_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
      launch_fwd_with_scores<kDType, kHeadDim>(params, stream);
    });
  });
}

}  // namespace flash_attn::sm80
