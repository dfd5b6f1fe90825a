#include "bwd.h"

#include "../cuda/bwd_steps.h"
#include "bwd_config.h"

namespace flash_attn::sm90 {

int bwd_dq_accum_cols(const AttnParams& params) {
  return with_bwd_class(params.head_dim, params.head_dim_v,
                        [&]<int kHeadDim, int kHeadDimV> { return kHeadDim; });
}

void run_bwd(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  cuda::run_bwd_steps(params, DqAccumOrder::kByLane, stream, [&] {
    cuda::with_dtype(params.dtype, [&]<DType kDType> {
      with_bwd_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim, int kHeadDimV> {
        if constexpr (kHeadDim > kBwdMaxSingleHeadDim) {
          launch_bwd_pair<kDType, kHeadDim, kHeadDimV>(params, stream);
        } else if (cuda::has_score_terms(params)) {
          launch_bwd_with_scores<kDType, kHeadDim>(params, device, stream);
        } else {
          launch_bwd<kDType, kHeadDim>(params, device, stream);
        }
      });
    });
  });
}

}  // namespace flash_attn::sm90
