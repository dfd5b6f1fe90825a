// Where the backward kernels add to dQ.
#pragma once

#include "../cuda/attn/dq_accum.cuh"
#include "../cuda/ptx/red.cuh"
#include "../cuda/tile/fragment.cuh"
#include "bwd_work.cuh"

namespace flash_attn::sm90 {

// Walks over the blocks of kBlockM queries on its own, and knows where a warp adds 16 rows of each
// block's dQ. kAccumCols: the columns of dq_accum. kComputesAnew: this is computed in each block;
// kept, it would take registers that score terms need. kStretches: the walk may come to the end of
// a pool, and goes on at its beginning.
template <int kBlockM, int kAccumCols, bool kComputesAnew = false, bool kStretches = false>
class DqReduction {
 public:
  // row, col: the first of the warp's rows in a block, and its first column.
  __device__ __forceinline__ DqReduction(const BwdParams& params, const BwdWork& work,
                                         const QueryBlocks& first, int row, int col, int lane)
      : params_(params),
        work_(work),
        offset_(row * kAccumCols + col / 8 * kDqAccumBlock +
                dq_accum_position(DqAccumOrder::kByLane, lane, 0)),
        block_(first) {}

  // Goes to the first block, or to the next one. It should not stand right behind add(): an
  // instruction that changes the address waits until the reductions have been taken over.
  __device__ __forceinline__ void advance() {
    if (kComputesAnew || new_head_) {
      start_head(block_);
    } else {
      accum_ += kBlockM * kAccumCols;
      rows_left_ -= kBlockM;
      if constexpr (kStretches) {
        if (accum_ >= params_.dq_pool.end) accum_ -= params_.dq_pool.end - params_.dq_accum;
      }
    }
    new_head_ = block_.advance();
  }

  // Goes to any block; who calls it never calls advance(). What follows from the block's head is
  // kept, as reads of shared memory queue behind the reductions. It should not stand right behind
  // add() either.
  __device__ __forceinline__ void go_to(const QueryBlock& block) {
    if constexpr (kComputesAnew) return start_head(block);
    if (block.head != head_) {
      start_head({.head = block.head, .m = 0});
      head_ = block.head;
      head_accum_ = accum_;
      head_rows_left_ = rows_left_;
    }
    accum_ = head_accum_ + int64_t{block.m} * kBlockM * kAccumCols;
    rows_left_ = head_rows_left_ - block.m * kBlockM;
  }

  // The first column of dQ lies first_col behind the constructor's. A block of 16 rows that the
  // sequence lacks belongs to somebody else.
  template <int kCols>
  __device__ __forceinline__ void add(const Accumulator<1, kCols>& dQ, int first_col = 0) const {
    if (rows_left_ <= 0) return;
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const float (&c)[4] = dQ.data[0][n];
      flash_attn::ptx::red_add_v4(accum_ + (first_col / 8 + n) * kDqAccumBlock, c[0], c[1], c[2],
                                  c[3]);
    }
  }

 private:
  __device__ __forceinline__ void start_head(const QueryBlock& block) {
    const int first_row = block.m * kBlockM;
    rows_left_ =
        work_.seqlen.len_q - first_row - offset_ / (kDqAccumRows * kAccumCols) * kDqAccumRows;
    const int64_t of_head = (block.head - work_.q.head) * params_.dq_accum_rows;
    accum_ = params_.dq_accum + (work_.dq_row + of_head + first_row) * kAccumCols + offset_;
  }

  const BwdParams& params_;
  const BwdWork& work_;
  const int offset_;   // from a block's first value to the first of this lane
  QueryBlocks block_;  // behind the one that is added to
  bool new_head_ = true;
  float* accum_;
  int rows_left_;
  // What go_to() keeps of a head.
  int head_ = -1;
  float* head_accum_;
  int head_rows_left_;
};

}  // namespace flash_attn::sm90
