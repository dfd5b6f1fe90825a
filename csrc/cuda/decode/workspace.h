// Where the rows of PartialResults lie, in the two layouts that there are.
#pragma once

#include "../../core/host_device.h"
#include "../../core/params.h"

namespace flash_attn::cuda {

// Rows of a matrix tile, the least that mma.sync takes: the query heads of one kv head times the new
// tokens. Few rows waste tensor time, which is free here: reading K and V is what takes the time.
inline constexpr int kDecodeRows = 16;

// As in lse: (slots, heads_q, seqlen_q). Piece s of sequence b has slot s · batch + b; cut by length,
// the pieces of a sequence follow one another.
struct RowsByToken {
  FLASH_ATTN_HOST_DEVICE static int64_t row(const DecodeParams& params, int64_t slot, int head,
                                            int token) {
    return (slot * params.heads_q + head) * params.seqlen_q + token;
  }
  // The slot's first row, of head 0 and token 0.
  FLASH_ATTN_HOST_DEVICE static int64_t first_row(const DecodeParams& params, int64_t slot) {
    return slot * params.heads_q * params.seqlen_q;
  }
};

// (pieces, heads_kv, row tiles, kDecodeRows): what one thread block leaves lies side by side.
struct RowsByTile {
  static int64_t rows(int64_t pieces, int heads_kv, int row_tiles) {
    return pieces * heads_kv * row_tiles * kDecodeRows;
  }
  // Times kDecodeRows: the first row of a tile.
  FLASH_ATTN_HOST_DEVICE static int64_t slot(unsigned piece, unsigned kv_head, unsigned row_tile,
                                             unsigned heads_kv, unsigned row_tiles) {
    return (static_cast<int64_t>(piece) * heads_kv + kv_head) * row_tiles + row_tile;
  }
};

}  // namespace flash_attn::cuda
