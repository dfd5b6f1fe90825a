// Leading pages that sequences share, read once for the queries of all of them.
#pragma once

#include "../../core/host_device.h"
#include "../../core/params.h"

namespace flash_attn::cuda {

// The most rows of a sequence for each kv head: thread blocks take all rows of some sequences.
inline constexpr int kPrefixRows = 64;
// Rows that a thread block takes: two blocks of 16 a warp, where registers hold them.
constexpr int prefix_tile_rows(int head_dim) { return head_dim <= 128 ? 128 : 64; }
// A wider class would leave one thread block a multiprocessor.
inline constexpr int kPrefixHeadDim = 192;
// The most sequences of a call: a thread block counts them in the shared memory of its tiles.
inline constexpr int kPrefixMostSequences = 4096;

// The first lens[b] keys of sequence b lie where those of sequence source[b] do; a source that is
// no sequence has none. Anything may stand in either.
struct SharedPrefix {
  const int32_t *source = nullptr, *lens = nullptr;  // (batch)
  int pieces = 0;  // that they are cut into; their results come behind those of Splits

  // The sequence whose keys sequence batch_idx shares; -1: none.
  FLASH_ATTN_HOST_DEVICE int source_of(int batch_idx, int batch) const {
    const int from = source[batch_idx];
    return lens[batch_idx] > 0 && from >= 0 && from < batch ? from : -1;
  }
};

// Of what DecodeParams calls plain: a paged cache of q's dtype, no leftpad, keys cut alike, a
// workspace for splits.count + prefix.pieces results of each sequence, heads_q / heads_kv · seqlen_q
// of at most kPrefixRows, and head_dim = head_dim_v of at most kPrefixHeadDim.
void run_decode_shared(const DecodeParams& params, const SharedPrefix& prefix, Stream stream);

}  // namespace flash_attn::cuda
