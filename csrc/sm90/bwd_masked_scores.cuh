// A mask of tiles in the backward decides which blocks of queries a consumer walks over, and what
// of their P is 0.
#pragma once

#include "bwd_found_queries.cuh"

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
    has_labels_ = queries.has_labels();
    has_second_ = queries.has_second();
    more_ = !queries.is_last();
  }
  // The state of the mask's tile where the block's queries from 64 · tile on meet a consumer's
  // keys.
  __device__ __forceinline__ uint32_t state(int tile, int consumer) const {
    return states_ >> 2 * (2 * tile + consumer) & 3;
  }
  // As FoundQueries has them.
  __device__ __forceinline__ bool has_labels() const { return has_labels_; }
  __device__ __forceinline__ bool has_second() const { return has_second_; }

 private:
  bool more_, has_labels_ = false, has_second_ = false;
  uint32_t states_ = 0;
};

// Which queries of a tile of the mask see the lane's two keys: a bit for each element of P, those
// of data[0][n] from bit 4 · n on. rows: what the mask says of the block's queries, if the tile is
// mixed; the tile's begin with first_row. key: the first of the warp's 16 keys.
template <int kBlockM>
__device__ __forceinline__ uint32_t find_seen(uint32_t state, const TileMask& mask,
                                              const BwdWork& work, const FoundBlocks& block,
                                              const MaskRows<kBlockM>& rows, int first_row, int key,
                                              int lane) {
  if (state == kTileSeen) return ~0u;
  if (state == kTileHidden || mask.rows == nullptr) return 0;
  key += fragment_row(0, lane);
  first_row += fragment_col(0, lane);
  // of_row gives bits 0 and 2 of one query. The loop stays one, so that it takes few registers
  // while products are under way.
  const auto find = [&](int part, const auto& of_row) {
    const uint2* const from = rows.parts[part] + first_row;
    uint32_t seen = 0;
#pragma unroll 4
    for (int n = 0; n < kMaskTile / 8; ++n) {
      const uint4 two = *reinterpret_cast<const uint4*>(from + 8 * n);
      seen |= (of_row(two.x, two.y) | of_row(two.z, two.w) << 1) << 4 * n;
    }
    return seen;
  };
  if (mask.has_bits) {
    const bool is_upper = key % kMaskTile >= 32;
    return find(key % (2 * kMaskTile) / kMaskTile, [&](uint32_t lower, uint32_t upper) {
      const uint32_t of_keys = (is_upper ? upper : lower) >> key % 32;
      return (of_keys & 1) | (of_keys >> 8 & 1) << 2;
    });
  }
  uint32_t labels[2] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key) + 8};
  if (block.has_labels()) {
    const int32_t* const of_sequence = mask.labels + work.batch_idx * mask.labels_batch_stride;
#pragma unroll
    for (uint32_t& label : labels) {
      label = __ldg(of_sequence + min(static_cast<int>(label), work.seqlen.len_k - 1));
    }
  }
  const auto in_interval = [&](uint32_t first, uint32_t length) {
    return uint32_t{labels[0] - first < length} | uint32_t{labels[1] - first < length} << 2;
  };
  const uint32_t seen = find(0, in_interval);
  return block.has_second() ? seen | find(1, in_interval) : seen;
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
