// What the consumer warpgroups of the backward kernel for wide heads share: products over slabs.
#pragma once

#include "../cuda/attn/key_gradient.cuh"
#include "../cuda/ptx/opaque.cuh"
#include "../cuda/tile/smem_operand.cuh"
#include "bwd_pair_traits.cuh"
#include "ptx/fence.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

enum BwdPairBarrier : int {  // 0 is __syncthreads
  kProductsDone = 1
};

// What a thread of a consumer warpgroup knows of where it stands.
template <typename Traits>
struct BwdPairConsumer {
  const typename Traits::Params& params;
  BwdPairSharedStorage<Traits>& smem;
  WorkReader<BwdWork, Traits::kStages> queue;
  const int rank;      // of the thread block in its cluster: its keys start at rank · kBlockN
  int lane, warp_row;  // warp_row: the first of the warp's 16 rows, keys or queries

  __device__ __forceinline__ BwdPairConsumer(const typename Traits::Params& params,
                                             BwdPairSharedStorage<Traits>& smem, int rank)
      : params(params), smem(smem), queue(smem.queue), rank(rank) {}

  // Says anew which thread this is, with each tile: what follows from it for the end of a tile is
  // not computed before all tiles then, where it would take registers.
  __device__ __forceinline__ void place_thread() {
    const auto thread = static_cast<int>(flash_attn::ptx::opaque(threadIdx.x));
    lane = thread % 32;
    warp_row = thread / 32 % 4 * 16;
  }

  __device__ __forceinline__ DqPlace dq_place() const {
    return {.row = warp_row, .col = 0, .lane = lane};
  }

  // The lane, as a value that the compiler does not know. What follows from it alone is not
  // computed before the loop, where it would take registers.
  __device__ __forceinline__ int opaque_lane() const {
    return static_cast<int>(flash_attn::ptx::opaque(lane));
  }
};

// Stores the gradient of this warp's keys, dK or dV, through the slabs that held K or V, and says
// that the next tile's may come there as far as this thread is concerned. Slabs that no load writes
// keep their zeros.
template <typename Traits, int kSlabs, int kCols>
__device__ __forceinline__ void store_key_gradient(
    const BwdPairConsumer<Traits>& self, const BwdWork& work,
    typename Traits::Slab (&slabs)[kSlabs], const Ring<1>& slabs_ring,
    const Accumulator<1, kCols>& gradient, void* tensor, const Strides& strides, int num_cols) {
  ptx::barrier_sync<Traits::kConsumerThreads>(kProductsDone);  // nobody reads the slabs any more
#pragma unroll
  for (int s = 0; s < kSlabs; ++s) {
    if (s * Traits::kSlabCols >= num_cols) break;
    store_rounded(slabs[s], gradient, s * Traits::kSlabCols, self.warp_row, self.lane);
  }
  __syncwarp();
  const KeyGradientRows rows(work.seqlen, work.batch_idx, work.kv.head, work.first_key);
  for (int s = 0; s < kSlabs; ++s) {
    rows.template store<16, 32>(
        static_cast<typename Traits::Element*>(tensor) + s * Traits::kSlabCols, strides,
        num_cols - s * Traits::kSlabCols, slabs[s], self.warp_row, self.lane);
  }
  ptx::fence_async_shared();
  slabs_ring.arrive_empty();
}

// The first slabs of K or V of this warp's 16 keys are operands in registers for as long as the
// tile lasts. Without any there is an array all the same, which takes no register.
template <int kSlabs>
struct HeldSlabs {
  OperandA<1, 64> slabs[kSlabs > 0 ? kSlabs : 1];

  // Called once the slabs are there.
  template <typename Slab>
  __device__ __forceinline__ void read(const Slab* from, int warp_row, int lane) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      const SmemOperand<Side::kA, Layout::kKInner, Slab> rows(from[s], warp_row, lane);
#pragma unroll
      for (int k = 0; k < Slab::kCols; k += 16) rows.load(slabs[s].data[0][k / 16], 0, k);
    }
  }
};

// Starts C = A B over the columns of the slabs, of which some are held. B's are taken from the ring
// as they come. add_rows() starts what comes behind them.
template <typename Traits, int kSlabs, int kHeld, int kStages, typename AddRows>
__device__ __forceinline__ void start_scores(typename Traits::Scores& C,
                                             const typename Traits::Slab (&A)[kSlabs],
                                             HeldSlabs<kHeld>& held,
                                             const typename Traits::Slab (&B)[kStages],
                                             Ring<kStages> ring, const AddRows& add_rows) {
  using Element = typename Traits::Element;
  using Operand = WgmmaOperand<Layout::kKInner, typename Traits::Slab>;
#pragma unroll
  for (int s = 0; s < kSlabs; ++s, ring.advance()) {
    ring.wait_full();
    const Operand a(A[s]), b(B[ring.stage()]);
    if (s < kHeld && s == 0) {
      gemm_rs<Element, Into::kZero>(C, held.slabs[s], b);
    } else if (s < kHeld) {
      gemm_rs<Element, Into::kSum>(C, held.slabs[s], b);
    } else if (s == 0) {
      gemm_ss<Element, Traits::kSlabCols, Into::kZero>(C, a, b);
    } else {
      gemm_ss<Element, Traits::kSlabCols, Into::kSum>(C, a, b);
    }
  }
  add_rows();
  ptx::wgmma_commit();
}

// Starts gradient += scores · B, slab after slab of B's columns.
template <typename Traits, int kCols, int kStages>
__device__ __forceinline__ void start_key_gradient(Accumulator<1, kCols>& gradient,
                                                   typename Traits::ScoresOperand& scores,
                                                   const typename Traits::Slab (&B)[kStages],
                                                   Ring<kStages> ring) {
#pragma unroll
  for (int col = 0; col < kCols; col += Traits::kSlabCols, ring.advance()) {
    ring.wait_full();
    gemm_rs<typename Traits::Element>(
        gradient, scores, WgmmaOperand<Layout::kKOuter, typename Traits::Slab>(B[ring.stage()]),
        col);
  }
  ptx::wgmma_commit();
}

// The warp is done with a block's slabs.
template <int kSlabs, int kStages>
__device__ __forceinline__ void release_slabs(Ring<kStages>& ring, int lane) {
#pragma unroll
  for (int s = 0; s < kSlabs; ++s, ring.advance()) {
    if (lane == 0) ring.arrive_empty();
  }
}

}  // namespace flash_attn::sm90
