// Which sequences of a call a launch works on.
#pragma once

#include <type_traits>

#include "../../core/sequences.h"
#include "tile_mask.cuh"

namespace flash_attn {

// The parameters of a kernel with this policy. Params: FwdParams or BwdParams.
template <typename Params, typename ScorePolicy>
using ParamsOf =
    std::conditional_t<kSkipsTiles<ScorePolicy>, Masked<Params>,
                       std::conditional_t<ScorePolicy::kGeneral, OfSequences<Params>, Params>>;

template <typename Params>
__device__ __forceinline__ bool is_chosen(const Params&, int /*batch_idx*/) {
  return true;
}
// batch_idx: as a scheduler names it. The rows before the first sequence and behind the last go
// with all.
template <typename Params>
__device__ __forceinline__ bool is_chosen(const OfSequences<Params>& params, int batch_idx) {
  if (params.chosen == nullptr) return true;
  return batch_idx >= 0 && batch_idx < params.batch && params.chosen[batch_idx] != 0;
}

}  // namespace flash_attn
