// A consumer's walk over the keys of a tile: the main loop of the forward kernel (fwd.cuh).
#pragma once

#include "../cuda/attn/mask.cuh"
#include "fwd_consumer.cuh"
#include "fwd_steps.cuh"
#include "ptx/fence.cuh"

namespace flash_attn::sm90 {

// A consumer's walk over the keys of a tile; leaves O (not yet normalised) and the softmax state of
// its rows, and the last product under way.
template <typename Traits>
class KeyWalk {
  using Element = typename Traits::Element;
  using V = WgmmaOperand<Layout::kKOuter, typename Traits::VTile>;
  using Probabilities = OperandA<1, Traits::kBlockN>;
  using Term = LinearTerm<Element, Traits::kBlockN>;
  static constexpr bool kLooksAhead = Traits::ScorePolicy::kGeneral && Traits::kTile.blocks == 1;
  static constexpr bool kTriesFirst = Traits::kConsumers < 3;  // registers of three are too few
  static constexpr float kShare = 0.125f;  // of the sum so far, where maxima are true
  static constexpr int kTiles = Traits::kBlockN / kMaskTile;  // of a mask
  using MaskRows = BlockMask::Rows<Traits::kHeadDim>;

 public:
  // S holds the scores of the first block.
  __device__ __forceinline__ KeyWalk(const FwdWork& work, const typename Traits::ScorePolicy& score,
                                     FwdConsumer<Traits>& self, typename Traits::Scores& S,
                                     typename Traits::Output& O, typename Traits::Softmax& softmax)
      : work(work),
        score(score),
        self(self),
        S(S),
        O(O),
        softmax(softmax),
        range(work.range),
        n(work.range.end - 1) {
    if constexpr (Traits::kSoftcap) {
      first_serves = score.first.fits();
      second_serves = score.second.fits();
      mixed_serves = score.mixed.fits();
    }
    if constexpr (Traits::kMasked) {
      row_intervals = score.row_intervals(work.first_row + self.warp_row, self.lane);
      first_key = work.first_key;
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kTile.blocks > 1) {
      Probabilities P;
      first(P);
#pragma unroll 1
      while (advance()) next_in_steps(P);
      return last(P);
    }
    Probabilities P, P_next;  // two, so that one can come while the other is read
    first(P);
#pragma unroll 1
    for (;;) {
      if (!advance()) return last(P);
      next(P, P_next);
      if (!advance()) return last(P_next);
      next(P_next, P);
    }
  }

 private:
  // Goes on to the next block, and says whether there is one. With a mask, its number comes beside
  // K.
  __device__ __forceinline__ bool advance() {
    if constexpr (Traits::kMasked) return !found.is_last();
    return --n >= range.begin;
  }

  __device__ __forceinline__ void first(Probabilities& P) {
    self.bring_bias(P);
    look_ahead();
    MaskRows rows;
    if constexpr (Traits::kMasked) rows = bring_mask();
    if constexpr (Traits::kPieces) missing_keys = self.missing_keys();
    self.release(self.k_ring);
    if constexpr (Traits::kMasked) hide(rows);
    finish_scores(P, self.v_ring);
    if constexpr (Traits::kStartsWithBias) {
      softmax.flip_signs(S);
      UnboundedStep(score, scales_q<Traits>(self.params)).complete(S);
      softmax.template raise_max<0>(S, correction);
    } else {
      softmax.update_max(S, correction);
    }
    softmax.template exponentiate_into<Element>(P, S);  // P = exp(S - m)
    if constexpr (Traits::kTile.blocks == 1) {
      softmax.even_out_sums();
      self.send_staged();
    }
    if constexpr (Traits::kDropout) {
      query_word =
          score.draw_query_word(self.params.dropout, work.first_row + self.warp_row, self.lane);
    }
    drop(P);
    wait_values();
  }

  __device__ __forceinline__ void next(Probabilities& P, Probabilities& P_next) {
    if constexpr (Traits::kAlibi) follow_slope();
    self.k_ring.wait_full();
    self.start_scores(S, score);
    self.wait_turn();
    self.scores(S);
    if constexpr (Traits::kAlibi) self.smem.alibi.start(S, slope_operand);
    ptx::wgmma_commit();  // S = Q K(n)ᵀ
    accumulate(P);
    ptx::wgmma_commit();  // O += P V(n + 1)
    self.pass_turn();
    self.release_bias();
    self.bring_bias(P_next);
    look_ahead();
    MaskRows rows;
    if constexpr (Traits::kMasked) rows = bring_mask();
    if constexpr (Traits::kPieces) missing_keys = self.missing_keys();
    ptx::wgmma_wait<1>();
    pin(S);
    self.release(self.k_ring);
    if constexpr (Traits::kMasked) hide(rows);
    const bool moved = step_ahead(P_next);  // P = exp(S - m), while P V(n + 1) runs
    const auto v_in_use = self.v_ring;
    self.v_ring.advance();
    drop(P_next);
    // V(n) has long been there. The wait's branch keeps ptxas from moving the exponentials behind
    // the next wait, where nothing runs beside them.
    wait_values();

    ptx::wgmma_wait<0>();
    pin(O);
    pin(P);
    self.release_values(v_in_use);
    if (moved) scale_rows(O, correction);  // O = O · exp(m_old - m)
  }

  // Does one thing after the other, with S in the registers of P: the products of another thread
  // block fill the gaps.
  __device__ __forceinline__ void next_in_steps(Probabilities& P) {
    accumulate(P);
    ptx::wgmma_commit();  // O += P V(n + 1)
    self.k_ring.wait_full();
    ptx::wgmma_wait<0>();
    pin(O);
    pin(P);
    self.release_values(self.v_ring);
    self.v_ring.advance();
    self.scores(S);
    ptx::wgmma_commit();  // S = Q K(n)ᵀ
    self.send_staged();
    if constexpr (Traits::kPieces) missing_keys = self.missing_keys();
    ptx::wgmma_wait<0>();
    pin(S);
    self.release(self.k_ring);
    finish_scores(P, self.v_ring);
    if (softmax.update_max(S, correction, kShare)) scale_rows(O, correction);
    softmax.template exponentiate_into<Element>(P, S);
    drop(P);
    wait_values();
  }

  __device__ __forceinline__ void last(Probabilities& P) {
    self.release(self.q_ring);
    accumulate(P);
    ptx::wgmma_commit();  // O += P V(n + 1)
    if constexpr (Traits::kTile.blocks > 1) {
      self.send_staged();
      ptx::wgmma_wait<0>();
      pin(O);
      pin(P);
    }
    if constexpr (Traits::kStartsEarly) self.start_next_tile(S);
    ptx::wgmma_wait<Traits::kStartsEarly ? 1 : 0>();
    pin(O);
    self.release_values(self.v_ring);
    self.v_ring.advance();
  }

  __device__ __forceinline__ void accumulate(Probabilities& P) {
    gemm_rs<Element>(O, P, V(self.smem.v[self.v_ring.stage()]));
  }

  // What a P of the block at hand may reach without being exact (share_of_sum()).
  __device__ __forceinline__ float share() const {
    if constexpr (Traits::kMasked) return found.share();
    const BlockRange& blocks = work.range;  // read again, not kept: registers are short
    return share_of_sum(blocks.end - 1 - n, blocks.end - blocks.begin);
  }

  // Computes P of the next block by the maxima of the blocks before. Score terms are computed in
  // step with the exponentials where they can be.
  __device__ __forceinline__ bool step_ahead(Probabilities& P_next) {
    const auto with = [&](auto& step) {
      return softmax.template step_ahead<Element>(P_next, S, correction, share(), step);
    };
    if constexpr (Traits::kAddsBias) {
      if (is_full() && !softmax.negates()) {
        BiasStep step(bias_factor);
        return with(step);
      }
    }
    if constexpr (Traits::kAlibi) {
      if (slope != 0.f) {
        AlibiStep step(of_row, slope);
        return with(step);
      }
    }
    if constexpr (Traits::kKeyBias) {
      if (is_full() && !softmax.negates()) {
        KeyBiasStep step(self.key_bias(), self.lane);
        const bool moved = with(step);
        self.release_key_bias();
        return moved;
      }
    }
    if constexpr (Traits::kSoftcap) {
      using Policy = typename Traits::ScorePolicy;
      if (is_full() && !softmax.negates()) {
        // A score that came too near the cap is not the last of its tile.
        const auto try_step = [&](auto&& step, bool& serves) {
          const bool moved = with(step);
          if (moved) serves = !__any_sync(~0u, step.failed());
          return moved;
        };
        if constexpr (kTriesFirst) {
          if (first_serves) {
            return try_step(SoftcapStep<Policy, 1>(score, first_polynomial), first_serves);
          }
        }
        if (second_serves) {
          return try_step(SoftcapStep<Policy, 2>(score, second_polynomial), second_serves);
        }
        if (mixed_serves) {
          // With so narrow heads the products leave the special-function unit less time.
          using MixedStep = SoftcapMixedStep<Policy, Traits::kHeadDim <= 64>;
          return try_step(MixedStep(score, softmax.scale_log2()), mixed_serves);
        }
      }
    }
    finish_scores(P_next, self.v_ring.after());
    if constexpr (Traits::kStartsWithBias) {
      softmax.flip_signs(S);
      UnboundedStep step(score, scales_q<Traits>(self.params));
      return with(step);
    }
    NoStep step;
    return with(step);
  }

  // Reads what the block at hand needs beside its scores while the products run: shared memory
  // answers slowly beside them, and the exponentials would wait for it.
  __device__ __forceinline__ void look_ahead() {
    if constexpr (kLooksAhead) {
      const BlockRange& blocks = work.range;
      const int block = this->block();
      const bool is_full = block >= blocks.full_begin && block < blocks.full_end;
      facts = (is_full ? kFull : 0) | (block <= blocks.begin ? kFirst : 0);
      ptx::pin(facts);
    }
    if constexpr (Traits::kAddsBias) {
      bias_factor = score.inverse_scale();
      ptx::pin(bias_factor);
    }
    if constexpr (Traits::kAlibi) {
      const int to_diagonal = score.to_diagonal(place()) + fragment_row(0, self.lane);
      of_row = -slope * static_cast<float>(to_diagonal);
      ptx::pin(of_row);
      next_slope = slope_of(block_in_place(work, score.turned(), max(n - 1, range.begin)));
      ptx::pin(next_slope);
    }
    if constexpr (Traits::kSoftcap) {
      if constexpr (kTriesFirst) {
        first_polynomial = score.first;
        first_polynomial.pin();
      }
      second_polynomial = score.second;
      second_polynomial.pin();
    }
  }

  // The slope of a block in whose scores ALiBi can be a column, else 0.
  __device__ __forceinline__ float slope_of(int block) const {
    const BlockRange& blocks = work.range;
    const bool is_full = block >= blocks.full_begin && block < blocks.full_end;
    const float slope = linear_slope<Traits::kBlockN, Term>(
        score, {work.first_row + self.warpgroup * 64, work.first_key + block * Traits::kBlockN});
    return is_full && !softmax.negates() ? slope : 0.f;
  }
  // Prepares the slope of the block at hand, which seldom changes within a tile.
  __device__ __forceinline__ void follow_slope() {
    if (next_slope != slope) {
      slope = next_slope;
      slope_operand = Term::operand_of(slope, self.lane);
    }
    pin(slope_operand);
  }

  // While the products run, reads which block has come, and what the mask lets the lane's queries
  // see of it.
  __device__ __forceinline__ MaskRows bring_mask() {
    // The lane that releases the stage is the one that reads it.
    if (self.lane == 0) found = self.smem.mask.of_k[self.k_ring.stage()];
    found = found.of_first_lane();
    const ScorePlace place = {work.first_row + self.warp_row, found_key()};
    return score.template rows<kTiles, MaskRows>(row_intervals, place, states(), self.lane);
  }
  // The first key of the block that has come.
  __device__ __forceinline__ int found_key() const {
    return first_key + found.n() * Traits::kBlockN;
  }
  __device__ __forceinline__ bool is_masked() const {
    return states() != BlockMask::kAllSeen<kTiles>;
  }
  __device__ __forceinline__ uint32_t states() const {
    return found.template states_of<kTiles>(self.warpgroup);
  }
  // Sets S to -inf where the mask hides it.
  __device__ __forceinline__ void hide(const MaskRows& rows) const {
    if (MaskRows::kBranchless || is_masked()) score.hide(S, rows, states(), found_key(), self.lane);
  }

  // The block of keys in the n-th place. Computed where it is needed, as registers are short.
  __device__ __forceinline__ int block() const {
    if constexpr (Traits::kAlibi) return block_in_place(work, score.turned(), n);
    if constexpr (Traits::kMasked) return found.n();
    return n;
  }
  __device__ __forceinline__ bool is_full() const {
    if constexpr (kLooksAhead) return (facts & kFull) != 0;
    if constexpr (Traits::kMasked) return !found.is_cut();
    return block() >= blocks().full_begin && block() < blocks().full_end;
  }
  // With score terms there are too few registers to keep the range, so it is read again.
  __device__ __forceinline__ const BlockRange& blocks() const {
    if constexpr (Traits::kPlainScores) return range;
    return work.range;
  }

  // Applies the score terms, and sets S to -inf where nothing is seen. P holds a staged bias. The
  // block's values come to that place of their ring.
  __device__ __forceinline__ void finish_scores(const Probabilities& P,
                                                const Ring<Traits::kStages>& v_ring) {
    score.finish(S, place(), self.lane);
    if constexpr (Traits::kAddsBias) {
      score.template add_bias<Element>(S, P);
    } else if constexpr (Traits::kKeyBias) {
      add_key_bias(S, self.key_bias(), self.lane);
      self.release_key_bias();
    } else if constexpr (!Traits::kStagedBias) {
      score.template add_bias<Element>(S, self.params.score.bias, place(), self.lane);
    }
    if (missing_keys == 0 && is_full()) return;
    if (missing_keys != 0) self.pass_over(S, missing_keys, v_ring);
    const int query = self.query(work, 0), other_query = self.query(work, 1);
    const int first_key = block() * Traits::kBlockN;
    if (work.window.end_key(work.first_row) < first_key + Traits::kBlockN) {
      mask_from(
          S, {work.window.end_key(query) - first_key, work.window.end_key(other_query) - first_key},
          self.lane);
    }
    if (block() < blocks().full_begin) {
      mask_before(S,
                  {work.window.first_key(query) - first_key,
                   work.window.first_key(other_query) - first_key},
                  self.lane);
    }
  }

  __device__ __forceinline__ void drop(Probabilities& P) const {
    if constexpr (Traits::kDropout) {
      self.v_ring.wait_full();  // the words of the keys come with V
      score.drop(P, self.params.dropout, query_word,
                 self.smem.dropout.key_words[self.v_ring.stage()], self.lane);
    } else {
      score.drop(P, self.params.dropout, place(), self.lane);
    }
  }

  // Where this warp's scores lie: their first query and their first key.
  __device__ __forceinline__ ScorePlace place() const {
    return {work.first_row + self.warp_row, work.first_key + block() * Traits::kBlockN};
  }

  // Waits for V(n). The values of keys in front of the first that the tile's queries see become 0:
  // their P is 0, but 0 · NaN would reach O. Each consumer writes the same zeros for itself.
  __device__ __forceinline__ void wait_values() const {
    self.v_ring.wait_full();
    if constexpr (Traits::ScorePolicy::kGeneral || Traits::kMasked) {
      if constexpr (kLooksAhead) {
        if ((facts & kFirst) == 0) return;
      } else if constexpr (Traits::kMasked) {
        if (!found.is_ahead()) return;
      } else {
        if (block() > blocks().begin) return;
      }
      const int unseen = work.window.first_key(work.first_row) - block() * Traits::kBlockN;
      if (unseen > 0) self.clear_values(unseen);
    }
  }

  const FwdWork& work;
  const typename Traits::ScorePolicy& score;
  FwdConsumer<Traits>& self;
  typename Traits::Scores& S;
  typename Traits::Output& O;
  typename Traits::Softmax& softmax;
  const BlockRange range;
  int n;  // counts blocks of keys
  // With a mask `found` is in place of n. The rest is kept for a tile, as memory answers slowly.
  FoundKeys found;
  BlockMask::RowIntervals row_intervals;
  int first_key;
  uint32_t missing_keys = 0;  // of the block at hand, in pages: a bit for each eight
  float correction[2];
  enum : uint32_t { kFull = 1, kFirst = 2 };
  uint32_t facts;                     // of the block at hand: whether it is full, or the first
  float bias_factor;                  // of a staged bias
  float slope = NAN, next_slope = 0;  // ALiBi: of the block at hand and the next one; NaN: none yet
  typename Term::Slope slope_operand;  // of `slope`
  float of_row;                        // ALiBi: what is linear in the row, of the lane's first one
  SoftcapPolynomial<1> first_polynomial;
  SoftcapPolynomial<2> second_polynomial;
  bool first_serves, second_serves, mixed_serves;  // of softcap's steps, so far
  uint32_t query_word;                             // dropout's, of the lane's rows
};

}  // namespace flash_attn::sm90
