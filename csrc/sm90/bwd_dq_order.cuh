// dQ's sums come in the same order every time: blocks of keys take turns at each block of queries.
// One warp waits for the turns of its thread block, and one passes them on. Where only one warp is
// free, it does both: in pairs of thread blocks, and with a pool.
#pragma once

#include <cuda/atomic>

#include "../cuda/attn/dq_accum.cuh"
#include "bwd_work.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/ring.cuh"
#include "tile/work_queue.cuh"

namespace flash_attn::sm90 {

template <typename Traits>
struct BwdSharedStorage;

// How many threads read a thread block's works for the sake of turns.
template <typename Traits>
inline constexpr int kTurnReaders = !Traits::kOrders ? 0
                                    : Traits::kPools ? 1
                                                     : 2 * 32;

// The turn of one block of keys at one block of queries.
struct DqTurn {
  ::cuda::atomic_ref<int32_t, ::cuda::thread_scope_device> added;  // how many have been, so far
  int turn;                                                        // how many come before this one

  // kPools: dq_accum is a pool. share: which of dQ's columns are meant, where thread blocks share
  // them.
  template <int kBlockM, int kBlockN, bool kPools = false>
  __device__ __forceinline__ static DqTurn make(const BwdParams& params, bool last_first,
                                                const BwdWork& work, const QueryBlocks& block,
                                                int share = 0) {
    const int first_row = block.m * kBlockM, own = work.first_key / kBlockN;
    const int64_t row =
        first_row + dq_turn_row<kPools>(params, work.seqlen.q_begin, work.batch_idx, block.head);
    const BlockRange keys = BlockRange::of_keys<kBlockM, kBlockN>(work.window, first_row);
    return {::cuda::atomic_ref<int32_t, ::cuda::thread_scope_device>(
                params.dq_turns[row / kDqAccumRows * kDqShares + share]),
            last_first ? keys.end - 1 - own : own - keys.begin};
  }

  __device__ __forceinline__ bool has_come() const {
    return added.load(::cuda::memory_order_acquire) == turn;
  }
  // Whoever sees the number sees the reductions whose end this thread knows of by an mbarrier.
  __device__ __forceinline__ void pass_on() const {
    added.store(turn + 1, ::cuda::memory_order_release);
  }
};

// Calls step(turn, ring) for each block of queries of each tile. A whole warp calls it.
template <typename Traits, typename Step>
__device__ __forceinline__ void for_each_turn(const BwdParams& params, bool last_first,
                                              BwdSharedStorage<Traits>& smem, const Step& step) {
  WorkReader queue(smem.queue);
  Ring<Traits::kTurnStages> ring(smem.turn_ring);
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
#pragma unroll 1
    for (QueryBlocks block(*work); block.more(); block.advance(), ring.advance()) {
      step(DqTurn::make<Traits::kBlockM, Traits::kBlockN>(params, last_first, *work, block), ring);
    }
    queue.release(true);
  }
}

// Whether the sequences lie one behind the other. A whole warp calls it.
__device__ __forceinline__ bool ascends(const int32_t* cu_seqlens, int batch) {
  if (cu_seqlens == nullptr) return true;
  bool ascending = true;
  for (int b = threadIdx.x % 32; b < batch; b += 32) {
    ascending &= cu_seqlens[b] <= cu_seqlens[b + 1];
  }
  return __all_sync(~0u, ascending);
}

// A tile waits only for tiles that were taken before it. Where sequences overlap, which is an error
// of the caller, some tiles do not exist, and nobody may wait for them.
template <typename Traits>
__device__ __forceinline__ void await_turns_loop(const BwdParams& params, bool last_first,
                                                 BwdSharedStorage<Traits>& smem) {
  const bool waits =
      ascends(params.cu_seqlens_q, params.batch) && ascends(params.cu_seqlens_k, params.batch);
  for_each_turn(params, last_first, smem, [waits](const DqTurn& at, const auto& ring) {
    while (waits && !at.has_come()) {
    }
    ring.wait_empty();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.arrive_full();
  });
}

template <typename Traits>
__device__ __forceinline__ void pass_turns_loop(const BwdParams& params, bool last_first,
                                                BwdSharedStorage<Traits>& smem) {
  for_each_turn(params, last_first, smem, [&](const DqTurn& at, const auto& ring) {
    ring.in(smem.added_ring).wait_full();
    if (threadIdx.x % 32 == 0) {
      ring.arrive_empty();
      at.pass_on();
    }
    __syncwarp();
  });
}

// Waits for turns and passes them on, for one share of dQ's columns. Before a tile's first turn it
// calls before(work). A whole warp calls it, of which one thread looks for either in turn.
template <int kBlockM, int kBlockN, bool kPools, int kStages, typename Queue, typename Before>
__device__ __forceinline__ void take_turns_loop(const BwdParams& params, bool last_first, int share,
                                                Queue& works, RingBarriers<kStages>& turns,
                                                RingBarriers<kStages>& added,
                                                const Before& before) {
  const bool waits =
      ascends(params.cu_seqlens_q, params.batch) && ascends(params.cu_seqlens_k, params.batch);
  if (!ptx::elect_one()) return;
  WorkReader queue(works);
  Ring<kStages> turn_ring(turns), added_ring(added);
#pragma unroll 1
  while (const BwdWork* const work = queue.read()) {
    const auto turn_at = [&](const QueryBlocks& block) {
      return DqTurn::make<kBlockM, kBlockN, kPools>(params, last_first, *work, block, share);
    };
    before(*work);
    QueryBlocks awaited(*work), passed(*work);
    int open = 0;  // blocks whose turn has come and was not passed on yet
#pragma unroll 1
    while (passed.more()) {
      if (open < kStages && awaited.more() && (!waits || turn_at(awaited).has_come())) {
        turn_ring.arrive_full();
        turn_ring.advance();
        awaited.advance();
        ++open;
      }
      if (open > 0 && added_ring.is_full()) {
        turn_at(passed).pass_on();
        added_ring.advance();
        passed.advance();
        --open;
      }
    }
    queue.release(true);
  }
}

}  // namespace flash_attn::sm90
