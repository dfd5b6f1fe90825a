// A consumer warpgroup of the backward kernel: the steps of its walk over the queries.
#pragma once

#include "../cuda/attn/key_gradient.cuh"
#include "../cuda/ptx/opaque.cuh"
#include "../cuda/tile/smem_operand.cuh"
#include "bwd_scores.cuh"
#include "bwd_traits.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

enum BwdBarrier : int {  // 0 is __syncthreads
  kTogether = 1,
  kHeadStart
};

// Where a consumer stands in the ring of the blocks of a bias.
template <typename Traits, bool kHasOne = Traits::kAdditive>
struct BwdTermPlace {
  __device__ __forceinline__ explicit BwdTermPlace(BwdSharedStorage<Traits>&) {}
};
template <typename Traits>
struct BwdTermPlace<Traits, true> {
  Ring<Traits::kTermStages> term_ring;

  __device__ __forceinline__ explicit BwdTermPlace(BwdSharedStorage<Traits>& smem)
      : term_ring(smem.term_ring) {}
};

// What a consumer keeps from tile to tile.
template <typename Traits>
struct BwdConsumer : BwdTermPlace<Traits> {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using ScoresOperand = typename Traits::ScoresOperand;
  using QueryGradient = typename Traits::QueryGradient;
  using HeldOperand = OperandA<1, Traits::kHeadDim>;

  const typename Traits::Params& params;
  BwdSharedStorage<Traits>& smem;
  const int warpgroup;
  int lane, warp_row;  // warp_row: the first of the warp's 16 keys in the block
  const float scale_log2;
  Ring<Traits::kStages> q_ring;  // dO's is in step with it
  Ring<Traits::kScoreStages> ds_ring;
  Ring<1> k_ring;  // V's is in step with it
  Ring<Traits::kTurnStages> turn_ring;
  WorkReader<BwdWork, 2> queue;

  __device__ __forceinline__ BwdConsumer(const typename Traits::Params& params,
                                         BwdSharedStorage<Traits>& smem, int consumer)
      : BwdTermPlace<Traits>(smem),
        params(params),
        smem(smem),
        warpgroup(consumer),
        scale_log2(Traits::RowValues::scale_log2(params.softmax_scale)),
        q_ring(smem.q_ring),
        ds_ring(smem.ds_ring),
        k_ring(smem.k_ring),
        turn_ring(smem.turn_ring),
        queue(smem.queue) {}

  // Called at the start of a tile. What follows from the thread's number is computed anew in each,
  // as there are no registers to keep it.
  __device__ __forceinline__ void place_thread() {
    const unsigned thread = flash_attn::ptx::opaque(threadIdx.x);
    lane = thread % 32;
    warp_row = warpgroup * 64 + thread / 32 % 4 * 16;
  }

  // The consumers come to a tile together, and the second begins when the first has issued its
  // scores and their gradient. If they began together, they would do their exponentials together,
  // too, iteration after iteration, and the tensor cores would have nothing to do meanwhile; if the
  // second came an iteration later, the first would wait for its dS all the time.
  __device__ __forceinline__ void await_start() const {
    if (warpgroup == 0) {
      ptx::barrier_sync<Traits::kConsumerThreads>(kTogether);
    } else {
      ptx::barrier_arrive<Traits::kConsumerThreads>(kTogether);
      ptx::barrier_sync<Traits::kConsumerThreads>(kHeadStart);
    }
  }
  __device__ __forceinline__ void give_head_start() const {
    if (warpgroup == 0) ptx::barrier_arrive<Traits::kConsumerThreads>(kHeadStart);
  }

  // Says that the reductions of the tile have been issued.
  __device__ __forceinline__ void say_summed() const {
    __syncwarp();
    if (lane == 0) queue.in(smem.summed_ring).arrive_full();
  }

  // The number of this thread among those of all consumers.
  __device__ __forceinline__ int thread() const { return threadIdx.x - 128; }
  // The lane, as a value that the compiler does not know. What follows from it alone is not
  // computed before the loop, where it would take registers.
  __device__ __forceinline__ int opaque_lane() const {
    return static_cast<int>(flash_attn::ptx::opaque(lane));
  }

  // The warp is done with the stage.
  template <int kStages>
  __device__ __forceinline__ void release(const Ring<kStages>& ring) const {
    if (lane == 0) ring.arrive_empty();
  }

  __device__ __forceinline__ Ring<Traits::kStages> dout_ring() const {
    return q_ring.in(smem.dout_ring);
  }
  __device__ __forceinline__ Ring<1> v_ring() const { return k_ring.in(smem.v_ring); }
  // The ring of what dropout keeps.
  __device__ __forceinline__ Ring<Traits::kScoreStages> kept_ring() const {
    return ds_ring.in(smem.term_ring);
  }

  // Reads this warp's keys of K or V into an operand in registers, once they are there.
  __device__ __forceinline__ void hold(HeldOperand& held,
                                       const typename Traits::KTile& tile) const {
    const SmemOperand<Side::kA, Layout::kKInner, typename Traits::KTile> rows(tile, warp_row, lane);
#pragma unroll
    for (int k = 0; k < Traits::kHeadDim; k += 16) rows.load(held.data[0][k / 16], 0, k);
  }
  __device__ __forceinline__ void hold(typename Traits::Nothing,
                                       const typename Traits::KTile&) const {}

  // Starts Sᵀ = K Qᵀ of this consumer's keys; the next function starts dPᵀ = V dOᵀ.
  __device__ __forceinline__ void start_scores(Scores& S, typename Traits::HeldK& K) const {
    const auto& lse = smem.row_values[q_ring.stage()].lse;
    const auto ones = lse.ones();
    start_product(S, K, smem.k, smem.q[q_ring.stage()]);
    lse.subtract_from(S, ones);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void start_score_gradient(Scores& dP,
                                                       typename Traits::HeldV& V) const {
    const auto& delta = smem.row_values[q_ring.stage()].delta;
    const auto ones = delta.ones();
    start_product(dP, V, smem.v, smem.dout[q_ring.stage()]);
    delta.subtract_from(dP, ones);
    ptx::wgmma_commit();
  }

  // Starts dV += Pᵀ dO or dK += dSᵀ Q. The rounded scores are registers, and queries are their
  // columns, of which those from kFirst to kEnd count.
  template <int kFirst = 0, int kEnd = Traits::kBlockM>
  __device__ __forceinline__ void start_key_gradient(typename Traits::KeyGradient& gradient,
                                                     ScoresOperand& scores,
                                                     const typename Traits::QTile& tile) const {
    gemm_rs<Element, kFirst, kEnd>(gradient, scores,
                                   WgmmaOperand<Layout::kKOuter, typename Traits::QTile>(tile));
    ptx::wgmma_commit();
  }

  // Waits until what lay in the next stage of dS has been copied to the gradient of the bias.
  __device__ __forceinline__ void await_copies() const {
    if (params.dbias.form != BiasGradientParams::Form::kNone) ds_ring.wait_empty();
  }

  // Starts this consumer's share of dQ = dS K, over all keys of the block.
  __device__ __forceinline__ void start_query_gradient(QueryGradient& dQ,
                                                       const typename Traits::ScoreTile& ds) const {
    constexpr Layout kLayout = Traits::kAdditive ? Layout::kKInner : Layout::kKOuter;
    using DS = WgmmaOperand<kLayout, typename Traits::ScoreTile>;
    gemm_ss<Element, Traits::kBlockN, Into::kZero>(dQ, DS(ds, dq_first_row()), dq_keys());
    ptx::wgmma_commit();
  }

  // Where this consumer's first row and column of a block's dQ lie.
  __device__ __forceinline__ int dq_first_row() const {
    return Traits::kDqShare == DqShare::kRows ? warpgroup * 64 : 0;
  }
  __device__ __forceinline__ int dq_first_col() const {
    return Traits::kDqShare == DqShare::kCols ? warpgroup * Traits::kDqCols : 0;
  }
  // That of this warp.
  __device__ __forceinline__ DqPlace dq_place() const {
    return {.row = dq_first_row() + warp_row % 64, .col = dq_first_col(), .lane = lane};
  }

 private:
  // The columns of K that this consumer's columns of dQ come from.
  __device__ __forceinline__ auto dq_keys() const {
    using K = WgmmaOperand<Layout::kKOuter, typename Traits::KTile>;
    if constexpr (Traits::kRepeatsKeys) {
      return K(warpgroup == 0 ? smem.k : smem.right_k);
    } else {
      return K(smem.k, dq_first_col());
    }
  }
  // Starts a product of this consumer's keys, which are held in registers or lie in the tile.
  __device__ __forceinline__ void start_product(Scores& C, HeldOperand& held,
                                                const typename Traits::KTile&,
                                                const typename Traits::QTile& rows) const {
    gemm_rs<Element, Into::kZero>(C, held, queries(rows));
  }
  __device__ __forceinline__ void start_product(Scores& C, typename Traits::Nothing,
                                                const typename Traits::KTile& tile,
                                                const typename Traits::QTile& rows) const {
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(C, keys(tile), queries(rows));
  }
  __device__ __forceinline__ auto keys(const typename Traits::KTile& tile) const {
    return WgmmaOperand<Layout::kKInner, typename Traits::KTile>(
        tile, flash_attn::ptx::opaque(warpgroup) * 64);
  }
  __device__ __forceinline__ static auto queries(const typename Traits::QTile& tile) {
    return WgmmaOperand<Layout::kKInner, typename Traits::QTile>(tile);
  }
};

// Stores a tile of columns of dK or dV of this warp's keys, from first_col on, which lie at `col`
// of the gradient. They go through an empty stage of dS: nobody else touches this warp's rows there
// before all consumers have come to the next tile (await_start).
template <typename Traits, int kCols>
__device__ __forceinline__ void store_key_gradient_cols(const BwdConsumer<Traits>& self,
                                                        const BwdWork& work,
                                                        const Accumulator<1, kCols>& gradient,
                                                        int col, int first_col, void* tensor,
                                                        const Strides& strides, int num_cols) {
  using Tile = typename Traits::GradientTile;
  const KeyGradientRows rows(work.seqlen, work.batch_idx, work.kv.head, work.first_key);
  if constexpr (Traits::kSplits) {
    if (self.params.wide_key_gradients) {
      rows.template store_wide<Tile::kCols>(static_cast<float*>(tensor) + first_col, strides,
                                            num_cols - first_col, gradient, col, self.warp_row,
                                            self.lane);
      return;
    }
  }
  auto& tile = reinterpret_cast<Tile&>(self.smem.ds[self.ds_ring.stage()]);
  __syncwarp();
  store_rounded(tile, gradient, col, self.warp_row, self.lane);
  __syncwarp();
  rows.template store<16, 32>(static_cast<typename Traits::Element*>(tensor) + first_col, strides,
                              num_cols - first_col, tile, self.warp_row, self.lane);
}

// Stores all columns.
template <typename Traits>
__device__ __forceinline__ void store_key_gradient(const BwdConsumer<Traits>& self,
                                                   const BwdWork& work,
                                                   const typename Traits::KeyGradient& gradient,
                                                   void* tensor, const Strides& strides,
                                                   int num_cols) {
  if constexpr (Traits::kAdditive) self.await_copies();
#pragma unroll
  for (int col = 0; col < Traits::kHeadDim; col += Traits::GradientTile::kCols) {
    store_key_gradient_cols(self, work, gradient, col, col, tensor, strides, num_cols);
  }
}

}  // namespace flash_attn::sm90
