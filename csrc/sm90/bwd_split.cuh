// Several thread blocks share a tile: each walks over some of the queries, and whoever ends last
// adds up their dK and dV. It does so in the order of the splits, so that the bits are the same
// every time. Each warp does this for its own keys and waits for nobody.
#pragma once

#include "../cuda/bwd_steps.h"
#include "bwd_consumer.cuh"
#include "ptx/counter.cuh"

namespace flash_attn::sm90 {

// Leaves one split of the work: some of the heads if there are enough, else some of each head's
// queries.
__device__ __forceinline__ void take_split(BwdWork& work, const BwdParams& params, int tile,
                                           int split) {
  const int splits = params.splits.count, heads = work.end_head - work.q.head;
  work.tile = tile;
  work.split = split;
  if (heads < splits) {
    work.range = work.range.piece(split, splits);
    return;
  }
  const int each = (heads + splits - 1) / splits, skipped = min(split * each, heads);
  work.q.head += skipped;
  work.dq_row += skipped * params.dq_accum_rows;
  work.end_head = min(work.q.head + each, work.end_head);
}

// The sums of this warp's keys of each split, as accumulators hold them: dV's blocks of eight
// columns come first, and then dK's.
template <typename Traits>
class SplitSums {
  static_assert(Traits::kConsumerThreads / 32 == cuda::kBwdSplitWarps);
  using KeyGradient = typename Traits::KeyGradient;
  static constexpr int kBlocks = Traits::kHeadDim / 8, kLanes = 32;

 public:
  __device__ __forceinline__ SplitSums(const BwdSplits& splits, const BwdWork& work)
      : splits_(splits),
        split_(work.split),
        lane_(threadIdx.x % kLanes),
        warp_(work.tile * cuda::kBwdSplitWarps + static_cast<int>(threadIdx.x) / kLanes -
              4 /* of the producer */) {}

  // Leaves the sums of this split. Returns whether those of all splits are there. A whole warp
  // calls it.
  __device__ __forceinline__ bool leave(const KeyGradient& dV, const KeyGradient& dK) const {
    put(dV, place(split_));
    put(dK, place(split_) + kBlocks * kLanes);
    __syncwarp();
    int before = 0;
    if (lane_ == 0) before = ptx::add_acq_rel(&splits_.arrived[warp_], 1);
    return __shfl_sync(~0u, before, 0) == splits_.count - 1;
  }

  // Adds up columns of dV, or of dK, over all splits, from the first one on. There are no registers
  // for all columns at once.
  template <int kCols>
  __device__ __forceinline__ Accumulator<1, kCols> total(bool of_keys, int first_col) const {
    Accumulator<1, kCols> total;
    total.fill(0.f);
    const int first = (of_keys ? kBlocks : 0) + first_col / 8;
#pragma unroll 1
    for (int split = 0; split < splits_.count; ++split) {
      const float4* const sums = place(split) + first * kLanes;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        const float4 sum = __ldcg(sums + n * kLanes);
        float (&c)[4] = total.data[0][n];
        c[0] += sum.x;
        c[1] += sum.y;
        c[2] += sum.z;
        c[3] += sum.w;
      }
    }
    return total;
  }

 private:
  __device__ __forceinline__ float4* place(int split) const {
    const int64_t row = int64_t{warp_} * splits_.count + split;
    return reinterpret_cast<float4*>(splits_.sums) + row * (2 * kBlocks * kLanes) + lane_;
  }
  __device__ __forceinline__ static void put(const KeyGradient& gradient, float4* place) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float (&c)[4] = gradient.data[0][n];
      place[n * kLanes] = {c[0], c[1], c[2], c[3]};
    }
  }

  const BwdSplits& splits_;
  const int split_, lane_, warp_;  // warp_: its number among those of all tiles
};

// Ends a split of a tile: the last one to end stores what all have summed.
template <typename Traits>
__device__ __forceinline__ void join_splits(const BwdConsumer<Traits>& self, const BwdWork& work,
                                            const typename Traits::KeyGradient& dK,
                                            const typename Traits::KeyGradient& dV) {
  constexpr int kCols = Traits::GradientTile::kCols;
  static_assert(Traits::kHeadDim % kCols == 0);
  const BwdParams& params = self.params;
  const SplitSums<Traits> sums(params.splits, work);
  if (!sums.leave(dV, dK)) return;
#pragma unroll 1
  for (int col = 0; col < Traits::kHeadDim; col += kCols) {
    store_key_gradient_cols(self, work, sums.template total<kCols>(false, col), 0, col, params.dv,
                            params.dv_strides, params.head_dim_v);
    auto keys = sums.template total<kCols>(true, col);
    scale_rows(keys, {params.softmax_scale, params.softmax_scale});
    store_key_gradient_cols(self, work, keys, 0, col, params.dk, params.dk_strides,
                            params.head_dim);
  }
}

}  // namespace flash_attn::sm90
