// The backward's launches of fp32.
#pragma once

#include <type_traits>

#include "bwd.cuh"

namespace flash_attn::sm80 {

template <DType kDType, int kHeadDim, bool kScoreTerms>
void launch_bwd_wide(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  using ScorePolicy = std::conditional_t<kScoreTerms, GeneralScores, PlainScores>;
  const auto launch = [&]<SmemBudget kBudget> {
    constexpr BwdTile kTile =
        kScoreTerms ? kBwdWideScoresTile<kHeadDim, kBudget> : kBwdWideTile<kHeadDim, kBudget>;
    using Traits = BwdTraits<kDType, kHeadDim, kTile, ScorePolicy>;
    launch_bwd_kernel<Traits, kBudget>(params, stream);
  };
  const SmemBudget budget = smem_budget(device.smem_optin_bytes);
  if constexpr (kHeadDim > kBwdWidePortableHeadDim) {
    launch.template operator()<SmemBudget::kLargest>();
  } else {
    if (budget == SmemBudget::kSmall) {
      launch.template operator()<SmemBudget::kSmall>();
    } else if (budget == SmemBudget::kLarge) {
      launch.template operator()<SmemBudget::kLarge>();
    } else {
      launch.template operator()<SmemBudget::kLargest>();
    }
  }
  if (params.dq_accum == nullptr) launch_bwd_dq<kDType, kHeadDim, ScorePolicy>(params, stream);
  if constexpr (kScoreTerms) {
    if (params.dbias.form == BiasGradientParams::Form::kShared) {
      launch_bwd_bias<kDType, kHeadDim>(params, stream);
    }
  }
}

}  // namespace flash_attn::sm80
