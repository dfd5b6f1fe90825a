// Decode of multi-head latent attention: K has one row a token, whose first columns are its value.
//
//   S = softmax_scale · Q Kᵀ → mask → online softmax → O = P V, V = K[:, : d_v]
//
// A thread block has 64 rows of Q, which are heads times new tokens, and its share of all keys
// (cuda/decode/kvcache_schedule.cuh). Beside Q there is room for two tiles of 64 keys, one for each
// of two consumer warpgroups, which computes S and P of it. O fills the registers of both: each has
// half of its columns, of all tiles. So P goes to the other consumer as well, and while one
// exponentiates, the other multiplies:
//
//   producers    wait empty   copy K(j)   …
//   consumer A   S(j) = Q K(j)ᵀ   O += P(j-1) K(j-1)   P(j) = exp2(S(j) - max)   O += P(j) K(j)
//   consumer B   P(j-1) = …   O += P(j-1) K(j-1)   S(j+1) = Q K(j+1)ᵀ   O += P(j) K(j)   P(j+1) = …
#pragma once

#include "../cuda/attn/logit_record.cuh"
#include "../cuda/cache/rotary.cuh"
#include "../cuda/decode/output_row.cuh"
#include "../cuda/launch.h"
#include "../cuda/ptx/griddepcontrol.cuh"
#include "latent_loads.cuh"
#include "latent_softmax.cuh"
#include "ptx/fence.cuh"
#include "tile/gemm.cuh"

namespace flash_attn::sm90 {

// Brings the rows of Q into shared memory, with zeros beyond rows and columns. The consumers call
// it, with four lanes a row, when none of them reads the rows of the piece before any more.
template <typename Traits>
__device__ __forceinline__ void load_latent_queries(LatentStorage<Traits>& smem,
                                                    const DecodeParams& params,
                                                    const cuda::KvcachePiece& piece) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kConsumerThreads / kLatentRows, kStep = kLanes * kChunk;
  constexpr int kChunks = kLatentHeadDim / kStep;
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
    smem.q.chunk(row, first_col + i * kStep) = chunks[i];
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
  for (int part = 0; part < Traits::kParts; ++part) {
    const int first_col = (consumer * Traits::kParts + part) * Traits::kPartCols;
#pragma unroll
    for (int i = 0; i < O[part].kRowElements; i += 2) {
      const int col = first_col + fragment_col(i, lane);
      if (col >= params.head_dim_v) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (out[half] == nullptr) continue;
        const float o0 = O[part].at(half, i) * factor[half];
        const float o1 = O[part].at(half, i + 1) * factor[half];
        if (whole) {
          *reinterpret_cast<uint32_t*>(out[half] + col) =
              flash_attn::ptx::pack<typename Traits::Element>(o0, o1);
        } else {
          *reinterpret_cast<float2*>(partial[half] + col) = {o0, o1};
        }
      }
    }
  }
}

// What a consumer does with the tiles of a piece: with its own, and with the other consumer's.
template <typename Traits>
struct LatentConsumer {
  using Element = typename Traits::Element;
  using PartView = WgmmaOperand<Layout::kKInner, typename Traits::PartTile>;
  using RestView = WgmmaOperand<Layout::kKInner, typename Traits::RestTile>;
  using PView = WgmmaOperand<Layout::kKInner, typename Traits::PTile>;
  using VView = WgmmaOperand<Layout::kKOuter, typename Traits::PartTile>;
  static constexpr int kParts = Traits::kParts;

  LatentStorage<Traits>& smem;
  const LatentRows& rows;
  int consumer, warp_row, lane;
  LatentSoftmax softmax;
  typename Traits::Output O;

  // Starts S = Q Kᵀ of an own tile, at a visit of its stage.
  __device__ __forceinline__ void start_scores(typename Traits::Scores& S, unsigned visit) {
    const auto &Q = smem.q, &K = smem.k[consumer];
    const int own_part = consumer * kParts, other_part = (1 - consumer) * kParts;
    const Ring<Traits::kStages> ring(smem.own_parts[0], visit);
    ring.wait_full();
    if (smem.exists[consumer] != ~uint64_t{0}) clear_absent_keys(ring);
    gemm_ss<Element, Traits::kPartCols, Into::kZero>(S, PartView(Q.part[own_part]),
                                                     PartView(K.part[own_part]));
#pragma unroll
    for (int i = 1; i < kParts; ++i) {
      ring.in(smem.own_parts[i]).wait_full();
      gemm_ss_more<Element, Traits::kPartCols>(S, PartView(Q.part[own_part + i]),
                                               PartView(K.part[own_part + i]));
    }
    gemm_ss_more<Element, Traits::kRestCols>(S, RestView(Q.rest), RestView(K.rest));
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      ring.in(smem.other_parts[i]).wait_full();
      gemm_ss_more<Element, Traits::kPartCols>(S, PartView(Q.part[other_part + i]),
                                               PartView(K.part[other_part + i]));
    }
    ptx::wgmma_commit();
  }

  // Starts O += P V of the other consumer's tile, as soon as P is there.
  __device__ __forceinline__ void start_others_values(unsigned visit) {
    const int other = 1 - consumer;
    Ring<Traits::kStages>(smem.probabilities, visit).wait_full();
    float correction[2];
    softmax.follow(smem.row_max, correction, warp_row, lane);
    correct(O, correction);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      gemm_ss<Element, kLatentKeys, Into::kSum>(O[i], PView(smem.p),
                                                VView(smem.k[other].part[consumer * kParts + i]));
      ptx::wgmma_commit();
    }
  }
  // Waits for it, and for what was started before. The other consumer's tile may go then.
  __device__ __forceinline__ void finish_others_values() {
    finish_values(smem.other_parts, 1 - consumer);
  }

  // Of an own tile S, which is finished, becomes P, which the other consumer gets as well. Then
  // O += P V, and the tile may go.
  __device__ __forceinline__ void add_values(typename Traits::Scores& S, int tile) {
    pin(S);
    rows.mask(S, smem.exists[consumer], tile * kLatentKeys, lane);
    float correction[2];
    softmax.step(S, correction);
    auto P = to_operand_a<Element>(S);
    store_operand(smem.p, P, warp_row, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 == 0) smem.row_max[warp_row + fragment_row(half, lane)] = softmax.row_max[half];
    }
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(smem.probabilities.full[consumer]);
    correct(O, correction);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      gemm_rs<Element>(O[i], P, VView(smem.k[consumer].part[consumer * kParts + i]));
      ptx::wgmma_commit();
    }
    finish_values(smem.own_parts, consumer);
  }

 private:
  // In the place of keys that do not exist lies anything. A NaN there would survive a product with
  // P = 0.
  __device__ __forceinline__ void clear_absent_keys(const Ring<Traits::kStages>& ring) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      ring.in(smem.own_parts[i]).wait_full();
      ring.in(smem.other_parts[i]).wait_full();
    }
    constexpr int kChunks = kLatentHeadDim / kChunk;
    for (int i = threadIdx.x % 128; i < kLatentKeys * kChunks; i += 128) {
      const int key = i / kChunks;
      if ((smem.exists[consumer] >> key & 1) != 0) continue;
      smem.k[consumer].chunk(key, i % kChunks * kChunk) = {};
    }
    ptx::fence_async_shared();
    ptx::barrier_sync<128>(kLatentAbsentKeys + consumer);
  }

  // Waits for O += P V, part by part. Those parts of a stage may go then.
  __device__ __forceinline__ void finish_values(RingBarriers<Traits::kStages> (&parts)[kParts],
                                                int stage) {
    static_assert(kParts == 2);
    ptx::wgmma_wait<1>();
    pin(O[0]);
    ptx::mbarrier_arrive(parts[0].empty[stage]);
    ptx::wgmma_wait<0>();
    pin(O[1]);
    ptx::mbarrier_arrive(parts[1].empty[stage]);
  }
};

template <typename Traits>
__device__ __forceinline__ void latent_consumer_loop(const DecodeParams& params,
                                                     LatentStorage<Traits>& smem,
                                                     typename Traits::Schedule& schedule,
                                                     int consumer) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const int first_row = blockIdx.x * kLatentRows + warp_row;
  unsigned visit = 0;  // of the ring, at the piece's first tile
  cuda::KvcachePiece piece;
  for (unsigned number = 0; schedule.next(piece); ++number) {
    ptx::barrier_sync<Traits::kConsumerThreads>(kLatentQueries);
    load_latent_queries(smem, params, piece);
    ptx::barrier_sync<Traits::kConsumerThreads>(kLatentQueries);
    const LatentRows rows(params, piece, first_row, lane);
    LatentConsumer<Traits> self{smem,     rows, consumer,
                                warp_row, lane, {.scale_log2 = params.softmax_scale * kLog2E}};
#pragma unroll
    for (auto& part : self.O) part.fill(0.f);

    const bool is_first = visit % Traits::kStages == consumer;  // has the piece's first tile
    int tile = piece.first_tile;
    if (is_first) {
      typename Traits::Scores S;
      self.start_scores(S, visit);
      ptx::wgmma_wait<0>();
      self.add_values(S, tile);
    }
    const unsigned visit_of_0 = visit - piece.first_tile;  // of the sequence's tiles
    for (tile += is_first ? 2 : 1; tile < piece.end_tile; tile += 2) {
      typename Traits::Scores S;
      self.start_scores(S, visit_of_0 + tile);
      self.start_others_values(visit_of_0 + tile - 1);
      self.finish_others_values();
      self.add_values(S, tile);
    }
    if (tile == piece.end_tile) {  // the last one is the other consumer's
      self.start_others_values(visit_of_0 + tile - 1);
      self.finish_others_values();
    }
    visit = visit_of_0 + piece.end_tile;
    self.softmax.template finish<Traits>(smem, number, consumer, warp_row, lane);
    store_latent<Traits>(self.O, self.softmax, params, piece, first_row, consumer, lane);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    latent_kernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ LatentCache cache) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<LatentStorage<Traits>*>(dynamic_smem);
  // Lengths may be another kernel's results, as in cuda/decode/kvcache.cuh.
  flash_attn::ptx::wait_for_prerequisites();
  flash_attn::ptx::launch_dependents();
  if (threadIdx.x == 0) smem.init_barriers();
  clear_absent_columns(params, smem);
  typename Traits::Schedule schedule(params);
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in all lanes
  if (warp < 4 * Traits::kConsumers) {
    ptx::raise_registers<Traits::kConsumerRegisters>();
    latent_consumer_loop<Traits>(params, smem, schedule, warp / 4);
  } else {
    ptx::lower_registers<Traits::kProducerRegisters>();
    const int producer = warp - 4 * Traits::kConsumers;
    if (producer < 2) load_latent_loop<Traits>(params, cache, smem, schedule, producer == 0);
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
                                                  stream, params, LatentCache::of<Traits>(params));
}

}  // namespace flash_attn::sm90
