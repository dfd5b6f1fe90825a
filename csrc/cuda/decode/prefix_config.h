// The grid of prefix.cuh, and its instances: one a dtype and head-dim class, in inst/prefix_d*.cu.
#pragma once

#include "../divisor.h"
#include "prefix.h"

namespace flash_attn::cuda {

inline constexpr int kPrefixWarps = 4;

// From rows of a tile to rows of the call.
struct PrefixGrid {
  Divisor members, sequence_rows, group, pieces;
  int tile_members;  // sequences of a tile
  int num_tiles;     // that have thread blocks of their own, if all sequences share one prefix

  // rows: of a tile.
  PrefixGrid(const DecodeParams& params, const SharedPrefix& prefix, int rows)
      : members(rows / (params.seqlen_q * params.group)),
        sequence_rows(params.seqlen_q * params.group),
        group(params.group),
        pieces(prefix.pieces),
        tile_members(rows / (params.seqlen_q * params.group)),
        num_tiles((params.batch + tile_members - 1) / tile_members) {}
};

template <DType kDType, int kHeadDim>
void launch_prefix(const DecodeParams& params, const SharedPrefix& prefix, Stream stream);

}  // namespace flash_attn::cuda
