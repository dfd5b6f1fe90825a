// Merges the pieces of decode: one thread block a row (sequence, query head, token), or a slice of
// its columns. Rows of sequences in one piece are finished already.
//
//   lse = ln Σₛ exp(lseₛ),    out = Σₛ exp(lseₛ - lse) · oₛ
//
// Threads lie along the columns, four floats each, and repeat over the pieces as often as there is
// use for: with head_dim 128 and 16 pieces, 32 · 4 threads load four pieces each. A thread runs
// once through its pieces with a state (o, l, m): Σ exp(lseₛ - m) · oₛ, Σ exp(lseₛ - m), max lseₛ;
// the states of a column meet by shuffles where a warp has several, then in shared memory. A piece
// without keys has lse -inf and anything as o, which is loaded (lse and o come together, one
// latency) and dropped.
//
// A forward whose keys are cut leaves thousands of rows in few pieces. Blocks of one row would end
// faster than they can be started: combine_rows_kernel (decode.cu) has several in a block.
//
// The blocks come while the kernel that reads the keys runs, find their sequence and its pieces
// from the lengths, and wait.
#pragma once

#include <algorithm>

#include "../../core/divisor.h"
#include "../launch.h"
#include "../ptx/griddepcontrol.cuh"
#include "kvcache_schedule.cuh"
#include "output_row.cuh"
#include "pieces.cuh"
#include "prefix.h"

namespace flash_attn::cuda {

inline constexpr int kMaxCombineThreads = 512;
inline constexpr int kPiecesAtOnce = 4;  // that a thread has under way

// The pieces of one sequence lie at first, base + step, base + 2 · step, … of the workspace.
struct SequencePieces {
  int batch_idx = 0, count = 0;  // 0: nothing to merge here
  int first = 0, base = 0, step = 0;

  __device__ __forceinline__ int workspace_idx(int piece) const {
    return piece == 0 ? first : base + piece * step;
  }
};

struct CombineGrid {
  Divisor seqlen_q, heads_q, threads_of_piece;
  int columns;        // of a block, in fours: as many threads as one piece keeps busy
  int at_once;        // pieces that have threads of their own
  bool whole_groups;  // warps hold whole groups of threads, which meet without shared memory
  KvcacheParts parts;
  SharedPrefix prefix;
};

// Finds the pieces that decode.cuh leaves, or a forward whose keys are cut. Behind them come those
// that prefix.cuh leaves of shared keys.
struct PiecesOfDecode {
  __device__ __forceinline__ static SequencePieces of(const DecodeParams& params, int batch_idx,
                                                      const CombineGrid& grid) {
    if (params.splits.keys == 0) {
      int count = params.splits.count;
      if (grid.prefix.pieces > 0 && grid.prefix.source_of(batch_idx, params.batch) >= 0) {
        count += grid.prefix.pieces;
      }
      return {batch_idx, count, batch_idx, batch_idx, params.batch};
    }
    const PieceRange range = PieceLine(params).of_sequence(batch_idx);
    return {batch_idx, range.count == 1 ? 0 : range.count, range.first, range.first, 1};
  }
};

// Finds the pieces that kvcache.cuh leaves. Where keys are dealt out, `index` is a sequence or,
// with fewer cuts than sequences, the cut behind a part. Then the first cut inside a sequence is
// the one that merges it.
template <int kKeys>
struct PiecesOfKvcache {
  __device__ __forceinline__ static SequencePieces of(const DecodeParams& params, int index,
                                                      const CombineGrid& grid) {
    return params.splits.count > 0 ? of_splits(params, index) : of_parts(params, index, grid.parts);
  }

 private:
  __device__ __forceinline__ static SequencePieces of_splits(const DecodeParams& params,
                                                             int batch_idx) {
    const int tiles = SequenceKeys(params, batch_idx).template tiles<kKeys>();
    const int count = KvcacheSplits::of<kKeys>(params, tiles).count;
    const int first = batch_idx * params.splits.count;
    return {batch_idx, count == 1 ? 0 : count, first, first, 1};
  }
  __device__ __forceinline__ static SequencePieces of_parts(const DecodeParams& params, int index,
                                                            const KvcacheParts& parts) {
    SequenceCursor<kKeys> cursor(params);
    const int total = cursor.total_tiles(), share = kvcache_share<kKeys>(total, parts.count);
    const int begin_of_part = index * share, cut = begin_of_part + share;
    if (parts.merged_by_cut) {
      if (cut >= total) return {};
      cursor.seek_tile(cut);
      if (cursor.begin() < begin_of_part || cursor.begin() == cut) return {};
    } else {
      cursor.seek_sequence(index);
    }
    const int first = static_cast<unsigned>(cursor.begin()) / static_cast<unsigned>(share);
    const int last =
        static_cast<unsigned>(cursor.begin() + cursor.tiles() - 1) / static_cast<unsigned>(share);
    // KvcachePiece::number
    return {cursor.batch_idx(), last == first ? 0 : last - first + 1, 2 * first + 1, 2 * first, 2};
  }
};

struct MergeState {
  float4 o;
  float sum, max_lse;

  __device__ __forceinline__ static MergeState empty() { return {{}, 0.f, -INFINITY}; }

  // Takes in (other_o, other_sum) times weight. NaN comes through, with weight 0 too.
  __device__ __forceinline__ void add(float weight, float other_sum, const float4& other_o) {
    sum += weight * other_sum;
    o.x += weight * other_o.x;
    o.y += weight * other_o.y;
    o.z += weight * other_o.z;
    o.w += weight * other_o.w;
  }
  __device__ __forceinline__ void raise(float new_max) {
    const float factor = merge_weight(max_lse, merge_reference(new_max));
    sum *= factor;
    o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    max_lse = new_max;
  }
  // Takes in the states of the lanes whose numbers differ by multiples of `step`, a power of two.
  // All lanes of a warp call it.
  __device__ __forceinline__ void merge_lanes(int step) {
    float new_max = max_lse;
    for (int distance = step; distance < 32; distance *= 2) {
      new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, distance));
    }
    raise(new_max);
    for (int distance = step; distance < 32; distance *= 2) {
      const float4 other_o = {
          __shfl_xor_sync(~0u, o.x, distance), __shfl_xor_sync(~0u, o.y, distance),
          __shfl_xor_sync(~0u, o.z, distance), __shfl_xor_sync(~0u, o.w, distance)};
      add(1.f, __shfl_xor_sync(~0u, sum, distance), other_o);
    }
  }
};

// Returns the state of four columns over the pieces first, first + step, … of a row of a sequence.
__device__ __forceinline__ MergeState merge_pieces(const DecodeParams& params,
                                                   const SequencePieces& pieces, int row_of_piece,
                                                   int col, int first, int step) {
  MergeState state = MergeState::empty();
  for (int begin = first; begin < pieces.count; begin += kPiecesAtOnce * step) {
    float lse[kPiecesAtOnce];
    float4 o[kPiecesAtOnce];
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      const int piece = begin + i * step;
      const bool exists = piece < pieces.count;
      const int64_t partial_row =
          workspace_row(params, pieces.workspace_idx(piece), 0, 0) + row_of_piece;
      const float* source = params.partial.o + partial_row * params.head_dim_v + col;
      lse[i] = exists ? params.partial.lse[partial_row] : -INFINITY;
      o[i] = exists ? *reinterpret_cast<const float4*>(source) : float4{};
    }
    float max_lse = state.max_lse;
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) max_lse = fmaxf(max_lse, lse[i]);
    state.raise(max_lse);
    const float reference = merge_reference(max_lse);
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      if (lse[i] != -INFINITY) state.add(merge_weight(lse[i], reference), 1.f, o[i]);
    }
  }
  return state;
}

// Stores four columns of a row. reference: that of total.sum.
template <bool kWide>
__device__ __forceinline__ void store_merged(const DecodeParams& params,
                                             const OutputRow<kWide>& output, int head, int col,
                                             const MergeState& total, float reference) {
  const float lse = merge_finish(reference, total.sum);
  const float factor = (total.sum == 0.f ? 0.f : ptx::reciprocal(total.sum)) *
                       output.finish_lse(params, head, lse, col == 0);
  output.store(params, col, total.o.x * factor, total.o.y * factor);
  output.store(params, col + 2, total.o.z * factor, total.o.w * factor);
}

// Pieces is PiecesOfDecode or PiecesOfKvcache. With kWide the result is fp32.
template <typename Pieces, bool kWide>
__global__ void __launch_bounds__(kMaxCombineThreads)
    decode_combine_kernel(const __grid_constant__ DecodeParams params,
                          const __grid_constant__ CombineGrid grid) {
  extern __shared__ __align__(16) char smem_bytes[];
  MergeState* states = reinterpret_cast<MergeState*>(smem_bytes);  // room for one a thread
  const int row = blockIdx.x;  // of gridDim.x = sequences or cuts · heads_q · seqlen_q
  const int columns = grid.columns, at_once = grid.at_once;
  const int first_piece = grid.threads_of_piece.divide(threadIdx.x);
  const int own = threadIdx.x - first_piece * columns, col = (blockIdx.y * columns + own) * 4;
  const int sequence_head = grid.seqlen_q.divide(row), index = grid.heads_q.divide(sequence_head);
  const int token = row - sequence_head * params.seqlen_q;
  const int head = sequence_head - index * params.heads_q;
  const SequencePieces pieces = Pieces::of(params, index, grid);
  if (pieces.count == 0) {
    // Of the grid, one block at least has to wait, or the kernel behind it could start too early.
    if ((blockIdx.x | blockIdx.y) == 0) ptx::wait_for_prerequisites();
    return;
  }
  const OutputRow<kWide> output(params, pieces.batch_idx, head, token);

  ptx::wait_for_prerequisites();
  MergeState state = MergeState::empty();
  if (first_piece < at_once) {
    state = merge_pieces(params, pieces, head * params.seqlen_q + token, col, first_piece, at_once);
  }
  if (grid.whole_groups) state.merge_lanes(columns);
  const int groups = grid.whole_groups ? blockDim.x / 32 : min(at_once, pieces.count);
  const int own_group = grid.whole_groups ? threadIdx.x / 32 : first_piece;
  const bool holds = !grid.whole_groups || threadIdx.x % 32 < columns;
  if (holds && own_group < groups) states[own_group * columns + own] = state;
  __syncthreads();
  if (threadIdx.x >= columns) return;

  MergeState total = MergeState::empty();
  states += threadIdx.x;
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    total.max_lse = fmaxf(total.max_lse, states[group * columns].max_lse);
  }
  const float reference = merge_reference(total.max_lse);
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    const MergeState& other = states[group * columns];
    total.add(merge_weight(other.max_lse, reference), other.sum, other.o);
  }
  store_merged(params, output, head, col, total, reference);
}

// rows counts those of all sequences that may have something to merge. most_pieces is how many a
// sequence may have, as far as the host knows. With in_any_batch the order of a sum depends on
// nothing but the sequence.
template <typename Pieces, bool kWide = false>
void launch_combine(const DecodeParams& params, const KvcacheParts& parts,
                    const SharedPrefix& prefix, int64_t rows, int most_pieces, bool in_any_batch,
                    Stream stream) {
  // Few rows leave most SMs idle: then a block takes 128 bytes of a row.
  constexpr int kFewRows = 64, kSliceColumns = 32;
  const int slices = !in_any_batch && rows <= kFewRows && params.head_dim_v % kSliceColumns == 0
                         ? params.head_dim_v / kSliceColumns
                         : 1;
  const int at_once = (most_pieces + kPiecesAtOnce - 1) / kPiecesAtOnce;
  const int columns = params.head_dim_v / 4 / slices;
  const int threads = std::min((columns * at_once + 31) / 32 * 32, kMaxCombineThreads);
  launch_overlapping<decode_combine_kernel<Pieces, kWide>>(
      dim3(static_cast<unsigned>(rows), slices), threads,
      threads * static_cast<int>(sizeof(MergeState)), /*overlap=*/true, stream, params,
      CombineGrid{.seqlen_q = Divisor(params.seqlen_q),
                  .heads_q = Divisor(params.heads_q),
                  .threads_of_piece = Divisor(columns),
                  .columns = columns,
                  .at_once = threads / columns,
                  .whole_groups = 32 % columns == 0,
                  .parts = parts,
                  .prefix = prefix});
}

}  // namespace flash_attn::cuda
