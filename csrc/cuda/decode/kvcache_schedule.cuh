// Which thread block of kvcache.cuh reads which keys of which sequences.
//
// Grid (row tiles, kv heads, parts). The keys of a sequence lie in tiles, which start at multiples
// of kKeys. The tiles of all sequences, one after the other, are one line, which is cut into equal
// parts wherever the cuts fall, the same for each head and row tile:
//
//   sequences   │ 0                  │ 1    │ 2        │ 3                     │ …
//   parts       │ 0          │ 1          │ 2          │ 3          │ 4          │ …
//
// so that lengths, which only the device knows, leave no block without work, and the blocks of one
// part read the heads of the same tokens, neighbours in memory. A sequence inside one part is
// finished there; the others are merged by combine.cuh. A block leaves at most two pieces of
// sequences: one that began before its part, and one that goes on behind.
//
// Cut alike or by length, each sequence is cut by its own length alone, and the parts take the
// pieces in turns: no bit of a sequence's result depends on the other sequences.
//
// A launch finds the instruction cache cold, and a call is short: all is 32-bit arithmetic, with
// one division by what only the device knows. Whole warps do it, each for itself; lane i holds the
// keys of sequence i of 32.
#pragma once

#include "../cache/rows.cuh"
#include "../cache/sequence_keys.cuh"
#include "kvcache_config.h"

namespace flash_attn::cuda {

// Goes from sequence to sequence of the batch, and says where each lies on the line of tiles.
template <int kKeys>
class SequenceCursor {
 public:
  __device__ __forceinline__ explicit SequenceCursor(const DecodeParams& params)
      : params_(params), lane_(threadIdx.x % 32) {}

  // Tiles of all sequences.
  __device__ __forceinline__ int total_tiles() {
    int total = 0;
#pragma unroll 1
    for (int base = 0; base < params_.batch; base += 32) {
      load(base);
      total += __reduce_add_sync(~0u, lane_tiles_);
    }
    return total;
  }

  // Goes to the sequence that holds the tile. total_tiles() must have been called before.
  __device__ __forceinline__ void seek_tile(int tile) {
    find([&](int, int end) { return end > tile; });
  }
  // Goes to this sequence. total_tiles() must have been called before.
  __device__ __forceinline__ void seek_sequence(int batch_idx) {
    find([&](int index, int) { return index >= batch_idx; });
  }
  __device__ __forceinline__ void advance() {
    begin_ += tiles_;
    if ((batch_idx_ + 1) % 32 == 0) load(batch_idx_ + 1);
    select(batch_idx_ + 1);
  }

  __device__ __forceinline__ int batch_idx() const { return batch_idx_; }
  __device__ __forceinline__ int begin() const { return begin_; }  // on the line
  __device__ __forceinline__ int tiles() const { return tiles_; }
  __device__ __forceinline__ const SequenceKeys& keys() const { return keys_; }

 private:
  // Goes to the first sequence for which found(its index, where it ends on the line) is true.
  template <typename Found>
  __device__ __forceinline__ void find(const Found& found) {
    int begin = 0;
#pragma unroll 1
    for (int base = 0;; base += 32) {
      if (params_.batch > 32) load(base);
      int end = lane_tiles_;  // of the lane's sequence, by prefix sum
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, end, distance);
        if (lane_ >= distance) end += other;
      }
      end += begin;
      const int batch_idx = base + lane_;
      const unsigned hits = __ballot_sync(~0u, batch_idx < params_.batch && found(batch_idx, end));
      if (hits != 0) {
        const int lane = __ffs(hits) - 1;
        begin_ = __shfl_sync(~0u, end - lane_tiles_, lane);
        select(base + lane);
        return;
      }
      begin = __shfl_sync(~0u, end, 31);
    }
  }

  __device__ __forceinline__ void load(int base) {
    const int batch_idx = base + lane_;
    lane_keys_ = SequenceKeys(params_, min(batch_idx, params_.batch - 1));
    lane_tiles_ = batch_idx < params_.batch ? lane_keys_.template tiles<kKeys>() : 0;
  }
  __device__ __forceinline__ void select(int batch_idx) {
    batch_idx_ = batch_idx;
    keys_.first = __shfl_sync(~0u, lane_keys_.first, batch_idx % 32);
    keys_.end = __shfl_sync(~0u, lane_keys_.end, batch_idx % 32);
    tiles_ = __shfl_sync(~0u, lane_tiles_, batch_idx % 32);
  }

  const DecodeParams& params_;
  int lane_, lane_tiles_;
  SequenceKeys lane_keys_;
  int batch_idx_, begin_, tiles_;
  SequenceKeys keys_;
};

// How many tiles each part has. Fewer keys than the least are not worth another piece to merge.
template <int kKeys>
__device__ __forceinline__ int kvcache_share(int total_tiles, unsigned parts) {
  constexpr int kLeastTiles = 128 / kKeys;
  return max(static_cast<int>((total_tiles + parts - 1) / parts), kLeastTiles);
}

// What a thread block works on between two merges.
struct KvcachePiece {
  int batch_idx;
  SequenceKeys keys;
  int first_tile, end_tile;  // of the sequence's cache rows
  // The piece's number among those of this head and row tile. Dealt out, it is 2 · part, + 1 if the
  // sequence begins here. Else it counts the splits of all sequences. -1 says that the piece is a
  // whole sequence.
  int number;
};

// The pieces of one sequence where keys are not dealt out.
struct KvcacheSplits {
  int tiles_each, count;

  template <int kKeys>
  __device__ __forceinline__ static KvcacheSplits of(const DecodeParams& params, int tiles) {
    const int each = params.splits.keys > 0
                         ? params.splits.keys / kKeys
                         : (tiles + params.splits.count - 1) / params.splits.count;
    return {each, (tiles + each - 1) / each};
  }
};

// The pieces of one thread block, in order.
template <int kKeys>
class KvcacheSchedule {
 public:
  __device__ __forceinline__ explicit KvcacheSchedule(const DecodeParams& params)
      : params_(params), cursor_(params) {
    if (params.splits.count > 0) {
      at_ = blockIdx.z;
      end_ = params.batch * params.splits.count;
      return;
    }
    const int total = cursor_.total_tiles();
    const int share = kvcache_share<kKeys>(total, gridDim.z);
    at_ = min(blockIdx.z * share, static_cast<unsigned>(total));
    end_ = min(at_ + share, total);
    if (at_ < end_) cursor_.seek_tile(at_);
  }

  // Returns false where there are no more pieces.
  __device__ __forceinline__ bool next(KvcachePiece& piece) {
    if (params_.splits.count > 0) return next_split(piece);
    if (at_ >= end_) return false;
    if (at_ == cursor_.begin() + cursor_.tiles()) cursor_.advance();
    const int begin = at_ - cursor_.begin(), tiles = cursor_.tiles();
    const int end = min(tiles, begin + end_ - at_);
    set(piece, cursor_.batch_idx(), cursor_.keys(), begin, end);
    piece.number = end - begin == tiles ? -1 : static_cast<int>(2 * blockIdx.z) + (begin == 0);
    at_ += end - begin;
    return true;
  }

 private:
  __device__ __forceinline__ bool next_split(KvcachePiece& piece) {
#pragma unroll 1
    for (; at_ < end_; at_ += gridDim.z) {
      const int batch_idx = at_ / params_.splits.count, split = at_ % params_.splits.count;
      if (params_.sequence_mask != nullptr && params_.sequence_mask[batch_idx] == 0) continue;
      const SequenceKeys keys(params_, batch_idx);
      const int tiles = keys.template tiles<kKeys>();
      const KvcacheSplits splits = KvcacheSplits::of<kKeys>(params_, tiles);
      if (split >= splits.count) continue;
      set(piece, batch_idx, keys, split * splits.tiles_each,
          min((split + 1) * splits.tiles_each, tiles));
      piece.number = splits.count == 1 ? -1 : at_;
      at_ += gridDim.z;
      return true;
    }
    return false;
  }

  __device__ __forceinline__ static void set(KvcachePiece& piece, int batch_idx,
                                             const SequenceKeys& keys, int begin, int end) {
    const int first_tile = keys.template first_tile<kKeys>();
    piece.batch_idx = batch_idx;
    piece.keys = keys;
    piece.first_tile = first_tile + begin;
    piece.end_tile = first_tile + end;
  }

  const DecodeParams& params_;
  SequenceCursor<kKeys> cursor_;
  int at_, end_;  // on the line of tiles; else of all pieces
};

// Row r of a kv head: token r / group, query head kv_head · group + r % group.
struct KvcacheRow {
  int token, head;

  __device__ __forceinline__ KvcacheRow(const DecodeParams& params, int kv_head, int row) {
    const int group = params.group;
    // Exact for fewer than 2^20 rows, and far shorter than an integer division.
    token = static_cast<int>(__fdividef(static_cast<float>(row) + 0.5f, static_cast<float>(group)));
    head = kv_head * group + row - token * group;
  }
};

}  // namespace flash_attn::cuda
