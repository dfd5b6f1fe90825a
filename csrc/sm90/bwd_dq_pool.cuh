// dq_accum as a pool (DqPool): the sums of dQ stay in the L2 cache, and become rows of dq while the
// kernel runs. One warp says which sums are complete. Another one converts them, band after band,
// and leaves zeros. Where sums come in order, their turns say when they are complete
// (bwd_dq_order.cuh).
//
// Nobody waits for a thread block that does not run: tiles and shares are taken in order, those
// that run finish what they took, and the warp that converts holds up no other role.
#pragma once

#include "../cuda/attn/dq_accum.cuh"
#include "bwd_dq_order.cuh"
#include "bwd_traits.cuh"
#include "ptx/counter.cuh"
#include "ptx/fence.cuh"

namespace flash_attn::sm90 {

__device__ __forceinline__ int32_t* dq_shares_taken(const BwdParams& params) {
  return &params.dq_pool.progress[0];
}
__device__ __forceinline__ int32_t* dq_blocks_added(const BwdParams& params, int number) {
  return &params.dq_pool.progress[1 + 2 * number];
}
__device__ __forceinline__ int32_t* dq_shares_written(const BwdParams& params, int number) {
  return &params.dq_pool.progress[2 + 2 * number];
}

// A share is some bands of one query head, one behind the other; a head, or a stretch of one, has
// so many shares.
template <typename Traits>
__device__ __forceinline__ int dq_shares_of_stretch(const BwdParams& params) {
  constexpr int kRows = Traits::kBands * Traits::kBandRows;
  if constexpr (Traits::kStretches) return kBwdStretchRows / kRows;
  return (params.seqlen_q + kRows - 1) / kRows;
}

// Calls f(number) for what counts a tile: its head, or each stretch of its queries.
template <typename Traits, typename F>
__device__ __forceinline__ void for_each_stretch(const BwdParams& params, const BwdWork& work,
                                                 const F& f) {
  const int head = work.batch_idx * params.heads_kv + work.kv.head;
  if constexpr (!Traits::kStretches) {
    f(head);
  } else {
    if (!work.has_queries()) return;
    constexpr int kBlocks = kBwdStretchRows / Traits::kBlockM;
    const int last = (work.range.end - 1) / kBlocks;
#pragma unroll 1
    for (int stretch = work.range.begin / kBlocks; stretch <= last; ++stretch) {
      f(head * params.dq_pool.stretches + stretch);
    }
  }
}

__device__ __forceinline__ void await(const int32_t* counter, int value) {
  while (!__any_sync(~0u, ptx::ld_acquire(counter) == value)) __nanosleep(100);
}

// Whether the sums that lay where those of the work belong have become rows of dq.
template <typename Traits>
__device__ __forceinline__ bool has_place(const BwdParams& params, const BwdWork& work) {
  bool has = true;
  for_each_stretch<Traits>(params, work, [&](int number) {
    const int before = number - params.dq_pool.places;
    if (before < 0) return;
    const int group = params.heads_q / params.heads_kv;
    has &= ptx::ld_acquire(dq_shares_written(params, before)) ==
           group * dq_shares_of_stretch<Traits>(params);
  });
  return has;
}

// Lets the consumers begin with a tile when there is a place for its sums, and says when the tile
// has been added. It does not stick to this order: the place may be that of the sums of the tile
// before. A tile without queries waits for the place, too: a head may have no others, and where
// they have all been counted, its sums are taken from that place. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void pass_tiles_loop(const BwdParams& params,
                                                BwdSharedStorage<Traits>& smem) {
  WorkReader next(smem.queue), added(smem.queue);
  Ring<1> k_ring(smem.k_ring);
  bool is_first = true;
  const BwdWork* work;
  do {
    work = next.read();
    next.release(false);
    bool is_let_in = work == nullptr;
    const auto let_in = [&] {
      if (work->has_queries()) {
        k_ring.wait_empty();
        k_ring.arrive_full();
        k_ring.advance();
      }
      is_let_in = true;
    };
    if (!is_let_in && has_place<Traits>(params, *work)) let_in();
    if (!is_first) {
      const BwdWork& done = *added.read();
      added.in(smem.summed_ring).wait_full();
      for_each_stretch<Traits>(params, done, [&](int number) {
        // The release makes the consumers' reductions complete for whoever sees the number.
        ptx::add_release(dq_blocks_added(params, number), 1);
      });
      added.release(true);
    }
    is_first = false;
    if (!is_let_in) {
      while (!has_place<Traits>(params, *work)) __nanosleep(100);
      let_in();
    }
  } while (work != nullptr);
}

// Where the sums of a pool come in order: a tile's first turn is when there is a place for its
// sums.
template <typename Traits>
__device__ __forceinline__ void take_turns_in_pool_loop(const BwdParams& params, bool last_first,
                                                        BwdSharedStorage<Traits>& smem) {
  take_turns_loop<Traits::kBlockM, Traits::kBlockN, /*kPools=*/true>(
      params, last_first, /*share=*/0, smem.queue, smem.turn_ring, smem.added_ring,
      [&](const BwdWork& work) {
        while (!has_place<Traits>(params, work)) __nanosleep(100);
      });
}

// The warp that makes rows of dq from the sums that are complete, share after share. A band comes
// by TMA, is rounded where it lies, and leaves by TMA, while the next one comes.
template <typename Traits>
class DqConverter {
  using Element = typename Traits::Element;
  using Slab = typename Traits::BandSlab;
  static constexpr int kRows = Traits::kBandRows, kCols = Traits::kHeadDim;
  static constexpr int kBytes = kRows * kCols * static_cast<int>(sizeof(float));

 public:
  __device__ __forceinline__ DqConverter(const BwdParams& params, const CUtensorMap& map,
                                         BwdSharedStorage<Traits>& smem)
      : params_(params), map_(map), smem_(smem) {}

  // blocks: how many blocks of keys a head has.
  __device__ __forceinline__ void run(int blocks) {
    const int of_stretch = dq_shares_of_stretch<Traits>(params_);
    const int group = params_.heads_q / params_.heads_kv;
#pragma unroll 1
    for (int share = take(); share < num_shares(of_stretch); share = take()) {
      head_ = share / of_stretch;
      first_row_ = share % of_stretch * Traits::kBands * kRows;
      const int number = head_ / group;
      const int place = number % params_.dq_pool.places * group + head_ % group;
      sums_ = params_.dq_accum + (place * params_.dq_accum_rows + first_row_) * kCols;
      if constexpr (Traits::kStretches || Traits::kOrders) {
        // A place that no tile adds to has not been waited for.
        const int before = number - params_.dq_pool.places;
        if (before >= 0) await(dq_shares_written(params_, before), group * of_stretch);
      }
      if constexpr (Traits::kStretches) {
        // So far a stretch has been counted as a head; no heads share keys then.
        const int of_head = params_.dq_pool.stretches;
        first_row_ += head_ % of_head * kBwdStretchRows;
        head_ /= of_head;
        blocks = blocks_of_stretch();
      }
      if constexpr (Traits::kOrders) {
        await_turns();
      } else {
        await(dq_blocks_added(params_, number), blocks);
      }
      if (!Traits::kStretches || exists(0)) start(0);
#pragma unroll 1
      for (int band = 0; band < Traits::kBands && exists(band); ++band, ++visit_) {
        if (band + 1 < Traits::kBands && exists(band + 1)) start(band + 1);
        finish(band);
      }
      if (speaks()) ptx::add_release(dq_shares_written(params_, number), 1);
    }
    if (speaks()) ptx::bulk_wait();
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static bool speaks() { return lane() == 0; }
  __device__ __forceinline__ int row_of(int band) const { return first_row_ + band * kRows; }
  __device__ __forceinline__ bool exists(int band) const { return row_of(band) < params_.seqlen_q; }

  __device__ __forceinline__ int num_shares(int of_stretch) const {
    const int of_call = params_.batch * params_.heads_q * of_stretch;
    return Traits::kStretches ? of_call * params_.dq_pool.stretches : of_call;
  }

  // How many blocks of keys add to the stretch in which the share lies.
  __device__ __forceinline__ int blocks_of_stretch() const {
    const SeqlenInfo seqlen(params_, head_ / params_.heads_q);
    const BlockRange range = BlockRange::of_keys<kBwdStretchRows, Traits::kBlockN>(
        AttentionWindow(params_, seqlen.len_q, seqlen.len_k),
        first_row_ / kBwdStretchRows * kBwdStretchRows);
    return range.end - range.begin;
  }

  // Waits until all turns at the share's blocks of queries have been passed on.
  __device__ __forceinline__ void await_turns() const {
    constexpr int kBlocks = Traits::kBands * kRows / Traits::kBlockM;
    static_assert(kBlocks > 0 && kBlocks <= 32);
    const int batch_idx = head_ / params_.heads_q;
    const SeqlenInfo seqlen(params_, batch_idx);
    const AttentionWindow window(params_, seqlen.len_q, seqlen.len_k);
    const int first_row = first_row_ + lane() % kBlocks * Traits::kBlockM;
    if (first_row < seqlen.len_q) {
      const int64_t row =
          first_row + dq_turn_row<true>(params_, 0, batch_idx, head_ % params_.heads_q);
      const auto keys = BlockRange::of_keys<Traits::kBlockM, Traits::kBlockN>(window, first_row);
      const int32_t* const added = &params_.dq_turns[row / kDqAccumRows * kDqShares];
      while (ptx::ld_acquire(added) != keys.end - keys.begin) __nanosleep(100);
    }
    __syncwarp();
  }

  __device__ __forceinline__ int take() const {
    int taken = 0;
    if (speaks()) taken = atomicAdd(dq_shares_taken(params_), 1);
    return __shfl_sync(~0u, taken, 0);
  }

  // Starts the copy of the share's first band (band = 0), or of the one behind the band that is
  // being visited.
  __device__ __forceinline__ void start(int band) const {
    if (!speaks()) return;
    const Ring<Traits::kBandStages> ring(smem_.band_ring, visit_ + (band > 0));
    // Waits until what left from this stage has been read.
    ptx::bulk_wait_read();
    // The sums were added by reductions, which the copy must see.
    ptx::fence_async_global();
    ring.expect_bytes(kBytes);
    ptx::bulk_load(smem_.bands[ring.stage()], sums_ + band * kRows * kCols, kBytes, ring.full());
  }

  __device__ __forceinline__ void finish(int band) const {
    const Ring<Traits::kBandStages> ring(smem_.band_ring, visit_);
    ring.wait_full();
    auto* const zeros = reinterpret_cast<float4*>(sums_ + band * kRows * kCols);
#pragma unroll 4
    for (int i = lane(); i < kRows * kCols / 4; i += 32) zeros[i] = {};
    const float* const from = smem_.bands[ring.stage()];
    auto* const slabs = reinterpret_cast<Slab*>(smem_.bands[ring.stage()]);
#pragma unroll 1
    for (int row = 0; row < kRows; row += kDqAccumRows) {
      const uint32_t to = slabs->address(row + lane() % 16, lane() / 16 * 8);
#pragma unroll 1
      for (int col = 0; col < kCols; col += 32) {
        const uint32_t of_slab = col / Slab::kCols * sizeof(Slab);
        round_block(from + row * kCols + col / 8 * kDqAccumBlock,
                    (to ^ col % Slab::kCols * 2) + of_slab);
      }
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (!speaks()) return;
    const MatrixPlace place = {.box = {params_.seqlen_q, 0, params_.seqlen_q},
                               .head = head_ % params_.heads_q,
                               .batch = head_ / params_.heads_q};
    for (int col = 0; col < params_.head_dim; col += Slab::kCols) {
      store_tile_rows<kRows>(slabs[col / Slab::kCols], 0, map_, place, row_of(band), col);
    }
    ptx::bulk_commit();
  }

  // Rounds 16 rows and 32 columns of sums to the slab's rows, which begin at `to`. What is written
  // lies in front of what is still to be read, or in these blocks themselves.
  __device__ __forceinline__ void round_block(const float* from, uint32_t to) const {
    uint32_t pairs[2][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float4 sums = *reinterpret_cast<const float4*>(
          from + b * kDqAccumBlock + dq_accum_position(DqAccumOrder::kByLane, lane(), 0));
      const float scale = params_.softmax_scale;
      pairs[b / 2][b % 2 * 2] = flash_attn::ptx::pack<Element>(sums.x * scale, sums.y * scale);
      pairs[b / 2][b % 2 * 2 + 1] = flash_attn::ptx::pack<Element>(sums.z * scale, sums.w * scale);
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::stmatrix_x4(Slab::advance(to, 0, 0) ^ (half * 32), pairs[half]);
    }
    __syncwarp();
  }

  const BwdParams& params_;
  const CUtensorMap& map_;
  BwdSharedStorage<Traits>& smem_;
  int head_, first_row_;  // of the share; query heads of all batch entries, one after the other
  float* sums_;
  unsigned visit_ = 0;
};

}  // namespace flash_attn::sm90
