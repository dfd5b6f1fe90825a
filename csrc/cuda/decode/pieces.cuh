// Which keys a thread block of decode.cuh takes.
//
// Either all sequences are cut into as many pieces, with a thread block for each, or each sequence
// into as many as its length asks for. These lie on a line, sequence after sequence, the same for
// each kv head and row tile:
//
//   sequences   │ 0                  │ 1    │ 2        │ 3                     │ …
//   pieces      │ 0   │ 1   │ 2   │ 3│ 4    │ 5   │ 6  │ 7   │ 8   │ 9   │ 10  │ …
//
// Lengths are on the device, so each block finds its pieces there. The grid has a few times the
// blocks that the device has room for, whatever the lengths: blocks that end early make room for
// others, and those that find nothing to do are not many. Piece n is taken by the blocks of n
// modulo the grid.
#pragma once

#include <climits>

#include "../cache/sequence_keys.cuh"
#include "../ptx/opaque.cuh"
#include "config.h"

namespace flash_attn::cuda {

// Where a sequence's pieces lie on the line.
struct PieceRange {
  int batch_idx, first;
  int count;  // at least one; 0: there is no such piece
};

// Used by whole warps; lane i looks at sequence i of 32.
class PieceLine {
 public:
  __device__ __forceinline__ explicit PieceLine(const DecodeParams& params)
      : params_(params), lane_(threadIdx.x % 32), piece_tiles_(params.splits.keys / kLineKeys) {
    if (params.splits.most_pieces == 0) return;
    int total = 0;
#pragma unroll 4
    for (int batch_idx = lane_; batch_idx < params.batch; batch_idx += 32) {
      total += tiles(batch_idx);
    }
    total = __reduce_add_sync(~0u, total);
    const int largest = (total + params.splits.least_pieces - 1) / params.splits.least_pieces;
    const int smallest = (total + params.splits.most_pieces - 1) / params.splits.most_pieces;
    piece_tiles_ = max(min(piece_tiles_, largest), smallest);
    end_ = params.batch + total / piece_tiles_;
  }

  __device__ __forceinline__ int piece_tiles() const { return piece_tiles_; }

  // The sequence that holds a piece.
  __device__ __forceinline__ PieceRange find(int number) const {
    int begin = 0;
#pragma unroll 1
    for (int base = 0; base < params_.batch && number < end_; base += 32) {
      const int batch_idx = base + lane_;
      const int count = batch_idx < params_.batch ? pieces(batch_idx) : 0;
      int end = count;  // by prefix sum
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, end, distance);
        if (lane_ >= distance) end += other;
      }
      end += begin;
      const unsigned hits = __ballot_sync(~0u, end > number);
      if (hits != 0) {
        const int lane = __ffs(hits) - 1;
        return {.batch_idx = base + lane,
                .first = __shfl_sync(~0u, end - count, lane),
                .count = __shfl_sync(~0u, count, lane)};
      }
      begin = __shfl_sync(~0u, end, 31);
    }
    return {.batch_idx = 0, .first = 0, .count = 0};
  }

  __device__ __forceinline__ PieceRange of_sequence(int batch_idx) const {
    int before = 0;
#pragma unroll 4
    for (int other = lane_; other < batch_idx; other += 32) before += pieces(other);
    return {.batch_idx = batch_idx,
            .first = __reduce_add_sync(~0u, before),
            .count = pieces(batch_idx)};
  }

 private:
  __device__ __forceinline__ int tiles(int batch_idx) const {
    return SequenceKeys(params_, batch_idx).tiles<kLineKeys>();
  }
  __device__ __forceinline__ int pieces(int batch_idx) const {
    return (tiles(batch_idx) + piece_tiles_ - 1) / piece_tiles_;
  }

  const DecodeParams& params_;
  int lane_, piece_tiles_;
  int end_ = INT_MAX;  // no piece has this number or a higher one
};

// A thread block's kv head and rows. Neighbouring blocks read the same keys (row tiles), then
// neighbouring memory (kv heads).
struct DecodeBlock {
  int index;  // of the thread block, among those of DecodeGrid
  int kv_head;
  int first_row, num_rows;  // row r is token r / group and head kv_head · group + r % group
  int number;               // of its piece, among those of all sequences

  __device__ __forceinline__ DecodeBlock(const DecodeParams& params, const DecodeGrid& grid,
                                         int block_index)
      : index(block_index) {
    const int tile = grid.row_tiles.divide(index), piece = grid.heads_kv.divide(tile);
    first_row = (index - tile * grid.num_row_tiles) * kDecodeRows;
    num_rows = min(kDecodeRows, params.seqlen_q * params.group - first_row);
    kv_head = tile - piece * params.heads_kv;
    number = piece;
  }
};

// What a thread block works on.
struct DecodePiece : DecodeBlock {
  const DecodeGrid& grid;
  int group;  // query heads that share the kv head
  int batch_idx;
  int cache_row;  // dense caches
  int len_k;
  int first_seen;          // by any of the rows
  int first_key, end_key;  // of the cache's rows; empty: first_key >= end_key
  int workspace_idx;       // -1: all keys of the sequence, straight to the output

  // Cuts a sequence into pieces that differ by one tile at most. A piece has least_tiles at least,
  // even if others have none then.
  template <int kKeys, bool kPaged>
  __device__ __forceinline__ static DecodePiece of_split(const DecodeParams& params,
                                                         const DecodeGrid& grid,
                                                         const DecodeBlock& block,
                                                         int least_tiles = 0) {
    const int batch_idx = grid.splits.divide(block.number);
    const int split = block.number - batch_idx * params.splits.count;
    DecodePiece piece(params, grid, block, batch_idx);
    piece.workspace_idx = params.partial.o == nullptr ? -1 : split * params.batch + piece.batch_idx;
    piece.template clip<kKeys, kPaged>(params, 0, params.capacity);
    if (params.splits.count == 1) return piece;
    const int tiles = (max(piece.end_key - piece.first_key, 0) + kKeys - 1) / kKeys;
    const int share = grid.splits.divide(tiles), rest = tiles - share * params.splits.count;
    int first_tile = split * share + min(split, rest);
    int end_tile = first_tile + share + (split < rest ? 1 : 0);
    if (share < least_tiles) {
      first_tile = min(split * least_tiles, tiles);
      end_tile = min(first_tile + least_tiles, tiles);
    }
    piece.end_key = min(piece.first_key + end_tile * kKeys, piece.end_key);
    piece.first_key += first_tile * kKeys;
    return piece;
  }

  template <int kKeys, bool kPaged>
  __device__ __forceinline__ static DecodePiece of_line(const DecodeParams& params,
                                                        const DecodeGrid& grid,
                                                        const DecodeBlock& block,
                                                        const PieceLine& line, int number,
                                                        const PieceRange& range) {
    DecodePiece piece(params, grid, block, range.batch_idx);
    piece.workspace_idx = range.count == 1 ? -1 : number;
    const SequenceKeys keys(params, range.batch_idx);
    const int first_tile =
        keys.first_tile<kLineKeys>() + (number - range.first) * line.piece_tiles();
    const int end_tile =
        min(first_tile + line.piece_tiles(), (keys.end + kLineKeys - 1) / kLineKeys);
    piece.template clip<kKeys, kPaged>(params, first_tile * kLineKeys, end_tile * kLineKeys);
    return piece;
  }

  __device__ __forceinline__ bool whole() const { return workspace_idx < 0; }
  __device__ __forceinline__ int token(int row) const { return grid.group.divide(first_row + row); }
  __device__ __forceinline__ int head(int row, int token_of_row) const {
    return kv_head * group + first_row + row - token_of_row * group;
  }
  // Finds the block's kv head and rows once more.
  __device__ __forceinline__ void find_rows(const DecodeParams& params) {
    static_cast<DecodeBlock&>(*this) =
        DecodeBlock(params, grid, static_cast<int>(ptx::opaque(index)));
  }
  // The keys that one row sees.
  __device__ __forceinline__ SequenceKeys seen_by(const DecodeParams& params, int row) const {
    return SequenceKeys(params, batch_idx, len_k, token(row), token(row));
  }

 private:
  __device__ __forceinline__ DecodePiece(const DecodeParams& params, const DecodeGrid& grid_of_call,
                                         const DecodeBlock& block, int batch)
      : DecodeBlock(block),
        grid(grid_of_call),
        group(params.group),
        batch_idx(batch),
        cache_row(batch),
        len_k(kvcache_len_k(params, batch)) {}

  // Takes the keys of [begin, end) that any of the rows sees. With pages, pieces begin at multiples
  // of kKeys, which may lie before the first key seen.
  template <int kKeys, bool kPaged>
  __device__ __forceinline__ void clip(const DecodeParams& params, int begin, int end) {
    const SequenceKeys seen(params, batch_idx, len_k, token(0), token(num_rows - 1));
    first_seen = seen.first;
    first_key = max(seen.first, begin);
    if (kPaged) first_key = first_key / kKeys * kKeys;
    end_key = min(seen.end, end);
    if (!kPaged && params.cache_batch_idx != nullptr) {
      cache_row = params.cache_batch_idx[batch_idx];
      if (cache_row < 0 || cache_row >= params.cache_rows) end_key = 0;
    }
  }
};

}  // namespace flash_attn::cuda
