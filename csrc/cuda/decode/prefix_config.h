// The grid of prefix.cuh, and its instances: one a dtype and head-dim class, in inst/prefix_d*.cu.
#pragma once

#include "config.h"
#include "prefix.h"

namespace flash_attn::cuda {

inline constexpr int kPrefixWarps = 4;

// A piece of the keys that a sequence does not share has at least so many of decode.cuh's tiles.
inline constexpr int kOwnTiles = 4 * kDecodeWarps;

// Turns the index of a thread block into a tile of rows, and rows of the tile into rows of the
// call.
struct PrefixGrid {
  Divisor tiles, heads_kv, members, sequence_rows, group, pieces;
  int tile_members;  // sequences of a tile
  int num_tiles;     // that have thread blocks of their own, if all sequences share one prefix
  int shared_blocks, own_blocks;

  // rows: of a tile.
  PrefixGrid(const DecodeParams& params, const SharedPrefix& prefix, int rows,
             const DecodeGrid& own)
      : tiles(tiles_of(params, rows)),
        heads_kv(params.heads_kv),
        members(members_of(params, rows)),
        sequence_rows(decode_group_rows(params)),
        group(params.group),
        pieces(prefix.pieces),
        tile_members(members_of(params, rows)),
        num_tiles(tiles_of(params, rows)),
        shared_blocks(num_tiles * params.heads_kv * prefix.pieces),
        own_blocks(static_cast<int>(own.blocks(params))) {}

 private:
  static int members_of(const DecodeParams& params, int rows) {
    return rows / decode_group_rows(params);
  }
  static int tiles_of(const DecodeParams& params, int rows) {
    const int members = members_of(params, rows);
    return (params.batch + members - 1) / members;
  }
};

// params: leftpad_k is prefix.lens.
template <DType kDType, int kHeadDim>
void launch_prefix(const DecodeParams& params, const SharedPrefix& prefix, Stream stream);

}  // namespace flash_attn::cuda
