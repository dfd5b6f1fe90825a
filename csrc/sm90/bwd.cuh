// Backward attention for Hopper: wgmma and TMA, loads and products in different warps.
//
//   P  = exp(softmax_scale · Q Kᵀ - LSE), masked        dV = Pᵀ dO
//   dS = P ∘ (dO Vᵀ - delta)                            dK = softmax_scale · dSᵀ Q
//   delta = rowsum(dO ∘ O) - dLSE                       dQ = softmax_scale · dS K
//
// A tile is kBlockN keys of one kv head; K, V and the sums dK, dV stay with the thread block while it
// walks over the query heads that read this kv head and over their queries in blocks of kBlockM.
// Nobody else adds to its dK and dV: the same bits every time. dQ is summed over thread blocks by
// fp32 reductions in global memory. A thread block takes tile after tile, and what the next one needs
// is loaded while dK and dV of this one go out. Where sequences are short, the sums of dQ are a pool in the
// L2 cache, and two warps make rows of dq of them meanwhile (bwd_dq_pool.cuh). Roles:
//
//   producer warpgroup    warp 0: K, V, Q, dO             consumer warpgroups    64 keys each:
//   (few registers)       warp 1: tiles, LSE, delta       (many registers)       S, dP, dK, dV
//                         warps 2, 3: the order of dQ's
//                         sums, or their pool; or a
//                         bias and its gradient; or
//                         dropout's words of queries
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
// The loop here departs from it in two ways. A consumer's products go on beside its arithmetic. And consumers
// meet at no barrier: each says when its dS lies there, and dQ comes an iteration late, when the other's
// dS has been there for a while. The first consumer has a head start of half an iteration, so that what
// one waits for hides behind the other's products (i: the iteration; dV in two halves of the queries):
//
//   issue      │ S (i)    │ dP (i) │ dV (i), half │ dV (i), half │ dQ (i-1), dK (i) │
//   meanwhile  │ read LSE │ exp    │ dS           │ dS, store    │ reduce dQ        │
//
// dS comes from P as fp32, dV from P as rounded, and there are no registers for both. So only half of P
// is rounded beside the other, and dV begins with it; the rest is rounded in its place, when its dS is
// done.
//
// Compiled for several forms (BwdForm): without score terms, with all of them (cuda/attn/score_policy.cuh),
// and with some. Softcap alone puts P times its slope in the place of P, dropout alone P with a sign.
//
// Shared memory   │ K │ V │ Q × kStages │ dO × kStages │ dS × 3, at the end of a tile dV and dK │
//                 │ LSE, delta × kStages │ pieces of dQ × 2 │ work × 2, barriers │
#pragma once

#include "../cuda/ptx/griddepcontrol.cuh"
#include "bwd_consumer.cuh"
#include "bwd_dq_order.cuh"
#include "bwd_dq_reduction.cuh"
#include "bwd_producer_loops.cuh"
#include "bwd_split.cuh"

namespace flash_attn::sm90 {

// A consumer's walk over the queries; leaves its sums dK (not yet scaled) and dV.
template <typename Traits>
class QueryWalk {
  using Element = typename Traits::Element;
  using Consumer = BwdConsumer<Traits>;
  static constexpr bool kGeneral = Traits::ScorePolicy::kGeneral;
  static constexpr int kEarly = Traits::kEarly;
  // Reads from shared memory are slow beside products. Of few queries, LSE and delta have room in registers
  // before they are needed, while S or dP is under way.
  static constexpr bool kReadsAhead = Traits::kPlainScores && Traits::kBlockM == 64;

 public:
  __device__ __forceinline__ QueryWalk(const BwdWork& work, Consumer& self,
                                       typename Traits::KeyGradient& dK,
                                       typename Traits::KeyGradient& dV)
      : work(work),
        self(self),
        dK(dK),
        dV(dV),
        block(work),
        full_begin(work.range.full_begin),
        full_end(work.range.full_end),
        reduction(self.params, work, block, self.dq_first_row() + self.warp_row % 64,
                  self.dq_first_col(), self.lane) {}

  __device__ __forceinline__ void run() {
    if (!block.more()) return;
    self.k_ring.wait_full();
    self.v_ring().wait_full();
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
    const auto& row_values = self.smem.row_values[self.q_ring.stage()];
    if constexpr (kFirst) self.await_start();
    self.q_ring.wait_full();
    self.start_scores(S);  // Sᵀ = K Qᵀ
    uint32_t key_word = 0;
    if constexpr (Traits::kWeighted) key_word = draw_key_word();
    LaneValues<Traits::kBlockM> lse;
    if constexpr (kReadsAhead) lse.read(row_values.lse_log2, self.lane);
    ptx::wgmma_wait<0>();
    pin(S);
    self.dout_ring().wait_full();
    self.start_score_gradient(dP);  // dPᵀ = V dOᵀ
    if constexpr (kFirst) self.give_head_start();
    const bool masked = block.m < first_full() || block.m >= end_full();
    const auto& dout = self.smem.dout[self.q_ring.stage()];
    typename Traits::ScoresOperand P;
    // dV += Pᵀ dO; dS = P ∘ (dP - delta)
    if constexpr (Traits::kStashesWeights) {
      exponentiate<Element>(P, dS, S, self.smem.score(work, block.head), self.params,
                            self.scale_log2, row_values.lse_log2, masked, work, place(), self.lane,
                            [&](int k, const auto& weights, const auto& marked) {
                              stash(self.smem.stash, self.thread(), k, weights, marked);
                            });
      self.start_key_gradient(dV, P, dout);
      ptx::wgmma_wait<1>();
      pin(dP);
      differentiate_weights<Element>(dS, self.smem.stash, self.thread(), dP, row_values.delta,
                                     self.opaque_lane());
    } else if constexpr (Traits::kWeighted) {
      if (drops()) {
        lse.read(row_values.lse_log2, self.opaque_lane());
        exponentiate(S, self.scale_log2, lse, masked, work, self.warp_row,
                     block.m * Traits::kBlockM, self.opaque_lane());
        negate_dropped(S, key_word);
        round_kept<Element>(P, self.smem.late_p, self.thread(), S);
      } else {
        const auto& score = self.smem.score(work, block.head);
        exponentiate_capped<Element>(P, self.smem.late_p, self.thread(), S, score.softcap_tanh(),
                                     score.cap() * self.scale_log2, row_values.lse_log2, masked,
                                     work, self.warp_row, block.m * Traits::kBlockM,
                                     self.opaque_lane());
      }
      self.template start_key_gradient<0, kEarly>(dV, P, dout);
      ptx::wgmma_wait<1>();
      pin(dP);
      differentiate_kept<Element, kEarly, Traits::kBlockM>(dS, S, dP, row_values.delta,
                                                           self.opaque_lane());
      take_late(P, self.smem.late_p, self.thread());
      self.template start_key_gradient<kEarly, Traits::kBlockM>(dV, P, dout);
      differentiate_kept<Element, 0, kEarly>(dS, S, dP, row_values.delta, self.opaque_lane());
    } else {
      if constexpr (kGeneral) finish_scores(S);
      if constexpr (!kReadsAhead) lse.read(row_values.lse_log2, self.lane);
      exponentiate(S, self.scale_log2, lse, masked, work, self.warp_row, block.m * Traits::kBlockM,
                   self.lane);
      round_scores<Element, 0, kEarly>(P, S);
      self.template start_key_gradient<0, kEarly>(dV, P, dout);
      LaneValues<kEarly> delta;
      if constexpr (kReadsAhead) delta.read(row_values.delta + kEarly, self.lane);
      ptx::wgmma_wait<1>();
      pin(dP);
      if constexpr (!kReadsAhead) delta.read(row_values.delta + kEarly, self.lane);
      differentiate<Element, kEarly>(dS, S, dP, delta);
      round_scores<Element, kEarly, Traits::kBlockM>(P, S);
      self.template start_key_gradient<kEarly, Traits::kBlockM>(dV, P, dout);
      delta.read(row_values.delta, self.lane);
      differentiate<Element, 0>(dS, S, dP, delta);
    }
    if constexpr (!kFirst) self.ds_ring.before().wait_full();
    if constexpr (Traits::kAdditive) self.await_copies();
    auto& ds_tile = self.smem.ds[self.ds_ring.stage()];
    if constexpr (Traits::kAdditive) {
      store_transposed(ds_tile, dS, self.warp_row, self.opaque_lane());
    } else {
      store_operand(ds_tile, dS, self.warp_row, kGeneral ? self.opaque_lane() : self.lane);
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    __syncwarp();
    if (self.lane == 0) self.ds_ring.arrive_full();
    typename Traits::QueryGradient dQ;
    if constexpr (!kFirst) start_dq(dQ);
    ptx::wgmma_wait<kFirst ? 0 : 1>();
    pin(dV);
    pin(P);
    self.release(self.dout_ring());
    start_dk();
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();
      end_dq(dQ);
    }
    ptx::wgmma_wait<0>();
    end_dk();
    if constexpr (Traits::kOrders && !kFirst) say_added();
    self.q_ring.advance();
    self.ds_ring.advance();
    block.advance();
  }

  // Of this warp's scores.
  __device__ __forceinline__ ScorePlace place() const {
    return {block.m * Traits::kBlockM, work.first_key + self.warp_row};
  }

  // Terms that are added to S.
  __device__ __forceinline__ void finish_scores(typename Traits::Scores& S) {
    const auto& score = self.smem.score(work, block.head);
    score.template finish<true>(S, place(), self.lane);
    if (self.params.score.bias.data == nullptr) return;
    self.term_ring.wait_full();
    add_bias(S, self.smem.bias[self.term_ring.stage()], score.inverse_scale(), self.warp_row,
             self.opaque_lane());
    // Reads that are still under way would meet what TMA writes next.
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    __syncwarp();
    self.release(self.term_ring);
    self.term_ring.advance();
  }

  // Dropout's, of the lane's keys, beside the product that is under way.
  __device__ __forceinline__ uint32_t draw_key_word() const {
    if (!drops()) return 0;
    self.words_ring().wait_full();
    return flash_attn::ptx::opaque(self.smem.score(work, block.head)
                                       .draw_key_word(self.params.dropout, place().key, self.lane));
  }
  __device__ __forceinline__ bool drops() const { return self.params.dropout.rng_state != nullptr; }
  // What is dropped of P.
  __device__ __forceinline__ void negate_dropped(typename Traits::Scores& P,
                                                 uint32_t key_word) const {
    self.smem.score(work, block.head)
        .negate_dropped(P, self.params.dropout, place().key, key_word,
                        self.smem.dropout.query_words[self.q_ring.stage()], self.opaque_lane());
    self.words_ring().arrive_empty();
  }

  // The blocks that need no mask. With score terms registers are too short for them.
  __device__ __forceinline__ int first_full() const {
    return kGeneral ? work.range.full_begin : full_begin;
  }
  __device__ __forceinline__ int end_full() const {
    return kGeneral ? work.range.full_end : full_end;
  }

  // dK += dSᵀ Q
  __device__ __forceinline__ void start_dk() {
    self.start_key_gradient(dK, dS, self.smem.q[self.q_ring.stage()]);
  }
  __device__ __forceinline__ void end_dk() {
    pin(dK);
    pin(dS);
    self.q_ring.arrive_empty();
  }
  // Of the block before: dQ = dS K, which wants the dS of all consumers.
  __device__ __forceinline__ void start_dq(typename Traits::QueryGradient& dQ) {
    self.start_query_gradient(dQ, self.smem.ds[self.ds_ring.before().stage()]);
    reduction.advance();
  }
  __device__ __forceinline__ void end_dq(typename Traits::QueryGradient& dQ) {
    pin(dQ);
    if constexpr (Traits::kOrders) self.turn_ring.wait_full();
    reduction.template add<Traits::kDqAddedCols>(dQ, self.dq_first_added_col());
    if constexpr (Traits::kOrders) self.turn_ring.advance();
  }
  // Of the block before: behind the next product, when its reductions are on their way.
  __device__ __forceinline__ void say_added() const {
    __syncwarp();
    if (self.lane == 0) self.turn_ring.before().in(self.smem.added_ring).arrive_full();
  }

  __device__ __forceinline__ void finish() {
    typename Traits::QueryGradient dQ;
    self.release(self.v_ring());
    self.ds_ring.before().wait_full();
    start_dq(dQ);
    ptx::wgmma_wait<0>();
    self.release(self.k_ring);
    self.k_ring.advance();
    end_dq(dQ);
    if constexpr (Traits::kOrders) say_added();
  }

  const BwdWork& work;
  Consumer& self;
  typename Traits::KeyGradient &dK, &dV;
  typename Traits::ScoresOperand
      dS;  // of the block before; then this one's weights, if there are any
  QueryBlocks block;
  const int full_begin, full_end;  // read here, not in the loop: the reductions hold up such reads
  DqReduction<Traits::kBlockM, Traits::kTileCols, kGeneral> reduction;
};

template <typename Traits>
__device__ __forceinline__ void bwd_consumer_loop(const BwdParams& params,
                                                  BwdSharedStorage<Traits>& smem, int consumer) {
  BwdConsumer<Traits> self(params, smem, consumer);
#pragma unroll 1
  while (const BwdWork* const work = self.queue.read()) {
    self.place_thread();
    typename Traits::KeyGradient dK, dV;
    dK.fill(0.f);
    dV.fill(0.f);
    QueryWalk<Traits>(*work, self, dK, dV).run();
    if constexpr (Traits::kPools) self.say_summed();
    if constexpr (Traits::kSplits) {
      if (params.splits.count > 1) {
        join_splits(self, *work, dK, dV);
        self.queue.release(true);
        continue;
      }
    }
    const float scale = Traits::ScorePolicy::output_scale(params.dropout);
    const float dk_scale = params.softmax_scale * scale;
    scale_rows(dK, {dk_scale, dk_scale});
    if constexpr (Traits::kStashesWeights || Traits::kWeighted) {
      const float dv_scale = Traits::kStashesWeights ? scale / kExactScale : scale;
      scale_rows(dV, {dv_scale, dv_scale});
    }
    store_key_gradient(self, *work, dV, params.dv, params.dv_strides, params.head_dim_v);
    store_key_gradient(self, *work, dK, params.dk, params.dk_strides, params.head_dim);
    self.queue.release(true);
  }
}

// Everybody waits for the kernel before, from which delta and the zeros of the workspace come.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdParams params,
               const __grid_constant__ typename Traits::Scheduler scheduler,
               const __grid_constant__ BwdTermMaps<Traits::kAdditive> maps, int num_tiles) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<BwdSharedStorage<Traits>*>(dynamic_smem);
  const bool drops = Traits::kWeighted && params.dropout.rng_state != nullptr;
  const bool loads_bias = Traits::kAdditive && params.score.bias.data != nullptr;
  const bool stores_dbias = loads_bias && params.dbias.form != BiasGradientParams::Form::kNone;
  if (threadIdx.x == 0) {
    smem.init_barriers(64 * Traits::kOrders + Traits::kPools + loads_bias + stores_dbias +
                       32 * drops);
  }
  smem.zero_absent_slabs(params);
  __syncthreads();
  flash_attn::ptx::wait_for_prerequisites();

  // Known to be the same in all lanes. Computed where it is used: kept, it takes a register too many.
  const auto this_warp = [] {
    return __shfl_sync(~0u, flash_attn::ptx::opaque(threadIdx.x) / 32, 0);
  };
  if (this_warp() < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if (this_warp() == 0) {
      if (ptx::elect_one()) load_loop<Traits>(params, maps, smem);
    } else if (this_warp() == 1) {
      schedule_and_load_row_values_loop<Traits>(params, scheduler, num_tiles, smem);
    } else if (Traits::kOrders) {
      if constexpr (Traits::kOrders) {
        const bool last_first = scheduler.last_blocks_first;
        if (this_warp() == 2) await_turns_loop<Traits>(params, last_first, smem);
        if (this_warp() == 3) pass_turns_loop<Traits>(params, last_first, smem);
      }
    } else if (Traits::kPools) {
      if constexpr (Traits::kPools) {
        if (this_warp() == 2)
          DqConverter<Traits>(params, maps.dq, smem).run(scheduler.blocks_per_head);
        if (this_warp() == 3 && ptx::elect_one()) pass_tiles_loop<Traits>(params, smem);
      }
    } else if (loads_bias && this_warp() == 2) {
      if constexpr (Traits::kAdditive) {
        if (ptx::elect_one()) load_bias_loop<Traits>(params, maps.bias, smem);
      }
    } else if (stores_dbias && this_warp() == 3) {
      if constexpr (Traits::kAdditive) {
        if (ptx::elect_one()) store_bias_gradient_loop<Traits>(params, maps.dbias, smem);
      }
    } else if (drops && this_warp() == 2) {
      if constexpr (Traits::kWeighted) draw_query_words_loop<Traits>(params, smem);
    }
  } else {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    bwd_consumer_loop<Traits>(params, smem, static_cast<int>(this_warp() / 4) - 1);
  }
}

}  // namespace flash_attn::sm90
