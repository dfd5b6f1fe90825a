#include "bwd.h"

#include "../cuda/bwd_steps.h"
#include "large_head.h"

namespace flash_attn::sm80 {

int bwd_dq_accum_cols(const BwdParams& params, bool masked) {
  if (is_large_head(params.head_dim, params.head_dim_v)) return kLargeHeadDim;
  const auto of_class = [&]<int kHeadDim> { return kHeadDim; };
  return masked || has_score_terms(params) || cuda::is_wide(params.dtype)
             ? with_scores_class(params.head_dim, params.head_dim_v, of_class)
             : with_head_dim_class(params.head_dim, params.head_dim_v, of_class);
}

void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  cuda::run_bwd_steps(params, cuda::portable_dq_accum_order(), stream, [&] {
    if (cuda::is_wide(params.dtype)) {
      return cuda::with_wide_dtype(params.dtype, [&]<DType kDType> {
        with_scores_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
          return has_score_terms(params)
                     ? launch_bwd_wide<kDType, kHeadDim, true>(params, device, stream)
                     : launch_bwd_wide<kDType, kHeadDim, false>(params, device, stream);
        });
      });
    }
    with_dtype(params.dtype, [&]<DType kDType> {
      if (is_large_head(params.head_dim, params.head_dim_v)) {
        return has_score_terms(params) ? launch_bwd_large_head<kDType, true>(params, stream)
                                       : launch_bwd_large_head<kDType, false>(params, stream);
      }
      if (has_score_terms(params)) return run_bwd_of_sequences(params, stream);
      with_head_dim_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
        launch_bwd<kDType, kHeadDim>(params, device, stream);
      });
    });
  });
}

void run_bwd_dq_of_parts(const BwdParams& params, Stream stream) {
  cuda::run_bwd_convert_dq(params, cuda::portable_dq_accum_order(), stream);
}

void run_bwd_masked(const Masked<BwdParams>& params, Stream stream) {
  cuda::run_bwd_steps(params, cuda::portable_dq_accum_order(), stream, [&] {
    with_dtype(params.dtype, [&]<DType kDType> {
      with_scores_class(params.head_dim, params.head_dim_v,
                        [&]<int kHeadDim> { launch_bwd_masked<kDType, kHeadDim>(params, stream); });
    });
  });
}

void run_bwd_of_sequences(const OfSequences<BwdParams>& params, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    with_scores_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
      launch_bwd_with_scores<kDType, kHeadDim>(params, stream);
    });
  });
}

void run_bwd_bias(const BwdParams& params, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    with_scores_class(params.head_dim, params.head_dim_v,
                      [&]<int kHeadDim> { launch_bwd_bias<kDType, kHeadDim>(params, stream); });
  });
}

}  // namespace flash_attn::sm80
