// Where the backward kernels add to dQ.
#pragma once

#include "../cuda/attn/dq_accum.cuh"
#include "../cuda/ptx/red.cuh"
#include "../cuda/tile/fragment.cuh"
#include "bwd_work.cuh"

namespace flash_attn::sm90 {

// Walks over the blocks of kBlockM queries on its own, and knows where a warp adds to each block's
// dQ. kClassCols: how many columns the sums have, if these are those of the class
// (kDqHasClassCols); else 0, and there are as many as dQ has. kComputesAnew: where the sums lie is
// computed in each block; kept, it would take registers that score terms need. kStretches: the walk
// may come to the end of a pool, and goes on at its beginning. kMayLackPlace: a sequence may be too
// long for the places of a pool, and then adds nothing.
template <int kBlockM, int kClassCols = 0, bool kComputesAnew = false, bool kStretches = false,
          bool kMayLackPlace = false>
class DqReduction {
  static constexpr bool kHasClassCols = kClassCols > 0;

 public:
  __device__ __forceinline__ DqReduction(const BwdParams& params, const BwdWork& work,
                                         const QueryBlocks& first, const DqPlace& place)
      : params_(params),
        work_(work),
        place_(place),
        offset_(place.row * kClassCols + place.col / 8 * kDqAccumBlock +
                dq_accum_position(DqAccumOrder::kByLane, place.lane, 0)),
        block_(first) {}

  // Goes to the first block, or to the next one. It should not stand right behind add(): an
  // instruction that changes the address waits until the reductions have been taken over.
  __device__ __forceinline__ void advance() {
    if (kComputesAnew || new_head_) {
      start_head(block_);
    } else {
      accum_ += kBlockM * accum_cols();
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
    accum_ = head_accum_ + int64_t{block.m} * kBlockM * accum_cols();
    rows_left_ = head_rows_left_ - block.m * kBlockM;
  }

  // The first column of dQ lies first_col behind that of the place. A block of 16 rows that the
  // sequence lacks belongs to somebody else; columns that the class alone has have no place.
  template <int kCols>
  __device__ __forceinline__ void add(const Accumulator<1, kCols>& dQ, int first_col = 0) const {
    if (rows_left_ <= 0) return;
    const int cols = kHasClassCols ? kCols : accum_cols() - place_.col - first_col;
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      if (n * 8 >= cols) break;
      const float (&c)[4] = dQ.data[0][n];
      flash_attn::ptx::red_add_v4(accum_ + (first_col / 8 + n) * kDqAccumBlock, c[0], c[1], c[2],
                                  c[3]);
    }
  }

 private:
  __device__ __forceinline__ int accum_cols() const {
    return kHasClassCols ? kClassCols : params_.dq_accum_cols;
  }

  __device__ __forceinline__ void start_head(const QueryBlock& block) {
    const int first_row = block.m * kBlockM + (kHasClassCols ? 0 : place_.row);
    const int row_of_offset =
        kHasClassCols ? offset_ / (kDqAccumRows * kClassCols) * kDqAccumRows : 0;
    rows_left_ = work_.seqlen.len_q - first_row - row_of_offset;
    if (kMayLackPlace && work_.dq_row == BwdWork::kNoDqRow) rows_left_ = 0;
    const int64_t of_head = (block.head - work_.q.head) * params_.dq_accum_rows;
    accum_ = params_.dq_accum + (work_.dq_row + of_head + first_row) * accum_cols() + offset_;
  }

  const BwdParams& params_;
  const BwdWork& work_;
  // With the columns of a class the offset says the row, and no register keeps the place.
  const DqPlace place_;
  const int offset_;
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
