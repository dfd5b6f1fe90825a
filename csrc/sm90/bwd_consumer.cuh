// A consumer warpgroup of the backward kernel: the steps of its walk over the queries.
#pragma once

#include "../cuda/attn/dq_accum.cuh"
#include "../cuda/attn/mask.cuh"
#include "../cuda/attn/softmax_bwd.cuh"
#include "../cuda/ptx/red.cuh"
#include "bwd_traits.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

enum BwdBarrier : int {  // 0 is __syncthreads
  kConsumersDone = 1
};

// What a consumer keeps while it walks.
template <typename Traits>
struct BwdConsumer {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using ScoresOperand = typename Traits::ScoresOperand;
  using QueryGradient = typename Traits::QueryGradient;
  static constexpr int kPairs = Traits::kBlockM / 8;  // of neighbouring queries that a lane holds

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
      : params(params),
        smem(smem),
        work(smem.work()),
        warpgroup(consumer),
        lane(threadIdx.x % 32),
        warp_row(consumer * 64 + threadIdx.x / 32 % 4 * 16),
        scale_log2(params.softmax_scale * kLog2E),
        q_ring(smem.q_ring),
        dout_ring(smem.dout_ring),
        ds_ring(smem.ds_ring) {}

  // The warp is done with the slot.
  __device__ __forceinline__ void release(Ring<Traits::kStages>& ring) const {
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

  // One value for each of this lane's queries of the block, from row_values.
  __device__ __forceinline__ void load_pairs(float2 (&pairs)[kPairs], const float* values) const {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      pairs[n] = *reinterpret_cast<const float2*>(values + n * 8 + lane % 4 * 2);
    }
  }

  // P = exp(S - LSE), 0 where nothing is seen: after the exponential, which may overflow there.
  __device__ __forceinline__ void exponentiate(Scores& S, const float2 (&lse_log2)[kPairs],
                                               int first_query, bool masked) const {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = S.data[0][n][i];
        s = flash_attn::ptx::exp2(
            fmaf(s, scale_log2, -(i % 2 == 0 ? lse_log2[n].x : lse_log2[n].y)));
      }
    }
    if (masked) {
      const int key = work.first_key + warp_row + fragment_row(0, lane);
      mask_queries(S, work.window, {key, key + 8}, first_query, lane);
    }
  }

  // dS = P ∘ (dP - delta), the gradient of softmax_scale · S, from P as rounded: one set of
  // registers less.
  __device__ __forceinline__ void differentiate(ScoresOperand& dS, const Scores& dP,
                                                const ScoresOperand& P, const float* delta) const {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(delta + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int r = n % 2 * 2 + row;
        const float2 p = flash_attn::ptx::unpack<Element>(P.data[0][n / 2][r]);
        const float* const dp = dP.data[0][n] + 2 * row;
        dS.data[0][n / 2][r] =
            flash_attn::ptx::pack<Element>(p.x * (dp[0] - pair.x), p.y * (dp[1] - pair.y));
      }
    }
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

// A walk of its own over the blocks of queries: where a warp adds its 16 rows of each block's dQ.
template <typename Traits>
class DqReduction {
 public:
  __device__ __forceinline__ DqReduction(const BwdConsumer<Traits>& consumer,
                                         const QueryBlocks& first)
      : consumer_(consumer), block_(first) {}

  // To the first block, or the next one. Not right behind add(): an instruction that changes the
  // address waits until the reductions have been taken over.
  __device__ __forceinline__ void advance() {
    if (new_head_) {
      start_head();
    } else {
      accum_ += Traits::kBlockM * Traits::kHeadDim;
      rows_left_ -= Traits::kBlockM;
    }
    new_head_ = block_.advance();
  }

  // A block of 16 rows that the sequence lacks belongs to somebody else.
  __device__ __forceinline__ void add(const typename Traits::QueryGradient& dQ) const {
    if (rows_left_ <= 0) return;
#pragma unroll
    for (int n = 0; n < Traits::kDqCols / 8; ++n) {
      const float (&c)[4] = dQ.data[0][n];
      flash_attn::ptx::red_add_v4(accum_ + n * kDqAccumBlock, c[0], c[1], c[2], c[3]);
    }
  }

 private:
  __device__ __forceinline__ void start_head() {
    const BwdParams& params = consumer_.params;
    const BwdWork& work = consumer_.work;
    const int row = block_.m * Traits::kBlockM + consumer_.dq_first_row() + consumer_.warp_row % 64;
    rows_left_ = work.seqlen.len_q - row;
    const int64_t first = dq_accum_first_row(params, work.seqlen.q_begin, work.batch_idx);
    accum_ = params.dq_accum +
             (block_.head * params.dq_accum_rows + first + row) * Traits::kHeadDim +
             consumer_.dq_first_col() / 8 * kDqAccumBlock +
             dq_accum_position(DqAccumOrder::kByLane, consumer_.lane, 0);
  }

  const BwdConsumer<Traits>& consumer_;
  QueryBlocks block_;  // behind the one that is added to
  bool new_head_ = true;
  float* accum_;
  int rows_left_;
};

}  // namespace flash_attn::sm90
