// A call cut into slices: on the CPU one sequence and one kv head with the query heads that share
// it, or several kv heads where sequences are short; elsewhere everything at once. Inside a slice all
// tensors are (batch, heads, length, d).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "aten/attention.h"
#include "aten/block_range.h"
#include "aten/score.h"
#include "aten/sequences.h"

namespace flash_attn::aten {

struct Slice {
  Block batches, heads, kv_heads;  // of the call; heads: query heads
  at::Tensor q, k, v;
  ScoreTerms terms;
  at::Tensor sink;        // (1, heads, 1, 1) in the dtype computed in, or undefined
  at::Tensor row_exists;  // bool (batch, 1, seqlen_q, 1) where queries are padded, else undefined
  bool on_gpu = false;    // in products and kernels (gpu_tiles.h), not in operations of ATen alone

  int64_t seqlen_q() const { return q.size(2); }
  int64_t seqlen_k() const { return k.size(2); }

  // Blocks of query rows. Heads that share a kv head share a tile: a block has fewer rows of each.
  int64_t count_row_blocks() const;
  Block row_block(int64_t index) const;
  // Blocks of keys, counted from 0.
  int64_t count_key_blocks() const;
  Block key_block(int64_t index) const;
  // Whether any query may not see some of these keys.
  bool may_hide(Block keys) const;
  // Some of `keys`: at least those that the rows see. On a GPU their edges are multiples of 64, as
  // products of other widths are slower.
  Block visible_keys(Block rows, Block keys) const;
  // The first block of keys of a range that is not empty. It ends early where tiles begin or cease
  // to need a mask, but on a GPU, whose kernels mask every tile.
  Block first_keys(Block rows, Block range) const;

  // Rows of a tensor of this slice as a tile (tile.h).
  at::Tensor tile(const at::Tensor& x, Block rows) const;
  // A tile as (batch, heads, rows, d).
  at::Tensor unpack_queries(const at::Tensor& tile) const;
  at::Tensor unpack_keys(const at::Tensor& tile) const;

  // Dropout's factors for a tile; undefined without dropout.
  at::Tensor dropout_factors(Block rows, Block keys) const;
  // Rows of q, times ScoreTerms::query_scale.
  at::Tensor scaled_queries(Block rows) const;
  // The sink's logit for each of the rows as a column, or undefined.
  at::Tensor sink_column(Block rows) const;
  // lse as a column in units of log 2. Rows that give no gradient (core/score_range.h), those
  // without keys among them: +inf, so that exp2(S − LSE) is 0 there.
  at::Tensor lse_column(const at::Tensor& lse, Block rows) const;
};

class Call {
 public:
  explicit Call(const Args& args);  // keeps a reference

  const Args& args;
  const Sequences queries, keys;
  const bool on_gpu;  // Slice::on_gpu

  // body(slice) for each slice, in parallel on the CPU if they are independent of each other.
  void for_slices(bool independent, const std::function<void(const Slice&)>& body) const;
  // body(slice, rows) for each block of query rows of each slice, in parallel on the CPU.
  void for_row_blocks(const std::function<void(const Slice&, Block)>& body) const;

  // Whether no two slices meet in attn_bias.
  bool owns_bias() const;

  Slice slice(int64_t index) const;
  int64_t count_slices() const;

 private:
  // What the lengths, the bias and dropout add to a slice's score terms.
  void add_terms(Slice& slice) const;

  int64_t slices_each() const;  // of a sequence

  bool one_slice_;
  int64_t kv_heads_each_;  // in a slice, but the last one of a sequence may have fewer
  Dropout dropout_;        // of all batches and heads
};

// How many kv heads a slice on the CPU has, where `batch` sequences have at most so many queries and
// keys. An operation costs microseconds whatever its size, so kv heads go through it together, as far
// as their tiles fit a core's cache and each core still has a slice.
int64_t kv_heads_of_slice(const Args& args, int64_t batch, int64_t seqlen_q, int64_t seqlen_k);

// A slice but for its q, k and v, and with those score terms that depend on no length.
Slice start_slice(const Args& args, Block batches, Block kv_heads);

// lse (batch, heads, seqlen) or (heads, total) as (batch, seqlen, heads, 1) or (total, heads, 1).
at::Tensor lse_tokens(const at::Tensor& lse);

// A view of the part of x, broadcastable to (batch, heads_q, …), that belongs to a slice; always 4
// dimensions.
at::Tensor broadcast_part(const at::Tensor& x, const Slice& slice);

}  // namespace flash_attn::aten
