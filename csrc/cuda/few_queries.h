// The queries of varlen sequences as decode's kernels read them: as many of each sequence.
#pragma once

#include "../core/params.h"
#include "device.h"

namespace flash_attn::cuda {

// Decode counts queries from the end of the keys, so a sequence's queries are the last of its row.
struct EvenQueries {
  void* q;         // (batch, tokens, heads_q, head_dim) contiguous; what a sequence lacks is 0
  int32_t* first;  // (batch) where a sequence's keys begin
  int32_t* end;    // and where they end
  int tokens;
  bool
      leaves_long;  // sequences, of more than `tokens` queries, to another kernel: here without keys
};
struct EvenResults {
  const void* out;   // (batch, tokens, heads_q, head_dim_v) contiguous
  const float* lse;  // (batch, heads_q, tokens) contiguous
  int tokens;
  bool leaves_long;  // as above
};

// A tile of queries of a sequence, and what a kernel has to know of that sequence. It is one read: a
// chain of them, each of which waits for the one before, takes microseconds.
struct alignas(16) ListedTile {
  int q_begin, len_q, k_begin, len_k;
  int block;      // of queries
  int row;        // the number of the sequence
  int segment_q;  // rows to write
  int not_used;   // two reads of 16 bytes
};

// The tiles of each head of a varlen call.
struct TileList {
  int32_t* tile_counter;  // of the kernel that they are for: 0
  int32_t* num_tiles;
  ListedTile* tiles;  // those with most keys of each sequence first; room for most_tiles
  int most_tiles, queries_of_tile;
};

// The sequences of a varlen call with more than some number of queries, side by side as those of a
// call of their own. Their segments reach to the next one, so rows of the others are among those
// that do not count. Behind the last one come as many without rows as others were.
struct LongSequences {
  int32_t *cu_seqlens_q, *cu_seqlens_k;        // (batch + 1)
  int32_t *seqused_q, *seqused_k, *leftpad_k;  // (batch)
  int32_t* row;                                // (batch) the number that a sequence had
  TileList list;                               // without rows that do not count
};

// Deals out the sequences with more than `tokens` queries.
void run_deal_long(const FwdParams& params, int tokens, const LongSequences& to, Stream stream);
// Lists the tiles of all sequences, and of the rows before the first and behind the last one.
void run_list_tiles(const FwdParams& params, const TileList& to, Stream stream);

// Head dims are multiples of 8, and rows begin at multiples of 16 bytes.
void run_gather_queries(const FwdParams& params, const EvenQueries& even, Stream stream);
// Writes all of params.out and params.lse, but for the queries of sequences that are left to another
// kernel. Else queries that `even` had no room for, a sequence's first ones, become NaN.
void run_scatter_results(const FwdParams& params, const EvenResults& even, Stream stream);

}  // namespace flash_attn::cuda
