// Rows of a matrix tile, and where those of PartialResults lie.
#pragma once

#include "../../core/host_device.h"
#include "../../core/params.h"

namespace flash_attn::cuda {

// Rows of a matrix tile, the least that mma.sync takes: the query heads of one kv head times the
// new tokens. Few rows waste tensor time, which is free here: reading K and V is what takes the
// time.
inline constexpr int kDecodeRows = 16;

// Rows of one kv head in one sequence, and the tiles that they fill.
FLASH_ATTN_HOST_DEVICE inline int decode_group_rows(const DecodeParams& params) {
  return params.seqlen_q * params.group;
}
FLASH_ATTN_HOST_DEVICE inline int decode_row_tiles(const DecodeParams& params) {
  return (decode_group_rows(params) + kDecodeRows - 1) / kDecodeRows;
}

// A workspace has the shape (results, heads_q, seqlen_q), as lse has it with sequences. The
// kernel that leaves a piece says which of the results it is, by workspace_idx.
FLASH_ATTN_HOST_DEVICE inline int64_t workspace_row(const DecodeParams& params,
                                                    int64_t workspace_idx, int head, int token) {
  return (workspace_idx * params.heads_q + head) * params.seqlen_q + token;
}

}  // namespace flash_attn::cuda
