// dS of a warp's rows, for the kernels that compute it a second time: it stays in registers.
#pragma once

#include "../cuda/attn/score_policy.cuh"
#include "../cuda/attn/softmax_bwd.cuh"
#include "../cuda/tile/gemm.cuh"

namespace flash_attn::sm80 {

//   P = exp(Q Kᵀ - LSE), score terms, masked        dS = P ∘ (dO Vᵀ - delta)
//
// place: of the warp's first row and the tile's first key. slope: as GeneralScores::finish() leaves
// it.
template <typename Element, int kHeadDim, typename ScorePolicy, typename Rows, typename Cols,
          typename Scores, typename Mask>
__device__ __forceinline__ void compute_score_gradient(
    const BwdParams& params, const ScorePolicy& score, const Rows& Q, const Cols& K, const Rows& dO,
    const Cols& V, const float (&lse_log2)[Scores::kRows], const float (&delta)[Scores::kRows],
    ScorePlace place, bool masked, const Mask& mask, int lane, Scores& dS, Scores& slope) {
  Scores P;
  gemm_smem<Element, kHeadDim, Into::kZero>(P, Q, K);  // S = Q Kᵀ
  score.finish(P, slope, place, lane);
  score.template add_bias<BiasElement<Element>>(P, params.score.bias, place, lane);
  recompute_probabilities(P, params.softmax_scale * kLog2E, lse_log2, masked, mask);
  gemm_smem<Element, kHeadDim, Into::kZero>(dS, dO, V);       // dP = dO Vᵀ
  score.gradient(dS, P, delta, params.dropout, place, lane);  // dS = P ∘ (dP - delta)
}

}  // namespace flash_attn::sm80
