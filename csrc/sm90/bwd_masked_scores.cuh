// A mask of tiles in the backward decides which blocks of queries a consumer walks over, and what
// of their P is 0.
#pragma once

#include "bwd_traits.cuh"

namespace flash_attn::sm90 {

// A consumer's walk over the blocks that were found. It stands in for QueryBlocks.
class FoundBlocks : public QueryBlock {
 public:
  __device__ __forceinline__ explicit FoundBlocks(const BwdWork& work)
      : QueryBlock{}, more_(work.has_queries()) {}

  __device__ __forceinline__ bool more() const { return more_; }
  // Goes to the block that has come.
  __device__ __forceinline__ void go_to(const FoundQueries& queries) {
    static_cast<QueryBlock&>(*this) = queries.block();
    states_ = queries.states();
    more_ = !queries.is_last();
  }
  // The state of the mask's tile where the block's queries from 64 · tile on meet a consumer's
  // keys.
  __device__ __forceinline__ uint32_t state(int tile, int consumer) const {
    return states_ >> 2 * (2 * tile + consumer) & 3;
  }

 private:
  bool more_;
  uint32_t states_ = 0;
};

// Which queries of a tile of the mask see the lane's two keys: a bit for each element of P, those
// of data[0][n] from bit 4 · n on. rows: what the mask says of the queries, if the tile is mixed.
// key: the first of the warp's 16 keys.
__device__ __forceinline__ uint32_t find_seen(uint32_t state, const TileMask& mask,
                                              const BwdWork& work, const int4* rows, int key,
                                              int lane) {
  if (state == kTileSeen) return ~0u;
  if (state == kTileHidden || mask.rows == nullptr) return 0;
  const bool by_labels = mask.labels != nullptr && rows->w >= rows->z;
  key += fragment_row(0, lane);
  rows += fragment_col(0, lane);
  // of_row gives bits 0 and 2 of one query. The loop stays one, so that it takes few registers
  // while products are under way.
  const auto find = [&](const auto& of_row) {
    uint32_t seen = 0;
#pragma unroll 2
    for (int n = 0; n < kMaskTile / 8; ++n) {
      seen |= (of_row(rows[8 * n]) | of_row(rows[8 * n + 1]) << 1) << 4 * n;
    }
    return seen;
  };
  if (mask.has_bits) {
    const int word = key % (2 * kMaskTile) / 32, bit = key % 32;
    return find([&](const int4& row) {
      const uint32_t of_keys = reinterpret_cast<const uint32_t*>(&row)[word] >> bit;
      return (of_keys & 1) | (of_keys >> 8 & 1) << 2;
    });
  }
  int labels[2] = {key, key + 8};
  if (by_labels) {
    const int32_t* const of_sequence = mask.labels + work.batch_idx * mask.labels_batch_stride;
#pragma unroll
    for (int& label : labels) label = __ldg(of_sequence + min(label, work.seqlen.len_k - 1));
  }
  return find([&](const int4& row) {
    const BlockMask::Intervals ends = {row};
    return uint32_t{ends.contain(labels[0])} | uint32_t{ends.contain(labels[1])} << 2;
  });
}

// Sets P to 0 where the mask hides it. seen: the bits of each 64 queries.
template <int kBlockM>
__device__ __forceinline__ void hide(Accumulator<1, kBlockM>& P,
                                     const uint32_t (&seen)[kBlockM / kMaskTile]) {
#pragma unroll
  for (int tile = 0; tile < kBlockM / kMaskTile; ++tile) {
    if (__all_sync(~0u, seen[tile] == ~0u)) continue;
#pragma unroll
    for (int n = 0; n < kMaskTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& p = P.data[0][tile * (kMaskTile / 8) + n][i];
        if ((seen[tile] >> (4 * n + i) & 1) == 0) p = 0.f;
      }
    }
  }
}

}  // namespace flash_attn::sm90
