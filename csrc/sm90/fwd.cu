#include "fwd.h"

#include "config.h"

namespace flash_attn::sm90 {
namespace {

// One term that kernels of their own serve: softcap or ALiBi. Not a bias: FwdForm::kStagedBias has not
// been seen right on a GPU since a race in it was fixed.
bool has_one_term(const FwdParams& params) {
  const ScoreParams& score = params.score;
  return (score.softcap != 0) + (score.alibi_slopes != nullptr) == 1 &&
         score.bias.data == nullptr && params.dropout.rng_state == nullptr;
}

}  // namespace

void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    if (params.num_splits > 1) {
      with_pieces_class(params.head_dim, [&]<int kHeadDim> {
        launch_fwd_in_pieces<kDType, kHeadDim>(params, device, stream);
      });
    } else if (has_score_terms(params) && params.head_dim <= kOneTermHeadDim &&
               params.head_dim_v <= kOneTermHeadDim && has_one_term(params)) {
      with_one_term_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
        launch_fwd_with_one_term<kDType, kHeadDim>(params, device, stream);
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
