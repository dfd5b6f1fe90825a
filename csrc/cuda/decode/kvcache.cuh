// Split-KV decode against the caches that decode.cuh does not serve: of 8 bits and of fp32, and
// those of 16 bits above a head dim of 256. They may have any form: paged, indexed, left-padded,
// just appended to; with every term of the score.
//
//   S = softmax_scale · Q Kᵀ → softcap → ALiBi → mask → online softmax → O = P V
//
// The time is that of reading K and V once, so all is arranged to keep reads under way. A thread
// block works through its share of all keys (kvcache_schedule.cuh), in tiles that its producer
// warps bring into a ring of shared memory, K and V in turns, and up to a whole ring ahead of the
// four warps that compute. The producers do not stop where one sequence ends and the next begins.
//
//   producers   wait empty   copy K(j)   wait empty   copy V(j)   …
//   each warp   wait K(j)    S = Q K(j)ᵀ of its quarter of the keys    release   scores
//     all warps   exchange row maxima    P = exp2(S - max)    exchange P
//   each warp   wait V(j)    O += P V(j) in its quarter of the columns    release
//
// The two exchanges cost two barriers of 128 threads a tile, which is little beside its read. They
// leave nothing to merge between the warps in the end but row sums.
//
// In multi-head latent attention values are the first columns of their keys. Where memory has them
// once, a tile of K is one of V as well, and the ring has tiles of K alone.
//
// 8-bit caches are widened to fp16 between ldmatrix and mma (widened_gemm.cuh). Descales enter the
// softmax scale and O.
//
// With fp32 caches Q, P and O are fp32 too, and products are those of gemm<float>, whatever torch
// allows.
#pragma once

#include "../cache/loader.cuh"
#include "../launch.h"
#include "../ptx/barrier.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/opaque.cuh"
#include "kvcache_gemm.cuh"
#include "kvcache_queries.cuh"
#include "kvcache_schedule.cuh"
#include "kvcache_softmax.cuh"
#include "output_row.cuh"

namespace flash_attn::cuda {

// Stores O and the lse of a sequence, or of a piece of it, where they belong.
template <typename Traits>
__device__ __forceinline__ void store_piece(const typename Traits::Output& O,
                                            const KvcacheSoftmax& softmax,
                                            const DecodeParams& params, const KvcachePiece& piece,
                                            int warp, int lane) {
  const int first_row = blockIdx.x * kDecodeRows;
  const bool whole = piece.number < 0, stores_lse = warp == 0 && lane % 4 == 0;
  const float descale = descale_of(params.v_descale, params.v_descale_batch_stride,
                                   params.v_descale_head_stride, piece.batch_idx, blockIdx.y);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(half, lane);
    if (first_row + row >= decode_group_rows(params)) continue;
    const float sum = softmax.row_sum[half];
    const float lse = sum == 0.f ? -INFINITY : (softmax.row_max[half] + ptx::log2(sum)) * kLn2;
    float factor = sum == 0.f ? 0.f : descale / sum;
    const KvcacheRow at(params, blockIdx.y, first_row + row);
    const OutputRow<Traits::kWide> output(params, piece.batch_idx, at.head, at.token);
    const int64_t partial_row = workspace_row(params, piece.number, at.head, at.token);
    float* partial = params.partial.o + partial_row * params.head_dim_v;
    if (params.max_logits != nullptr && stores_lse && sum != 0.f) {
      raise_to(params.max_logits + at.head, softmax.row_max[half] * kLn2);
    }
    if (whole) {
      factor *= output.finish_lse(params, at.head, lse, stores_lse);
    } else if (stores_lse) {
      params.partial.lse[partial_row] = lse;
    }
#pragma unroll
    for (int i = 0; i < O.kRowElements; i += 2) {
      // Of two neighbouring columns; 8-bit products hold even and odd ones in blocks of their own.
      const int block = i / 4, pair = i / 2 % 2;
      const int col = (block * kKvcacheWarps + warp) * 16 +
                      (Traits::k8Bit ? lane % 4 * 4 + pair * 2 : pair * 8 + lane % 4 * 2);
      const float o0 = O.at(half, Traits::k8Bit ? 4 * block + pair : i) * factor;
      const float o1 = O.at(half, Traits::k8Bit ? 4 * block + 2 + pair : i + 1) * factor;
      if (col >= params.head_dim_v) continue;
      if (whole) {
        output.store(params, col, o0, o1);
      } else {
        *reinterpret_cast<float2*>(partial + col) = {o0, o1};
      }
    }
  }
}

// Whether the values of a call lie in memory as the first columns of its keys.
template <typename Traits>
__device__ __forceinline__ bool values_lie_in_keys(const DecodeParams& params) {
  if constexpr (!Traits::kLatent) {
    return false;
  } else {
    return params.k_cache == params.v_cache && params.k_strides == params.v_strides &&
           params.head_dim_v <= params.head_dim;
  }
}

// The warps that load run this: each brings a quarter of every tile's rows, wherever they lie.
template <typename Traits>
__device__ __forceinline__ void produce(const DecodeParams& params,
                                        const KvcacheTiles<Traits>& ring,
                                        KvcacheSchedule<Traits::kKeys>& schedule) {
  using Share = KvcacheShare<Traits>;
  KvcacheStorage<Traits>& smem = ring.smem;
  const int warp = threadIdx.x / 32 - kKvcacheWarps, lane = threadIdx.x % 32;
  KvcachePiece piece;
  RingVisit at;
  const bool one_tile = values_lie_in_keys<Traits>(params);
  const auto wait_empty = [&] { ptx::mbarrier_wait(smem.empty[at.stage], at.phase ^ 1); };
  const auto arrive_full = [&] {
    ptx::mbarrier_arrive_after_copies(smem.full[at.stage]);
    if (lane == 0) ptx::mbarrier_arrive(smem.full[at.stage]);  // valid is written
    at.advance(ring.stages);
  };
  while (schedule.next(piece)) {
    const int first_row = warp * Share::kKeys;
    CacheLoader<Share> cache(params, piece.batch_idx, blockIdx.y, piece.keys.first, piece.keys.end,
                             piece.first_tile * Traits::kKeys + first_row, lane, first_row);
    for (int tile = piece.first_tile; tile < piece.end_tile; ++tile) {
      // The appended tokens are the cache's last; what comes before is there.
      if (params.seqlen_new > 0 &&
          (tile + 1) * Traits::kKeys > piece.keys.end - params.seqlen_new) {
        ptx::wait_for_prerequisites();
      }
      cache.locate(tile * Traits::kKeys + first_row);
      wait_empty();
      cache.keys(ring.tiles[at.stage], smem.valid[at.stage][warp]);
      arrive_full();
      if (one_tile) continue;
      wait_empty();
      cache.values(ring.tiles[at.stage]);
      arrive_full();
    }
  }
}

// The warps that compute run this. kBias: the call may have one.
template <typename Traits, bool kBias>
__device__ __forceinline__ void consume(const DecodeParams& params,
                                        const KvcacheTiles<Traits>& ring,
                                        KvcacheSchedule<Traits::kKeys>& schedule) {
  KvcacheStorage<Traits>& smem = ring.smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  KvcachePiece piece;
  RingVisit at;
  const bool one_tile = values_lie_in_keys<Traits>(params);
  // All lanes arrive: racecheck does not follow an order that one lane passes on for its warp.
  const auto release = [&] {
    ptx::mbarrier_arrive(smem.empty[at.stage]);
    at.advance(ring.stages);
  };
  while (schedule.next(piece)) {
    load_queries<typename Traits::Element, Traits::k8Bit>(smem.q, smem.row_terms, params, piece);
    ptx::barrier_sync<Traits::kThreads>(kComputeBarrier);
    const KvcacheQueries<Traits> Q(smem.q, lane);
    const KvcacheRows rows(params, piece, lane);
    typename Traits::Output O;
    O.fill(0.f);
    KvcacheSoftmax softmax(params.score);

    for (int tile = piece.first_tile; tile < piece.end_tile; ++tile) {
      ptx::mbarrier_wait(smem.full[at.stage], at.phase);
      const uint32_t valid = smem.valid[at.stage][warp];
      auto S = multiply_keys<Traits>(Q, ring.tiles[at.stage], warp, lane);
      if (!one_tile) release();
      const int first_key = tile * Traits::kKeys + warp * Traits::kWarpKeys;
      finish_and_mask<Traits, kBias>(S, smem, params, rows, valid, first_key, lane);
      float correction[2];
#if __CUDA_ARCH__ < 900
      // Addresses kept from tile to tile spill where two blocks share a multiprocessor.
      const auto step_lane = static_cast<int>(ptx::opaque(lane));
#else
      const int step_lane = lane;
#endif
      if (softmax.template step<Traits>(S, correction, smem, warp, step_lane)) {
        scale_rows(O, correction);
      }
      if (!one_tile) ptx::mbarrier_wait(smem.full[at.stage], at.phase);
      multiply_values<Traits>(O, smem.p, ring.tiles[at.stage], warp, lane);
      release();
    }
    softmax.template finish<Traits>(smem, warp, lane);
    ptx::wait_for_prerequisites();  // whoever wrote before, or still reads the workspace
    store_piece<Traits>(O, softmax, params, piece, warp, lane);
  }
}

template <typename Traits, int kBlocksPerSm>
__global__ void __launch_bounds__(Traits::kAllThreads, kBlocksPerSm)
    kvcache_kernel(const __grid_constant__ DecodeParams params,
                   const __grid_constant__ unsigned stages) {
  extern __shared__ __align__(1024) char smem_bytes[];
  // Lengths may be another kernel's results: neither this one nor the merge, whose blocks come when
  // all of these are resident or done, reads any before. Behind an append they are older than that.
  if (params.seqlen_new == 0 || params.sequence_mask != nullptr) ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  const KvcacheTiles<Traits> ring(smem_bytes, stages);
  ring.init(kKvcacheArrivals, params.head_dim, params.head_dim_v);
  KvcacheSchedule<Traits::kKeys> schedule(params);
  __syncthreads();
  if (threadIdx.x < Traits::kThreads) {
    consume<Traits, kBlocksPerSm == Traits::kLeastBlocks>(params, ring, schedule);
  } else {
    produce<Traits>(params, ring, schedule);
  }
}

template <DType kCacheDType, int kHeadDim>
void launch_kvcache(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  using Traits = KvcacheTraits<kCacheDType, kHeadDim>;
  const auto smem_bytes = [](int stages) {
    return stages * static_cast<int>(sizeof(typename Traits::KvTile)) +
           static_cast<int>(sizeof(KvcacheStorage<Traits>));
  };
  int stages = kKvcacheMaxStages;
  while (stages > 2 && smem_bytes(stages) > grid.smem_bytes) stages -= 2;
  const auto run = [&]<int kBlocksPerSm> {
    constexpr auto kKernel = kvcache_kernel<Traits, kBlocksPerSm>;
    allow_smem<kKernel>(grid.smem_optin_bytes);  // whatever later calls ask for
    launch_overlapping<kKernel>(dim3(decode_row_tiles(params), params.heads_kv, grid.parts),
                                Traits::kAllThreads, smem_bytes(stages), /*overlap=*/true, stream,
                                params, static_cast<unsigned>(stages));
  };
  if (grid.blocks_per_sm >= Traits::kMostBlocks) {
    run.template operator()<Traits::kMostBlocks>();
  } else {
    run.template operator()<Traits::kLeastBlocks>();
  }
}

}  // namespace flash_attn::cuda
