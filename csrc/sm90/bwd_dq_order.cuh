// dQ's sums come in the same order every time: blocks of keys take turns at each block of queries.
// One warp waits for the turns of its thread block and passes them on. A pass must not wait for a
// turn, nor a turn for a pass, so each block of queries that is under way has a lane of its own.
#pragma once

#include "../cuda/attn/dq_accum.cuh"
#include "../cuda/ptx/fence.cuh"
#include "bwd_work.cuh"
#include "ptx/counter.cuh"
#include "tile/ring.cuh"
#include "tile/work_queue.cuh"

namespace flash_attn::sm90 {

// How many threads read a thread block's works for the sake of turns.
template <typename Traits>
inline constexpr int kTurnReaders = Traits::kOrders ? 32 : 0;

// The turn of one block of keys at one block of queries.
struct DqTurn {
  int32_t* added;  // how many have been, so far
  int turn;        // how many come before this one

  // kPools: dq_accum is a pool. share: which of dQ's columns are meant, where thread blocks share
  // them.
  template <int kBlockM, int kBlockN, bool kPools = false>
  __device__ __forceinline__ static DqTurn make(const BwdParams& params, bool last_first,
                                                const BwdWork& work, const QueryBlock& block,
                                                int share = 0) {
    const int first_row = block.m * kBlockM, own = work.first_key / kBlockN;
    const int64_t row =
        first_row + dq_turn_row<kPools>(params, work.seqlen.q_begin, work.batch_idx, block.head);
    const BlockRange keys = BlockRange::of_keys<kBlockM, kBlockN>(work.window, first_row);
    return {&params.dq_turns[row / kDqAccumRows * kDqShares + share],
            last_first ? keys.end - 1 - own : own - keys.begin};
  }

  // A look is under way until its answer is used, and counts once fence_acquire() stands behind it.
  __device__ __forceinline__ int look() const { return ptx::ld_relaxed(added); }
  // It counts if fence_release() stands before it.
  __device__ __forceinline__ void pass_on() const { ptx::st_relaxed(added, turn + 1); }
};

// Whether the sequences lie one behind the other. A whole warp calls it.
__device__ __forceinline__ bool ascends(const int32_t* cu_seqlens, int batch) {
  if (cu_seqlens == nullptr) return true;
  bool ascending = true;
  for (int b = threadIdx.x % 32; b < batch; b += 32) {
    ascending &= cu_seqlens[b] <= cu_seqlens[b + 1];
  }
  return __all_sync(~0u, ascending);
}

// Where sequences overlap, which is an error of the caller, some tiles do not exist, and nobody may
// wait for them. A whole warp calls it.
__device__ __forceinline__ bool all_tiles_exist(const BwdParams& params) {
  return ascends(params.cu_seqlens_q, params.batch) && ascends(params.cu_seqlens_k, params.batch);
}

// Waits for turns and passes them on, for one share of dQ's columns. Before a tile's first turn it
// calls before(work). A whole warp calls it. Each of kStages lanes has a stage of both rings, and
// with it the blocks of queries that visit this stage: it looks for the turn of a block, and when
// the block has been added it passes the turn on and goes to the stage's next one. So one load
// looks for all turns that may come, and one fence, which takes as long as the reductions that are
// under way, passes on all turns whose blocks have been added. The answer to the look comes
// meanwhile.
//
// A tile waits only for tiles that were taken before it.
template <int kBlockM, int kBlockN, bool kPools, int kStages, typename Queue, typename Before>
__device__ __forceinline__ void take_turns_loop(const BwdParams& params, bool last_first, int share,
                                                Queue& works, RingBarriers<kStages>& turns,
                                                RingBarriers<kStages>& added,
                                                const Before& before) {
  const bool waits = all_tiles_exist(params);
  const int lane = threadIdx.x % 32;
  WorkReader queue(works);
  Ring<kStages> ring(turns, lane);
  int index = lane;  // of the lane's block among those of the tile
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
    before(*work);
    const auto turn_at = [&] {
      return DqTurn::make<kBlockM, kBlockN, kPools>(params, last_first, *work,
                                                    work->query_block(index), share);
    };
    const int blocks = work->has_queries() ? work->num_query_blocks() : 0;
    enum { kNone, kAwaited, kHasCome } turn = lane < kStages && index < blocks ? kAwaited : kNone;
    DqTurn at{};
    if (turn == kAwaited) at = turn_at();
#pragma unroll 1
    while (__any_sync(~0u, turn != kNone)) {
      const bool looks = turn == kAwaited;
      int seen = 0;
      if (looks) seen = at.look();
      if (turn == kHasCome && ring.in(added).is_full()) {
        // The mbarrier has told of the consumers' reductions. The fence puts them before the
        // number, for whoever sees it and acquires.
        flash_attn::ptx::fence_release();
        at.pass_on();
        ring.advance_round();
        index += kStages;
        turn = index < blocks ? kAwaited : kNone;
        at = turn_at();
      }
      if (looks && (!waits || seen == at.turn)) {
        // The fence puts the reductions that the number tells of before the consumers', which come
        // behind the mbarrier.
        flash_attn::ptx::fence_acquire();
        ring.arrive_full();
        turn = kHasCome;
      }
    }
    index -= blocks;
    queue.release(true);
  }
}

}  // namespace flash_attn::sm90
