// The backward's launches for head dims above 256.
#pragma once

#include <type_traits>

#include "bwd.cuh"

namespace flash_attn::sm80 {

template <DType kDType, bool kScoreTerms>
void launch_bwd_large_head(const BwdParams& params, Stream stream) {
  using Traits = BwdTraits<kDType, kLargeHeadDim, kBwdLargeHeadTile,
                           std::conditional_t<kScoreTerms, GeneralScores, PlainScores>>;
  launch_bwd_kernel<Traits, SmemBudget::kLargest>(params, stream);
}

}  // namespace flash_attn::sm80
