// Merges the pieces of the sequences that kvcache.cuh left in pieces: one thread block a row.
//
//   lse = ln Σₛ exp(lseₛ),    out = Σₛ exp(lseₛ - lse) · oₛ
//
// Its blocks come while the split-KV kernel runs, find their sequence and its pieces from the
// lengths, and wait. What is left then is one trip to memory, for o and lse together, and a store.
// A warp has a row's columns side by side and 16 pieces (above 256 columns 8) under way; several
// warps deal more pieces among them.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "../ptx/griddepcontrol.cuh"
#include "kvcache_store.cuh"

namespace flash_attn::cuda {

inline constexpr int kCombineWarps = 8;  // at most
// Of a row of kVectors · 128 columns: what its registers hold.
template <int kVectors>
inline constexpr int kPiecesAtOnce = kVectors <= 2 ? 16 : 8;

// The pieces of one sequence, for each head and row tile: KvcachePiece::number is `first`, then
// base + step, base + 2 · step, …
struct SequencePieces {
  int batch_idx = 0, count = 0;  // 0: not this block's, or finished already
  int first = 0, base = 0, step = 0;
};

// Dealt out. Block z looks at sequence z, or where there are fewer cuts than sequences at the
// cut behind part z: the first cut inside a sequence is the one that merges it.
template <int kKeys>
__device__ __forceinline__ SequencePieces pieces_of_parts(const DecodeParams& params,
                                                          unsigned parts, bool by_cut) {
  SequenceCursor<kKeys> cursor(params);
  const int total = cursor.total_tiles(), share = kvcache_share(total, parts);
  const int begin_of_part = blockIdx.z * share, cut = begin_of_part + share;
  if (by_cut) {
    if (cut >= total) return {};
    cursor.seek_tile(cut);
    if (cursor.begin() < begin_of_part || cursor.begin() == cut) return {};
  } else {
    cursor.seek_sequence(blockIdx.z);
  }
  const int first = static_cast<unsigned>(cursor.begin()) / static_cast<unsigned>(share);
  const int last =
      static_cast<unsigned>(cursor.begin() + cursor.tiles() - 1) / static_cast<unsigned>(share);
  return {.batch_idx = cursor.batch_idx(),
          .count = last == first ? 0 : last - first + 1,
          .first = 2 * first + 1,
          .base = 2 * first,
          .step = 2};
}

template <int kKeys>
__device__ __forceinline__ SequencePieces pieces_of_splits(const DecodeParams& params) {
  const int batch_idx = blockIdx.z;
  const int tiles = SequenceKeys(params, batch_idx).template tiles<kKeys>();
  const int count = KvcacheSplits::of<kKeys>(params, tiles).count;
  const int first = batch_idx * params.splits.count;
  return {.batch_idx = batch_idx,
          .count = count == 1 ? 0 : count,
          .first = first,
          .base = first,
          .step = 1};
}

// Σ exp(lse - max_lse) · o of a lane's columns, four and, 128 further on, four more; Σ exp(lse -
// max_lse), the same in all lanes.
template <int kVectors>
struct PieceMerge {
  float4 o[kVectors];
  float sum = 0.f, max_lse = -INFINITY;

  __device__ __forceinline__ PieceMerge() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) o[i] = {};
  }
  __device__ __forceinline__ void raise(float new_max) {
    const float factor = merge_weight(max_lse, merge_reference(new_max));
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      o[i] = {o[i].x * factor, o[i].y * factor, o[i].z * factor, o[i].w * factor};
    }
    max_lse = new_max;
  }
  __device__ __forceinline__ void add(float weight, const float4 (&part_o)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      o[i].x += weight * part_o[i].x;
      o[i].y += weight * part_o[i].y;
      o[i].z += weight * part_o[i].z;
      o[i].w += weight * part_o[i].w;
    }
  }
};

// kPiecesAtOnce pieces of a row at a time, from `warp` times as many on.
template <int kVectors>
__device__ __forceinline__ PieceMerge<kVectors> merge_pieces(const DecodeParams& params,
                                                             const SequencePieces& pieces, int warp,
                                                             int warps, int lane) {
  const unsigned row_tiles = (gridDim.x + kDecodeRows - 1) / kDecodeRows;
  const auto row_of_piece = [&](int piece) {
    const int number = piece == 0 ? pieces.first : pieces.base + piece * pieces.step;
    const int64_t slot =
        RowsByTile::slot(number, blockIdx.y, blockIdx.x / kDecodeRows, gridDim.y, row_tiles);
    return slot * kDecodeRows + blockIdx.x % kDecodeRows;
  };
  PieceMerge<kVectors> state;
#pragma unroll 1
  for (int begin = warp * kPiecesAtOnce<kVectors>; begin < pieces.count;
       begin += warps * kPiecesAtOnce<kVectors>) {
    const int own = begin + lane;
    const bool has_own = lane < kPiecesAtOnce<kVectors> && own < pieces.count;
    const float lse = has_own ? params.partial.lse[row_of_piece(own)] : -INFINITY;
    float4 o[kPiecesAtOnce<kVectors>][kVectors];
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce<kVectors>; ++i) {
      const float* row = params.partial.o + row_of_piece(begin + i) * params.head_dim_v;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const int col = vector * 128 + lane * 4;
        o[i][vector] = begin + i < pieces.count && col < params.head_dim_v
                           ? *reinterpret_cast<const float4*>(row + col)
                           : float4{};
      }
    }
    float max_lse = lse;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(~0u, max_lse, distance);
      max_lse = max_lse >= other || isnan(max_lse) ? max_lse : other;  // NaN stays
    }
    state.raise(max_lse >= state.max_lse || isnan(max_lse) ? max_lse : state.max_lse);
    const float weight = merge_weight(lse, merge_reference(state.max_lse));
    float sum = weight;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    state.sum += sum;
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce<kVectors>; ++i) state.add(__shfl_sync(~0u, weight, i), o[i]);
  }
  return state;
}

template <int kKeys, int kVectors>
__global__ void __launch_bounds__(32 * kCombineWarps)
    kvcache_combine_kernel(const __grid_constant__ DecodeParams params,
                           const __grid_constant__ unsigned parts,
                           const __grid_constant__ bool by_cut) {
  using State = PieceMerge<kVectors>;
  extern __shared__ __align__(16) char smem_bytes[];
  State* states = reinterpret_cast<State*>(smem_bytes);  // of the warps but the first
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const SequencePieces pieces = params.splits.count > 0
                                    ? pieces_of_splits<kKeys>(params)
                                    : pieces_of_parts<kKeys>(params, parts, by_cut);
  if (pieces.count == 0) {
    // Of the grid, one block at least has to wait, or the kernel behind it could start too early.
    if ((blockIdx.x | blockIdx.y | blockIdx.z) == 0) ptx::wait_for_prerequisites();
    return;
  }
  const KvcacheRow at(params, blockIdx.y, blockIdx.x);
  const OutputRow output(params, pieces.batch_idx, at);

  ptx::wait_for_prerequisites();
  State state = merge_pieces<kVectors>(params, pieces, warp, warps, lane);
  if (warps > 1) {
    if (warp > 0) states[(warp - 1) * 32 + lane] = state;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll 1
    for (int other_warp = 0; other_warp < warps - 1; ++other_warp) {
      const State other = states[other_warp * 32 + lane];
      state.raise(state.max_lse >= other.max_lse || isnan(state.max_lse) ? state.max_lse
                                                                         : other.max_lse);
      const float weight = merge_weight(other.max_lse, merge_reference(state.max_lse));
      state.sum += weight * other.sum;
      state.add(weight, other.o);
    }
  }
  const float lse = merge_finish(merge_reference(state.max_lse), state.sum);
  const float factor =
      (state.sum == 0.f ? 0.f : 1.f / state.sum) * output.finish_lse(params, at, lse, lane == 0);
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
    const int col = vector * 128 + lane * 4;
    if (col >= params.head_dim_v) continue;
    const float4& o = state.o[vector];
    store_pair(output.out + col, params.dtype, o.x * factor, o.y * factor);
    store_pair(output.out + col + 2, params.dtype, o.z * factor, o.w * factor);
  }
}

// The call of some neighbouring sequences alone, as far as the merge sees of it. Cut alike or by
// length, where a sequence's pieces lie follows from its index.
inline DecodeParams of_sequences(DecodeParams params, int first, int count) {
  params.batch = count;
  if (params.cache_seqlens != nullptr) params.cache_seqlens += first;
  if (params.leftpad_k != nullptr) params.leftpad_k += first;
  params.out = static_cast<uint16_t*>(params.out) + first * params.out_strides.batch;
  if (params.lse != nullptr) params.lse += int64_t{first} * params.heads_q * params.seqlen_q;
  const int64_t rows = RowsByTile::rows(int64_t{first} * params.splits.count, params.heads_kv,
                                        kvcache_row_tiles(params));
  params.partial.o += rows * params.head_dim_v;
  params.partial.lse += rows;
  return params;
}

template <int kKeys, int kVectors>
void launch_kvcache_combine(const DecodeParams& params, const KvcacheGrid& grid, Stream stream) {
  constexpr int kMaxGridZ = 65535;
  const bool by_cut = params.splits.count == 0 && grid.parts - 1 < params.batch;
  const int sequences = by_cut ? grid.parts - 1 : params.batch;
  if (sequences == 0) return;
  // The lengths are not known here: as many pieces as if all were alike.
  const int pieces = params.splits.count > 0 ? params.splits.count
                     : params.batch == 1     ? grid.parts
                                             : grid.parts / params.batch + 2;
  const int warps = std::clamp((pieces + kPiecesAtOnce<kVectors> - 1) / kPiecesAtOnce<kVectors>, 1,
                               kCombineWarps);
  const int smem_bytes = (warps - 1) * 32 * static_cast<int>(sizeof(PieceMerge<kVectors>));
  const auto launch_sequences = [&](const DecodeParams& some, int count, bool overlap) {
    launch_overlapping<kvcache_combine_kernel<kKeys, kVectors>>(
        dim3(kvcache_group_rows(params), params.heads_kv, count), 32 * warps, smem_bytes, overlap,
        stream, some, static_cast<unsigned>(grid.parts), by_cut);
  };
  if (sequences <= kMaxGridZ) return launch_sequences(params, sequences, true);
  for (int first = 0; first < sequences; first += kMaxGridZ) {
    const int count = std::min(sequences - first, kMaxGridZ);
    launch_sequences(of_sequences(params, first, count), count, false);
  }
}

}  // namespace flash_attn::cuda
