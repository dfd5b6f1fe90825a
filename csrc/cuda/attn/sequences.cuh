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

// Whether any may be chosen: a launch for the rest of a call seldom has a sequence, and its blocks
// need not look for their tiles to know that. All threads of a block call it.
template <typename Params>
__device__ __forceinline__ bool has_chosen(const Params&) {
  return true;
}
template <typename Params>
__device__ __forceinline__ bool has_chosen(const OfSequences<Params>& params) {
  constexpr int kMostFlags = 4096;  // of more, to read all takes longer than to find a tile
  if (params.chosen == nullptr || params.batch > kMostFlags) return true;
  int any = 0;
  for (int b = threadIdx.x; b < params.batch; b += blockDim.x) any |= params.chosen[b];
  return __syncthreads_or(any) != 0;
}

}  // namespace flash_attn
