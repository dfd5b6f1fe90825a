// A mask whose hidden tiles a kernel passes over. Which these are is read where it is needed, 32
// tiles at a time: a list would have no bound, and bits would take registers throughout.
#pragma once

#include <cmath>
#include <type_traits>

#include "../../core/tile_mask.h"
#include "score_policy.cuh"

namespace flash_attn {

// PlainScores with the mask of one query head of one sequence.
class MaskedScores : public PlainScores {
 public:
  // params: Masked<FwdParams> or Masked<BwdParams>.
  template <typename Params>
  __device__ __forceinline__ MaskedScores(const Params& params, int batch_idx, int head,
                                          int64_t /*diagonal*/)
      : query_tiles_(params.mask.query_tiles),
        key_tiles_(params.mask.key_tiles),
        last_query_(params.seqlen_q - 1),
        last_key_(params.seqlen_k - 1),
        has_bits_(params.mask.has_bits) {
    const TileMask& mask = params.mask;
    tiles_ = mask.tiles + batch_idx * mask.batch_stride + head * mask.head_stride;
    rows_ = static_cast<const char*>(mask.rows) + batch_idx * mask.rows_batch_stride +
            head * mask.rows_head_stride;
    labels_ = mask.labels == nullptr ? nullptr : mask.labels + batch_idx * mask.labels_batch_stride;
  }

  // Returns the last of the blocks of keys [begin, end) that the queries [first_row, first_row +
  // kBlockM) see something of, or begin - 1 if there is none. Whole warps call it.
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ int last_key_block(int first_row, int begin, int end) const {
    const int lane = ptx::opaque(threadIdx.x) % 32;
    for (; end > begin; end -= 32) {
      const int n = end - 1 - lane;
      const bool seen = n >= begin && sees<kBlockM, kBlockN>(first_row, n * kBlockN);
      const unsigned found = __ballot_sync(~0u, seen);
      if (found != 0) return end - __ffs(static_cast<int>(found));
    }
    return begin - 1;
  }

  // Returns the first of the blocks of queries [begin, end) that sees something of the keys
  // [first_key, first_key + kBlockN), or `end` if there is none. Whole warps call it.
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ int first_query_block(int first_key, int begin, int end) const {
    const int lane = ptx::opaque(threadIdx.x) % 32;
    for (; begin < end; begin += 32) {
      const int m = begin + lane;
      const bool seen = m < end && sees<kBlockM, kBlockN>(m * kBlockM, first_key);
      const unsigned found = __ballot_sync(~0u, seen);
      if (found != 0) return begin + __ffs(static_cast<int>(found)) - 1;
    }
    return end;
  }

  // Whether a warp's scores have to be masked. They lie in one tile.
  __device__ __forceinline__ bool hides(ScorePlace place) const {
    return state(place.query / kMaskTile, place.key / kMaskTile) != kTileSeen;
  }

  // Sets what the mask hides to -inf.
  template <int kMBlocks, int kN>
  __device__ __forceinline__ void mask(Accumulator<kMBlocks, kN>& S, ScorePlace place,
                                       int lane) const {
    const TileState of_tile = state(place.query / kMaskTile, place.key / kMaskTile);
    if (of_tile == kTileSeen) return;
    // Otherwise what follows from the lane alone is kept from before the kernel's loop on, in
    // registers.
    lane = static_cast<int>(ptx::opaque(lane));
    const int lane_key = place.key + fragment_col(0, lane);
#pragma unroll
    for (int row = 0; row < S.kRows; ++row) {
      const int query = place.query + row / 2 * 16 + fragment_row(row, lane);
      const uint64_t seen = of_tile == kTileHidden ? 0 : keys_seen<S.kRowElements>(query, lane_key);
#pragma unroll
      for (int i = 0; i < S.kRowElements; ++i) {
        if ((seen >> fragment_col(i, 0) & 1) == 0) S.at(row, i) = -INFINITY;
      }
    }
  }

 protected:
  // What lies beyond the last query or key is hidden.
  __device__ __forceinline__ TileState state(int query_tile, int key_tile) const {
    if (query_tile >= query_tiles_ || key_tile >= key_tiles_) return kTileHidden;
    return static_cast<TileState>(__ldg(tiles_ + int64_t{query_tile} * key_tiles_ + key_tile));
  }

  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ bool sees(int first_row, int first_key) const {
    static_assert(kBlockM % kMaskTile == 0 && kBlockN % kMaskTile == 0);
    bool seen = false;
#pragma unroll
    for (int row = 0; row < kBlockM; row += kMaskTile) {
#pragma unroll
      for (int col = 0; col < kBlockN; col += kMaskTile) {
        seen |= state((first_row + row) / kMaskTile, (first_key + col) / kMaskTile) != kTileHidden;
      }
    }
    return seen;
  }

  struct Intervals {
    int4 ends;

    // Where there are labels, whether these are the positions, of which none need be read.
    __device__ __forceinline__ bool are_of_positions() const { return ends.w < ends.z; }
    __device__ __forceinline__ bool contain(int label) const {
      return (label >= ends.x && label < ends.y) || (label >= ends.z && label < ends.w);
    }
    // The positions from first_key on that lie in the intervals, a bit each.
    __device__ __forceinline__ uint64_t bits(int first_key) const {
      return (from(ends.x - first_key) & ~from(ends.y - first_key)) |
             (from(ends.z - first_key) & ~from(ends.w - first_key));
    }

   private:
    __device__ __forceinline__ static uint64_t from(int bit) {
      return bit <= 0 ? ~uint64_t{0} : bit >= kMaskTile ? 0 : ~uint64_t{0} << bit;
    }
  };

  // Which of a mixed tile's keys from first_key on the query sees, a bit each. Only the columns of
  // kElements elements of a row need to be right.
  template <int kElements>
  __device__ __forceinline__ uint64_t keys_seen(int query, int first_key) const {
    if (rows_ == nullptr) return 0;
    query = min(query, last_query_);
    if (has_bits_) {
      const auto* const words = static_cast<const unsigned long long*>(rows_);
      return __ldg(words + int64_t{query} * key_tiles_ + first_key / kMaskTile) >>
             first_key % kMaskTile;
    }
    const Intervals row = {__ldg(static_cast<const int4*>(rows_) + query)};
    if (labels_ == nullptr || row.are_of_positions()) return row.bits(first_key);
    uint64_t seen = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int col = fragment_col(i, 0), label = __ldg(labels_ + min(first_key + col, last_key_));
      seen |= uint64_t{row.contain(label)} << col;
    }
    return seen;
  }

  const uint8_t* tiles_;
  const void* rows_;
  const int32_t* labels_;  // null: positions
  int query_tiles_, key_tiles_, last_query_, last_key_;
  bool has_bits_;
};

// Whether a kernel with this policy passes over tiles.
template <typename ScorePolicy>
inline constexpr bool kSkipsTiles = std::is_same_v<ScorePolicy, MaskedScores>;
}  // namespace flash_attn
