// What a thread block of the backward kernels works on, and its walk over the queries.
#pragma once

#include <algorithm>

#include "../cuda/attn/block_range.cuh"
#include "../cuda/attn/dq_accum.cuh"
#include "../cuda/attn/seqlen.cuh"
#include "../cuda/attn/tile_scheduler.cuh"
#include "bwd_config.h"
#include "tile/copy.cuh"

namespace flash_attn::sm90 {

// A block of queries of a query head, from m · kBlockM on.
struct QueryBlock {
  int head, m;
};

// One block of keys of one kv head.
struct BwdWork {
  AttentionWindow window;
  SeqlenInfo seqlen;
  BlockRange range;   // of queries
  MatrixPlace q, kv;  // q: dO as well; its head is the first of the group
  int end_head;       // behind the group's last query head
  int batch_idx, first_key;
  // Which score_storage has the terms of the first head; those of the next head lie in the other
  // one.
  int first_score;
  int64_t dq_row;           // of dq_accum, over all heads: query 0 of the first head; or kNoDqRow
  int tile = 0, split = 0;  // where tiles are split

  // A varlen sequence that is longer than a pool's places.
  static constexpr int64_t kNoDqRow = -1;

  __device__ __forceinline__ bool has_queries() const { return range.begin < range.end; }
  // How many blocks QueryBlocks visits.
  __device__ __forceinline__ int num_query_blocks() const {
    return (range.end - range.begin) * (end_head - q.head);
  }
  // The one that QueryBlocks visits index-th.
  __device__ __forceinline__ QueryBlock query_block(int index) const {
    const int of_head = range.end - range.begin;
    return {.head = q.head + index / of_head, .m = range.begin + index % of_head};
  }

  // Makes the work of kBlockN keys, which blocks of kBlockM queries meet. kPools: dq_accum is a
  // pool.
  template <int kBlockM, int kBlockN, bool kPools = false, bool kStretches = false>
  __device__ __forceinline__ static BwdWork make(const BwdParams& params,
                                                 const TileCoordinates& tile,
                                                 const SeqlenInfo& seqlen) {
    const int first_key = tile.block * kBlockN, group = params.heads_q / params.heads_kv;
    const AttentionWindow window(params, seqlen.len_q, seqlen.len_k);
    const auto range = BlockRange::of_queries<kBlockM, kBlockN>(window, first_key);
    const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
    const bool has_sums = !kPools || kStretches || has_place_in_pool(params, seqlen);
    return {
        .window = window,
        .seqlen = seqlen,
        .range = range,
        .q = {.box = {varlen_q ? params.total_q : params.seqlen_q, seqlen.q_begin, seqlen.len_q},
              .head = tile.head * group,
              .batch = varlen_q ? 0 : tile.batch_idx},
        .kv = {.box = {varlen_k ? params.total_k : params.seqlen_k, seqlen.k_begin, seqlen.len_k},
               .head = tile.head,
               .batch = varlen_k ? 0 : tile.batch_idx},
        .end_head = (tile.head + 1) * group,
        .batch_idx = tile.batch_idx,
        .first_key = first_key,
        .first_score = 0,
        .dq_row =
            has_sums ? dq_accum_group_row<kPools, kStretches>(
                           params, seqlen.q_begin, tile.batch_idx, tile.head, range.begin * kBlockM)
                     : kNoDqRow};
  }
};

// A walk over the blocks of queries that a block of keys meets: head after head of the group, and
// within a head from the first to the last. All roles walk alike.
class QueryBlocks : public QueryBlock {
 public:
  __device__ __forceinline__ explicit QueryBlocks(const BwdWork& work)
      : QueryBlock{.head = work.has_queries() ? work.q.head : work.end_head, .m = work.range.begin},
        begin_(work.range.begin),
        end_(work.range.end),
        first_head_(work.q.head),
        end_head_(work.end_head) {}
  __device__ __forceinline__ bool more() const { return head < end_head_; }
  __device__ __forceinline__ bool is_first() const { return head == first_head_ && m == begin_; }
  __device__ __forceinline__ bool is_last() const { return head == end_head_ - 1 && m == end_ - 1; }
  __device__ __forceinline__ bool starts_head() const { return m == begin_; }
  // Goes to the next block, and says whether its head is a new one.
  __device__ __forceinline__ bool advance() {
    if (++m < end_) return false;
    m = begin_;
    ++head;
    return true;
  }

 private:
  int begin_, end_, first_head_, end_head_;
};

// P times this, as fp16, is what dS comes from where there is no room for fp32. P is at most 1 but
// for rounding. So it keeps all bits of fp16 down to 2^-27, and some down to 2^-37.
inline constexpr float kExactScale = 0x1p13f;

struct BwdTensorMaps {
  CUtensorMap q, k, v, dout;
};

// Makes the maps of a call. Their boxes are the tiles: block_m queries, or block_n keys.
inline BwdTensorMaps make_bwd_tensor_maps(const BwdParams& params, int block_m, int block_n,
                                          int slab_cols) {
  const bool varlen_q = params.cu_seqlens_q != nullptr, varlen_k = params.cu_seqlens_k != nullptr;
  const TensorShape q_shape = {.dtype = params.dtype,
                               .cols = params.head_dim,
                               .rows = varlen_q ? params.total_q : params.seqlen_q,
                               .heads = params.heads_q,
                               .batch = varlen_q ? 1 : params.batch};
  const TensorShape k_shape = {.dtype = params.dtype,
                               .cols = params.head_dim,
                               .rows = varlen_k ? params.total_k : params.seqlen_k,
                               .heads = params.heads_kv,
                               .batch = varlen_k ? 1 : params.batch};
  TensorShape v_shape = k_shape, dout_shape = q_shape;
  v_shape.cols = dout_shape.cols = params.head_dim_v;
  return {
      .q = make_tensor_map(params.q, params.q_strides, q_shape, slab_cols, block_m),
      .k = make_tensor_map(params.k, params.k_strides, k_shape, slab_cols, block_n),
      .v = make_tensor_map(params.v, params.v_strides, v_shape, slab_cols, block_n),
      .dout = make_tensor_map(params.dout, params.dout_strides, dout_shape, slab_cols, block_m)};
}

// Makes the map of dq.
inline CUtensorMap make_dq_map(const BwdParams& params, int slab_cols, int rows) {
  const bool varlen = params.cu_seqlens_q != nullptr;
  return make_tensor_map(params.dq, params.dq_strides,
                         {.dtype = params.dtype,
                          .cols = params.head_dim,
                          .rows = varlen ? params.total_q : params.seqlen_q,
                          .heads = params.heads_q,
                          .batch = varlen ? 1 : params.batch},
                         slab_cols, rows);
}

// Where a warp adds to the dQ of each block of queries: to 16 rows and some columns, from these on.
struct DqPlace {
  int row, col, lane;
};

// Deals out the blocks of kBlockN keys of a call, of which `running` run at a time.
// group_first_first: as BwdTile's.
template <typename Scheduler>
Scheduler make_bwd_scheduler(const BwdParams& params, int running, int group_first_first = 0) {
  const int group = params.heads_q / params.heads_kv, pairs = params.batch * params.heads_kv;
  // This is what the blocks of one kv head read and add to over and over: Q, dO and dq_accum.
  const int64_t bytes = params.seqlen_q *
                        (int64_t{params.head_dim} + params.head_dim_v + 2 * params.dq_accum_cols) *
                        2 * group;
  Scheduler scheduler = Scheduler::make(params.cu_seqlens_k, params.total_k, params.seqlen_k,
                                        params.batch, params.heads_kv, bytes);
  const auto heads_of = [&](int tiles) {
    return std::min(tiles / std::max<int>(scheduler.blocks_per_head, 1), pairs);
  };
  const bool alike = sequences_are_alike(params), takes_turns = params.dq_turns != nullptr;
  const bool is_causal = params.window_left < 0 && params.window_right >= 0;
  // Tiles come head after head, and varlen ones sequence after sequence if there is a pool: the
  // thread blocks walk over the same Q and dO together, and a pool's sums are complete soon. But
  // blocks of one head that take turns come one behind the other, so as few of them as the L2 cache
  // allows run together.
  const bool together = params.dq_pool.places > 0 || (alike && !takes_turns);
  if (together) scheduler.section_heads = 1;
  scheduler.sequence_by_sequence = params.dq_pool.places > 0;
  // Where additions to dQ wait for their turn and the last block of keys that a block of queries
  // sees comes first, blocks of keys that start together, each at its diagonal, need not wait.
  scheduler.last_blocks_first = takes_turns && params.window_right >= 0;
  if (!takes_turns) {
    // In the last section short tiles have to fill the gaps that long ones leave, so it holds two
    // rounds, unless they would read far more than the L2 cache has.
    const auto last_heads = static_cast<int>(std::min<int64_t>(
        heads_of(2 * running), kBwdLastSectionBytes / std::max<int64_t>(bytes, 1)));
    if (!together) {
      // A section with fewer tiles than run at a time would spare no memory, and put off the
      // longest tiles of the heads behind it.
      scheduler.section_heads = std::max<int>(scheduler.section_heads, heads_of(running));
      scheduler.last_section_heads = std::max<int>(scheduler.section_heads, last_heads);
    } else if (is_causal) {
      // Its sums have half of the pool, while those of the heads before leave the other half.
      scheduler.last_section_heads = std::min(last_heads, params.dq_pool.places / 2);
    }
  } else if (!together && group > 1 && params.cu_seqlens_k == nullptr) {
    // A tile walks over the heads of a group one after the other, so that of each kv head the L2
    // cache has to hold one query head. The longer the walk, the more is lost in the end if the
    // longest tiles come last, and the less where tiles wait at their diagonals instead. Which
    // block comes first may not depend on the batch, as the bits depend on it.
    const bool first_first = is_causal && group_first_first > 0 && group >= group_first_first &&
                             params.seqlen_q >= kBwdLeastQueriesFirstFirst;
    if (first_first) scheduler.last_blocks_first = false;
    const int least_heads = first_first ? kBwdHeadsFirstFirst : alike ? kBwdGroupsInOrder : 0;
    scheduler.section_heads = std::min(std::max<int>(scheduler.section_heads, least_heads), pairs);
  }
  return scheduler;
}

}  // namespace flash_attn::sm90
