// Decode of multi-head latent attention: K has one row a token, whose first columns are its value.
//
//   S = softmax_scale · Q Kᵀ → mask → online softmax → O = P V, V = K[:, : d_v]
//
// A thread block has 64 rows of Q, which are heads times new tokens, and its share of all keys
// (cuda/decode/kvcache_schedule.cuh). Rows of K are copied one by one, as pages have any size, into
// a ring of two tiles of 64, which is all that fits beside Q. O fills the registers of two
// warpgroups. Each has half of its columns, and computes half of S and P:
//
//   producers     wait empty   copy K(j)   …
//   consumer w    wait K(j)    S = Q K(j)ᵀ, half w of the keys
//     both        exchange row maxima    P = exp2(S - max)    exchange P
//   consumer w    O += P K(j), half w of the columns    release
#pragma once

#include "../cuda/attn/logit_record.cuh"
#include "../cuda/cache/loader.cuh"
#include "../cuda/cache/rotary.cuh"
#include "../cuda/decode/output_row.cuh"
#include "../cuda/launch.h"
#include "../cuda/ptx/griddepcontrol.cuh"
#include "latent_softmax.cuh"
#include "ptx/fence.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

// The warps that load run this: each brings a quarter of every tile's rows, wherever they lie.
template <typename Traits>
__device__ __forceinline__ void load_latent_loop(const DecodeParams& params,
                                                 LatentStorage<Traits>& smem,
                                                 typename Traits::Schedule& schedule, int warp) {
  using Share = LatentShare<Traits>;
  const int lane = threadIdx.x % 32, first_row = warp * Share::kKeys;
  const int half = warp / Traits::kWarpsOfHalf, warp_of_half = warp % Traits::kWarpsOfHalf;
  Ring<Traits::kStages> ring(smem.ring);
  cuda::KvcachePiece piece;
  while (schedule.next(piece)) {
    cuda::CacheLoader<Share> cache(params, piece.batch_idx, blockIdx.y, piece.keys.first,
                                   piece.keys.end, piece.first_tile * kLatentKeys + first_row, lane,
                                   warp_of_half * Share::kKeys);
    for (int tile = piece.first_tile; tile < piece.end_tile; ++tile) {
      cache.locate(tile * kLatentKeys + first_row);
      ring.wait_empty();
      cache.keys(smem.k[ring.stage()][half], smem.valid[ring.stage()][half][warp_of_half]);
      flash_attn::ptx::mbarrier_arrive_after_copies(ring.full());
      if (lane == 0) ring.arrive_full();  // valid is written
      ring.advance();
    }
  }
}

// Brings the rows of Q into shared memory, with zeros beyond rows and columns. The consumers call
// it, with four lanes a row, when none of them reads the rows of the piece before any more.
template <typename Traits>
__device__ __forceinline__ void load_latent_queries(LatentStorage<Traits>& smem,
                                                    const DecodeParams& params,
                                                    const cuda::KvcachePiece& piece) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kConsumerThreads / kLatentRows, kStep = kLanes * kChunk;
  constexpr int kChunks = Traits::kHeadDim / kStep;
  const int row = threadIdx.x / kLanes, row_of_head = blockIdx.x * kLatentRows + row;
  const int first_col = threadIdx.x % kLanes * kChunk;
  const bool exists = row_of_head < cuda::decode_group_rows(params);
  const cuda::KvcacheRow at(params, blockIdx.y, exists ? row_of_head : 0);
  const auto* source = cuda::query_row<Element>(params, piece.batch_idx, at.token, at.head);
  uint4 chunks[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = first_col + i * kStep;
    const bool loads = exists && col < params.head_dim;
    chunks[i] = loads ? *reinterpret_cast<const uint4*>(source + col) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    *reinterpret_cast<uint4*>(smem.q.pointer(row, first_col + i * kStep)) = chunks[i];
  }
  ptx::fence_async_shared();
}

// Stores this consumer's columns of O and, once for both, the lse of a sequence, or of a piece of
// it, where they belong. first_row: of the warp, among the rows of the kv head.
template <typename Traits>
__device__ __forceinline__ void store_latent(const typename Traits::Output& O,
                                             const LatentSoftmax& softmax,
                                             const DecodeParams& params,
                                             const cuda::KvcachePiece& piece, int first_row,
                                             int consumer, int lane) {
  const bool whole = piece.number < 0, stores_lse = consumer == 0 && lane % 4 == 0;
  typename cuda::OutputRow<>::Word* out[2];  // of the row; null where there is none
  float *partial[2], factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + fragment_row(half, lane);
    out[half] = nullptr;
    if (row >= cuda::decode_group_rows(params)) continue;
    const cuda::KvcacheRow at(params, blockIdx.y, row);
    const cuda::OutputRow<> output(params, piece.batch_idx, at.head, at.token);
    const int64_t partial_row = cuda::workspace_row(params, piece.number, at.head, at.token);
    out[half] = output.out;
    partial[half] = params.partial.o + partial_row * params.head_dim_v;
    const float sum = softmax.row_sum[half], max = softmax.row_max[half];
    const float lse = sum == 0.f ? -INFINITY : (max + flash_attn::ptx::log2(sum)) * kLn2;
    factor[half] = sum == 0.f ? 0.f : 1.f / sum;
    if (params.max_logits != nullptr && stores_lse && sum != 0.f) {
      raise_to(params.max_logits + at.head, max * kLn2);
    }
    if (whole) {
      factor[half] *= output.finish_lse(params, at.head, lse, stores_lse);
    } else if (stores_lse) {
      params.partial.lse[partial_row] = lse;
    }
  }
#pragma unroll
  for (int i = 0; i < O.kRowElements; i += 2) {
    const int col = consumer * Traits::kOutputCols + fragment_col(i, lane);
    if (col >= params.head_dim_v) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (out[half] == nullptr) continue;
      const float o0 = O.at(half, i) * factor[half], o1 = O.at(half, i + 1) * factor[half];
      if (whole) {
        *reinterpret_cast<uint32_t*>(out[half] + col) =
            flash_attn::ptx::pack<typename Traits::Element>(o0, o1);
      } else {
        *reinterpret_cast<float2*>(partial[half] + col) = {o0, o1};
      }
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void latent_consumer_loop(const DecodeParams& params,
                                                     LatentStorage<Traits>& smem,
                                                     typename Traits::Schedule& schedule,
                                                     int consumer) {
  using Element = typename Traits::Element;
  using QView = WgmmaOperand<Layout::kKInner, typename Traits::QTile>;
  using KView = WgmmaOperand<Layout::kKInner, typename Traits::KTile>;
  using PView = WgmmaOperand<Layout::kKInner, typename Traits::PTile>;
  using VView = WgmmaOperand<Layout::kKOuter, typename Traits::KTile>;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const int first_row = blockIdx.x * kLatentRows + warp_row;
  const float scale_log2 = params.softmax_scale * kLog2E;
  Ring<Traits::kStages> ring(smem.ring);
  cuda::KvcachePiece piece;
  while (schedule.next(piece)) {
    ptx::barrier_sync<Traits::kConsumerThreads>(kLatentQueries);
    load_latent_queries(smem, params, piece);
    ptx::barrier_sync<Traits::kConsumerThreads>(kLatentQueries);
    const LatentRows rows(params, piece, first_row, lane);
    typename Traits::Output O;
    O.fill(0.f);
    LatentSoftmax softmax;

    for (int tile = piece.first_tile; tile < piece.end_tile; ++tile) {
      ring.wait_full();
      // What cp.async has written is read by wgmma as by TMA.
      ptx::fence_async_shared();
      const auto& K = smem.k[ring.stage()];
      typename Traits::Scores S;
      gemm_ss<Element, Traits::kHeadDim, Into::kZero>(S, QView(smem.q), KView(K[consumer]));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      pin(S);
      scale_rows(S, {scale_log2, scale_log2});
      rows.mask(S, *reinterpret_cast<const uint32_t*>(smem.valid[ring.stage()][consumer]),
                tile * kLatentKeys + consumer * Traits::kKeys, lane);
      float correction[2];
      if (softmax.step<Traits>(S, correction, smem, consumer, warp_row, lane)) {
        scale_rows(O, correction);
      }
      store_operand(smem.p[consumer], to_operand_a<Element>(S), warp_row, lane);
      ptx::fence_async_shared();
      ptx::barrier_sync<Traits::kConsumerThreads>(kLatentProbabilities);
#pragma unroll
      for (int half = 0; half < Traits::kConsumers; ++half) {
        gemm_ss<Element, Traits::kKeys, Into::kSum>(O, PView(smem.p[half]),
                                                    VView(K[half], consumer * Traits::kOutputCols));
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      pin(O);
      ring.arrive_empty();
      ring.advance();
    }
    softmax.finish<Traits>(smem, consumer, warp_row, lane);
    store_latent<Traits>(O, softmax, params, piece, first_row, consumer, lane);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    latent_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<LatentStorage<Traits>*>(dynamic_smem);
  // Lengths may be another kernel's results, as in cuda/decode/kvcache.cuh.
  flash_attn::ptx::wait_for_prerequisites();
  flash_attn::ptx::launch_dependents();
  if (threadIdx.x == 0) smem.init_barriers();
  typename Traits::Schedule schedule(params);
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4 * Traits::kConsumers) {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    latent_consumer_loop<Traits>(params, smem, schedule, warp / 4);
  } else {
    ptx::lower_registers<Traits::kProducerRegisters>();
    load_latent_loop<Traits>(params, smem, schedule, warp - 4 * Traits::kConsumers);
  }
}

template <DType kDType>
void launch_latent(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  using Traits = LatentTraits<kDType>;
  constexpr int kSmemBytes = sizeof(LatentStorage<Traits>);
  static_assert(kSmemBytes <= 227 * 1024);
  const int row_tiles = (cuda::decode_group_rows(params) + kLatentRows - 1) / kLatentRows;
  cuda::launch_overlapping<latent_kernel<Traits>>(dim3(row_tiles, params.heads_kv, grid.parts),
                                                  Traits::kThreads, kSmemBytes, /*overlap=*/true,
                                                  stream, params);
}

}  // namespace flash_attn::sm90
