// Several thread blocks share a tile: each walks over some of the queries, and their dK and dV are
// added up in pairs, and in pairs of pairs. Of two that are added the one that ends first leaves its
// gradients, and the other one adds them to its own and goes on. So the order of the
// additions, and with it each bit, is the same every time. Each warp does this for its own keys.
#pragma once

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

// Where the gradients of this warp's keys wait for those of other splits, as accumulators hold them:
// dV's blocks of eight columns come first, and then dK's. There is a place for every two splits: two
// that have been added leave one to those that come next.
template <typename Traits>
class SplitSums {
  static_assert(Traits::kConsumerThreads / 32 == kBwdSplitWarps);
  using KeyGradient = typename Traits::KeyGradient;
  static constexpr int kBlocks = Traits::kHeadDim / 8, kLanes = 32;
  static constexpr int kProducerThreads = 128;

 public:
  __device__ __forceinline__ SplitSums(const BwdSplits& splits, const BwdWork& work)
      : splits_(splits), split_(work.split) {
    // What follows from the thread's number is not computed before all tiles.
    const auto thread = static_cast<int>(flash_attn::ptx::opaque(threadIdx.x)) - kProducerThreads;
    lane_ = thread % kLanes;
    warp_ = work.tile * kBwdSplitWarps + thread / kLanes;
  }

  // Whether the gradients have become those of all splits; else they are left to another one. A
  // whole warp calls it.
  __device__ __forceinline__ bool collect(KeyGradient& dV, KeyGradient& dK) const {
#pragma unroll 1
    for (int level = 0; 1 << level < splits_.count; ++level) {
      const int own = split_ >> level, other = own ^ 1;  // of 2^level splits each
      if (other << level >= splits_.count) continue;
      const int pair = (own >> 1 << (level + 1)) + (1 << level);
      if (leave(pair, place_of(own, level), dV, dK)) return false;
      const float4* const place = place_of(other, level);
      add(dV, place);
      add(dK, place + kBlocks * kLanes);
    }
    return true;
  }

 private:
  // If the other side of the pair has not come, leaves it the gradients of this one. Else those of
  // the other side are there, as it waits for them to be written.
  __device__ __forceinline__ bool leave(int pair, float4* place, const KeyGradient& dV,
                                        const KeyGradient& dK) const {
    int32_t* const arrived = &splits_.arrived[int64_t{warp_} * 2 * splits_.count + pair];
    int before = 0;
    if (lane_ == 0) before = atomicAdd(arrived, 1);
    before = __shfl_sync(~0u, before, 0);
    if (before == 0) {
      put(dV, place);
      put(dK, place + kBlocks * kLanes);
      __syncwarp();
      if (lane_ == 0) ptx::add_release(arrived, 1);
      return true;
    }
    // All lanes wait alike: behind a loop of one lane ptxas spills registers.
    constexpr int kBothCameAndOneLeft = 3;
    while (!__all_sync(~0u, ptx::ld_acquire(arrived) == kBothCameAndOneLeft)) __nanosleep(20);
    return false;
  }

  __device__ __forceinline__ float4* place_of(int splits, int level) const {
    const int64_t row = int64_t{warp_} * ((splits_.count + 1) / 2) + (splits << level >> 1);
    return reinterpret_cast<float4*>(splits_.sums) + row * (2 * kBlocks * kLanes) + lane_;
  }
  __device__ __forceinline__ static void put(const KeyGradient& gradient, float4* place) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float (&c)[4] = gradient.data[0][n];
      place[n * kLanes] = {c[0], c[1], c[2], c[3]};
    }
  }
  __device__ __forceinline__ static void add(KeyGradient& gradient, const float4* place) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float4 sum = __ldcg(place + n * kLanes);
      float (&c)[4] = gradient.data[0][n];
      c[0] += sum.x;
      c[1] += sum.y;
      c[2] += sum.z;
      c[3] += sum.w;
    }
  }

  const BwdSplits& splits_;
  const int split_;
  int lane_, warp_;  // warp_: its number among those of all tiles
};

}  // namespace flash_attn::sm90
