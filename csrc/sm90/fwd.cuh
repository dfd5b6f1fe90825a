// Forward attention for Hopper: wgmma and TMA, loads and products in different warps.
//
//   O = softmax(softmax_scale · Q Kᵀ, masked) V        LSE = log Σ exp(…)
//
// A thread block stays on its multiprocessor and works through tiles: kBlockM queries of one head,
// whose keys it walks over in blocks of kBlockN, from the last to the first, so that the masked
// blocks of a causal row come first. Roles:
//
//   producer warpgroup    warp 0: takes tiles, loads K      consumer warpgroups    64 queries each:
//   (few registers)       warp 1: Q     warp 2: V           (many registers)       S, P, O in registers
//
// Each role runs ahead of the next as far as its ring has slots: while consumers finish a tile, K
// and V of the next one come in.
//
// The plain loop of a consumer:
//
//   for n:  S = Q K(n)ᵀ; mask; P, m, l = online_softmax(S)
//           O = O · exp(m_old - m) + P V(n)
//
// The loop here departs from it in three ways. S = Q K(n)ᵀ is issued before O += P V(n + 1), so that
// softmax(n) hides behind that product. Consumers take turns to issue, so that one's softmax also
// hides behind the others' products. And the exponentials do not wait for the maxima of their own
// block (OnlineSoftmax::step_ahead): O is rescaled only where a maximum rises by more than 2⁸.
//
//   consumer 0   │ issue Q K(n)ᵀ, P V(n+1) │ softmax(n)              │ issue Q K(n-1)ᵀ, P V(n) │ …
//   consumer 1   │ softmax(n+1)            │ issue Q K(n)ᵀ, P V(n+1) │ softmax(n)              │ …
//   products     │ consumer 0's            │ consumer 1's            │ consumer 0's            │ …
//
// Shared memory   d <= 128   │ Q × 2           │ K × kStages │ V × kStages │ O │ work, barriers │
//                 d > 128    │ Q, in the end O │ K × kStages │ V × kStages │     work, barriers │
#pragma once

#include <new>

#include "../cuda/attn/mask.cuh"
#include "../cuda/launch.h"
#include "fwd.h"
#include "fwd_traits.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

// ---- producer warps

// K or V of one tile of queries. One thread.
template <typename Traits, typename Tile>
__device__ __forceinline__ void load_blocks(const CUtensorMap& map, const FwdWork& work,
                                            int num_cols, Tile (&tiles)[Traits::kStages],
                                            Ring<Traits::kStages>& ring) {
#pragma unroll 1
  for (int n = work.range.end - 1; n >= work.range.begin; --n) {
    ring.wait_empty();
    ring.expect_bytes(loaded_bytes<Tile>(num_cols));
    load_tile(tiles[ring.stage()], map, work.kv, n * Traits::kBlockN, num_cols, ring.full(),
              ptx::CacheHint::kEvictLast);
    ring.advance();
  }
}

// Takes tiles from a counter that all blocks share, from long to short, and publishes them; loads
// their K. The next tile is taken when this one's last K has been asked for: late, so that blocks
// end together, but early enough for its first loads to hide behind the end of this one.
template <typename Traits>
__device__ __forceinline__ void schedule_and_load_k_loop(
    const FwdParams& params, const typename Traits::Scheduler& scheduler, int num_tiles,
    const CUtensorMap& k_map, FwdSharedStorage<Traits>& smem) {
  Ring<FwdSharedStorage<Traits>::kWorkSlots> slots(smem.work_ring);
  Ring<Traits::kStages> k_ring(smem.k_ring);
  const int lane = threadIdx.x % 32;
  int tile_idx = blockIdx.x;
#pragma unroll 1
  while (tile_idx < num_tiles) {
    const TileCoordinates tile = scheduler.tile(tile_idx);
    const SeqlenInfo seqlen(params, tile.batch_idx);
    const int first_row = tile.block * Traits::kBlockM;
    if (first_row < seqlen.segment_q) {
      if (lane == 0) {
        slots.wait_empty();
        FwdWorkSlot& slot = smem.work[slots.stage()];
        slot.end = false;
        new (slot.storage) FwdWork(make_work<Traits>(params, tile, seqlen));
        slots.arrive_full();
        load_blocks<Traits>(k_map, slot.work(), params.head_dim, smem.k, k_ring);
      }
      slots.advance();
    }
    if (lane == 0) tile_idx = gridDim.x + atomicAdd(params.tile_counter, 1);
    tile_idx = __shfl_sync(~0u, tile_idx, 0);
  }
  if (lane == 0) {
    slots.wait_empty();
    smem.work[slots.stage()].end = true;
    slots.arrive_full();
  }
}

// Calls step(work) for each tile. One thread of a loader warp.
template <typename Traits, typename Step>
__device__ __forceinline__ void for_each_work(FwdSharedStorage<Traits>& smem, const Step& step) {
  Ring<FwdSharedStorage<Traits>::kWorkSlots> slots(smem.work_ring);
#pragma unroll 1
  for (;; slots.advance()) {
    slots.wait_full();
    const FwdWorkSlot& slot = smem.work[slots.stage()];
    if (slot.end) break;
    step(slot.work());
    slots.arrive_empty();
  }
}

template <typename Traits>
__device__ __forceinline__ void load_q_loop(const CUtensorMap& map, int num_cols,
                                            FwdSharedStorage<Traits>& smem) {
  Ring<Traits::kQStages> ring(smem.q_ring);
  for_each_work<Traits>(smem, [&](const FwdWork& work) {
    ring.wait_empty();
    ring.expect_bytes(loaded_bytes<typename Traits::QTile>(num_cols));
    load_tile(smem.q[ring.stage()], map, work.q, work.first_row, num_cols, ring.full(),
              ptx::CacheHint::kEvictFirst);
    ring.advance();
  });
}

template <typename Traits>
__device__ __forceinline__ void load_v_loop(const CUtensorMap& map, int num_cols,
                                            FwdSharedStorage<Traits>& smem) {
  Ring<Traits::kStages> ring(smem.v_ring);
  for_each_work<Traits>(
      smem, [&](const FwdWork& work) { load_blocks<Traits>(map, work, num_cols, smem.v, ring); });
}

// ---- consumer warpgroups

// What a consumer keeps from tile to tile.
template <typename Traits>
struct FwdConsumer {
  int warpgroup, lane;
  int warp_row;  // of the warp's 16 rows in the tile
  Ring<FwdSharedStorage<Traits>::kWorkSlots> slots;
  Ring<Traits::kQStages> q_ring;
  Ring<Traits::kStages> k_ring, v_ring;

  __device__ __forceinline__ FwdConsumer(FwdSharedStorage<Traits>& smem, int consumer)
      : warpgroup(consumer),
        lane(threadIdx.x % 32),
        warp_row(consumer * 64 + threadIdx.x / 32 % 4 * 16),
        slots(smem.work_ring),
        q_ring(smem.q_ring),
        k_ring(smem.k_ring),
        v_ring(smem.v_ring) {
    if (Traits::kTile.ordered && warpgroup == Traits::kConsumers - 1) pass_turn();
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

  // The warp is done with the slot.
  template <int kStages>
  __device__ __forceinline__ void release(Ring<kStages>& ring) const {
    if (lane == 0) ring.arrive_empty();
    ring.advance();
  }
};

// A consumer's walk over the keys of a tile; leaves O (not yet normalised) and the softmax state of
// its rows.
template <typename Traits>
class KeyWalk {
  using Element = typename Traits::Element;
  using Q = WgmmaOperand<Layout::kKInner, typename Traits::QTile>;
  using K = WgmmaOperand<Layout::kKInner, typename Traits::KTile>;
  using V = WgmmaOperand<Layout::kKOuter, typename Traits::VTile>;
  using Probabilities = OperandA<1, Traits::kBlockN>;

 public:
  __device__ __forceinline__ KeyWalk(FwdSharedStorage<Traits>& smem, const FwdWork& work,
                                     FwdConsumer<Traits>& self, typename Traits::Output& O,
                                     typename Traits::Softmax& softmax)
      : smem(smem),
        work(work),
        self(self),
        O(O),
        softmax(softmax),
        q(smem.q[self.q_ring.stage()], self.warpgroup * 64),
        range(work.range),
        n(work.range.end - 1) {}

  __device__ __forceinline__ void run() {
    Probabilities P, P_next;  // two, so that one can come while the other is read
    first(P);
#pragma unroll 1
    for (;;) {
      if (--n < range.begin) return last(P);
      next(P, P_next);
      if (--n < range.begin) return last(P_next);
      next(P_next, P);
    }
  }

 private:
  __device__ __forceinline__ void first(Probabilities& P) {
    self.k_ring.wait_full();
    self.wait_turn();
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(S, q, K(smem.k[self.k_ring.stage()]));
    ptx::wgmma_commit();  // S = Q K(n)ᵀ
    self.pass_turn();

    ptx::wgmma_wait<0>();
    pin(S);
    self.release(self.k_ring);
    mask();
    softmax.update_max(S, correction);
    softmax.template exponentiate_into<Element>(P, S);  // P = exp(S - m)
    self.v_ring.wait_full();
  }

  __device__ __forceinline__ void next(Probabilities& P, Probabilities& P_next) {
    self.k_ring.wait_full();
    self.wait_turn();
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(S, q, K(smem.k[self.k_ring.stage()]));
    ptx::wgmma_commit();  // S = Q K(n)ᵀ
    gemm_rs<Element>(O, P, V(smem.v[self.v_ring.stage()]));
    ptx::wgmma_commit();  // O += P V(n + 1)
    self.pass_turn();

    ptx::wgmma_wait<1>();
    pin(S);
    self.release(self.k_ring);
    mask();
    bool moved;  // exp(S - m), while P V(n + 1) runs
    if constexpr (Traits::kTile.ahead) {
      moved = softmax.template step_ahead<Element>(P_next, S, correction);
    } else {
      moved = softmax.step(S, correction);
    }
    // V(n) has long been there. The wait's branch keeps ptxas from moving the exponentials behind
    // the next wait, where nothing runs beside them.
    const auto v_in_use = self.v_ring;
    self.v_ring.advance();
    self.v_ring.wait_full();

    ptx::wgmma_wait<0>();
    pin(O);
    pin(P);
    if (self.lane == 0) v_in_use.arrive_empty();
    if (moved) scale_rows(O, correction);  // O = O · exp(m_old - m)
    if constexpr (!Traits::kTile.ahead) P_next = to_operand_a<Element>(S);
  }

  __device__ __forceinline__ void last(Probabilities& P) {
    gemm_rs<Element>(O, P, V(smem.v[self.v_ring.stage()]));
    ptx::wgmma_commit();  // O += P V(n + 1)
    ptx::wgmma_wait<0>();
    pin(O);
    self.release(self.v_ring);
  }

  // S = -inf where nothing is seen.
  __device__ __forceinline__ void mask() {
    if (n >= range.full_begin && n < range.full_end) return;
    const int query = work.first_row + self.warp_row + fragment_row(0, self.lane);
    mask_keys(S, work.window, {query, query + 8}, n * Traits::kBlockN, self.lane);
  }

  FwdSharedStorage<Traits>& smem;
  const FwdWork& work;
  FwdConsumer<Traits>& self;
  typename Traits::Output& O;
  typename Traits::Softmax& softmax;
  const Q q;
  const BlockRange range;
  int n;  // block of keys
  typename Traits::Scores S;
  float correction[2];
};

// Normalises O and writes it and LSE; rows of the segment that do not count get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void store_tile(const FwdParams& params, const CUtensorMap& map,
                                           FwdSharedStorage<Traits>& smem, const FwdWork& work,
                                           FwdConsumer<Traits>& self, typename Traits::Output& O,
                                           typename Traits::Softmax& softmax) {
  softmax.finish();
  const int first_row = work.first_row + self.warp_row;  // of the warp
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int query = first_row + fragment_row(row, self.lane);
    const bool counts = query < work.window.len_q();
    if (self.lane % 4 == 0 && query < work.segment_q) {
      work.lse[query] = counts ? softmax.log_sum_exp(row) : -INFINITY;
    }
    const float inverse_sum = softmax.inverse_sum(row);
#pragma unroll
    for (int i = 0; i < O.kRowElements; ++i) O.at(row, i) *= inverse_sum;
    if (!counts) {
#pragma unroll
      for (int i = 0; i < O.kRowElements; ++i) O.at(row, i) = 0.f;
    }
  }

  if constexpr (Traits::kTile.own_output) {  // this warp's rows of the tile before are on their way
    if (self.lane == 0) ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>());
    __syncwarp();
  } else {  // all warps of the consumer are done with its rows of Q
    ptx::barrier_sync<128>(kOutput + self.warpgroup);
  }
  store_rounded(smem.o(), O, self.warp_row, self.lane);
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  __syncwarp();
  if (self.lane == 0) {
    if (first_row < work.segment_q) {
      store_tile_rows<16>(smem.o(), self.warp_row, map, work.q, first_row, params.head_dim_v);
    }
    ::cuda::ptx::cp_async_bulk_commit_group();
    if constexpr (!Traits::kTile.own_output) {
      ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>());
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void consumer_loop(const FwdParams& params, const CUtensorMap& out_map,
                                              FwdSharedStorage<Traits>& smem, int consumer) {
  FwdConsumer<Traits> self(smem, consumer);
#pragma unroll 1
  for (;;) {
    self.slots.wait_full();
    const FwdWorkSlot& slot = smem.work[self.slots.stage()];
    if (slot.end) break;
    const FwdWork& work = slot.work();
    typename Traits::Output O;
    typename Traits::Softmax softmax(params.softmax_scale);
    O.fill(0.f);
    self.q_ring.wait_full();
    if (work.range.end > work.range.begin) KeyWalk<Traits>(smem, work, self, O, softmax).run();
    if constexpr (Traits::kTile.own_output) self.release(self.q_ring);
    store_tile<Traits>(params, out_map, smem, work, self, O, softmax);
    if constexpr (!Traits::kTile.own_output) {
      // O, wider than Q, was where Q has nothing but zeros.
      __syncwarp();
      zero_absent_slabs(smem.q[0], params.head_dim, self.warp_row, 16, self.lane, 32);
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
      __syncwarp();
      self.release(self.q_ring);
    }
    self.release(self.slots);
  }
  if (self.lane == 0) ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>());
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdParams params,
               const __grid_constant__ typename Traits::Scheduler scheduler,
               const __grid_constant__ FwdTensorMaps maps, int num_tiles) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<FwdSharedStorage<Traits>*>(dynamic_smem);
  if (threadIdx.x == 0) smem.init_barriers();
  smem.zero_absent_slabs(params);
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if (warp == 0) {
      schedule_and_load_k_loop<Traits>(params, scheduler, num_tiles, maps.k, smem);
    } else if (warp < 3 && ptx::elect_one()) {
      if (warp == 1) load_q_loop<Traits>(maps.q, params.head_dim, smem);
      if (warp == 2) load_v_loop<Traits>(maps.v, params.head_dim_v, smem);
    }
  } else {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    consumer_loop<Traits>(params, maps.out, smem, warp / 4 - 1);
  }
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  using Traits = FwdTraits<kDType, kHeadDim, kHeadDimV>;
  using Storage = FwdSharedStorage<Traits>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  const int64_t group = params.heads_q / params.heads_kv;
  const auto scheduler = Traits::Scheduler::make(
      params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch, params.heads_q,
      int64_t{params.seqlen_k} * (params.head_dim + params.head_dim_v) * 2 / group);
  const int num_tiles = scheduler.num_tiles();
  if (num_tiles == 0) return;

  const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
  const TensorShape q_shape = {.dtype = kDType,
                               .cols = params.head_dim,
                               .rows = varlen_q ? params.total_q : params.seqlen_q,
                               .heads = params.heads_q,
                               .batch = varlen_q ? 1 : params.batch};
  const TensorShape k_shape = {.dtype = kDType,
                               .cols = params.head_dim,
                               .rows = varlen_k ? params.total_k : params.seqlen_k,
                               .heads = params.heads_kv,
                               .batch = varlen_k ? 1 : params.batch};
  TensorShape v_shape = k_shape, out_shape = q_shape;
  v_shape.cols = out_shape.cols = params.head_dim_v;
  const FwdTensorMaps maps = {.q = make_tensor_map(params.q, params.q_strides, q_shape,
                                                   Traits::QTile::kSlabCols, Traits::kBlockM),
                              .k = make_tensor_map(params.k, params.k_strides, k_shape,
                                                   Traits::KTile::kSlabCols, Traits::kBlockN),
                              .v = make_tensor_map(params.v, params.v_strides, v_shape,
                                                   Traits::VTile::kSlabCols, Traits::kBlockN),
                              .out = make_tensor_map(params.out, params.out_strides, out_shape,
                                                     Traits::OTile::kSlabCols, 16)};
  const int blocks = std::min(num_tiles, device.num_sms);
  FLASH_ATTN_CUDA_CHECK(cudaMemsetAsync(params.tile_counter, 0, sizeof(int32_t), stream));
  cuda::launch<fwd_kernel<Traits>>(blocks, Traits::kThreads, sizeof(Storage), stream, params,
                                   scheduler, maps, num_tiles);
}

}  // namespace flash_attn::sm90
