// Backward attention for Hopper where heads are wider than 128: pairs of thread blocks.
//
//   P  = exp(softmax_scale · Q Kᵀ - LSE), masked        dV = Pᵀ dO
//   dS = P ∘ (dO Vᵀ - delta)                            dK = softmax_scale · dSᵀ Q
//   delta = rowsum(dO ∘ O) - dLSE                       dQ = softmax_scale · dS K
//
// It works as bwd.cuh, with other roles. dK and dV of 64 keys fill the registers of two warpgroups,
// and 64 keys alone would send twice as many reductions of dQ to the L2 cache as it can take. So
// two thread blocks of 64 keys each, a cluster, walk over the queries together and exchange dS:
// each computes half of dQ's columns, for the keys of both. A cluster takes tile after tile of 128
// keys. What the next one needs first of Q, dO, LSE and delta comes while dK and dV of this one go
// out, and K and V where these have left.
//
//   warpgroup 0, producer   warp 0: K, Q     warp 1: V, dO     warp 2: tiles, LSE and delta
//                           warp 3: the order of dQ's sums
//   warpgroup 1, dQ         dQ = dS K, a half of the columns over 128 keys; reductions
//   warpgroup 2, S          Sᵀ = K Qᵀ; P = exp(S - LSE); mask           → P to shared memory
//                           dV += Pᵀ dO
//   warpgroup 3, D          dPᵀ = V dOᵀ; dS = P ∘ (dP - delta)          → dS to both blocks
//                           dK += dSᵀ Q
//
// S and D hold K and V of their keys in registers, as many slabs as there is room for. Where shared
// memory has room, LSE and delta are columns of the products (bwd_row_terms.cuh). Each warpgroup is
// a block of queries ahead of the next, as far as the rings between them have stages, so that the
// tensor cores always have somebody's product to do. Within a warpgroup nothing is overlapped but
// the product that ends an iteration. Where this is late (late_products), it is queued behind the
// next scores at once, so that S and D wait for each other with it under way, not in front of it. P
// and dS of the next block are passed on before it is waited for, as others wait for them.
//
// In the form kWithoutDq there is no warpgroup 1, no peer, and dS stays in D's registers. In the
// form kMasked all roles walk over those blocks of queries that a mask does not hide from the pair
// (bwd_pair_masked.cuh).
//
// Shared memory   │ K, in the end dK │ V, in the end dV │ half of the peer's K │
//                 │ slabs of Q and of dO │ P, in its place dS × 2 │ the peer's dS × 2 │
//                 │ LSE, delta × 2 │ work × 2, barriers │
#pragma once

#include <algorithm>

#include "../cuda/launch.h"
#include "../cuda/ptx/griddepcontrol.cuh"
#include "bwd.h"
#include "bwd_dq_order.cuh"
#include "bwd_dq_reduction.cuh"
#include "bwd_pair_consumer.cuh"
#include "bwd_pair_loads.cuh"
#include "bwd_pair_masked.cuh"
#include "ptx/fence.cuh"

namespace flash_attn::sm90 {

// The role S: computes P of each block of queries, and dV.
template <typename Traits>
__device__ __forceinline__ void compute_probabilities_loop(BwdPairConsumer<Traits>& self) {
  using Element = typename Traits::Element;
  auto& smem = self.smem;
  const float scale_log2 = Traits::RowValues::scale_log2(self.params.softmax_scale);
  Ring<Traits::kQStages> q_ring(smem.q_ring);
  Ring<Traits::kDoutStages> dout_ring(smem.dout_ring);
  Ring<Traits::kStages> row_ring(smem.row_ring);
  HeldSlabs<Traits::kHeldSlabsK> held_k;
  typename Traits::ScoresOperand P;     // of the block before, until its dV is done
  [[maybe_unused]] FoundQueries found;  // with a mask, the block at hand
  Accumulator<1, Traits::kHeadDimV> dV;

  const auto start_dv = [&] {  // dV += Pᵀ dO
    start_key_gradient<Traits>(dV, P, smem.dout, dout_ring);
  };
  const auto end_dv = [&] {
    pin(dV);
    pin(P);
    release_slabs<Traits::kSlabsV>(dout_ring, self.lane);
  };
  const auto step = [&](const BwdWork& work, int m, auto is_first) {
    constexpr bool kEarly = !decltype(is_first)::value && !Traits::kTile.late_products;
    constexpr bool kLate = !decltype(is_first)::value && Traits::kTile.late_products;
    typename Traits::Scores S;
    if constexpr (kEarly) start_dv();
    start_scores<Traits>(S, smem.k, held_k, smem.q, q_ring, [&] {  // Sᵀ = K Qᵀ
      if constexpr (Traits::kFoldsRows) {
        row_ring.wait_full();
        const auto& lse = smem.row_values[row_ring.stage()].lse;
        const auto ones = lse.ones();
        ptx::wgmma_fence();
        lse.subtract_from(S, ones);
      }
    });
    if constexpr (kEarly) {
      ptx::wgmma_wait<1>();
      end_dv();
    }
    if constexpr (kLate) start_dv();
    if constexpr (!Traits::kFoldsRows) row_ring.wait_full();
    [[maybe_unused]] uint32_t seen[1];
    if constexpr (Traits::kMasked) {
      found = smem.mask.of_rows[row_ring.stage()];
      m = found.block().m;
      seen[0] = find_seen(found.states() >> 2 * self.rank & 3, self.params.mask, work,
                          found.block(), work.first_key + self.warp_row, self.opaque_lane());
    }
    ptx::wgmma_wait<kLate ? 1 : 0>();
    pin(S);
    release_slabs<Traits::kSlabs>(q_ring, self.lane);
    typename Traits::Rows::template OfLane<Traits::kBlockM> lse;
    smem.row_values[row_ring.stage()].lse.read(lse, 0, self.lane);
    exponentiate(S, scale_log2, lse);
    if (m < work.range.full_begin || m >= work.range.full_end) {
      hide_unseen(S, work, self.warp_row, m * Traits::kBlockM, self.lane);
    }
    if constexpr (Traits::kMasked) hide(S, seen);
    row_ring.arrive_empty();
    const auto p_ring = row_ring.in(smem.p_ring);
    p_ring.wait_empty();
    store_exact<typename Traits::Exact>(smem.p(p_ring.stage()), S, self.warp_row,
                                        self.opaque_lane());
    __syncwarp();
    if (self.lane == 0) p_ring.arrive_full();
    if constexpr (kLate) {  // now that D need not wait for it
      ptx::wgmma_wait<0>();
      end_dv();
    }
    P = to_operand_a<Element>(S);
    row_ring.advance();
  };

#pragma unroll 1
  while (const BwdWork* const work = self.queue.read()) {
    const Ring<1> k_ring = self.queue.in(smem.k_ring);
    self.place_thread();
    dV.fill(0.f);
    k_ring.wait_full();
    int left = work->num_query_blocks();
    if (left > 0) {
      held_k.read(smem.k, self.warp_row, self.lane);
      int m = work->range.begin;
      step(*work, m, std::true_type{});
#pragma unroll 1
      while (Traits::kMasked ? !found.is_last() : --left > 0) {
        if (++m == work->range.end) m = work->range.begin;  // of the next head
        step(*work, m, std::false_type{});
      }
      start_dv();
      ptx::wgmma_wait<0>();
      end_dv();
    }
    scale_rows(dV, {1 / kExactScale, 1 / kExactScale});
    store_key_gradient(self, *work, smem.v, self.queue.in(smem.v_ring), dV, self.params.dv,
                       self.params.dv_strides, self.params.head_dim_v);
    if constexpr (Traits::kHeldSlabsK > 0) self.queue.in(smem.k_ring).arrive_empty();
    self.queue.release(true);
  }
}

// Sends this warp's 16 rows of dS to the peer. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void send_to_peer(const BwdPairConsumer<Traits>& self,
                                             const Ring<Traits::kStages>& ds_ring,
                                             const typename Traits::Slab& scores) {
  constexpr uint32_t kWarpBytes = sizeof(typename Traits::Slab) / 4;
  ds_ring.expect_bytes(kWarpBytes);  // as many come from the peer's warp
  const auto at_peer = [&](const void* here) {
    return ptx::address_in_block(flash_attn::ptx::smem_address(here), self.rank ^ 1);
  };
  const uint32_t offset = self.warp_row / 16 * kWarpBytes;
  ptx::copy_to_block(at_peer(self.smem.peer_ds[ds_ring.stage()].data) + offset,
                     reinterpret_cast<const char*>(scores.data) + offset, kWarpBytes,
                     at_peer(&ds_ring.full()));
}

// The role D: computes dS of each block of queries, for both blocks of the cluster, and dK.
template <typename Traits>
__device__ __forceinline__ void compute_score_gradients_loop(BwdPairConsumer<Traits>& self) {
  using Element = typename Traits::Element;
  auto& smem = self.smem;
  Ring<Traits::kQStages> q_ring(smem.q_ring);
  Ring<Traits::kDoutStages> dout_ring(smem.dout_ring);
  Ring<Traits::kStages> row_ring(smem.row_ring);
  HeldSlabs<Traits::kHeldSlabsV> held_v;
  typename Traits::ScoresOperand dS;  // of the block before, until its dK is done
  [[maybe_unused]] bool more;         // with a mask, whether a block comes behind the one at hand
  Accumulator<1, Traits::kHeadDim> dK;

  const auto start_dk = [&] {  // dK += dSᵀ Q
    start_key_gradient<Traits>(dK, dS, smem.q, q_ring);
  };
  const auto end_dk = [&] {
    pin(dK);
    pin(dS);
    release_slabs<Traits::kSlabs>(q_ring, self.lane);
  };
  const auto step = [&](auto is_first) {
    constexpr bool kEarly = !decltype(is_first)::value && !Traits::kTile.late_products;
    constexpr bool kLate = !decltype(is_first)::value && Traits::kTile.late_products;
    typename Traits::Scores dP;
    if constexpr (kEarly) start_dk();
    start_scores<Traits>(dP, smem.v, held_v, smem.dout, dout_ring, [&] {  // dPᵀ = V dOᵀ
      if constexpr (Traits::kFoldsRows) {
        row_ring.wait_full();
        const auto& delta = smem.row_values[row_ring.stage()].delta;
        const auto ones = delta.ones();
        ptx::wgmma_fence();
        delta.subtract_from(dP, ones);
      }
    });
    if constexpr (kEarly) {
      ptx::wgmma_wait<1>();
      end_dk();
    }
    if constexpr (kLate) start_dk();
    row_ring.in(smem.p_ring).wait_full();
    if constexpr (!Traits::kFoldsRows) row_ring.wait_full();
    ptx::wgmma_wait<kLate ? 1 : 0>();
    pin(dP);
    release_slabs<Traits::kSlabsV>(dout_ring, self.lane);
    [[maybe_unused]] auto& scores = smem.scores[row_ring.stage()];
    const int lane = Traits::kMasked ? self.opaque_lane() : self.lane;
    if constexpr (Traits::kFoldsRows) {
      differentiate<typename Traits::Exact>(dP, smem.p(row_ring.stage()), self.warp_row, lane);
    } else {
      differentiate<typename Traits::Exact>(dP, smem.p(row_ring.stage()), self.warp_row,
                                            smem.row_values[row_ring.stage()].delta.numbers, lane);
    }
    if constexpr (Traits::kHasDq) {
      // This takes the place of this warp's P.
      store_operand(scores, to_operand_a<Element>(dP), self.warp_row, self.lane);
      ptx::fence_async_shared();
    }
    if constexpr (Traits::kMasked) more = !smem.mask.of_rows[row_ring.stage()].is_last();
    row_ring.arrive_empty();
    __syncwarp();
    if (self.lane == 0) {
      if constexpr (Traits::kHasDq) {
        send_to_peer(self, row_ring.in(smem.ds_ring), scores);
      } else {
        row_ring.in(smem.p_ring).arrive_empty();
      }
    }
    if constexpr (kLate) {  // now that dQ need not wait for it
      ptx::wgmma_wait<0>();
      end_dk();
    }
    pin(dP);
    dS = to_operand_a<Element>(dP);
    row_ring.advance();
  };

#pragma unroll 1
  while (const BwdWork* const work = self.queue.read()) {
    const Ring<1> v_ring = self.queue.in(smem.v_ring);
    self.place_thread();
    dK.fill(0.f);
    v_ring.wait_full();
    const int num_blocks = work->num_query_blocks();
    if (num_blocks > 0) {
      held_v.read(smem.v, self.warp_row, self.lane);
      step(std::true_type{});
#pragma unroll 1
      for (int i = 1; Traits::kMasked ? more : i < num_blocks; ++i) step(std::false_type{});
      start_dk();
      ptx::wgmma_wait<0>();
      end_dk();
    }
    scale_rows(dK, {self.params.softmax_scale, self.params.softmax_scale});
    store_key_gradient(self, *work, smem.k, self.queue.in(smem.k_ring), dK, self.params.dk,
                       self.params.dk_strides, self.params.head_dim);
    if constexpr (Traits::kHeldSlabsV > 0) self.queue.in(smem.v_ring).arrive_empty();
    self.queue.release(true);
  }
}

// The role dQ: computes this thread block's share of the slabs, for the keys of both.
template <typename Traits>
__device__ __forceinline__ void reduce_query_gradients_loop(BwdPairConsumer<Traits>& self) {
  using Element = typename Traits::Element;
  using Operand = WgmmaOperand<Layout::kKOuter, typename Traits::Slab>;
  constexpr int kOwnSlabs = Traits::kSlabs / 2;  // that are always this block's
  // With a mask there are no registers to keep what follows from a block's head.
  using Reduction =
      DqReduction<Traits::kBlockM, Traits::kDqHasClassCols ? Traits::kHeadDim : 0, Traits::kMasked>;
  auto& smem = self.smem;
  Ring<Traits::kStages> ds_ring(smem.ds_ring);
  Ring<Traits::kTurnStages> turn_ring(smem.turn_ring);
  BlockSource<Traits> found(smem);
  const int first_slab = self.rank * (Traits::kSlabs - kOwnSlabs);
  const int first_peer_slab = self.rank * (Traits::kSlabs - Traits::kPeerSlabs);
  const auto add_slab = [&](const Reduction& reduction, int slab, bool is_last) {
    typename Traits::QueryGradient dQ;
    gemm_ss<Element, Traits::kBlockN, Into::kZero>(dQ, Operand(smem.scores[ds_ring.stage()]),
                                                   Operand(smem.k[slab]));
    gemm_ss<Element, Traits::kBlockN, Into::kSum>(dQ, Operand(smem.peer_ds[ds_ring.stage()]),
                                                  Operand(smem.peer_k[slab - first_peer_slab]));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    pin(dQ);
    if (is_last && self.lane == 0) {
      const auto p_ring = ds_ring.in(smem.p_ring);
      p_ring.arrive_empty();
      ptx::mbarrier_arrive_remote(
          ptx::address_in_block(flash_attn::ptx::smem_address(&p_ring.empty()), self.rank ^ 1));
    }
    reduction.add(dQ, slab * Traits::kSlabCols);
  };

#pragma unroll 1
  while (const BwdWork* const work = self.queue.read()) {
    self.place_thread();
    const int num_blocks = work->num_query_blocks();
    [[maybe_unused]] bool more = num_blocks > 0;  // with a mask: blocks that were found
    Reduction reduction(self.params, *work, QueryBlocks(*work), self.dq_place());
    // The two thread blocks add the slab in the middle by turns. Where sums come in order, the
    // queries decide whose turn it is, so that it is the same every time.
    int visit = Traits::kOrders ? work->range.begin : 0;
    self.queue.in(smem.k_ring).wait_full();
#pragma unroll 1
    for (int i = 0; Traits::kMasked ? more : i < num_blocks; ++i) {
      ds_ring.wait_full();
      if constexpr (Traits::kMasked) {
        const FoundQueries queries = found.read_by_warp(self.lane);
        more = !queries.is_last();
        reduction.go_to(queries.block());
      } else {
        reduction.advance();
      }
      if constexpr (Traits::kOrders) turn_ring.wait_full();
      if constexpr (Traits::kSlabs % 2 == 1) {
        if (visit % 2 == self.rank) add_slab(reduction, kOwnSlabs, false);
      }
#pragma unroll
      for (int s = 0; s < kOwnSlabs; ++s) add_slab(reduction, first_slab + s, s == kOwnSlabs - 1);
      if constexpr (Traits::kOrders) {
        __syncwarp();
        if (self.lane == 0) turn_ring.in(smem.added_ring).arrive_full();
        turn_ring.advance();
      }
      ++visit;
      // Of the next head.
      if (Traits::kOrders && visit == work->range.end) visit = work->range.begin;
      ds_ring.advance();
    }
    ptx::barrier_sync<Traits::kConsumerThreads>(kProductsDone);
    self.queue.release(true);
  }
}

template <typename Traits>
__global__ void __cluster_dims__(Traits::kBlocks, 1, 1) __launch_bounds__(Traits::kThreads, 1)
    bwd_pair_kernel(const __grid_constant__ typename Traits::Params params,
                    const __grid_constant__ typename Traits::Scheduler scheduler,
                    const __grid_constant__ BwdTensorMaps maps, int num_tiles) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<BwdPairSharedStorage<Traits>*>(dynamic_smem);
  const int rank = Traits::kHasDq ? ptx::cluster_rank() : 0;
  if (threadIdx.x == 0) smem.init_barriers();
  smem.zero_absent_slabs(params, rank);
  ptx::cluster_sync();                        // the peer's barriers are ready
  flash_attn::ptx::wait_for_prerequisites();  // for delta, and zeros in dq_accum and the counter
  // The kernel of dQ waits for delta by this one.
  if constexpr (!Traits::kHasDq) flash_attn::ptx::launch_dependents();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if (warp == 0) {
      load_k_and_queries_loop(params, maps, smem, rank);
    } else if (warp == 1) {
      load_v_and_gradients_loop(params, maps, smem, rank);
    } else if (warp == 2) {
      if constexpr (Traits::kMasked) {
        schedule_and_find_queries_loop<Traits>(params, scheduler, num_tiles, smem, rank);
      } else {
        schedule_and_load_row_values_loop(params, scheduler, num_tiles, smem, rank);
      }
    } else if (Traits::kOrders) {
      if constexpr (Traits::kOrders) {
        take_turns_loop<Traits::kBlockM, Traits::kPairN, /*kPools=*/false>(
            params, scheduler.last_blocks_first, rank, smem.queue, smem.turn_ring, smem.added_ring,
            [](const BwdWork&) {});
      }
    }
    __syncwarp();
  } else {
    BwdPairConsumer<Traits> self(params, smem, rank);
    constexpr int kFirstWarpS = Traits::kHasDq ? 8 : 4;
    if (warp < kFirstWarpS) {
      if constexpr (Traits::kHasDq) {
        ptx::lower_registers<Traits::kDqRegisters>();
        reduce_query_gradients_loop(self);
      }
    } else {
      if (warp < kFirstWarpS + 4) {
        ptx::raise_registers<Traits::kSRegisters>();
        compute_probabilities_loop(self);
      } else {
        ptx::raise_registers<Traits::kDRegisters>();
        compute_score_gradients_loop(self);
      }
    }
  }
  ptx::cluster_sync();  // the peer may still arrive at mbarriers here
}

template <typename Traits>
void launch_bwd_pair_kernel(const typename Traits::Params& params, const cuda::DeviceInfo& device,
                            Stream stream, const MaskOrder& order = {}) {
  using Storage = BwdPairSharedStorage<Traits>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  const int clusters = device.num_sms / Traits::kBlocks;
  auto scheduler = make_bwd_scheduler<typename Traits::Scheduler>(params, clusters,
                                                                  Traits::kTile.group_first_first);
  if constexpr (Traits::kMasked) scheduler.order = order;
  const int num_tiles = scheduler.num_tiles();
  if (num_tiles == 0) return;
  const BwdTensorMaps maps =
      make_bwd_tensor_maps(params, Traits::kBlockM, Traits::kBlockN, Traits::kSlabCols);
  cuda::launch_overlapping<bwd_pair_kernel<Traits>>(Traits::kBlocks * std::min(num_tiles, clusters),
                                                    Traits::kThreads, sizeof(Storage), true, stream,
                                                    params, scheduler, maps, num_tiles);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd_pair(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  if (params.dq_turns != nullptr) {
    launch_bwd_pair_kernel<BwdPairTraits<kDType, kHeadDim, kHeadDimV, BwdPairForm::kOrdered>>(
        params, device, stream);
  } else {
    launch_bwd_pair_kernel<BwdPairTraits<kDType, kHeadDim, kHeadDimV, BwdPairForm::kPlain>>(
        params, device, stream);
  }
}

template <DType kDType, int kHeadDim>
void launch_bwd_pair_masked(const Masked<BwdParams>& params, const MaskOrder& order,
                            const cuda::DeviceInfo& device, Stream stream) {
  launch_bwd_pair_kernel<BwdPairTraits<kDType, kHeadDim, kHeadDim, BwdPairForm::kMasked>>(
      params, device, stream, order);
}

}  // namespace flash_attn::sm90
