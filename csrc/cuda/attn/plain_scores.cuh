// The score policy of plain calls: it holds nothing, and its calls vanish. score_policy.cuh says
// what the calls mean.
#pragma once

#include <cfloat>
#include <cstdint>

#include "../../core/params.h"
#include "../tile/fragment.cuh"
#include "softmax_bwd.cuh"

namespace flash_attn {

// Query and key of a warp's first row and column of scores, counted in their sequence.
struct ScorePlace {
  int query, key;
};

struct PlainScores {
  static constexpr bool kGeneral = false;
  static constexpr float kLeastMax = -FLT_MAX;  // where the softmax starts

  PlainScores() = default;
  template <typename Params>
  __device__ __forceinline__ PlainScores(const Params&, int /*batch_idx*/, int /*head*/,
                                         int64_t /*diagonal*/) {}
  template <typename Scores>
  __device__ __forceinline__ void finish(Scores&, ScorePlace, int /*lane*/) const {}
  template <typename Scores>
  __device__ __forceinline__ void finish(Scores&, Scores& /*slope*/, ScorePlace,
                                         int /*lane*/) const {}
  template <typename Element, typename Scores>
  __device__ __forceinline__ void add_bias(Scores&, const BiasParams&, ScorePlace,
                                           int /*lane*/) const {}
  __device__ __forceinline__ uint32_t draw_query_word(const DropoutParams&, int /*first_query*/,
                                                      int /*lane*/) const {
    return 0;
  }
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void drop(OperandA<kMBlocks, kN>&, const DropoutParams&, ScorePlace,
                                       int /*lane*/) const {}
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void gradient(Accumulator<kMBlocks, kN>& dP,
                                           const Accumulator<kMBlocks, kN>& P,
                                           const float (&delta)[2 * kMBlocks], const DropoutParams&,
                                           ScorePlace, int /*lane*/) const {
    softmax_gradient(dP, P, delta);
  }
  template <typename Element, typename Scores>
  __device__ __forceinline__ void store_bias_gradient(const Scores&, const BiasGradientParams&,
                                                      const DropoutParams&, int /*batch_idx*/,
                                                      int /*head*/, ScorePlace,
                                                      int /*lane*/) const {}
  template <typename Scores>
  __device__ __forceinline__ void differentiate(Scores&, const Scores&) const {}
  __device__ __forceinline__ static constexpr float output_scale(const DropoutParams&) {
    return 1.f;
  }
};

}  // namespace flash_attn
