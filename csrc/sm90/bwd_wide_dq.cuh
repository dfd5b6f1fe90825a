// The widest heads where a kernel of its own computes dQ (kBwdDqApartClass): nothing is added up in
// memory, and the bits are the same every time. dK and dV come from bwd_pair_kernel without dQ, in
// tiles of 64 keys. In this kernel a thread block has 128 queries:
//
//   warpgroup 0, producer   warp 0: Q, dO, K     warp 1: V
//   warpgroups 1 and 2      64 queries each:  S = Q Kᵀ; P = exp(S - LSE); mask
//                                             dP = dO Vᵀ; dS = P ∘ (dP - delta), in registers
//                                             dQ += dS K, in registers
//
// dQ of a block of keys is computed beside S of the next one, and the exponentials of a block
// beside its dP. Nothing here needs the other kernel: these thread blocks start where its last ones
// leave multiprocessors free.
//
// Shared memory   │ Q, in the end dQ │ dO │ K × 2 │ V │ barriers │
#pragma once

#include <new>

#include "../cuda/attn/mask.cuh"
#include "../cuda/attn/softmax_bwd.cuh"
#include "bwd_pair.cuh"
#include "ptx/fence.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/gemm.cuh"
#include "tile/ring.cuh"

namespace flash_attn::sm90 {

template <DType kElementType, int kHeadDimClass>
struct BwdWideDqTraits {
  using Element = flash_attn::Element<kElementType>;
  static constexpr int kHeadDim = kHeadDimClass;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = 64;  // of a consumer, and of a block of keys
  static constexpr int kBlockM = kConsumers * kRows, kBlockN = kRows;
  static_assert(kBlockM == kBwdDqApartBlockM);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Tile = SmemTile<Element, kRows, kHeadDim>;
  using Scheduler = TileScheduler<kBlockM>;
};

// A block of queries of one head, and the keys that it sees.
struct BwdWideDqWork {
  SeqlenInfo seqlen;
  AttentionWindow window;
  BlockRange range;
  MatrixPlace q, kv;
  int batch_idx, first_row;

  template <typename Traits>
  __device__ __forceinline__ static BwdWideDqWork make(const BwdParams& params,
                                                       const TileCoordinates& tile) {
    const SeqlenInfo seqlen(params, tile.batch_idx);
    const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
    const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
    const int first_row = tile.block * Traits::kBlockM;
    return {
        .seqlen = seqlen,
        .window = window,
        .range = BlockRange::of_keys<Traits::kBlockM, Traits::kBlockN>(window, first_row),
        .q = {.box = {varlen_q ? params.total_q : params.seqlen_q, seqlen.q_begin, seqlen.len_q},
              .head = tile.head,
              .batch = varlen_q ? 0 : tile.batch_idx},
        .kv = {.box = {varlen_k ? params.total_k : params.seqlen_k, seqlen.k_begin, seqlen.len_k},
               .head = tile.head / (params.heads_q / params.heads_kv),
               .batch = varlen_k ? 0 : tile.batch_idx},
        .batch_idx = tile.batch_idx,
        .first_row = first_row};
  }
  // Whether a consumer has queries. TMA must not be asked for a box that lies beyond them.
  __device__ __forceinline__ bool has_rows(int first) const { return first < seqlen.len_q; }
};

template <typename Traits>
struct BwdWideDqSharedStorage {
  using Tile = typename Traits::Tile;

  alignas(1024) Tile q[Traits::kConsumers];
  alignas(1024) Tile dout[Traits::kConsumers];
  alignas(1024) Tile k[2];
  alignas(1024) Tile v[1];
  RingBarriers<1> rows_ring;  // Q and dO
  RingBarriers<2> k_ring;
  RingBarriers<1> v_ring;
  alignas(BwdWideDqWork) unsigned char work_storage[sizeof(BwdWideDqWork)];

  __device__ __forceinline__ BwdWideDqWork& work() {
    return *reinterpret_cast<BwdWideDqWork*>(work_storage);
  }
  __device__ __forceinline__ void init_barriers() {
    constexpr int kWarps = 4 * Traits::kConsumers;
    rows_ring.init(1, 1);
    k_ring.init(1, kWarps);
    v_ring.init(1, kWarps);
    ptx::fence_mbarrier_init();
  }
  // Sets to 0 what no load ever writes. All threads call it, before a barrier among them.
  __device__ __forceinline__ void zero_absent_columns(const BwdParams& params) {
    const auto zero = [](auto& tiles, int num_cols) {
      for (Tile& tile : tiles) zero_absent_slabs(tile, num_cols, threadIdx.x, Traits::kThreads);
    };
    zero(q, params.head_dim);
    zero(k, params.head_dim);
    zero(dout, params.head_dim_v);
    zero(v, params.head_dim_v);
    ptx::fence_async_shared();
  }
};

// Loads Q and dO once, and K block after block. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void load_rows_and_k(const BwdParams& params, const BwdWideDqWork& work,
                                                const BwdTensorMaps& maps,
                                                BwdWideDqSharedStorage<Traits>& smem) {
  using Tile = typename Traits::Tile;
  const bool has_both = work.has_rows(work.first_row + Traits::kRows);
  const Ring<1> rows(smem.rows_ring);
  rows.expect_bytes((has_both ? 2 : 1) *
                    (loaded_bytes<Tile>(params.head_dim) + loaded_bytes<Tile>(params.head_dim_v)));
  for (int i = 0; i < (has_both ? 2 : 1); ++i) {
    const int first = work.first_row + i * Traits::kRows;
    load_tile(smem.q[i], maps.q, work.q, first, params.head_dim, rows.full(),
              ptx::CacheHint::kEvictFirst);
    load_tile(smem.dout[i], maps.dout, work.q, first, params.head_dim_v, rows.full(),
              ptx::CacheHint::kEvictFirst);
  }
  Ring<2> ring(smem.k_ring);
#pragma unroll 1
  for (int n = work.range.begin; n < work.range.end; ++n, ring.advance()) {
    ring.wait_empty();
    ring.expect_bytes(loaded_bytes<Tile>(params.head_dim));
    load_tile(smem.k[ring.stage()], maps.k, work.kv, n * Traits::kBlockN, params.head_dim,
              ring.full(), ptx::CacheHint::kEvictLast);
  }
}

template <typename Traits>
__device__ __forceinline__ void load_v(const BwdParams& params, const BwdWideDqWork& work,
                                       const BwdTensorMaps& maps,
                                       BwdWideDqSharedStorage<Traits>& smem) {
  Ring<1> ring(smem.v_ring);
#pragma unroll 1
  for (int n = work.range.begin; n < work.range.end; ++n, ring.advance()) {
    ring.wait_empty();
    ring.expect_bytes(loaded_bytes<typename Traits::Tile>(params.head_dim_v));
    load_tile(smem.v[0], maps.v, work.kv, n * Traits::kBlockN, params.head_dim_v, ring.full(),
              ptx::CacheHint::kEvictLast);
  }
}

// LSE and delta of a thread's two rows.
struct TwoRowTerms {
  float lse_log2[2], delta[2];

  __device__ __forceinline__ TwoRowTerms(const BwdParams& params, const BwdWideDqWork& work,
                                         int first_row, int lane) {
    const int64_t first = work.batch_idx * params.lse_batch_stride +
                          work.q.head * params.lse_head_stride + work.seqlen.q_begin;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + fragment_row(i, lane);
      const bool exists = row < work.seqlen.len_q;
      lse_log2[i] = to_lse_log2(exists ? params.lse[first + row] : -INFINITY);
      // Past the L1 cache: not this kernel but the one before it has waited for who wrote it.
      delta[i] = exists ? __ldcg(params.delta + first + row) : 0.f;
    }
  }
};

// Stores 16 rows of dQ, which lie in the tile from tile_row on. Rows of the segment that do not
// count get 0. A warp calls it.
template <typename Tile>
__device__ __forceinline__ void store_query_gradient(const BwdParams& params,
                                                     const BwdWideDqWork& work, const Tile& tile,
                                                     int first_row, int tile_row, int lane) {
  using Element = typename Tile::Element;
  constexpr int kRowChunks = Tile::kCols / Tile::kChunk;
  Element* const matrix =
      static_cast<Element*>(params.dq) +
      SeqlenInfo::offset(params.dq_strides, work.batch_idx, work.q.head, work.seqlen.q_begin);
  for (int i = lane; i < 16 * kRowChunks; i += 32) {
    const int row = i / kRowChunks, col = i % kRowChunks * Tile::kChunk;
    if (first_row + row >= work.seqlen.segment_q || col >= params.head_dim) continue;
    uint4 chunk = {};
    if (first_row + row < work.seqlen.len_q) {
      chunk = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile.data) +
                                              Tile::byte_offset(tile_row + row, col));
    }
    *reinterpret_cast<uint4*>(matrix + (first_row + row) * params.dq_strides.row + col) = chunk;
  }
}

template <typename Traits>
__device__ __forceinline__ void compute_query_gradient(const BwdParams& params,
                                                       const BwdWideDqWork& work,
                                                       BwdWideDqSharedStorage<Traits>& smem,
                                                       int consumer) {
  using Element = typename Traits::Element;
  using Tile = typename Traits::Tile;
  using Rows = WgmmaOperand<Layout::kKInner, Tile>;
  using Columns = WgmmaOperand<Layout::kKOuter, Tile>;
  const int lane = threadIdx.x % 32, tile_row = threadIdx.x / 32 % 4 * 16;
  const int first_row = work.first_row + consumer * Traits::kRows + tile_row;
  const bool computes = work.has_rows(work.first_row + consumer * Traits::kRows);
  const float scale_log2 = params.softmax_scale * kLog2E;
  const TwoRowTerms terms(params, work, first_row, lane);
  Ring<2> k_ring(smem.k_ring);
  Ring<1> v_ring(smem.v_ring);
  OperandA<1, Traits::kBlockN> dS;
  Accumulator<1, Traits::kHeadDim> dQ;
  dQ.fill(0.f);

  const auto end_dq = [&](const Ring<2>& ring) {
    pin(dQ);
    pin(dS);
    if (lane == 0) ring.arrive_empty();
  };
  const auto step = [&](int n, auto is_first) {
    constexpr bool kFirst = decltype(is_first)::value;
    Accumulator<1, Traits::kBlockN> S, dP;
    k_ring.wait_full();
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(S, Rows(smem.q[consumer]).opaque(),  // S = Q Kᵀ
                                                    Rows(smem.k[k_ring.stage()]).opaque());
    ptx::wgmma_commit();
    v_ring.wait_full();
    gemm_ss<Element, Traits::kHeadDim, Into::kZero>(dP, Rows(smem.dout[consumer]).opaque(),
                                                    Rows(smem.v[0]).opaque());  // dP = dO Vᵀ
    ptx::wgmma_commit();
    if constexpr (!kFirst) {
      ptx::wgmma_wait<2>();
      end_dq(k_ring.before());
    }
    ptx::wgmma_wait<1>();
    pin(S);
    recompute_probabilities(
        S, scale_log2, terms.lse_log2, n < work.range.full_begin || n >= work.range.full_end,
        [&](Accumulator<1, Traits::kBlockN>& scores) {
          const int row = first_row + fragment_row(0, lane);
          mask_keys(scores, work.window, {row, row + 8}, n * Traits::kBlockN, lane);
        });
    ptx::wgmma_wait<0>();
    pin(dP);
    if (lane == 0) v_ring.arrive_empty();
    softmax_gradient(dP, S, terms.delta);
    dS = to_operand_a<Element>(dP);
    gemm_rs<Element>(dQ, dS, Columns(smem.k[k_ring.stage()]).opaque());  // dQ += dS K
    ptx::wgmma_commit();
    k_ring.advance();
    v_ring.advance();
  };

  int n = work.range.begin;
  if (!computes) {
    for (; n < work.range.end; ++n, k_ring.advance(), v_ring.advance()) {
      k_ring.wait_full();
      v_ring.wait_full();
      if (lane == 0) {
        k_ring.arrive_empty();
        v_ring.arrive_empty();
      }
    }
  } else {
    Ring<1>(smem.rows_ring).wait_full();
    if (n < work.range.end) {
      step(n, std::true_type{});
#pragma unroll 1
      while (++n < work.range.end) step(n, std::false_type{});
      ptx::wgmma_wait<0>();
      pin(dQ);
      pin(dS);
    }
    scale_rows(dQ, {params.softmax_scale, params.softmax_scale});
    ptx::barrier_sync<128>(1 + consumer);  // nobody reads these rows of Q any more
    store_rounded(smem.q[consumer], dQ, 0, tile_row, lane);
    __syncwarp();
  }
  store_query_gradient(params, work, smem.q[consumer], first_row, tile_row, lane);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_wide_dq_kernel(const __grid_constant__ BwdParams params,
                       const __grid_constant__ typename Traits::Scheduler scheduler,
                       const __grid_constant__ BwdTensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<BwdWideDqSharedStorage<Traits>*>(dynamic_smem);
  const TileCoordinates tile = scheduler.tile(static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) {
    smem.init_barriers();
    new (smem.work_storage) BwdWideDqWork(BwdWideDqWork::make<Traits>(params, tile));
  }
  smem.zero_absent_columns(params);
  __syncthreads();
  const BwdWideDqWork& work = smem.work();
  const bool has_rows = work.first_row < work.seqlen.segment_q;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4) {
    ptx::lower_registers<Traits::kProducerRegisters>();
    if (warp < 2 && work.has_rows(work.first_row) && ptx::elect_one()) {
      if (warp == 0) {
        load_rows_and_k(params, work, maps, smem);
      } else {
        load_v(params, work, maps, smem);
      }
    }
    __syncwarp();
  } else {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    if (has_rows) compute_query_gradient(params, work, smem, warp / 4 - 1);
  }
  // The kernel of dK and dV, which may still run, has waited for the one of delta; what comes
  // behind this kernel waits for this one alone.
  flash_attn::ptx::wait_for_prerequisites();
}

template <DType kDType, int kHeadDim>
void launch_bwd_wide_dq(const BwdParams& params, Stream stream) {
  using Traits = BwdWideDqTraits<kDType, kHeadDim>;
  using Storage = BwdWideDqSharedStorage<Traits>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  const int64_t group = params.heads_q / params.heads_kv;
  const int64_t bytes =  // that the blocks of a head read over and over: K and V
      int64_t{params.seqlen_k} * (params.head_dim + params.head_dim_v) * 2 / group;
  const auto scheduler = Traits::Scheduler::make(
      params.cu_seqlens_q, params.total_q, params.seqlen_q, params.batch, params.heads_q, bytes);
  if (scheduler.num_tiles() == 0) return;
  const BwdTensorMaps maps =
      make_bwd_tensor_maps(params, Traits::kRows, Traits::kRows, Traits::Tile::kSlabCols);
  cuda::launch_overlapping<bwd_wide_dq_kernel<Traits>>(scheduler.num_tiles(), Traits::kThreads,
                                                       sizeof(Storage), true, stream, params,
                                                       scheduler, maps);
}

template <DType kDType, int kHeadDim>
void launch_bwd_dq_apart(const BwdParams& params, const cuda::DeviceInfo& device, Stream stream) {
  launch_bwd_pair_kernel<BwdPairTraits<kDType, kHeadDim, kHeadDim, BwdPairForm::kWithoutDq>>(
      params, device, stream);
  launch_bwd_wide_dq<kDType, kHeadDim>(params, stream);
}

}  // namespace flash_attn::sm90
