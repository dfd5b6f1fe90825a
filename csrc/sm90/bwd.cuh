// Backward attention for Hopper: wgmma and TMA, loads and products in different warps.
//
//   P  = exp(softmax_scale · Q Kᵀ - LSE), masked        dV = Pᵀ dO
//   dS = P ∘ (dO Vᵀ - delta)                            dK = softmax_scale · dSᵀ Q
//   delta = rowsum(dO ∘ O) - dLSE                       dQ = softmax_scale · dS K
//
// A thread block owns kBlockN keys of one kv head; K, V and the sums dK, dV stay with it while it
// walks over the query heads that read this kv head and over their queries in blocks of kBlockM.
// Nobody else adds to its dK and dV: the same bits every time. dQ is summed over thread blocks by
// fp32 reductions in global memory. Roles:
//
//   producer warpgroup    warp 0: K, Q     warp 1: V, dO      consumer warpgroups    64 keys each:
//   (few registers)       warp 2: LSE and delta               (many registers)       S, dP, dK, dV
//
// Scores are computed transposed, Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, keys as rows: then Pᵀ and dSᵀ are
// register operands of dV and dK as they come, and only dS goes through shared memory, for dQ, which
// needs the keys of all consumers.
//
// The plain loop of a consumer:
//
//   for each block of queries:  Sᵀ = K Qᵀ; score terms; P = exp(S - LSE); mask      dPᵀ = V dOᵀ
//                               dV += Pᵀ dO;  dS = P ∘ (dP - delta)     → dS to shared memory
//                               barrier                                 // the other consumer's dS
//                               dK += dSᵀ Q;  dQ += dS K                // reductions, from registers
//
// The loop here departs from it in two ways. dK and dQ of a block are issued beside the scores of the
// next, so that nothing waits for its dS to reach shared memory; and consumers meet at no barrier:
// each says when its dS lies there, and waits for the other's only before dQ, half an iteration
// later. So one's exponentials hide behind the other's products (i: the iteration):
//
//   issue      │ dK (i-1), S (i) │ dP (i)    │ dV (i), dQ (i-1)       │                │
//   meanwhile  │                 │ exp       │ dS, store              │ reduce dQ      │
//   products   │ dK, S           │ dP        │ dV, dQ                 │ the other's    │
//
// Compiled for several forms (BwdForm): without score terms, with all of them (cuda/attn/score_policy.cuh),
// and with some. With all, what dS consists of beside dP is rounded together with P (exponentiate),
// and dQ(i-1) begins behind dS.
//
// Shared memory   │ K, in the end dK │ V, in the end dV │ Q × kStages │ dO × kStages │ dS × 3 │
//                 │ LSE, delta × kStages │ work, barriers │
#pragma once

#include <new>

#include "../cuda/attn/key_gradient.cuh"
#include "../cuda/launch.h"
#include "../cuda/ptx/griddepcontrol.cuh"
#include "bwd.h"
#include "bwd_consumer.cuh"
#include "bwd_dq_reduction.cuh"
#include "bwd_producer.cuh"

namespace flash_attn::sm90 {

// A consumer's walk over the queries; leaves its sums dK (not yet scaled) and dV.
template <typename Traits>
class QueryWalk {
  using Element = typename Traits::Element;
  using Consumer = BwdConsumer<Traits>;
  static constexpr bool kGeneral = Traits::ScorePolicy::kGeneral;
  static constexpr bool kWeighted = kGeneral && !Traits::kAdditive;  // dS is not P ∘ (dP - delta)
  // With all score terms, dQ begins when dP has been used up: there are no registers for both.
  static constexpr bool kLateDq = kWeighted && !Traits::kStashes;

 public:
  __device__ __forceinline__ QueryWalk(Consumer& self, typename Traits::KeyGradient& dK,
                                       typename Traits::KeyGradient& dV)
      : self(self),
        dK(dK),
        dV(dV),
        block(self.work),
        full_begin(self.work.range.full_begin),
        full_end(self.work.range.full_end),
        q_done(self.q_ring),
        ds_done(self.ds_ring),
        reduction(self.params, self.work, block, self.dq_first_row() + self.warp_row % 64,
                  self.dq_first_col(), self.lane) {}

  __device__ __forceinline__ void run() {
    if (!block.more()) return;
    Ring<1>(self.smem.k_ring).wait_full();
    Ring<1>(self.smem.v_ring).wait_full();
    step<true>();
#pragma unroll 1
    while (block.more()) step<false>();
    finish();
  }

 private:
  // The first has no block before it.
  template <bool kFirst>
  __device__ __forceinline__ void step() {
    typename Traits::Scores S, dP;
    typename Traits::QueryGradient dQ;
    QueryPairs<Traits::kBlockM> lse_log2;
    const auto& row_values = self.smem.row_values[self.q_ring.stage()];
    if constexpr (!kFirst) start_dk();
    self.q_ring.wait_full();
    self.start_scores(S);  // Sᵀ = K Qᵀ
    if constexpr (!kGeneral) {
      lse_log2 = QueryPairs<Traits::kBlockM>(row_values.lse_log2, self.lane);
    }
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();
      end_dk();
    }
    ptx::wgmma_wait<0>();
    pin(S);
    self.dout_ring.wait_full();
    self.start_score_gradient(dP);  // dPᵀ = V dOᵀ
    const bool masked = block.m < first_full() || block.m >= end_full();
    typename Traits::ScoresOperand P;
    if constexpr (kWeighted) {
      const auto& score = self.smem.score(block.head);
      const auto with = [&](const auto& terms) {
        exponentiate<Element>(P, dS, S, terms, self.params, self.scale_log2, row_values.lse_log2,
                              masked, self.work, place(), self.lane);
        if constexpr (Traits::kStashes) stash(self.smem.stash, self.thread(), dS);
      };
      if constexpr (!Traits::kStashes) {
        with(score);
      } else if (score.cap() > 0.f) {
        with(TermScores<ScoreTerms{.softcap = true}>(score));
      } else {
        with(TermScores<ScoreTerms{.dropout = true}>(score));
      }
    } else {
      if constexpr (kGeneral) {
        finish_scores(S);
        lse_log2 = QueryPairs<Traits::kBlockM>(row_values.lse_log2, self.opaque_lane());
      }
      exponentiate(S, self.scale_log2, lse_log2, masked, self.work, self.warp_row,
                   block.m * Traits::kBlockM, self.lane);
      P = to_operand_a<Element>(S);
    }
    self.start_key_gradient(dV, P, self.smem.dout[self.dout_ring.stage()]);  // dV += Pᵀ dO
    if constexpr (!kFirst && !kLateDq) start_dq(dQ);
    ptx::wgmma_wait<kFirst || kLateDq ? 1 : 2>();
    pin(dP);
    // dS = P ∘ (dP - delta)
    if constexpr (kWeighted) {
      if constexpr (Traits::kStashes) take_back(dS, self.smem.stash, self.thread());
      differentiate_weights<Element>(dS, dP, row_values.delta, self.opaque_lane());
    } else {
      differentiate<Element>(dS, dP, P, row_values.delta, self.lane);
    }
    if constexpr (!kFirst && kLateDq) ds_done.wait_full();
    store_operand(self.smem.ds[self.ds_ring.stage()], dS, self.warp_row, self.lane);
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    __syncwarp();
    if (self.lane == 0) self.ds_ring.arrive_full();
    self.ds_ring.advance();
    if constexpr (!kFirst && kLateDq) start_dq(dQ);
    ptx::wgmma_wait<kFirst ? 0 : 1>();
    pin(dV);
    pin(P);
    self.release(self.dout_ring);
    if constexpr (!kFirst) end_dq(dQ);
    self.q_ring.advance();
    block.advance();
  }

  // Of this warp's scores.
  __device__ __forceinline__ ScorePlace place() const {
    return {block.m * Traits::kBlockM, self.work.first_key + self.warp_row};
  }

  // Terms that are added to S.
  __device__ __forceinline__ void finish_scores(typename Traits::Scores& S) {
    const auto& score = self.smem.score(block.head);
    score.template finish<true>(S, place(), self.lane);
    if (self.params.score.bias.data == nullptr) return;
    self.bias_ring.wait_full();
    add_bias(S, self.smem.bias[self.bias_ring.stage()], score.inverse_scale(), self.warp_row,
             self.opaque_lane());
    // Reads that are still under way would meet what TMA writes next.
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    __syncwarp();
    self.release(self.bias_ring);
  }

  // The blocks that need no mask. With score terms registers are too short for them.
  __device__ __forceinline__ int first_full() const {
    return kGeneral ? self.work.range.full_begin : full_begin;
  }
  __device__ __forceinline__ int end_full() const {
    return kGeneral ? self.work.range.full_end : full_end;
  }

  // Of the block before: dK += dSᵀ Q, dQ = dS K, which wants the dS of all consumers.
  __device__ __forceinline__ void start_dk() {
    self.start_key_gradient(dK, dS, self.smem.q[q_done.stage()]);
  }
  __device__ __forceinline__ void end_dk() {
    pin(dK);
    pin(dS);
    self.release(q_done);
  }
  __device__ __forceinline__ void start_dq(typename Traits::QueryGradient& dQ) {
    ds_done.wait_full();
    self.start_query_gradient(dQ, self.smem.ds[ds_done.stage()]);
    ds_done.advance();
    reduction.advance();
  }
  __device__ __forceinline__ void end_dq(typename Traits::QueryGradient& dQ) {
    ptx::wgmma_wait<0>();
    pin(dQ);
    reduction.add(dQ);
  }

  __device__ __forceinline__ void finish() {
    typename Traits::QueryGradient dQ;
    start_dk();
    start_dq(dQ);
    end_dq(dQ);
    end_dk();
  }

  Consumer& self;
  typename Traits::KeyGradient &dK, &dV;
  typename Traits::ScoresOperand
      dS;  // of the block before; then this one's weights, if there are any
  QueryBlocks block;
  const int full_begin, full_end;  // read here, not in the loop: the reductions hold up such reads
  Ring<Traits::kStages> q_done;    // the block before
  Ring<Traits::kScoreStages> ds_done;
  DqReduction<Traits::kBlockM, Traits::kHeadDim> reduction;
};

// What the score terms of a head are. A place in the ring is empty: the head before the last, whose
// terms lay here, is done with.
template <typename Traits, typename Ring>
__device__ __forceinline__ void start_scores_of_head(const BwdParams& params,
                                                     BwdSharedStorage<Traits>& smem, int head,
                                                     const Ring& ring) {
  if constexpr (Traits::ScorePolicy::kGeneral) {
    const BwdWork& work = smem.work();
    ring.wait_empty();
    if (threadIdx.x % 32 == 0) {
      new (smem.score_storage[head % 2])
          typename Traits::ScorePolicy(params, work.batch_idx, head, work.seqlen.diagonal(params));
    }
  }
}

// dK and dV of this warp's keys, through shared memory that only it uses by now.
template <typename Traits>
__device__ __forceinline__ void store_key_gradients(const BwdConsumer<Traits>& self,
                                                    typename Traits::KeyGradient& dK,
                                                    typename Traits::KeyGradient& dV) {
  const BwdParams& params = self.params;
  const BwdWork& work = self.work;
  const float scale = Traits::ScorePolicy::output_scale(params.dropout);
  const float dk_scale = params.softmax_scale * scale;
  scale_rows(dK, {dk_scale, dk_scale});
  if constexpr (Traits::ScorePolicy::kGeneral) scale_rows(dV, {scale, scale});
  ptx::barrier_sync<Traits::kConsumerThreads>(kConsumersDone);  // all their dQ have read K
  store_rounded(self.smem.k, dK, 0, self.warp_row, self.lane);
  store_rounded(self.smem.v, dV, 0, self.warp_row, self.lane);
  __syncwarp();
  const KeyGradientRows rows(work.seqlen, work.batch_idx, work.kv.head, work.first_key);
  rows.template store<16, 32>(params.dk, params.dk_strides, params.head_dim, self.smem.k,
                              self.warp_row, self.lane);
  rows.template store<16, 32>(params.dv, params.dv_strides, params.head_dim_v, self.smem.v,
                              self.warp_row, self.lane);
}

template <typename Traits>
__device__ __forceinline__ void bwd_consumer_loop(const BwdParams& params,
                                                  BwdSharedStorage<Traits>& smem, int consumer) {
  BwdConsumer<Traits> self(params, smem, consumer);
  typename Traits::KeyGradient dK, dV;
  dK.fill(0.f);
  dV.fill(0.f);
  QueryWalk<Traits>(self, dK, dV).run();
  store_key_gradients(self, dK, dV);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdParams params,
               const __grid_constant__ typename Traits::Scheduler scheduler,
               const __grid_constant__ BwdTermMaps<Traits::kAdditive> maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<BwdSharedStorage<Traits>*>(dynamic_smem);
  const TileCoordinates tile = scheduler.tile(blockIdx.x);
  const SeqlenInfo seqlen(params, tile.batch_idx);
  if (tile.block * Traits::kBlockN >= seqlen.segment_k) {
    // Without this the grid could end before the one that zeroes dq_accum.
    flash_attn::ptx::wait_for_prerequisites();
    return;
  }
  if (threadIdx.x == 0) {
    smem.init_barriers();
    new (smem.work_storage)
        BwdWork(BwdWork::make<Traits::kBlockM, Traits::kBlockN>(params, tile, seqlen));
  }
  smem.zero_absent_slabs(params);
  __syncthreads();
  flash_attn::ptx::wait_for_prerequisites();  // for delta, and zeros in dq_accum

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    const BwdWork& work = smem.work();
    if (warp == 2) {
      const float delta_scale = Traits::ScorePolicy::kGeneral ? params.dropout.keep : 1.f;
      load_row_values_loop(params, work, smem.row_values, smem.q_ring, delta_scale,
                           [&](int head, const auto& ring) {
                             start_scores_of_head<Traits>(params, smem, head, ring);
                           });
    } else if (warp < 2 && work.has_queries() && ptx::elect_one()) {
      if (warp == 0) {
        load_keys(smem.k, maps.k, work, work.first_key, params.head_dim, smem.k_ring);
        load_queries_loop(smem.q, maps.q, work, params.head_dim, smem.q_ring);
      } else {
        load_keys(smem.v, maps.v, work, work.first_key, params.head_dim_v, smem.v_ring);
        load_queries_loop(smem.dout, maps.dout, work, params.head_dim_v, smem.dout_ring);
      }
    } else if (Traits::kAdditive && warp == 3 && params.score.bias.data != nullptr &&
               ptx::elect_one()) {
      if constexpr (Traits::kAdditive) {
        load_bias_loop(smem.bias, maps.bias, work, params.score.bias, smem.bias_ring);
      }
    }
  } else {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    bwd_consumer_loop<Traits>(params, smem, warp / 4 - 1);
  }
}

template <typename Traits>
void launch_bwd_kernel(const BwdParams& params, Stream stream) {
  using Storage = BwdSharedStorage<Traits>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  const auto scheduler = make_bwd_scheduler<typename Traits::Scheduler>(params, Traits::kHeadDim);
  if (scheduler.num_tiles() == 0) return;
  BwdTermMaps<Traits::kAdditive> maps = {
      make_bwd_tensor_maps(params, Traits::kBlockM, Traits::kBlockN, Traits::QTile::kSlabCols)};
  if constexpr (Traits::kAdditive) {
    if (params.score.bias.data != nullptr) {
      maps.bias = make_bias_map(params, Traits::BiasTile::kSlabCols, Traits::BiasTile::kRows);
    }
  }
  cuda::launch_overlapping<bwd_kernel<Traits>>(scheduler.num_tiles(), Traits::kThreads,
                                               sizeof(Storage), true, stream, params, scheduler,
                                               maps);
}

template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, Stream stream) {
  launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kPlain>>(params, stream);
}

template <DType kDType, int kHeadDim>
void launch_bwd_with_scores(const BwdParams& params, Stream stream) {
  launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kScores>>(params, stream);
}

template <DType kDType, int kHeadDim>
void launch_bwd_with_some_terms(const BwdParams& params, Stream stream) {
  if (params.score.softcap != 0 || params.dropout.rng_state != nullptr) {
    launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kWeighted>>(params, stream);
  } else {
    launch_bwd_kernel<BwdTraits<kDType, kHeadDim, BwdForm::kAdditive>>(params, stream);
  }
}

}  // namespace flash_attn::sm90
