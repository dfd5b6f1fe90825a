// The mask of cuda/attn/tile_mask.cuh for blocks of several of its tiles, whose states are read
// once, by who finds the blocks, and handed to who computes them.
#pragma once

#include "../cuda/attn/tile_mask.cuh"

namespace flash_attn::sm90 {

class BlockMask : public MaskedScores {
 public:
  using MaskedScores::Intervals;
  using MaskedScores::MaskedScores;

  // The states of a row of tiles of which nothing is hidden.
  template <int kTiles>
  static constexpr uint32_t kAllSeen = kTiles == 2 ? kTileSeen << 2 | kTileSeen : kTileSeen;

  // The states of the tiles of kBlockM queries by kBlockN keys, two bits each, row after row; 0:
  // nothing is seen.
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ uint32_t states(int first_row, int first_key) const {
    static_assert(kBlockM % kMaskTile == 0 && kBlockN % kMaskTile == 0);
    constexpr int kCols = kBlockN / kMaskTile;
    uint32_t states = 0;
#pragma unroll
    for (int i = 0; i < kBlockM / kMaskTile * kCols; ++i) {
      const TileState of_tile =
          state(first_row / kMaskTile + i / kCols, first_key / kMaskTile + i % kCols);
      states |= static_cast<uint32_t>(of_tile) << 2 * i;
    }
    return states;
  }

  // What the mask says of two queries for all blocks of keys, and how.
  struct RowIntervals {
    int4 of_query[2];
    bool has_bits, has_labels;
  };

  // What two queries see of a block's keys. For each query it is a word of bits for each tile or,
  // by labels, two intervals as beginning and length.
  struct RowPair {
    static constexpr bool kBranchless = false;
    uint4 of_query[2];
    bool by_labels;
  };
  // The same of a block of one tile, a bit for each key: of the first query, then of the second.
  // What hides by it has no branch. Beside an O of 256 columns no registers are left for a second
  // S, which a branch would need, nor for RowIntervals.
  struct RowBits {
    static constexpr bool kBranchless = true;
    uint4 bits;
  };
  template <int kHeadDim>
  using Rows = std::conditional_t<(kHeadDim > 192), RowBits, RowPair>;

  // What queries see of a block whose tiles have these states.
  template <int kTiles, typename Rows>
  __device__ __forceinline__ Rows rows(const RowIntervals& intervals, ScorePlace place,
                                       uint32_t states, int lane) const {
    if constexpr (Rows::kBranchless) {
      return seen_bits(place, states, lane);
    } else {
      if (states == kAllSeen<kTiles>) return {};
      return row_pair<kTiles>(intervals, place, lane);
    }
  }

  // Reads RowIntervals of the lane's two queries in the 16 from first_query on.
  __device__ __forceinline__ RowIntervals row_intervals(int first_query, int lane) const {
    RowIntervals rows = {};
    rows.has_bits = has_bits_;
    rows.has_labels = labels_ != nullptr;
    if (rows_ == nullptr || has_bits_) return rows;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.of_query[row] =
          __ldg(static_cast<const int4*>(rows_) + query_of(first_query, row, lane));
    }
    return rows;
  }

  // Says what the lane's two queries see of a block's keys. place is that of the rows and of the
  // block.
  template <int kTiles>
  __device__ __forceinline__ RowPair row_pair(const RowIntervals& rows, ScorePlace place,
                                              int lane) const {
    RowPair pair = {};
    const int first_key = place.key + fragment_col(0, lane);
    if (rows.has_bits) {
      const int first_tile = place.key / kMaskTile;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const auto* const words = static_cast<const unsigned long long*>(rows_) +
                                  query_of(place.query, row, lane) * key_tiles_ + first_tile;
        set_words<kTiles>(pair.of_query[row], [&](int tile) -> uint64_t {
          return first_tile + tile < key_tiles_ ? __ldg(words + tile) >> first_key % kMaskTile : 0;
        });
      }
      return pair;
    }
    const auto has_labels = [](const int4& ends) { return !Intervals{ends}.are_of_positions(); };
    pair.by_labels = rows.has_labels &&
                     __any_sync(~0u, has_labels(rows.of_query[0]) || has_labels(rows.of_query[1]));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int4& ends = rows.of_query[row];
      if (pair.by_labels) {
        pair.of_query[row] = {static_cast<uint32_t>(ends.x), length(ends.x, ends.y),
                              static_cast<uint32_t>(ends.z), length(ends.z, ends.w)};
      } else {
        pair.of_query[row] = {bits_of(ends, first_key), bits_of(ends, first_key + 32),
                              bits_of(ends, first_key + 64), bits_of(ends, first_key + 96)};
      }
    }
    return pair;
  }

  // Sets what the mask hides of a warp's block to -inf. states are those of its tiles, first_key is
  // its first key.
  template <int kN>
  __device__ __forceinline__ void hide(Accumulator<1, kN>& S, const RowPair& pair, uint32_t states,
                                       int first_key, int lane) const {
    constexpr int kElements = kMaskTile / 4;  // of a row in a tile
#pragma unroll
    for (int tile = 0; tile < kN / kMaskTile; ++tile) {
      const uint32_t state = states >> 2 * tile & 3;
      const auto hide_unseen = [&](const auto& is_seen) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const auto seen = is_seen(fragment_col(i, 0));
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            if (!seen[row]) S.at(row, tile * kElements + i) = -INFINITY;
          }
        }
      };
      if (state == kTileSeen) continue;
      if (state == kTileHidden) {
        hide_unseen([](int) { return Seen{false, false}; });
      } else if (pair.by_labels) {
        const int lane_key = first_key + tile * kMaskTile + fragment_col(0, lane);
        const auto hide_other_labels = [&](auto intervals) {
          hide_unseen([&](int col) {
            const int label = __ldg(labels_ + min(lane_key + col, last_key_));
            return Seen{contains<intervals>(pair.of_query[0], label),
                        contains<intervals>(pair.of_query[1], label)};
          });
        };
        // The queries of documents have one interval.
        if (__any_sync(~0u, (pair.of_query[0].w | pair.of_query[1].w) != 0)) {
          hide_other_labels(std::integral_constant<int, 2>());
        } else {
          hide_other_labels(std::integral_constant<int, 1>());
        }
      } else {
        hide_unseen([&](int col) {
          const auto bit = [&](const uint4& words) {
            const uint32_t low = tile == 0 ? words.x : words.z,
                           high = tile == 0 ? words.y : words.w;
            return ((col < 32 ? low : high) >> col % 32 & 1) != 0;
          };
          return Seen{bit(pair.of_query[0]), bit(pair.of_query[1])};
        });
      }
    }
  }

  __device__ __forceinline__ void hide(Accumulator<1, kMaskTile>& S, const RowBits& rows,
                                       uint32_t /*states*/, int /*first_key*/, int /*lane*/) const {
#pragma unroll
    for (int i = 0; i < kMaskTile / 4; ++i) {
      const int col = fragment_col(i, 0);
      const uint32_t first = col < 32 ? rows.bits.x : rows.bits.y;
      const uint32_t second = col < 32 ? rows.bits.z : rows.bits.w;
      S.at(0, i) = (first >> col % 32 & 1) != 0 ? S.at(0, i) : -INFINITY;
      S.at(1, i) = (second >> col % 32 & 1) != 0 ? S.at(1, i) : -INFINITY;
    }
  }

 private:
  __device__ __forceinline__ RowBits seen_bits(ScorePlace place, uint32_t state, int lane) const {
    if (state == kTileSeen) return {{~0u, ~0u, ~0u, ~0u}};
    if (state == kTileHidden || rows_ == nullptr) return {};
    const int first_key = place.key + fragment_col(0, lane);
    const auto seen = [&](int row) {
      return keys_seen<kMaskTile / 4>(place.query + fragment_row(row, lane), first_key);
    };
    const uint64_t first = seen(0), second = seen(1);
    return {{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
             static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)}};
  }
  struct Seen {
    bool of_query[2];
    __device__ __forceinline__ bool operator[](int row) const { return of_query[row]; }
  };

  // Of the 16 queries from first_query on, the one that a lane's row is.
  __device__ __forceinline__ int64_t query_of(int first_query, int row, int lane) const {
    return min(first_query + fragment_row(row, lane), last_query_);
  }

  template <int kTiles, typename OfTile>
  __device__ __forceinline__ static void set_words(uint4& words, const OfTile& of_tile) {
    static_assert(kTiles <= 2);
    uint64_t of_tiles[2] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) of_tiles[tile] = of_tile(tile);
    words = {static_cast<uint32_t>(of_tiles[0]), static_cast<uint32_t>(of_tiles[0] >> 32),
             static_cast<uint32_t>(of_tiles[1]), static_cast<uint32_t>(of_tiles[1] >> 32)};
  }

  // The 32 positions from first_key on that lie in two intervals, a bit each.
  __device__ __forceinline__ static uint32_t bits_of(const int4& ends, int first_key) {
    const auto from = [&](int position) {  // a shift by 32 leaves nothing
      return __funnelshift_lc(0, ~0u, max(position - first_key, 0));
    };
    return (from(ends.x) & ~from(ends.y)) | (from(ends.z) & ~from(ends.w));
  }
  __device__ __forceinline__ static uint32_t length(int first, int end) {
    return end > first ? static_cast<uint32_t>(end) - static_cast<uint32_t>(first) : 0;
  }
  template <int kIntervals>
  __device__ __forceinline__ static bool contains(const uint4& intervals, int label) {
    return static_cast<uint32_t>(label) - intervals.x < intervals.y ||
           (kIntervals == 2 && static_cast<uint32_t>(label) - intervals.z < intervals.w);
  }
};

}  // namespace flash_attn::sm90
