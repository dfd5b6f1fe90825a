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

// Whether it is a varlen call.
template <typename Traits>
__device__ __forceinline__ bool pools_varlen(const BwdParams& params) {
  return Traits::kPoolsVarlen && params.cu_seqlens_q != nullptr;
}

// A share is some bands of one query head, one behind the other; a head, or a stretch of one, has
// so many shares. In a varlen sequence that is shorter than max_seqlen the last ones are empty.
template <typename Traits>
__device__ __forceinline__ int dq_shares_of_stretch(const BwdParams& params) {
  if constexpr (Traits::kStretches) return kBwdStretchRows / Traits::kShareRows;
  return (params.seqlen_q + Traits::kShareRows - 1) / Traits::kShareRows;
}

// Calls f(number) for what counts a tile: its head, or each stretch of its queries. Nothing counts
// the keys before the first sequence and behind the last.
template <typename Traits, typename F>
__device__ __forceinline__ void for_each_stretch(const BwdParams& params, const BwdWork& work,
                                                 const F& f) {
  const int head = work.batch_idx * params.heads_kv + work.kv.head;
  if constexpr (!Traits::kStretches) {
    const bool is_outside = work.batch_idx < 0 || work.batch_idx == params.batch;
    if (!pools_varlen<Traits>(params) || !is_outside) f(head);
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
// they have all been counted, its sums are taken from that place. A whole warp calls it.
template <typename Traits>
__device__ __forceinline__ void pass_tiles_loop(const BwdParams& params,
                                                BwdSharedStorage<Traits>& smem) {
  const bool waits = !pools_varlen<Traits>(params) || all_tiles_exist(params);
  if (!ptx::elect_one()) return;
  const auto has_place_for = [&](const BwdWork& work) {
    return !waits || has_place<Traits>(params, work);
  };
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
    if (!is_let_in && has_place_for(*work)) let_in();
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
      while (!has_place_for(*work)) __nanosleep(100);
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
  static constexpr int kBytes = Traits::kBandBytes;
  static constexpr int kStepCols = 32, kLastCols = kCols % kStepCols;  // of round_step()
  static constexpr uint32_t kNans = 0x7fff7fff;  // two of them, of fp16 or bf16

 public:
  __device__ __forceinline__ DqConverter(const BwdParams& params, const CUtensorMap& map,
                                         BwdSharedStorage<Traits>& smem)
      : params_(params), map_(map), smem_(smem) {}

  // blocks_of_head: how many blocks of keys each has, but for those of varlen sequences.
  __device__ __forceinline__ void run(int blocks_of_head) {
    const int of_stretch = dq_shares_of_stretch<Traits>(params_);
    const int group = params_.heads_q / params_.heads_kv;
    const bool varlen = pools_varlen<Traits>(params_);
    if (varlen && !all_tiles_exist(params_)) return fill_share(0, params_.total_q, kNans);
#pragma unroll 1
    for (int share = take(); share < num_shares(of_stretch); share = take()) {
      head_ = share / of_stretch;
      first_row_ = share % of_stretch * Traits::kShareRows;
      int blocks = blocks_of_head;  // that add to these sums
      if constexpr (Traits::kPoolsVarlen) {
        end_ = params_.seqlen_q;
        if (varlen) {
          const SeqlenInfo seqlen(params_, head_ / params_.heads_q);
          place_in_sequence(seqlen, share % of_stretch == of_stretch - 1);
          blocks = (seqlen.segment_k + Traits::kBlockN - 1) / Traits::kBlockN;
        }
      }
      const int number = head_ / group;
      const int place = number % params_.dq_pool.places * group + head_ % group;
      sums_ = params_.dq_accum + (place * params_.dq_accum_rows + first_row_) * kCols;
      if (Traits::kStretches || Traits::kOrders || varlen) {
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
      if ((!Traits::kStretches && !varlen) || exists(0)) start(0);
#pragma unroll 1
      for (int band = 0; band < Traits::kBands && exists(band); ++band, ++visit_) {
        if (band + 1 < Traits::kBands && exists(band + 1)) start(band + 1);
        finish(band);
      }
      if (speaks()) ptx::add_release(dq_shares_written(params_, number), 1);
    }
    if (varlen) {
      const SeqlenInfo before(params_, -1), behind(params_, params_.batch);
      fill_share(0, before.segment_q, 0);
      fill_share(behind.q_begin, params_.total_q, 0);
    }
    if (speaks()) ptx::bulk_wait();
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static bool speaks() { return lane() == 0; }
  __device__ __forceinline__ int row_of(int band) const { return first_row_ + band * kRows; }
  __device__ __forceinline__ bool exists(int band) const {
    return row_of(band) < (Traits::kPoolsVarlen ? end_ : params_.seqlen_q);
  }

  __device__ __forceinline__ int num_shares(int of_stretch) const {
    const int of_call = params_.batch * params_.heads_q * of_stretch;
    return Traits::kStretches ? of_call * params_.dq_pool.stretches : of_call;
  }

  // Says where the varlen sequence of the share lies, and writes rows that have no sums: 0 for
  // queries that do not count, NaN where a place is too short. The last share has all that follow.
  __device__ __forceinline__ void place_in_sequence(const SeqlenInfo& seqlen, bool is_last) {
    q_begin_ = static_cast<int>(seqlen.q_begin);
    const bool has_place = has_place_in_pool(params_, seqlen);
    end_ = has_place ? seqlen.len_q : 0;
    const int end =
        is_last ? seqlen.segment_q : min(first_row_ + Traits::kShareRows, seqlen.segment_q);
    fill(head_ % params_.heads_q, q_begin_ + max(first_row_, end_), q_begin_ + end, 1,
         has_place ? 0 : kNans);
  }

  // The thread blocks share these rows of dq.
  __device__ __forceinline__ void fill_share(int64_t first, int64_t end, uint32_t pair) const {
#pragma unroll 1
    for (int head = 0; head < params_.heads_q; ++head) {
      fill(head, static_cast<int>(first + blockIdx.x), static_cast<int>(end), gridDim.x, pair);
    }
  }

  // Writes the same two elements all over some rows of a head.
  __device__ __forceinline__ void fill(int head, int first, int end, int step,
                                       uint32_t pair) const {
    const int col = lane() * 8;
    if (col >= params_.head_dim) return;
    Element* const dq = static_cast<Element*>(params_.dq) + head * params_.dq_strides.head + col;
#pragma unroll 1
    for (int row = first; row < end; row += step) {
      *reinterpret_cast<uint4*>(dq + row * params_.dq_strides.row) = {pair, pair, pair, pair};
    }
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
    constexpr int kBlocks = Traits::kShareRows / Traits::kBlockM;
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
    float* const sums = smem_.bands[ring.stage()];
#pragma unroll 1
    for (int row = 0; row < kRows; row += kDqAccumRows) {
      const uint32_t to = slab_of(sums, 0).address(row + lane() % 16, lane() / 16 * 8);
      const auto step = [&]<int kCount>(int col) {
        const uint32_t of_slab = col / Slab::kCols * Traits::kBandSlabStride;
        round_step<kCount>(sums + row * kCols + col / 8 * kDqAccumBlock,
                           (to ^ col % Slab::kCols * 2) + of_slab);
      };
#pragma unroll 1
      for (int col = 0; col < kCols - kLastCols; col += kStepCols) {
        step.template operator()<kStepCols>(col);
      }
      if constexpr (kLastCols > 0) step.template operator()<kLastCols>(kCols - kLastCols);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (!speaks()) return;
    MatrixPlace place = {.box = {params_.seqlen_q, 0, params_.seqlen_q},
                         .head = head_ % params_.heads_q,
                         .batch = head_ / params_.heads_q};
    if (pools_varlen<Traits>(params_)) {
      place.box = {params_.total_q, q_begin_, end_};
      place.batch = 0;
    }
    for (int col = 0; col < params_.head_dim; col += Slab::kCols) {
      store_tile_rows<kRows>(slab_of(sums, col), 0, map_, place, row_of(band), col);
    }
    ptx::bulk_commit();
  }

  // The slab of the band that has the column.
  __device__ __forceinline__ static Slab& slab_of(float* band, int col) {
    char* const bytes = reinterpret_cast<char*>(band);
    return *reinterpret_cast<Slab*>(bytes + col / Slab::kCols * Traits::kBandSlabStride);
  }

  // Rounds 16 rows and kCount columns of sums to the slab's rows, which begin at `to`. What is
  // written lies in front of what is still to be read, or in these blocks themselves.
  template <int kCount>
  __device__ __forceinline__ void round_step(const float* from, uint32_t to) const {
    uint32_t pairs[kCount / 16][4];
#pragma unroll
    for (int b = 0; b < kCount / 8; ++b) {
      const float4 sums = *reinterpret_cast<const float4*>(
          from + b * kDqAccumBlock + dq_accum_position(DqAccumOrder::kByLane, lane(), 0));
      const float scale = params_.softmax_scale;
      pairs[b / 2][b % 2 * 2] = flash_attn::ptx::pack<Element>(sums.x * scale, sums.y * scale);
      pairs[b / 2][b % 2 * 2 + 1] = flash_attn::ptx::pack<Element>(sums.z * scale, sums.w * scale);
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < kCount / 16; ++half) {
      ptx::stmatrix_x4(Slab::advance(to, 0, 0) ^ (half * 32), pairs[half]);
    }
    __syncwarp();
  }

  const BwdParams& params_;
  const CUtensorMap& map_;
  BwdSharedStorage<Traits>& smem_;
  int head_, first_row_;  // of the share; query heads of all batch entries, one after the other
  int q_begin_, end_;     // of a varlen sequence: its first row of dq, and how many have sums
  float* sums_;
  unsigned visit_ = 0;
};

}  // namespace flash_attn::sm90
