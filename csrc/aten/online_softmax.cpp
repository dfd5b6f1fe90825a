#include "aten/online_softmax.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "aten/score.h"
#include "core/score_range.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

// row_max of no keys.
double lowest_max(const Tensor& like, bool bounded) {
  if (bounded) return -kMaxScore * kLog2E;
  return like.scalar_type() == at::kDouble ? std::numeric_limits<double>::lowest()
                                           : std::numeric_limits<float>::lowest();
}

}  // namespace

OnlineSoftmax OnlineSoftmax::start(const Tensor& q, int64_t head_dim_v, const Tensor& sink,
                                   bool bounded) {
  const double lowest = lowest_max(q, bounded);
  std::vector<int64_t> column = q.sizes().vec(), values = column;
  column.back() = 1;
  values.back() = head_dim_v;

  OnlineSoftmax state;
  state.o = at::zeros(values, q.options());
  if (sink.defined()) {
    const Tensor logits = sink * kLog2E;
    limit_sinks(logits);
    const Tensor logit = logits.expand(column);
    state.row_max = logit.clamp_min(lowest);
    state.row_sum = (logit - state.row_max).exp2_();
    state.score_max = at::full(column, lowest, q.options());
  } else {
    state.row_max = at::full(column, lowest, q.options());
    state.row_sum = at::zeros(column, q.options());
  }
  return state;
}

Tensor OnlineSoftmax::step(Tensor s, bool bounded) {
  const Tensor largest = s.amax(-1, /*keepdim=*/true);
  if (!row_max.defined()) {  // nothing came before
    row_max = largest.clamp_min(lowest_max(s, bounded));
    s.sub_(row_max).exp2_();
    row_sum = s.sum(-1, /*keepdim=*/true);
    return s;
  }
  const Tensor new_max = at::maximum(row_max, largest);     // m' = max(m, max S)
  const Tensor rescale = row_max.sub_(new_max).exp2_();     // α  = 2^(m − m')
  s.sub_(new_max).exp2_();                                  // P  = 2^(S − m')
  row_sum.mul_(rescale).add_(s.sum(-1, /*keepdim=*/true));  // l  = α l + Σ P
  o.mul_(rescale);                                          // o  = α o
  row_max = new_max;
  if (score_max.defined()) score_max = at::maximum(score_max, largest);
  return s;
}

void OnlineSoftmax::merge(const OnlineSoftmax& other) {
  const Tensor new_max = at::maximum(row_max, other.row_max);
  const Tensor ours = (row_max - new_max).exp2_(), theirs = (other.row_max - new_max).exp2_();
  row_sum = row_sum * ours + other.row_sum * theirs;
  o = o * ours + other.o * theirs;
  row_max = new_max;
  raise_max_logits(other.max_logits);
}

void OnlineSoftmax::raise_max_logits(const Tensor& others) {
  if (others.defined()) max_logits = at::maximum(max_logits, others);
}

Tensor OnlineSoftmax::normalized() const { return o / row_sum.masked_fill(row_sum.eq(0), 1); }

Tensor OnlineSoftmax::lse() const { return row_sum.log().add_(row_max, kLn2); }

}  // namespace flash_attn::aten
