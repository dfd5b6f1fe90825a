// The backward of bwd.cuh for masks whose hidden tiles are skipped.
#pragma once

#include "bwd.cuh"

namespace flash_attn::sm80 {

// dQ by reductions only.
template <DType kDType, int kHeadDim>
void launch_bwd_masked(const Masked<BwdParams>& params, Stream stream) {
  using Traits = BwdTraits<kDType, kHeadDim, kBwdTile<kHeadDim, SmemBudget::kLarge>, MaskedScores>;
  launch_bwd_kernel<Traits, SmemBudget::kLarge>(params, stream);
}

}  // namespace flash_attn::sm80
