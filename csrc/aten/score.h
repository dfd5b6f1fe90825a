// The scores of a tile, the same for forward, backward and decode:
//   S = softmax_scale · Q Kᵀ → softcap → + bias, ALiBi → mask
//
// Scores are kept in units of log 2 (S · log2 e), so that softmax needs exp2. On a CPU that takes
// half the time of exp, and far less where results are denormal (docs/kernels/aten.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <vector>

#include "aten/block_range.h"
#include "aten/dropout.h"

namespace flash_attn::aten {

// Sinks, in units of log 2, in the range that core/score_range.h gives them, in place.
void limit_sinks(at::Tensor logits);

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

struct ScoreTile {
  at::Tensor s;       // scores · log2 e, a tile (tile.h)
  at::Tensor masked;  // bool, shaped like s; undefined unless careful
  at::Tensor tanh;    // tanh(S / softcap), shaped like s; undefined without softcap
  // (heads) the largest softmax_scale · q·k that is seen; undefined unless
  // ScoreTerms::wants_max_logits
  at::Tensor max_logits;
  // Something is masked, and NaN or inf may be in what is multiplied with this tile.
  bool careful = false;

  // P = exp(S − LSE) in place of s; lse: Slice::lse_column.
  at::Tensor probabilities(const at::Tensor& lse) const;
  // NaN · 0 = NaN: what was computed from a NaN behind the mask becomes `value` again.
  void remask(at::Tensor x, double value) const;
  // acc += x b and acc += xᵀ b for an x shaped like s and zero at `masked`. An undefined acc of the
  // first becomes the product.
  void add_product(at::Tensor& acc, const at::Tensor& x, const at::Tensor& b) const;
  void add_transposed_product(at::Tensor acc, const at::Tensor& x, const at::Tensor& b) const;
};

// What turns the product of q and k rows into scores, for some batches and heads of a call.
struct ScoreTerms {
  int64_t batch, heads;  // query heads
  double softmax_scale;
  double softcap = 0;
  bool wants_max_logits = false;
  Band band;

  // Undefined where the call has no such term.
  at::Tensor band_offset;   // int64 (batch, 1, 1, 1), where only the device knows the lengths
  at::Tensor query_exists;  // bool (batch, 1, seqlen_q, 1)
  at::Tensor key_exists;    // bool (batch, 1, 1, seqlen_k)
  at::Tensor bias;          // bool or float, (batch, heads, seqlen_q, seqlen_k), each may be 1
  at::Tensor alibi_slopes;  // fp32 (1 or batch, heads, 1, 1)
  Dropout dropout;
  DropoutParams dropout_params;  // the same for a GPU's kernels

  // Some of `keys`: at least those that a block of rows sees.
  Block visible_keys(Block rows, Block keys) const;
  // The keys of `visible` that all of the rows see by the band alone.
  Block full_keys(Block rows, Block visible) const;

  // Whether scores end at core/score_range.h's border.
  bool bounded() const;
  // What q is multiplied with before the product with k.
  double query_scale() const;
  // `operands`: all tensors that are multiplied with this tile or enter it, for ScoreTile::careful.
  ScoreTile scores(const at::Tensor& scaled_q, const at::Tensor& k, Block rows, Block keys,
                   std::initializer_list<at::Tensor> operands) const;
  // ScoreTile::max_logits of no keys: -inf. Undefined if not wanted.
  at::Tensor no_max_logits(at::TensorOptions options) const;
  // The part of bias, or of a tensor shaped like it, that belongs to a tile; size 1 stays 1.
  static at::Tensor bias_tile(const at::Tensor& bias, Block rows, Block keys);

 private:
  // How many steps each key lies beyond (the query's diagonal + step), negative before it:
  // (1 or batch, 1, rows, keys) or (rows, keys).
  at::Tensor steps_beyond(int64_t step, Block rows, Block keys, at::TensorOptions options) const;
  // Tensors that broadcast to (batch, heads, rows, keys), +inf where a key is seen and −inf where
  // not. On a CPU min(S, bound) masks several times as fast as a bool mask and masked_fill.
  std::vector<at::Tensor> bounds(Block rows, Block keys, at::TensorOptions options) const;
};

}  // namespace flash_attn::aten
