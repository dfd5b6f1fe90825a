// The layout of BwdParams::dq_accum, (heads_q, rows, cols) fp32, that blocks of keys add to.
#pragma once

#include <cstdint>

#include "../../core/params.h"
#include "seqlen.cuh"

namespace flash_attn {

// Blocks of 16 rows × 8 columns lie one after the other, those of the same 16 rows together: each
// is what a warp holds of an accumulator (tile/fragment.cuh), so that a reduction of the warp
// touches neighbouring bytes. Every sequence starts with a block of its own.
inline constexpr int kDqAccumRows = 16;
static_assert(BwdParams::kPartMultiple % kDqAccumRows == 0);
inline constexpr int kDqAccumBlock = kDqAccumRows * 8;
// BwdParams::dq_turns: numbers of 16 rows, as two thread blocks may share dQ's columns.
inline constexpr int kDqShares = 2;
// Rows behind the last sequence, which a kernel's last block of queries may add zeros to.
inline constexpr int kDqAccumPadding = 128;

// Where value i of lane l lies in its block. kByLane: one lane's four together, for reductions of
// vectors (sm_90 and newer); kByValue: all lanes' first values, then their second, …, for single
// ones.
enum class DqAccumOrder : uint8_t { kByLane, kByValue };
__device__ __forceinline__ constexpr int dq_accum_position(DqAccumOrder order, int lane, int i) {
  return order == DqAccumOrder::kByLane ? 4 * lane + i : 32 * i + lane;
}

// Row of a head where sequence `batch_idx` starts. The sequences do not overlap: one of n rows that
// starts at row x of q has ⌊(x + n) / 16⌋ - ⌊x / 16⌋ + 1 >= ⌈n / 16⌉ blocks.
__host__ __device__ __forceinline__ int64_t dq_accum_first_row(const BwdParams& params,
                                                               int64_t q_begin, int batch_idx) {
  if (params.cu_seqlens_q == nullptr) return params.dq_accum_sequence_rows * batch_idx;
  return (q_begin / kDqAccumRows + batch_idx) * kDqAccumRows;
}

// Row that stands for the first one of a sequence's query head in BwdParams::dq_turns. A pool has
// places for some heads, but turns of all.
template <bool kPools>
__device__ __forceinline__ int64_t dq_turn_row(const BwdParams& params, int64_t q_begin,
                                               int batch_idx, int head) {
  if constexpr (kPools) {
    return (int64_t{batch_idx} * params.heads_q + head) * params.dq_accum_rows;
  }
  return head * params.dq_accum_rows + dq_accum_first_row(params, q_begin, batch_idx);
}
// Numbers in BwdParams::dq_turns.
__host__ __device__ __forceinline__ int64_t dq_turn_numbers(const BwdParams& params) {
  const int64_t heads = int64_t{params.heads_q} * (params.dq_pool.places > 0 ? params.batch : 1);
  return heads * params.dq_accum_rows / kDqAccumRows * kDqShares;
}

// Heads that dq_accum has room for.
__host__ __device__ __forceinline__ int dq_accum_heads(const BwdParams& params) {
  return params.dq_pool.places > 0 ? params.dq_pool.places * (params.heads_q / params.heads_kv)
                                   : params.heads_q;
}

// Whether a place of a pool is long enough for the sums of a head: max_seqlen says how long, and
// may be wrong. A head whose sums have no place gets NaN.
__device__ __forceinline__ bool has_place_in_pool(const BwdParams& params,
                                                  const SeqlenInfo& seqlen) {
  return seqlen.len_q <= params.dq_accum_rows;
}

// Numbers in DqPool::progress.
__host__ __device__ __forceinline__ int64_t dq_pool_numbers(const BwdParams& params) {
  return 1 + 2 * int64_t{params.batch} * params.heads_kv * params.dq_pool.stretches;
}

// Row of dq_accum, over all heads, where the sums of the first query head of this kv head start.
// kPools: whether it is a pool. kStretches: heads come in stretches; then it is the row from which
// first_row counts as if the pool went on before and behind that query's stretch.
template <bool kPools, bool kStretches>
__device__ __forceinline__ int64_t dq_accum_group_row(const BwdParams& params, int64_t q_begin,
                                                      int batch_idx, int kv_head, int first_row) {
  const int group = params.heads_q / params.heads_kv;
  if constexpr (!kPools) {
    return kv_head * group * params.dq_accum_rows + dq_accum_first_row(params, q_begin, batch_idx);
  }
  const DqPool& pool = params.dq_pool;
  const int number = batch_idx * params.heads_kv + kv_head;
  if constexpr (!kStretches) return number % pool.places * group * params.dq_accum_rows;
  const int rows = static_cast<int>(params.dq_accum_rows), stretch = first_row / rows;
  const int place = (number * pool.stretches + stretch) % pool.places;
  return int64_t{place - stretch} * rows;
}

}  // namespace flash_attn
