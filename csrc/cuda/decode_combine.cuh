// Merges the pieces of split-KV decode: one thread block a row (sequence, query head, token), or a
// slice of its columns.
//
//   lse = ln Σₛ exp(lseₛ),    out = Σₛ exp(lseₛ - lse) · oₛ
//
// Threads lie along the columns, four floats each, and repeat over the splits as often as there is
// use for: with head_dim 128 and 16 splits, 32 · 4 threads load four splits each. A thread runs once
// through its splits with a state (o, l, m): Σ exp(lseₛ - m) · oₛ, Σ exp(lseₛ - m), max lseₛ; the
// states of a column meet in shared memory. A piece without keys has lse -inf and anything as o,
// which is loaded (lse and o come together, one latency) and dropped.
#pragma once

#include <algorithm>

#include "attn/merge.cuh"
#include "launch.h"
#include "ptx/griddepcontrol.cuh"
#include "tile/element.cuh"

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
};

// The state of four columns over the splits first, first + step, …
__device__ __forceinline__ MergeState merge_splits(const DecodeParams& params, unsigned row,
                                                   int col, int first, int step) {
  MergeState state = MergeState::empty();
  for (int begin = first; begin < params.num_splits; begin += kSplitsAtOnce * step) {
    float lse[kSplitsAtOnce];
    float4 o[kSplitsAtOnce];
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      const int64_t split = begin + i * step;
      const bool exists = split < params.num_splits;
      const int64_t part_row = split * gridDim.x + row;
      const float* source = params.partial_o + part_row * params.head_dim + col;
      lse[i] = exists ? params.partial_lse[part_row] : -INFINITY;
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

  ptx::wait_for_prerequisites();
  if (first_split < at_once) {
    states[threadIdx.x] = merge_splits(params, row, col, first_split, at_once);
  }
  __syncthreads();
  if (threadIdx.x >= columns) return;

  MergeState total = MergeState::empty();
  const int end = columns * min(at_once, params.num_splits);
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
  // Few rows leave most SMs idle: then a block takes 128 bytes of a row.
  constexpr int kFewRows = 64, kSliceColumns = 32;
  const int slices = rows <= kFewRows && params.head_dim % kSliceColumns == 0
                         ? params.head_dim / kSliceColumns
                         : 1;
  const int useful =
      params.head_dim / 4 / slices * ((params.num_splits + kSplitsAtOnce - 1) / kSplitsAtOnce);
  const int threads = std::min((useful + 31) / 32 * 32, kMaxCombineThreads);
  launch_overlapping<decode_combine_kernel<kDType>>(dim3(static_cast<unsigned>(rows), slices),
                                                    threads, 0,
                                                    /*overlap=*/true, stream, params);
}

}  // namespace flash_attn::cuda
