// A consumer warpgroup of the forward kernel: its place, its turn at the tensor cores, the start
// and the end of its tiles.
#pragma once

#include "../cuda/attn/mask.cuh"
#include "fwd.h"
#include "fwd_traits.cuh"
#include "ptx/fence.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

// Where a consumer stands in the ring of its blocks of a bias.
template <typename Traits, bool kHasRing = Traits::kAddsBias || Traits::kKeyBias>
struct FwdBiasRing {
  __device__ __forceinline__ FwdBiasRing(FwdSharedStorage<Traits>&, int /*consumer*/) {}
};
template <typename Traits>
struct FwdBiasRing<Traits, true> {
  Ring<Traits::kBiasStages> bias_ring;

  __device__ __forceinline__ FwdBiasRing(FwdSharedStorage<Traits>& smem, int consumer)
      : bias_ring(ring_of(smem, consumer)) {}

 private:
  __device__ __forceinline__ static RingBarriers<Traits::kBiasStages>& ring_of(
      FwdSharedStorage<Traits>& smem, int consumer) {
    if constexpr (Traits::kKeyBias) {
      return smem.key_bias.ring;
    } else {
      return smem.bias_rings[consumer];
    }
  }
};

// What a consumer keeps from tile to tile.
template <typename Traits>
struct FwdConsumer : FwdBiasRing<Traits> {
  using Q = WgmmaOperand<Layout::kKInner, typename Traits::QTile>;
  using K = WgmmaOperand<Layout::kKInner, typename Traits::KTile>;

  const typename Traits::Params& params;
  const CUtensorMap& out_map;
  FwdSharedStorage<Traits>& smem;
  int warpgroup, lane;
  int warp_row;     // of the warp's 16 rows in the tile
  int staged = -1;  // stage of the tile whose O lies in shared memory
  Ring<kFwdWorkStages> work_ring;
  Ring<Traits::kQStages> q_ring;
  Ring<Traits::kStages> k_ring, v_ring;

  __device__ __forceinline__ FwdConsumer(const typename Traits::Params& params,
                                         const CUtensorMap& out_map, FwdSharedStorage<Traits>& smem,
                                         int consumer)
      : FwdBiasRing<Traits>(smem, consumer),
        params(params),
        out_map(out_map),
        smem(smem),
        warpgroup(consumer),
        lane(threadIdx.x % 32),
        warp_row(consumer * 64 + threadIdx.x / 32 % 4 * 16),
        work_ring(smem.queue.ring),
        q_ring(smem.q_ring),
        k_ring(smem.k_ring),
        v_ring(smem.v_ring) {
    if (Traits::kTile.ordered && warpgroup == Traits::kConsumers - 1) pass_turn();
  }

  // The query, within the sequence, of one of the lane's two rows of a tile.
  __device__ __forceinline__ int query(const FwdWork& work, int half) const {
    if constexpr (Traits::kPieces) {
      return work.first_row + params.packed.token(warp_row + fragment_row(half, lane));
    }
    return work.first_row + warp_row + fragment_row(half, lane);
  }

  // Turns go round: whoever has waited issues its products and passes on.
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (Traits::kTile.ordered) ptx::barrier_sync<256>(kTurn + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Traits::kTile.ordered) {
      const int next = warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1;
      ptx::barrier_arrive<256>(kTurn + next);
    }
  }

  // The warp is done with the stage.
  template <int kStages>
  __device__ __forceinline__ void release(Ring<kStages>& ring) const {
    if (lane == 0) ring.arrive_empty();
    ring.advance();
  }

  // Gives back the stage of V and of dropout's words, which come with V. Each lane that has read
  // words arrives, as racecheck follows nothing else.
  __device__ __forceinline__ void release_values(const Ring<Traits::kStages>& ring) const {
    if (Traits::kDropout || lane == 0) ring.arrive_empty();
  }

  // Starts S = Q K(n)ᵀ of a tile, n its first block. The caller waits.
  __device__ __forceinline__ void start_tile(typename Traits::Scores& S) {
    work_ring.wait_full();
    const FwdWorkStage& stage = smem.queue.stages[work_ring.stage()];
    if (!stage.end && stage.work().has_keys()) {
      q_ring.wait_full();
      if constexpr (Traits::kScalesQ) scale_queries();
      k_ring.wait_full();
      start_scores(S, smem.score(work_ring.stage()));
      release_bias();
    }
    wait_turn();
    // Without keys S means nothing; but ptxas serialises products that are under way in one branch
    // only.
    scores(S);
    ptx::wgmma_commit();
    pass_turn();
  }

  __device__ __forceinline__ void start_next_tile(typename Traits::Scores& S) {
    work_ring.advance();
    start_tile(S);
  }

  // Starts the copy of the columns of O from first_col on that lie in shared memory.
  __device__ __forceinline__ void send_output(const FwdWork& work, int first_col) const {
    using Slab = typename Traits::OutputSlab;
    const int first_row = work.first_row + warp_row;
    ptx::fence_async_shared();
    __syncwarp();
    if (first_row < work.segment_q && lane == 0) {
#pragma unroll
      for (int slab = 0; slab < Traits::kOutputSlabs; ++slab) {
        const int col = first_col + slab * Slab::kCols;
        if (col < params.head_dim_v) {
          store_tile_rows<16>(smem.out[slab], warp_row, out_map, work.q, first_row, col);
        }
      }
      ptx::bulk_commit();
    }
  }

  // Sends what still lies in shared memory of the tile before, and is done with that tile.
  __device__ __forceinline__ void send_staged() {
    if (staged < 0) return;
    send_output(smem.queue.stages[staged].work(), Traits::VTile::kCols - Traits::kOutputCols);
    release_work(staged);
    staged = -1;
  }

  // This thread is done with the tile: once all threads are, its stage in the queue is free.
  __device__ __forceinline__ void release_work(int stage) const {
    ptx::mbarrier_arrive(smem.queue.ring.empty[stage]);
  }

  // Sets the values of the first keys of the block at hand to 0. The whole warpgroup calls it.
  __device__ __forceinline__ void clear_values(int num_keys) const {
    auto& tile = smem.v[v_ring.stage()];
    constexpr int kRowChunks = Traits::VTile::kCols / kChunk;
    for (int i = threadIdx.x % 128; i < num_keys * kRowChunks; i += 128) {
      *reinterpret_cast<uint4*>(tile.pointer(i / kRowChunks, i % kRowChunks * kChunk)) = {};
    }
    ptx::fence_async_shared();
    ptx::barrier_sync<128>(kCleared + warpgroup);
  }

  // The same with eights of keys in this stage, for each of which `eights` has a bit.
  __device__ __forceinline__ void clear_values(int stage, uint32_t eights) const {
    auto& tile = smem.v[stage];
    constexpr int kRowChunks = Traits::VTile::kCols / kChunk;
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < Traits::kBlockN * kRowChunks; i += 128) {
      const int key = i / kRowChunks;
      if ((eights >> key / 8 & 1) == 0) continue;
      *reinterpret_cast<uint4*>(tile.pointer(key, i % kRowChunks * kChunk)) = {};
    }
    ptx::fence_async_shared();
    ptx::barrier_sync<128>(kCleared + warpgroup);
  }

  // What the scores of the block at hand start with: nothing, or a staged bias, in the unit of S.
  // Its numbers may still be larger than a bias is (UnboundedStep).
  __device__ __forceinline__ void start_scores(typename Traits::Scores& S,
                                               const typename Traits::ScorePolicy& score) {
    if constexpr (Traits::kStartsWithBias) {
      using Element = typename Traits::Element;
      OperandA<1, Traits::kBlockN> bias;
      const auto ring = k_ring.in(smem.bias_rings[warpgroup]);
      ring.wait_full();
      const int row = warp_row % 64;
      load_operand(bias, smem.bias[warpgroup][ring.stage()], row, lane);
      if constexpr (Traits::kBiasMaps > 1) {
        load_operand<Traits::BiasTile::kCols>(bias, smem.bias_rest[warpgroup][ring.stage()], row,
                                              lane);
      }
      set_bias<Element>(S, bias);
      pin(S);  // else some of it is moved to other registers, here and behind the product
      if (!scales_q<Traits>(params)) {
        const float factor = score.inverse_scale();
        scale_rows(S, {factor, factor});
      }
      pin(S);
    }
  }
  // The warp is done with the bias that start_scores() read.
  __device__ __forceinline__ void release_bias() const {
    if constexpr (Traits::kStartsWithBias) {
      // Reads that are still under way would meet what TMA writes next.
      ptx::fence_async_shared();
      __syncwarp();
      if (lane == 0) k_ring.in(smem.bias_rings[warpgroup]).arrive_empty();
    }
  }

  // While the products run, brings what a staged bias adds to the next S of this warp's queries
  // into the registers of their P. For a bias of the keys alone it only waits until that is there.
  __device__ __forceinline__ void bring_bias(OperandA<1, Traits::kBlockN>& P) {
    if constexpr (Traits::kKeyBias) this->bias_ring.wait_full();
    if constexpr (Traits::kAddsBias) {
      auto& ring = this->bias_ring;
      ring.wait_full();
      load_operand(P, smem.bias[warpgroup][ring.stage()], warp_row % 64, lane);
      // Reads that are still under way would meet what TMA writes next.
      ptx::fence_async_shared();
      __syncwarp();
      release(ring);
    }
  }
  __device__ __forceinline__ const float* key_bias() const {
    return smem.key_bias.of_keys[this->bias_ring.stage()];
  }
  __device__ __forceinline__ void release_key_bias() {
    this->bias_ring.arrive_empty();
    this->bias_ring.advance();
  }

  // Of the K at hand, a bit for each eight keys whose page is missing.
  __device__ __forceinline__ uint32_t missing_keys() const {
    if (params.pages.entries == nullptr) return 0;
    // The lane that releases the stage is the one that reads it.
    uint32_t keys = 0;
    if (lane == 0) keys = smem.pieces.missing_keys[k_ring.stage()];
    return __shfl_sync(~0u, keys, 0);
  }
  // Sets the scores of missing keys to -inf and their values, in this place of the ring, to 0: their
  // P is 0, but 0 · NaN would reach O. Each consumer writes the same zeros for itself.
  __device__ __forceinline__ void pass_over(typename Traits::Scores& S, uint32_t missing_keys,
                                            const Ring<Traits::kStages>& ring) const {
    mask_eights(S, missing_keys);
    ring.wait_full();
    clear_values(ring.stage(), missing_keys);
  }

  // Starts S = Q Kᵀ, or S += Q Kᵀ.
  __device__ __forceinline__ void scores(typename Traits::Scores& S) const {
    gemm_ss<typename Traits::Element, Traits::kHeadDim,
            Traits::kStartsWithBias ? Into::kSum : Into::kZero>(
        S, Q(smem.q[q_ring.stage()], warpgroup * 64), K(smem.k[k_ring.stage()]));
  }

  // Multiplies this consumer's rows of Q, which have just come, by softmax_scale. The whole
  // warpgroup calls it.
  __device__ __forceinline__ void scale_queries() const {
    if (!scales_q<Traits>(params)) return;
    using Tile = typename Traits::QTile;
    auto& tile = smem.q[q_ring.stage()];
    const __nv_bfloat162 factor = __float2bfloat162_rn(params.softmax_scale);
    constexpr int kRowChunks = Tile::kCols / kChunk;
#pragma unroll
    for (int i = threadIdx.x % 128; i < 64 * kRowChunks; i += 128) {
      auto* const chunk = reinterpret_cast<uint4*>(
          tile.pointer(warpgroup * 64 + i / kRowChunks, i % kRowChunks * kChunk));
      uint4 numbers = *chunk;
      auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&numbers);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) pairs[pair] = __hmul2(pairs[pair], factor);
      *chunk = numbers;
    }
    ptx::fence_async_shared();
    ptx::barrier_sync<128>(kCleared + warpgroup);
  }
};

}  // namespace flash_attn::sm90
