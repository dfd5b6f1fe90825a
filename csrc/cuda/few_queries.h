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
};
struct EvenResults {
  const void* out;   // (batch, tokens, heads_q, head_dim_v) contiguous
  const float* lse;  // (batch, heads_q, tokens) contiguous
  int tokens;
};

// Head dims are multiples of 8, and rows begin at multiples of 16 bytes.
void run_gather_queries(const FwdParams& params, const EvenQueries& even, Stream stream);
// Writes all of params.out and params.lse. Queries that `even` had no room for, a sequence's first
// ones, become NaN.
void run_scatter_results(const FwdParams& params, const EvenResults& even, Stream stream);

}  // namespace flash_attn::cuda
