// The backward of bwd.cuh for masks whose hidden tiles are skipped.
#pragma once

#include "bwd.cuh"

namespace flash_attn::sm80 {

// dQ by reductions only. Up to 128 the larger tiles' registers leave none for the mask.
template <DType kDType, int kHeadDim>
void launch_bwd_masked(const Masked<BwdParams>& params, Stream stream) {
  constexpr SmemBudget kBudget = kHeadDim <= 128 ? SmemBudget::kSmall : SmemBudget::kLarge;
  using Traits = BwdTraits<kDType, kHeadDim, kBwdTile<kHeadDim, kBudget>, MaskedScores>;
  launch_bwd_kernel<Traits, kBudget>(params, stream);
}

}  // namespace flash_attn::sm80
