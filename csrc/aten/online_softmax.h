// Softmax over keys that arrive in pieces. The state of a block of query rows is (o, l, m), what
// the keys so far add up to:
//   m = max S      l = Σ 2^(S − m)      o = Σ 2^(S − m) v
// The states of two sets of keys merge into that of their union, in any order. S is in units of
// log 2 (score.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn::aten {

struct OnlineSoftmax {
  // These three are undefined before the first step(), unless there was start().
  at::Tensor o;        // (rows, d_v) or (matrices, rows, d_v), not normalised
  at::Tensor row_sum;  // l, (…, rows, 1)
  // m, (…, rows, 1). Without keys a finite number, so that S − m is never −inf + inf: the lowest,
  // or where scores are bounded the border, which hides what is below (core/score_range.h).
  at::Tensor row_max;
  at::Tensor max_logits;  // ScoreTile's, of all keys; or undefined
  // The largest score, where row_max may be a sink's: for probabilities, of step() alone.
  at::Tensor score_max;

  // No keys. A sink (…, rows, 1), its logits in natural units, is a key without a value.
  static OnlineSoftmax start(const at::Tensor& q, int64_t head_dim_v, const at::Tensor& sink,
                             bool bounded);

  // Takes the next scores in: brings what came before to the new m, adds P = 2^(s − m) to l and
  // returns it (in place of s). The caller then adds P V to o. bounded: as in start().
  at::Tensor step(at::Tensor s, bool bounded);
  void raise_max_logits(const at::Tensor& others);  // (heads), or undefined
  void merge(const OnlineSoftmax& other);

  // What the largest of a row's P is divided by: row_max where no sink is in it.
  const at::Tensor& largest_score() const { return score_max.defined() ? score_max : row_max; }
  at::Tensor normalized() const;  // o / l; rows without keys: 0
  at::Tensor lse() const;         // m + log l in natural units; rows without keys: −inf
};

}  // namespace flash_attn::aten
