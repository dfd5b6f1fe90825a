// Backward attention for Hopper, with wgmma and TMA: some warps load, and others multiply.
//
//   P  = exp(softmax_scale · Q Kᵀ - LSE), masked        dV = Pᵀ dO
//   dS = P ∘ (dO Vᵀ - delta)                            dK = softmax_scale · dSᵀ Q
//   delta = rowsum(dO ∘ O) - dLSE                       dQ = softmax_scale · dS K
//
// A tile is kBlockN keys of one kv head. K, V and the sums dK, dV stay with the thread block while
// it walks over the query heads that read this kv head and over their queries in blocks of kBlockM.
// Nobody else adds to its dK and dV, unless tiles are split (bwd_split.cuh); then they are added up
// in order. Either way the bits are the same every time. dQ is summed over thread blocks by fp32
// reductions in global memory. A thread block takes tile after tile, and what the next one needs is
// loaded while dK and dV of this one go out. Where a tile has few queries, or a mask, the sums of
// dQ are a pool in the L2 cache, and two warps make rows of dq of them meanwhile (bwd_dq_pool.cuh).
// The roles are:
//
//   producer warpgroup    warp 0: K, V, Q, dO             consumer warpgroups    64 keys each:
//   (few registers)       warp 1: tiles, LSE, delta       (many registers)       S, dP, dK, dV
//                         warp 2: the order of dQ's
//                         sums; or warps 2, 3: their
//                         pool; or a bias and its
//                         gradient
//   another one, with     what dropout keeps
//   dropout
//
// Scores are computed transposed, Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, with keys as rows. Then Pᵀ and dSᵀ are
// register operands of dV and dK as they come, and only dS goes through shared memory, for dQ,
// which needs the keys of all consumers.
//
// The plain loop of a consumer would be:
//
//   for each block of queries:  Sᵀ = K Qᵀ; score terms; P = exp(S - LSE); mask      dPᵀ = V dOᵀ
//                               dV += Pᵀ dO;  dS = P ∘ (dP - delta)     → dS to shared memory
//                               barrier                                 // the other consumer's dS
//                               dK += dSᵀ Q;  dQ += dS K                // reductions, from registers
//
// The loop here departs from it in two ways. A consumer's products go on beside its arithmetic. And
// consumers meet at no barrier: each says when its dS lies there, and dQ comes an iteration late,
// when the other's dS has been there for a while. The first consumer has a head start of half an
// iteration, so that what one waits for hides behind the other's products. In the drawing i is the
// iteration, and dV comes in two halves of the queries:
//
//   issue      │ S (i)    │ dP (i) │ dV (i), half │ dV (i), half │ dQ (i-1), dK (i) │
//   meanwhile  │ read LSE │ exp    │ dS           │ dS, store    │ reduce dQ        │
//
// Where LSE and delta are columns of S and dP (bwd_row_terms.cuh), nobody reads them.
//
// dS comes from P as fp32 and dV from P as rounded, and there are no registers for both. So only
// half of P is rounded beside the P in fp32, and dV begins with that half. The other half is
// rounded in its place, when its dS is done. With dropout these are parts of 32 queries.
//
// The kernel is compiled for several forms (BwdForm): without score terms, with all of them
// (cuda/attn/score_policy.cuh), with some, and without them for a mask whose hidden tiles are
// passed over (bwd_masked_producer.cuh). With softcap alone, P times the slope of the cap stands in
// the place of P; with dropout alone, P has a sign.
//
// Shared memory   │ K, half of it twice (kRepeatsKeys) │ V │ Q, dO × kStages │
//                 │ dS × 3, in the end dV and dK │ LSE, delta × kStages │ bands of dQ × 2 │
//                 │ work × 2, barriers │
#pragma once

#include "../cuda/ptx/griddepcontrol.cuh"
#include "bwd_consumer.cuh"
#include "bwd_dq_order.cuh"
#include "bwd_masked_producer.cuh"
#include "bwd_producer_loops.cuh"
#include "bwd_query_walk.cuh"
#include "bwd_split.cuh"

namespace flash_attn::sm90 {

// Where the tile is split, adds what the splits before have left. Returns whether dK and dV are those
// of the whole tile now.
template <typename Traits>
__device__ __forceinline__ bool collect_splits(const BwdConsumer<Traits>& self, const BwdWork& work,
                                               typename Traits::KeyGradient& dK,
                                               typename Traits::KeyGradient& dV) {
  if constexpr (Traits::kSplits) {
    return SplitSums<Traits>(self.params.splits, work).collect(dV, dK);
  } else {
    return true;
  }
}

template <typename Traits>
__device__ __forceinline__ void store_key_gradients(const BwdConsumer<Traits>& self,
                                                    const BwdWork& work,
                                                    typename Traits::KeyGradient& dK,
                                                    typename Traits::KeyGradient& dV) {
  const auto& params = self.params;
  const float scale = Traits::ScorePolicy::output_scale(params.dropout);
  const float dk_scale = params.softmax_scale * scale;
  scale_rows(dK, {dk_scale, dk_scale});
  if constexpr (Traits::kScaleOfP != 1 || Traits::kDrops) {
    const float dv_scale = scale / Traits::kScaleOfP;
    scale_rows(dV, {dv_scale, dv_scale});
  }
  store_key_gradient(self, work, dV, params.dv, params.dv_strides, params.head_dim_v);
  store_key_gradient(self, work, dK, params.dk, params.dk_strides, params.head_dim);
}

template <typename Traits>
__device__ __forceinline__ void bwd_consumer_loop(const typename Traits::Params& params,
                                                  BwdSharedStorage<Traits>& smem, int consumer) {
  BwdConsumer<Traits> self(params, smem, consumer);
#pragma unroll 1
  while (const BwdWork* const work = self.queue.read()) {
    self.place_thread();
    typename Traits::KeyGradient dK, dV;
    dK.fill(0.f);
    dV.fill(0.f);
    QueryWalk<Traits>(*work, self, dK, dV).run();
    if constexpr (Traits::kCountsTiles) self.say_summed();
    if (collect_splits(self, *work, dK, dV)) store_key_gradients(self, *work, dK, dV);
    self.queue.release(true);
  }
}

// Everybody waits for the kernel before, from which delta and the zeros of the workspace come.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(const __grid_constant__ typename Traits::Params params,
               const __grid_constant__ typename Traits::Scheduler scheduler,
               const __grid_constant__ BwdTermMaps<Traits::kAdditive> maps, int num_tiles) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<BwdSharedStorage<Traits>*>(dynamic_smem);
  const BiasParams& bias = params.score.bias;
  const bool loads_bias = Traits::kAdditive && bias.data != nullptr && bias.row_stride != 0;
  const bool stores_dbias = loads_bias && params.dbias.form != BiasGradientParams::Form::kNone;
  if (threadIdx.x == 0) {
    smem.init_barriers(kTurnReaders<Traits> + Traits::kCountsTiles + loads_bias + stores_dbias +
                       128 * Traits::kDrops);
  }
  smem.zero_absent_slabs(params);
  __syncthreads();
  flash_attn::ptx::wait_for_prerequisites();

  // The compiler knows it to be the same in all lanes. It is computed where it is used: kept, it
  // would take a register too many.
  const auto this_warp = [] {
    return __shfl_sync(~0u, flash_attn::ptx::opaque(threadIdx.x) / 32, 0);
  };
  if (this_warp() < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if (this_warp() == 0) {
      if (ptx::elect_one()) {
        if constexpr (Traits::kMasked) {
          load_found_loop<Traits>(params, maps, smem);
        } else {
          load_loop<Traits>(params, maps, smem);
        }
      }
    } else if (this_warp() == 1) {
      if constexpr (Traits::kMasked) {
        schedule_and_find_queries_loop<Traits>(params, scheduler, num_tiles, smem);
      } else {
        schedule_and_load_row_values_loop<Traits>(params, scheduler, num_tiles, smem);
      }
    } else if (Traits::kPools) {
      if constexpr (Traits::kPools) {
        if (this_warp() == 2) {
          DqConverter<Traits>(params, maps.dq, smem).run(scheduler.blocks_per_head);
        } else if constexpr (Traits::kOrders) {
          take_turns_in_pool_loop<Traits>(params, scheduler.last_blocks_first, smem);
        } else {
          pass_tiles_loop<Traits>(params, smem);
        }
      }
    } else if (Traits::kOrders && this_warp() == 2) {
      if constexpr (Traits::kOrders) {
        take_turns_loop<Traits::kBlockM, Traits::kBlockN, /*kPools=*/false>(
            params, scheduler.last_blocks_first, /*share=*/0, smem.queue, smem.turn_ring,
            smem.added_ring, [](const BwdWork&) {});
      }
    } else if (loads_bias && this_warp() == 2) {
      if constexpr (Traits::kAdditive) {
        if (ptx::elect_one()) load_bias_loop<Traits>(params, maps.bias, smem);
      }
    } else if (stores_dbias && this_warp() == 3) {
      if constexpr (Traits::kAdditive) {
        if (ptx::elect_one()) store_bias_gradient_loop<Traits>(params, maps.dbias, smem);
      }
    }
  } else if (Traits::kDrops && this_warp() >= 4 * (1 + Traits::kConsumers)) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if constexpr (Traits::kDrops) find_kept_loop<Traits>(params, this_warp() % 4, smem);
  } else {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    bwd_consumer_loop<Traits>(params, smem, static_cast<int>(this_warp() / 4) - 1);
  }
}

}  // namespace flash_attn::sm90
