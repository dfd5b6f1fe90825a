// A consumer warpgroup of the backward kernel: the steps of its walk over the queries.
#pragma once

#include "bwd_scores.cuh"
#include "bwd_traits.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

enum BwdBarrier : int {  // 0 is __syncthreads
  kConsumersDone = 1
};

// A consumer's place among the blocks of a bias.
template <typename Traits, bool kAdditive = Traits::kAdditive>
struct BwdBiasPlace {
  __device__ __forceinline__ explicit BwdBiasPlace(BwdSharedStorage<Traits>&) {}
};
template <typename Traits>
struct BwdBiasPlace<Traits, true> {
  Ring<Traits::kBiasStages> bias_ring;

  __device__ __forceinline__ explicit BwdBiasPlace(BwdSharedStorage<Traits>& smem)
      : bias_ring(smem.bias_ring) {}
};

// What a consumer keeps while it walks.
template <typename Traits>
struct BwdConsumer : BwdBiasPlace<Traits> {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using ScoresOperand = typename Traits::ScoresOperand;
  using QueryGradient = typename Traits::QueryGradient;

  const BwdParams& params;
  BwdSharedStorage<Traits>& smem;
  const BwdWork& work;
  const int warpgroup, lane;
  const int warp_row;  // of the warp's 16 keys in the block
  const float scale_log2;
  Ring<Traits::kStages> q_ring, dout_ring;
  Ring<Traits::kScoreStages> ds_ring;

  __device__ __forceinline__ BwdConsumer(const BwdParams& params, BwdSharedStorage<Traits>& smem,
                                         int consumer)
      : BwdBiasPlace<Traits>(smem),
        params(params),
        smem(smem),
        work(smem.work()),
        warpgroup(consumer),
        lane(threadIdx.x % 32),
        warp_row(consumer * 64 + threadIdx.x / 32 % 4 * 16),
        scale_log2(params.softmax_scale * kLog2E),
        q_ring(smem.q_ring),
        dout_ring(smem.dout_ring),
        ds_ring(smem.ds_ring) {}

  // Of all consumers.
  __device__ __forceinline__ int thread() const { return threadIdx.x - 128; }
  // What follows from it alone is not computed before the loop, where it would take registers.
  __device__ __forceinline__ int opaque_lane() const {
    return static_cast<int>(flash_attn::ptx::opaque(lane));
  }

  // The warp is done with the slot.
  template <int kSlots>
  __device__ __forceinline__ void release(Ring<kSlots>& ring) const {
    if (lane == 0) ring.arrive_empty();
    ring.advance();
  }

  // Starts Sᵀ = K Qᵀ of this consumer's keys; dPᵀ = V dOᵀ.
  __device__ __forceinline__ void start_scores(Scores& S) const {
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(S, keys(smem.k),
                                                    queries(smem.q[q_ring.stage()]));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void start_score_gradient(Scores& dP) const {
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(dP, keys(smem.v),
                                                    queries(smem.dout[dout_ring.stage()]));
    ptx::wgmma_commit();
  }

  // Starts dV += Pᵀ dO or dK += dSᵀ Q: the rounded scores are registers, queries their columns.
  __device__ __forceinline__ void start_key_gradient(typename Traits::KeyGradient& gradient,
                                                     ScoresOperand& scores,
                                                     const typename Traits::QTile& tile) const {
    gemm_rs<Element>(gradient, scores, WgmmaOperand<Layout::kKOuter, typename Traits::QTile>(tile));
    ptx::wgmma_commit();
  }

  // Starts this consumer's share of dQ = dS K, over all keys of the block.
  __device__ __forceinline__ void start_query_gradient(QueryGradient& dQ,
                                                       const typename Traits::ScoreTile& ds) const {
    using DS = WgmmaOperand<Layout::kKOuter, typename Traits::ScoreTile>;
    using K = WgmmaOperand<Layout::kKOuter, typename Traits::KTile>;
    gemm_ss<Element, Traits::kBlockN, Into::kZero>(dQ, DS(ds, dq_first_row()),
                                                   K(smem.k, dq_first_col()));
    ptx::wgmma_commit();
  }

  // Where this consumer's first row and column of a block's dQ lie.
  __device__ __forceinline__ int dq_first_row() const {
    return Traits::kDqShare == DqShare::kRows ? warpgroup * 64 : 0;
  }
  __device__ __forceinline__ int dq_first_col() const {
    return Traits::kDqShare == DqShare::kCols ? warpgroup * Traits::kDqCols : 0;
  }

 private:
  __device__ __forceinline__ auto keys(const typename Traits::KTile& tile) const {
    return WgmmaOperand<Layout::kKInner, typename Traits::KTile>(tile, warpgroup * 64);
  }
  __device__ __forceinline__ static auto queries(const typename Traits::QTile& tile) {
    return WgmmaOperand<Layout::kKInner, typename Traits::QTile>(tile);
  }
};

}  // namespace flash_attn::sm90
