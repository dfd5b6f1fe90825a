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
// The loop here departs from it in two ways. S = Q K(n)ᵀ is issued before O += P V(n + 1), so that
// softmax(n) hides behind that product. And consumers take turns to issue, so that one's softmax
// also hides behind the others' products:
//
//   consumer 0   │ issue Q K(n)ᵀ, P V(n+1) │ softmax(n)              │ issue Q K(n-1)ᵀ, P V(n) │ …
//   consumer 1   │ softmax(n+1)            │ issue Q K(n)ᵀ, P V(n+1) │ softmax(n)              │ …
//   products     │ consumer 0's            │ consumer 1's            │ consumer 0's            │ …
//
// Shared memory: │ Q, or in the end O │ K × kStages │ V × kStages │ (O) │ barriers, tiles to work on │
#pragma once

#include "../cuda/launch.h"
#include "fwd.h"
#include "fwd_traits.cuh"

namespace flash_attn::sm90 {

// ---- producer warps

template <typename Traits>
__device__ __forceinline__ FwdWork make_work(const FwdParams& params, const TileCoordinates& tile,
                                             const SeqlenInfo& seqlen) {
  const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
  const int first_row = tile.block * Traits::kBlockM;
  const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
  return {
      .window = window,
      .range = BlockRange::of_keys<Traits::kBlockM, Traits::kBlockN>(window, first_row),
      .q = {.box = {varlen_q ? params.total_q : params.seqlen_q, seqlen.q_begin, seqlen.segment_q},
            .head = tile.head,
            .batch = varlen_q ? 0 : tile.batch_idx},
      .kv = {.box = {varlen_k ? params.total_k : params.seqlen_k, seqlen.k_begin, seqlen.len_k},
             .head = tile.head / (params.heads_q / params.heads_kv),
             .batch = varlen_k ? 0 : tile.batch_idx},
      .lse = params.lse + tile.batch_idx * params.lse_batch_stride +
             tile.head * params.lse_head_stride + seqlen.q_begin,
      .first_row = first_row,
      .segment_q = seqlen.segment_q};
}

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
// their K. The next tile is taken when this one's last K has been asked for: late, so that blocks end together,
// but early enough for its first loads to hide behind the end of this one.
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
  Ring<1> ring(smem.q_ring);
  for_each_work<Traits>(smem, [&](const FwdWork& work) {
    ring.wait_empty();
    ring.expect_bytes(loaded_bytes<typename Traits::QTile>(num_cols));
    load_tile(smem.q, map, work.q, work.first_row, num_cols, ring.full(),
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
  Ring<1> q_ring;
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

// Walks over the keys; leaves O (not yet normalised) and the softmax state of the warpgroup's rows.
template <typename Traits>
__device__ __forceinline__ void compute_loop(FwdSharedStorage<Traits>& smem, const FwdWork& work,
                                             FwdConsumer<Traits>& self, typename Traits::Output& O,
                                             typename Traits::Softmax& softmax) {
  using Element = typename Traits::Element;
  using Q = WgmmaOperand<Layout::kKInner, typename Traits::QTile>;
  using K = WgmmaOperand<Layout::kKInner, typename Traits::KTile>;
  using V = WgmmaOperand<Layout::kKOuter, typename Traits::VTile>;
  const Q q(smem.q, self.warpgroup * 64);
  const auto mask = [&](typename Traits::Scores& S, int n) {
    if (n >= work.range.full_begin && n < work.range.full_end) return;
    const int query = work.first_row + self.warp_row + fragment_row(0, self.lane);
    mask_keys(S, work.window, {query, query + 8}, n * Traits::kBlockN, self.lane);
  };
  typename Traits::Scores S;
  float correction[2];
  int n = work.range.end - 1;

  self.k_ring.wait_full();
  self.wait_turn();
  gemm_ss<Element, Traits::kHeadDim, Into::kZero>(S, q, K(smem.k[self.k_ring.stage()]));
  ptx::wgmma_commit();  // S = Q K(n)ᵀ
  self.pass_turn();
  ptx::wgmma_wait<0>();
  pin(S);
  self.release(self.k_ring);
  mask(S, n);
  softmax.step(S, correction);  // S = exp(S - m)
  auto P = to_operand_a<Element>(S);
  self.v_ring.wait_full();

#pragma unroll 1
  for (--n; n >= work.range.begin; --n) {
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
    mask(S, n);
    const bool moved = softmax.step(S, correction);  // S = exp(S - m), while P V(n + 1) runs
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
    P = to_operand_a<Element>(S);
  }

  gemm_rs<Element>(O, P, V(smem.v[self.v_ring.stage()]));
  ptx::wgmma_commit();  // O += P V(n + 1)
  ptx::wgmma_wait<0>();
  pin(O);
  self.release(self.v_ring);
}

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
    if (work.range.end > work.range.begin) compute_loop<Traits>(smem, work, self, O, softmax);
    if constexpr (Traits::kTile.own_output) self.release(self.q_ring);
    store_tile<Traits>(params, out_map, smem, work, self, O, softmax);
    if constexpr (!Traits::kTile.own_output) {
      // O, wider than Q, was where Q has nothing but zeros.
      __syncwarp();
      zero_absent_slabs(smem.q, params.head_dim, self.warp_row, 16, self.lane, 32);
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
  const auto map = [](const void* tensor, const Strides& strides, const TensorShape& shape,
                      int box_cols, int box_rows) {
    return make_tensor_map(tensor, strides, shape, box_cols, box_rows);
  };
  const FwdTensorMaps maps = {
      .q = map(params.q, params.q_strides, q_shape, Traits::QTile::kSlabCols, Traits::kBlockM),
      .k = map(params.k, params.k_strides, k_shape, Traits::KTile::kSlabCols, Traits::kBlockN),
      .v = map(params.v, params.v_strides, v_shape, Traits::VTile::kSlabCols, Traits::kBlockN),
      .out = map(params.out, params.out_strides, out_shape, Traits::OTile::kSlabCols, 16)};
  const int blocks = std::min(num_tiles, device.num_sms);
  FLASH_ATTN_CUDA_CHECK(cudaMemsetAsync(params.tile_counter, 0, sizeof(int32_t), stream));
  cuda::launch<fwd_kernel<Traits>>(blocks, Traits::kThreads, sizeof(Storage), stream, params,
                                   scheduler, maps, num_tiles);
}

}  // namespace flash_attn::sm90
