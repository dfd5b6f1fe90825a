#include "fwd.h"

#include <algorithm>

#include "config.h"
#include "tile/tensor_map.h"

namespace flash_attn::sm90 {
namespace {

// One term that kernels of their own serve: softcap, ALiBi, dropout, or a bias that TMA can read.
bool has_one_term(const FwdParams& params) {
  const ScoreParams& score = params.score;
  const bool has_bias = score.bias.data != nullptr;
  const bool has_dropout = params.dropout.rng_state != nullptr;
  return (score.softcap != 0) + (score.alibi_slopes != nullptr) + has_bias + has_dropout == 1 &&
         (!has_bias || broadcasts_queries(score.bias) || can_stage_bias(params));
}

}  // namespace

void run_fwd_in_pieces(const FwdInPieces& params, const cuda::DeviceInfo& device, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    with_pieces_class(params.head_dim, [&]<int kHeadDim> {
      launch_fwd_in_pieces<kDType, kHeadDim>(params, device, stream);
    });
  });
}

void run_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  with_dtype(params.dtype, [&]<DType kDType> {
    if (params.max_logits != nullptr) {
      with_max_logits_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim, int kHeadDimV> {
        launch_fwd_with_max_logits<kDType, kHeadDim, kHeadDimV>(params, device, stream);
      });
    } else if (has_score_terms(params) && params.head_dim <= kOneTermHeadDim &&
               params.head_dim_v <= kOneTermHeadDim && has_one_term(params)) {
      with_one_term_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
        params.score.bias.data == nullptr
            ? launch_fwd_with_one_term<kDType, kHeadDim>(params, device, stream)
            : launch_fwd_with_bias<kDType, kHeadDim>(params, device, stream);
      });
    } else if (has_score_terms(params)) {
      with_scores_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
        launch_fwd_with_scores<kDType, kHeadDim>(params, device, stream);
      });
    } else {
      // The class between reads no pages (FwdTraits::kReadsPages).
      const int widest = std::max(params.head_dim, params.head_dim_v);
      const bool between = params.pages.entries != nullptr && widest > 128 && widest <= 160;
      const int head_dim = between ? 161 : params.head_dim;
      with_head_dim_class(head_dim, params.head_dim_v, [&]<int kHeadDim, int kHeadDimV> {
        launch_fwd<kDType, kHeadDim, kHeadDimV>(params, device, stream);
      });
    }
  });
}

void run_fwd_masked(const Masked<FwdParams>& params, int32_t* order, const cuda::DeviceInfo& device,
                    Stream stream) {
  const MaskOrder ordered = order_mask_tiles(params, order, device, stream);
  with_dtype(params.dtype, [&]<DType kDType> {
    with_masked_class(params.head_dim, params.head_dim_v, [&]<int kHeadDim> {
      launch_fwd_masked<kDType, kHeadDim>(params, ordered, device, stream);
    });
  });
}

}  // namespace flash_attn::sm90
