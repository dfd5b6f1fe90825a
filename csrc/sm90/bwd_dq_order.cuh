// dQ's sums in the same order every time: blocks of keys take turns at each block of queries. One warp waits
// for the turns of its thread block, one passes them on.
#pragma once

#include <cuda/atomic>

#include "../cuda/attn/dq_accum.cuh"
#include "bwd_traits.cuh"

namespace flash_attn::sm90 {

// One block of keys at one block of queries.
struct DqTurn {
  ::cuda::atomic_ref<int32_t, ::cuda::thread_scope_device> added;  // how many have been, so far
  int turn;                                                        // how many come before this one

  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ static DqTurn make(const BwdParams& params, bool last_first,
                                                const BwdWork& work, const QueryBlocks& block) {
    const int first_row = block.m * kBlockM, own = work.first_key / kBlockN;
    const int64_t row = block.head * params.dq_accum_rows + first_row +
                        dq_accum_first_row(params, work.seqlen.q_begin, work.batch_idx);
    const BlockRange keys = BlockRange::of_keys<kBlockM, kBlockN>(work.window, first_row);
    return {::cuda::atomic_ref<int32_t, ::cuda::thread_scope_device>(
                params.dq_turns[row / kDqAccumRows]),
            last_first ? keys.end - 1 - own : own - keys.begin};
  }
};

// Calls step(turn, ring) for each block of queries of each tile. A whole warp.
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

// Whether the sequences lie one behind the other. A whole warp.
__device__ __forceinline__ bool ascends(const int32_t* cu_seqlens, int batch) {
  if (cu_seqlens == nullptr) return true;
  bool ascending = true;
  for (int b = threadIdx.x % 32; b < batch; b += 32) {
    ascending &= cu_seqlens[b] <= cu_seqlens[b + 1];
  }
  return __all_sync(~0u, ascending);
}

// A tile waits only for tiles that were taken before it. Where sequences overlap, which is an error of
// the caller, some tiles do not exist, and nobody may wait for them.
template <typename Traits>
__device__ __forceinline__ void await_turns_loop(const BwdParams& params, bool last_first,
                                                 BwdSharedStorage<Traits>& smem) {
  const bool waits =
      ascends(params.cu_seqlens_q, params.batch) && ascends(params.cu_seqlens_k, params.batch);
  for_each_turn(params, last_first, smem, [waits](const DqTurn& at, const auto& ring) {
    while (waits && at.added.load(::cuda::memory_order_acquire) != at.turn) {
    }
    ring.wait_empty();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.arrive_full();
  });
}

// That consumers have issued their reductions is known here by an mbarrier; the release makes them
// complete for whoever sees the number.
template <typename Traits>
__device__ __forceinline__ void pass_turns_loop(const BwdParams& params, bool last_first,
                                                BwdSharedStorage<Traits>& smem) {
  for_each_turn(params, last_first, smem, [&](const DqTurn& at, const auto& ring) {
    ring.in(smem.added_ring).wait_full();
    if (threadIdx.x % 32 == 0) {
      ring.arrive_empty();
      at.added.store(at.turn + 1, ::cuda::memory_order_release);
    }
    __syncwarp();
  });
}

}  // namespace flash_attn::sm90
