// A mask as the kernels that skip tiles read it: besides what causal, windows and lengths leave a
// query.
#pragma once

#include <cstdint>

namespace flash_attn {

// Queries, and keys, of a tile.
inline constexpr int kMaskTile = 64;

// What a mask says of a tile.
enum TileState : uint8_t { kTileHidden, kTileMixed, kTileSeen };

// The mask of a call without cu_seqlens. A stride is 0 in a dimension that broadcasts.
struct TileMask {
  const uint8_t* tiles = nullptr;  // TileState (batch, heads_q, query_tiles, key_tiles)
  int64_t batch_stride = 0, head_stride = 0;
  int query_tiles = 0, key_tiles = 0;

  // What mixed tiles hold. As intervals: query i sees the keys whose labels lie in [first, end) or
  // [first2, end2). As bits: of key_tiles words of 64, bit j % 64 of word j / 64 says whether it
  // sees key j. The shape is (batch, heads_q, seqlen_q, 4) of int32, or (batch, heads_q, seqlen_q,
  // key_tiles) of uint64. If rows is null, mixed tiles are hidden.
  const void* rows = nullptr;
  int64_t rows_batch_stride = 0, rows_head_stride = 0;  // in bytes
  bool has_bits = false;
  const int32_t* labels = nullptr;  // (batch, seqlen_k), or null: key j has the label j
  int64_t labels_batch_stride = 0;
};

// The parameters of a kernel that skips tiles; those of others stay as they are. Params: FwdParams
// or BwdParams.
template <typename Params>
struct Masked : Params {
  TileMask mask;
};

}  // namespace flash_attn
