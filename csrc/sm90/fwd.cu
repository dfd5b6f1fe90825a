#include "fwd.h"

#include "config.h"

namespace flash_attn::sm90 {

void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    if (params.num_splits > 1) {
      with_pieces_class(params.head_dim, [&]<int kHeadDim> {
        launch_fwd_in_pieces<kDType, kHeadDim>(params, device, stream);
      });
    } else if (has_score_terms(params)) {
      with_scores_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
        launch_fwd_with_scores<kDType, kHeadDim>(params, device, stream);
      });
    } else {
      with_head_dim_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim, int kHeadDimV> {
        launch_fwd<kDType, kHeadDim, kHeadDimV>(params, device, stream);
      });
    }
  });
}

}  // namespace flash_attn::sm90
