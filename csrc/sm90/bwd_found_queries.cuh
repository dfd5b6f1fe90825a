// The blocks of queries that a mask of tiles does not hide from a block of keys, and who finds them.
#pragma once

#include "../core/tile_mask.h"
#include "bwd_work.cuh"
#include "masked_scores.cuh"

namespace flash_attn::sm90 {

// A block of queries that the mask does not hide from a block of keys.
class FoundQueries {
 public:
  FoundQueries() = default;
  // states: those of the mask's tiles, as BlockMask::states() gives them.
  __device__ __forceinline__ FoundQueries(const QueryBlock& block, uint32_t states, bool is_last)
      : head_(block.head), bits_(static_cast<uint32_t>(block.m) << 9 | states << 1 | is_last) {}

  __device__ __forceinline__ QueryBlock block() const {
    return {.head = static_cast<int>(head_ & ~(kLabels | kSecond)),
            .m = static_cast<int>(bits_ >> 9)};
  }
  __device__ __forceinline__ bool is_last() const { return (bits_ & 1) != 0; }
  __device__ __forceinline__ uint32_t states() const { return bits_ >> 1 & 0xff; }

  // What the rows of its mixed tiles are like: whether their intervals are of labels, not of
  // positions, and whether some row has a second one.
  __device__ __forceinline__ void set_form(bool has_labels, bool has_second) {
    head_ |= (has_labels ? kLabels : 0) | (has_second ? kSecond : 0);
  }
  __device__ __forceinline__ bool has_labels() const { return (head_ & kLabels) != 0; }
  __device__ __forceinline__ bool has_second() const { return (head_ & kSecond) != 0; }
  __device__ __forceinline__ FoundQueries of_first_lane() const {
    FoundQueries queries;
    queries.head_ = __shfl_sync(~0u, head_, 0);
    queries.bits_ = __shfl_sync(~0u, bits_, 0);
    return queries;
  }

 private:
  static constexpr uint32_t kLabels = 1u << 31, kSecond = 1u << 30;  // beside the head

  uint32_t head_, bits_;
};

// What the mask's rows say of a block's keys. Each has two parts: intervals, as beginning and
// length, or the words of bits of both tiles of keys. A thread reads those of two neighbours at
// once.
template <int kBlockM>
struct MaskRows {
  alignas(16) uint2 parts[2][kBlockM];
};

// Finds the blocks of kBlockM queries that see something of kBlockN keys: head after head, and
// within a head from the first to the last. A whole warp calls it, each lane of which looks at one
// of 32 blocks.
template <int kBlockM, int kBlockN>
class QueryFinder {
 public:
  __device__ __forceinline__ QueryFinder(const Masked<BwdParams>& params, const BwdWork& work)
      : params_(params), work_(work), at_{.head = work.q.head, .m = work.range.begin} {}

  // Looks for one that has not been taken, and says whether there is one.
  __device__ __forceinline__ bool look() {
#pragma unroll 1
    while (found_ == 0) {
      if (at_.m >= work_.range.end) at_ = {.head = at_.head + 1, .m = work_.range.begin};
      if (at_.head >= work_.end_head || !work_.has_queries()) return false;
      const int m = at_.m + static_cast<int>(threadIdx.x % 32);
      // The second thread block of a pair looks at the keys of both.
      const int first_key = work_.first_key & -kBlockN;
      states_ = m >= work_.range.end
                    ? 0
                    : BlockMask(params_, work_.batch_idx, at_.head, 0)
                          .template states<kBlockM, kBlockN>(m * kBlockM, first_key);
      found_ = __ballot_sync(~0u, states_ != 0);
      at_.m += 32;
    }
    return true;
  }

  // Takes the next one, after look().
  __device__ __forceinline__ FoundQueries take() {
    const int from = __ffs(static_cast<int>(found_)) - 1;
    const QueryBlock block = {.head = at_.head, .m = at_.m - 32 + from};
    const uint32_t states = __shfl_sync(~0u, states_, from);
    found_ &= found_ - 1;
    return FoundQueries(block, states, !look());
  }

 private:
  const Masked<BwdParams>& params_;
  const BwdWork& work_;
  QueryBlock at_;        // behind the blocks that have been looked at
  uint32_t found_ = 0;   // of the last 32 of them, a bit for each lane
  uint32_t states_ = 0;  // of this lane's
};

// Publishes the blocks that a finder finds, as mask.found, and calls load(queries) for each, for
// which `ring` has a stage. more: whether there is one. take_next_tile() is called as soon as the
// last one is known. A whole warp calls it.
template <typename Finder, typename Mask, typename FoundRing, typename Ring, typename Take,
          typename Load>
__device__ __forceinline__ void publish_found(Finder& finder, bool more, Mask& mask,
                                              FoundRing& found_ring, Ring& ring,
                                              const Take& take_next_tile, const Load& load) {
#pragma unroll 1
  for (; more; ring.advance(), found_ring.advance()) {
    const FoundQueries queries = finder.take();
    more = !queries.is_last();
    found_ring.wait_empty();
    if (threadIdx.x % 32 == 0) {
      mask.found[found_ring.stage()] = queries;
      found_ring.arrive_full();
    }
    if (!more) take_next_tile();
    load(queries);
  }
}

}  // namespace flash_attn::sm90
