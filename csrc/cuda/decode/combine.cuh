// Merges the pieces of split-KV decode: one thread block a row (sequence, query head, token), or a
// slice of its columns. Rows of sequences in one piece are finished already.
//
//   lse = ln Σₛ exp(lseₛ),    out = Σₛ exp(lseₛ - lse) · oₛ
//
// Threads lie along the columns, four floats each, and repeat over the splits as often as there is
// use for: with head_dim 128 and 16 splits, 32 · 4 threads load four splits each. A thread runs once
// through its splits with a state (o, l, m): Σ exp(lseₛ - m) · oₛ, Σ exp(lseₛ - m), max lseₛ; the
// states of a column meet by shuffles where a warp has several, then in shared memory. A piece
// without keys has lse -inf and anything as o, which is loaded (lse and o come together, one latency)
// and dropped.
#pragma once

#include <algorithm>

#include "../attn/merge.cuh"
#include "../launch.h"
#include "../ptx/griddepcontrol.cuh"
#include "../tile/element.cuh"
#include "pieces.cuh"

namespace flash_attn::cuda {

inline constexpr int kMaxCombineThreads = 512;
inline constexpr int kSplitsAtOnce = 4;  // that a thread has under way

struct MergeState {
  float4 o;
  float sum, max_lse;

  __device__ __forceinline__ static MergeState empty() { return {{}, 0.f, -INFINITY}; }

  // Takes in (part_o, part_sum) times weight. NaN comes through, with weight 0 too.
  __device__ __forceinline__ void add(float weight, float part_sum, const float4& part_o) {
    sum += weight * part_sum;
    o.x += weight * part_o.x;
    o.y += weight * part_o.y;
    o.z += weight * part_o.z;
    o.w += weight * part_o.w;
  }
  __device__ __forceinline__ void raise(float new_max) {
    const float factor = merge_weight(max_lse, merge_reference(new_max));
    sum *= factor;
    o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    max_lse = new_max;
  }
  // Takes in those of the lanes whose numbers differ by multiples of `step`, a power of two. All of a
  // warp.
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

// Where the pieces of one sequence lie: in the slots first, first + step, … of the workspace.
struct SequenceSlots {
  int first, step, count;

  __device__ __forceinline__ static SequenceSlots of(const DecodeParams& params, int batch_idx) {
    if (params.splits.keys == 0) return {batch_idx, params.batch, params.splits.count};
    const PieceRange place = PieceLine(params).of_sequence(batch_idx);
    return {place.first, 1, place.count};
  }
};

// The state of four columns over the pieces first, first + step, … of a row of a sequence.
__device__ __forceinline__ MergeState merge_slots(const DecodeParams& params,
                                                  const SequenceSlots& slots, int row_of_slot,
                                                  int col, int first, int step) {
  MergeState state = MergeState::empty();
  for (int begin = first; begin < slots.count; begin += kSplitsAtOnce * step) {
    float lse[kSplitsAtOnce];
    float4 o[kSplitsAtOnce];
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      const int split = begin + i * step;
      const bool exists = split < slots.count;
      const int64_t slot = slots.first + static_cast<int64_t>(split) * slots.step;
      const int64_t slot_row = RowsByToken::first_row(params, slot) + row_of_slot;
      const float* source = params.partial.o + slot_row * params.head_dim + col;
      lse[i] = exists ? params.partial.lse[slot_row] : -INFINITY;
      o[i] = exists ? *reinterpret_cast<const float4*>(source) : float4{};
    }
    float max_lse = state.max_lse;
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) max_lse = fmaxf(max_lse, lse[i]);
    state.raise(max_lse);
    const float reference = merge_reference(max_lse);
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      if (lse[i] != -INFINITY) state.add(merge_weight(lse[i], reference), 1.f, o[i]);
    }
  }
  return state;
}

template <DType kDType>
__global__ void __launch_bounds__(kMaxCombineThreads)
    decode_combine_kernel(const __grid_constant__ DecodeParams params) {
  using Element = flash_attn::Element<kDType>;
  __shared__ MergeState states[kMaxCombineThreads];
  const unsigned row = blockIdx.x;  // of gridDim.x = batch · heads_q · seqlen_q
  const int columns = params.head_dim / 4 / gridDim.y, at_once = blockDim.x / columns;
  const int col = (blockIdx.y * columns + threadIdx.x % columns) * 4,
            first_split = threadIdx.x / columns;
  const int token = row % params.seqlen_q;
  const unsigned sequence_head = row / params.seqlen_q;
  const int head = sequence_head % params.heads_q, batch_idx = sequence_head / params.heads_q;
  const Strides& strides = params.out_strides;
  Element* destination = static_cast<Element*>(params.out) + batch_idx * strides.batch +
                         token * strides.row + head * strides.head + col;

  const SequenceSlots slots = SequenceSlots::of(params, batch_idx);
  // A sequence of one piece is finished. Of the grid, one block at least has to wait.
  if (params.splits.keys > 0 && slots.count == 1 && row > 0) return;
  ptx::wait_for_prerequisites();
  if (params.splits.keys > 0 && slots.count == 1) return;
  MergeState state = MergeState::empty();
  if (first_split < at_once) {
    state = merge_slots(params, slots, head * params.seqlen_q + token, col, first_split, at_once);
  }
  // Where a warp holds whole groups of threads, these meet without shared memory.
  const bool whole_groups = 32 % columns == 0;
  if (whole_groups) state.merge_lanes(columns);
  const int groups = whole_groups ? blockDim.x / 32 : min(at_once, slots.count);
  const int group = whole_groups ? threadIdx.x / 32 : first_split;
  const bool holds = !whole_groups || threadIdx.x % 32 < columns;
  if (holds && group < groups) states[group * columns + threadIdx.x % columns] = state;
  __syncthreads();
  if (threadIdx.x >= columns) return;

  MergeState total = MergeState::empty();
  const int end = columns * groups;
  for (int i = threadIdx.x; i < end; i += columns) {
    total.max_lse = fmaxf(total.max_lse, states[i].max_lse);
  }
  const float reference = merge_reference(total.max_lse);
  for (int i = threadIdx.x; i < end; i += columns) {
    total.add(merge_weight(states[i].max_lse, reference), states[i].sum, states[i].o);
  }
  if (threadIdx.x == 0 && blockIdx.y == 0 && params.lse != nullptr) {
    params.lse[row] = merge_finish(reference, total.sum);
  }
  const float inverse_sum = total.sum == 0.f ? 0.f : 1.f / total.sum;
  *reinterpret_cast<uint2*>(destination) = {
      ptx::pack<Element>(total.o.x * inverse_sum, total.o.y * inverse_sum),
      ptx::pack<Element>(total.o.z * inverse_sum, total.o.w * inverse_sum)};
}

template <DType kDType>
void launch_decode_combine(const DecodeParams& params, Stream stream) {
  const int64_t rows = static_cast<int64_t>(params.batch) * params.heads_q * params.seqlen_q;
  // Few rows leave most SMs idle: then a block takes 128 bytes of a row. Cut by length, all blocks are
  // alike, so that the order of a sum depends on nothing but the sequence.
  constexpr int kFewRows = 64, kSliceColumns = 32;
  const bool by_length = params.splits.keys > 0;
  const int slices = !by_length && rows <= kFewRows && params.head_dim % kSliceColumns == 0
                         ? params.head_dim / kSliceColumns
                         : 1;
  const int at_once =
      by_length ? kSplitsAtOnce : (params.splits.count + kSplitsAtOnce - 1) / kSplitsAtOnce;
  const int useful = params.head_dim / 4 / slices * at_once;
  const int threads = std::min((useful + 31) / 32 * 32, kMaxCombineThreads);
  launch_overlapping<decode_combine_kernel<kDType>>(dim3(static_cast<unsigned>(rows), slices),
                                                    threads, 0,
                                                    /*overlap=*/true, stream, params);
}

}  // namespace flash_attn::cuda
