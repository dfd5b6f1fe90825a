// A consumer's walk over the queries of a tile: the main loop of the backward kernel (bwd.cuh).
#pragma once

#include "bwd_consumer.cuh"
#include "bwd_dq_reduction.cuh"
#include "bwd_masked_scores.cuh"
#include "ptx/fence.cuh"

namespace flash_attn::sm90 {

// A consumer's walk over the queries. It leaves its sums dK, which are not scaled yet, and dV.
template <typename Traits>
class QueryWalk {
  using Element = typename Traits::Element;
  using Consumer = BwdConsumer<Traits>;
  using Blocks = std::conditional_t<Traits::kMasked, FoundBlocks, QueryBlocks>;
  using RowValues = typename Traits::RowValues;
  static constexpr bool kGeneral = Traits::ScorePolicy::kGeneral;
  static constexpr int kEarly = Traits::kEarly;
  // Reads from shared memory are slow beside products. If the queries are few, LSE and delta have
  // room in registers before they are needed, while S or dP is under way.
  static constexpr bool kReadsAhead =
      (Traits::kPlainScores || Traits::kFoldsDelta) && Traits::kBlockM == 64;

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
        reduction(self.params, work, all_blocks(), self.dq_place()) {}

  __device__ __forceinline__ void run() {
    if (!block.more()) return;
    self.k_ring.wait_full();
    self.v_ring().wait_full();
    self.hold(K, self.smem.k);
    self.hold(V, self.smem.v);
    step<true>();
#pragma unroll 1
    while (block.more()) step<false>();
    finish();
  }

 private:
  __device__ __forceinline__ QueryBlocks all_blocks() const {
    if constexpr (Traits::kMasked) {
      return QueryBlocks(work);
    } else {
      return block;
    }
  }

  // The first block has none before it.
  template <bool kFirst>
  __device__ __forceinline__ void step() {
    typename Traits::Scores S, dP;
    const RowValues& rows = self.smem.row_values[self.q_ring.stage()];
    if constexpr (kFirst) self.await_start();
    self.q_ring.wait_full();
    self.start_scores(S, K);  // Sᵀ = K Qᵀ
    if constexpr (Traits::kDrops) self.kept_ring().wait_full();
    if constexpr (Traits::kAdditive) bring_key_bias();
    typename decltype(rows.lse)::template OfLane<Traits::kBlockM> lse;
    if constexpr (kReadsAhead) rows.lse.read(lse, 0, self.lane);
    uint32_t seen[Traits::kBlockM / kMaskTile];
    if constexpr (Traits::kMasked) find_seen_queries(seen);
    ptx::wgmma_wait<0>();
    pin(S);
    self.dout_ring().wait_full();
    self.start_score_gradient(dP, V);  // dPᵀ = V dOᵀ
    if constexpr (kFirst) self.give_head_start();
    const bool masked = block.m < first_full() || block.m >= end_full();
    const auto& dout = self.smem.dout[self.q_ring.stage()];
    typename Traits::ScoresOperand P;
    // dV += Pᵀ dO; dS = P ∘ (dP - delta)
    if constexpr (Traits::kStashesWeights) {
      exponentiate<Element>(P, dS, S, self.smem.score(work, block.head), self.params,
                            self.scale_log2, rows.lse.numbers, masked, work, place(), self.lane,
                            [&](int k, const auto& weights, const auto& marked) {
                              stash(self.smem.stash, self.thread(), k, weights, marked);
                            });
      self.start_key_gradient(dV, P, dout);
      ptx::wgmma_wait<1>();
      pin(dP);
      differentiate_weights<Element>(dS, self.smem.stash, self.thread(), dP, rows.delta.numbers,
                                     self.opaque_lane());
    } else if constexpr (Traits::kWeighted) {
      if constexpr (Traits::kDrops) {
        rows.lse.read(lse, 0, self.opaque_lane());
        exponentiate(S, self.scale_log2, lse);
        // The bound has no signs.
        negate_dropped(
            S, [&](int part) { return kept(part); },
            __uint_as_float(0xbf800000 ^ (self.params.dropout.bound & 0x80000000)));
        // This comes behind the signs: otherwise ptxas copies P to other registers for them, and
        // spills.
        if (masked) {
          hide_unseen(S, work, self.warp_row, block.m * Traits::kBlockM, self.opaque_lane());
        }
        round_kept<Element, 0, kEarly>(P, S);
      } else {
        const auto& score = self.smem.score(work, block.head);
        exponentiate_capped<Element>(P, self.smem.late_p, self.thread(), S, score.softcap_tanh(),
                                     self.scale_log2, rows.lse.numbers, masked, work, self.warp_row,
                                     block.m * Traits::kBlockM, self.opaque_lane());
      }
      self.template start_key_gradient<0, kEarly>(dV, P, dout);
      ptx::wgmma_wait<1>();
      pin(dP);
      if constexpr (Traits::kDrops) {
        differentiate_late<kEarly>(P, S, dP, rows.delta, dout);
      } else {
        differentiate_weighted<kEarly>(S, dP, rows.delta);
        take_late(P, self.smem.late_p, self.thread());
        self.template start_key_gradient<kEarly, Traits::kBlockM>(dV, P, dout);
      }
      differentiate_weighted<0>(S, dP, rows.delta);
      if constexpr (Traits::kDrops) self.kept_ring().arrive_empty();
    } else {
      if constexpr (kGeneral) finish_scores(S);
      if constexpr (!kReadsAhead) rows.lse.read(lse, 0, self.lane);
      exponentiate(S, self.scale_log2, lse);
      if (masked) hide_unseen(S, work, self.warp_row, block.m * Traits::kBlockM, self.lane);
      if constexpr (Traits::kMasked) hide(S, seen);
      round_scores<Element, 0, kEarly>(P, S);
      self.template start_key_gradient<0, kEarly>(dV, P, dout);
      typename decltype(rows.delta)::template OfLane<kEarly> delta;
      if constexpr (kReadsAhead) rows.delta.read(delta, kEarly, self.lane);
      ptx::wgmma_wait<1>();
      pin(dP);
      if constexpr (!kReadsAhead) rows.delta.read(delta, kEarly, self.lane);
      differentiate<Element, kEarly>(dS, S, dP, delta);
      round_scores<Element, kEarly, Traits::kBlockM>(P, S);
      self.template start_key_gradient<kEarly, Traits::kBlockM>(dV, P, dout);
      rows.delta.read(delta, 0, self.lane);
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
    ptx::fence_async_shared();
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
      await_turn();
      ptx::wgmma_wait<1>();
      end_dq(dQ);
    }
    ptx::wgmma_wait<0>();
    end_dk();
    self.q_ring.advance();
    self.ds_ring.advance();
    if constexpr (Traits::kMasked) {
      before = block;
    } else {
      block.advance();
    }
  }

  // With a mask, finds out which block has come and which of its queries see this warp's keys.
  __device__ __forceinline__ void find_seen_queries(uint32_t (&seen)[Traits::kBlockM / kMaskTile]) {
    block.go_to(self.smem.mask.of_q[self.q_ring.stage()]);
    const auto& rows = self.smem.mask.rows[self.q_ring.stage()];
#pragma unroll
    for (int tile = 0; tile < Traits::kBlockM / kMaskTile; ++tile) {
      seen[tile] = find_seen(block.state(tile, self.warpgroup), self.params.mask, work, block, rows,
                             tile * kMaskTile, work.first_key + self.warp_row, self.opaque_lane());
    }
  }

  // Where this warp's scores lie.
  __device__ __forceinline__ ScorePlace place() const {
    return {block.m * Traits::kBlockM, work.first_key + self.warp_row};
  }

  // Applies the terms that are added to S.
  __device__ __forceinline__ void finish_scores(typename Traits::Scores& S) {
    const auto& score = self.smem.score(work, block.head);
    score.template finish<true>(S, place(), self.lane);
    if (self.params.score.bias.data == nullptr) return;
    if (has_key_bias()) {
      const float2 of_keys = self.smem.key_bias[self.thread()];
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        S.at(0, i) += of_keys.x;
        S.at(1, i) += of_keys.y;
      }
      return;
    }
    self.term_ring.wait_full();
    add_bias(S, self.smem.bias[self.term_ring.stage()], score.inverse_scale(), self.warp_row,
             self.opaque_lane());
    // Reads that are still under way would meet what TMA writes next.
    ptx::fence_async_shared();
    __syncwarp();
    self.release(self.term_ring);
    self.term_ring.advance();
  }

  __device__ __forceinline__ bool has_key_bias() const {
    const BiasParams& bias = self.params.score.bias;
    return bias.data != nullptr && bias.row_stride == 0;
  }
  // Brings a bias that broadcasts the queries, once a head: the keys of a thread stay the same in a
  // tile.
  __device__ __forceinline__ void bring_key_bias() const {
    if (!has_key_bias() || !block.starts_head()) return;
    const BiasParams& bias = self.params.score.bias;
    const auto& score = self.smem.score(work, block.head);
    const int key = place().key + fragment_row(0, self.opaque_lane());
    self.smem.key_bias[self.thread()] = {score.template bias_of_key<Element>(bias, key),
                                         score.template bias_of_key<Element>(bias, key + 8)};
  }

  // What dropout keeps of this thread's scores. It is read where it is used.
  __device__ __forceinline__ uint2 kept(int part) const {
    return self.smem.dropout
        .kept[self.ds_ring.stage()][part][flash_attn::ptx::opaque(threadIdx.x) - 128];
  }

  // Computes dS of kEarly of the queries, from kFirst on, from what stands in the place of P.
  template <int kFirst, typename Delta>
  __device__ __forceinline__ void differentiate_weighted(const typename Traits::Scores& weights,
                                                         const typename Traits::Scores& dP,
                                                         const Delta& delta) {
    if constexpr (Traits::kDrops) {
      differentiate_kept<Element, kFirst, kFirst + kEarly>(dS, weights, dP, kept(kFirst / 64),
                                                           delta.numbers, self.opaque_lane());
    } else {
      typename Delta::template OfLane<kEarly> of_lane;
      delta.read(of_lane, kFirst, self.opaque_lane());
      differentiate<Element, kFirst>(dS, weights, dP, of_lane);
    }
  }

  // With dropout, computes dS of the queries from kFirst on, kEarly at a time, and goes on with dV.
  template <int kFirst, typename Delta>
  __device__ __forceinline__ void differentiate_late(typename Traits::ScoresOperand& P,
                                                     const typename Traits::Scores& weights,
                                                     const typename Traits::Scores& dP,
                                                     const Delta& delta,
                                                     const typename Traits::QTile& dout) {
    constexpr int kEnd = kFirst + kEarly;
    differentiate_weighted<kFirst>(weights, dP, delta);
    round_kept<Element, kFirst, kEnd>(P, weights);
    self.template start_key_gradient<kFirst, kEnd>(dV, P, dout);
    if constexpr (kEnd < Traits::kBlockM) differentiate_late<kEnd>(P, weights, dP, delta, dout);
  }

  // Blocks from first_full() to end_full() need no mask. With score terms registers are too short
  // to keep these two numbers.
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
  // Starts dQ = dS K of the block before, which needs the dS of all consumers.
  __device__ __forceinline__ void start_dq(typename Traits::QueryGradient& dQ) {
    self.start_query_gradient(dQ, self.smem.ds[self.ds_ring.before().stage()]);
    if constexpr (Traits::kMasked) {
      reduction.go_to(before);
    } else {
      reduction.advance();
    }
  }
  __device__ __forceinline__ void end_dq(typename Traits::QueryGradient& dQ) {
    pin(dQ);
    reduction.add(dQ);
    if constexpr (Traits::kOrders) {
      self.turn_ring.advance();
      say_added();
    }
  }
  // Waits for this tile's turn at the block before. It comes beside the product of dQ, as that does
  // not need the turn.
  __device__ __forceinline__ void await_turn() const {
    if constexpr (Traits::kOrders) self.turn_ring.wait_full();
  }
  // Says that dQ of the block before has been added. The warp that passes turns on waits for the
  // reductions.
  __device__ __forceinline__ void say_added() const {
    __syncwarp();
    if (self.lane == 0) self.turn_ring.before().in(self.smem.added_ring).arrive_full();
  }

  __device__ __forceinline__ void finish() {
    typename Traits::QueryGradient dQ;
    self.release(self.v_ring());
    self.ds_ring.before().wait_full();
    start_dq(dQ);
    await_turn();
    ptx::wgmma_wait<0>();
    self.release(self.k_ring);
    self.k_ring.advance();
    end_dq(dQ);
  }

  const BwdWork& work;
  Consumer& self;
  typename Traits::KeyGradient &dK, &dV;
  typename Traits::ScoresOperand
      dS;  // of the block before; then this one's weights, if there are any
  [[no_unique_address]] typename Traits::HeldK K;
  [[no_unique_address]] typename Traits::HeldV V;
  Blocks block;
  QueryBlock before;               // with a mask: the block before
  const int full_begin, full_end;  // read here, not in the loop: the reductions hold up such reads
  DqReduction<Traits::kBlockM, Traits::kDqHasClassCols ? Traits::kHeadDim : 0, kGeneral,
              Traits::kStretches, Traits::kPoolsVarlen>
      reduction;
};

}  // namespace flash_attn::sm90
