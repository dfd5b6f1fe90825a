#include "aten/score.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "aten/tile.h"
#include "core/score_range.h"

namespace flash_attn::aten {

using at::Tensor;

void limit_sinks(Tensor logits) {
  logits.clamp_max_(kMaxSink * kLog2E).masked_fill_(logits.lt(-kMaxSink * kLog2E), -kInf);
}

bool ScoreTerms::bounded() const {
  return softcap > 0 || bias.defined() || alibi_slopes.defined() || dropout ||
         dropout_params.rng_state != nullptr;
}

Block ScoreTerms::visible_keys(Block rows, Block keys) const {
  return band_offset.defined() ? keys : keys & band.visible_keys(rows);
}

Block ScoreTerms::full_keys(Block rows, Block visible) const {
  return band_offset.defined() ? visible : visible & band.full_keys(rows);
}

double ScoreTerms::query_scale() const {
  return softcap > 0 ? softmax_scale / softcap : softmax_scale * kLog2E;
}

ScoreTile ScoreTerms::scores(const Tensor& scaled_q, const Tensor& k, Block rows, Block keys,
                             std::initializer_list<Tensor> operands) const {
  ScoreTile tile;
  tile.s = product(scaled_q, k.transpose(-2, -1));  // S = scale · Q Kᵀ
  const Tensor logits = wants_max_logits ? tile.s * (softcap > 0 ? softcap : kLn2) : Tensor();
  if (softcap > 0) {
    tile.tanh = tile.s.tanh_();
    tile.s = tile.tanh * (softcap * kLog2E);  // S = softcap · tanh(S / softcap)
  }
  Tensor s = unpack(tile.s, batch, heads);
  const at::TensorOptions options = s.options();
  const bool additive_bias = bias.defined() && bias.scalar_type() != at::kBool;
  if (additive_bias) {
    s.add_(bias_tile(bias, rows, keys).to(options).clamp_max(kMaxScore), kLog2E);  // S += bias
  }
  if (alibi_slopes.defined()) {  // S −= slope · |key − diagonal|
    const Tensor distance = steps_beyond(0, rows, keys, options).abs_();
    s.addcmul_(alibi_slopes.to(options), distance, -kLog2E);
  }
  const std::vector<Tensor> bounds = this->bounds(rows, keys, options);
  for (const Tensor& bound : bounds) at::minimum_out(s, s, bound);  // S = −inf where masked

  tile.careful = (!bounds.empty() || additive_bias) && !known_finite(operands);
  if (tile.careful) {
    // min(NaN, −inf) is NaN, and so is NaN − inf with a bias that hides a key.
    Tensor masked;
    if (additive_bias) {
      masked = bias_tile(bias, rows, keys).to(options).lt(-kMaxScore);
    }
    for (const Tensor& bound : bounds) {
      masked = masked.defined() ? masked.logical_or(bound.lt(0)) : bound.lt(0);
    }
    tile.masked = masked.expand_as(s).reshape(tile.s.sizes());
    tile.remask(tile.s, -kInf);
    if (tile.tanh.defined()) tile.remask(tile.tanh, 0);
  }
  if (wants_max_logits) {
    const Tensor seen = bounded() ? tile.s.ge(-kMaxScore * kLog2E) : tile.s.gt(-kInf);  // not NaN
    tile.max_logits =
        unpack(logits.masked_fill(seen.logical_not(), -kInf), batch, heads).amax({0, 2, 3});
  }
  return tile;
}

Tensor ScoreTerms::no_max_logits(at::TensorOptions options) const {
  return wants_max_logits ? at::full({heads}, -kInf, options) : Tensor();
}

Tensor ScoreTerms::steps_beyond(int64_t step, Block rows, Block keys,
                                at::TensorOptions options) const {
  // Counted from the tile's corner, and the corner's distance in integers: however long the
  // sequences, what is near stays exact in fp32.
  const int64_t corner = keys.first - rows.first - band.offset - step;
  const Tensor row = at::arange(rows.size(), options).unsqueeze(-1);
  const Tensor key = at::arange(keys.size(), options);
  if (!band_offset.defined()) return key + static_cast<double>(corner) - row;
  return key + (corner - band_offset).to(options) - row;
}

std::vector<Tensor> ScoreTerms::bounds(Block rows, Block keys, at::TensorOptions options) const {
  std::vector<Tensor> bounds;
  if (band.limited() && (band_offset.defined() || !band.full_keys(rows).contains(keys))) {
    // The half keeps 0 away, whose product with inf is NaN.
    if (band.right < Band::kNoLimit) {
      bounds.push_back(steps_beyond(band.right, rows, keys, options).sub_(0.5).mul_(-kInf));
    }
    if (band.left < Band::kNoLimit) {
      bounds.push_back(steps_beyond(-band.left, rows, keys, options).add_(0.5).mul_(kInf));
    }
  }
  const auto bound_where = [&](const Tensor& seen) {
    bounds.push_back(at::where(seen, kInf, -kInf).to(options));
  };
  // Rows that only pad a batch must not see keys: one with a NaN would reach dK and dV through
  // them.
  if (query_exists.defined()) bound_where(query_exists.narrow(-2, rows.first, rows.size()));
  if (key_exists.defined()) bound_where(key_exists.narrow(-1, keys.first, keys.size()));
  if (bias.defined() && bias.scalar_type() == at::kBool) bound_where(bias_tile(bias, rows, keys));
  return bounds;
}

Tensor ScoreTerms::bias_tile(const Tensor& bias, Block rows, Block keys) {
  Tensor part = bias;
  if (bias.size(2) > 1) part = part.narrow(2, rows.first, rows.size());
  if (bias.size(3) > 1) part = part.narrow(3, keys.first, keys.size());
  return part;
}

Tensor ScoreTile::probabilities(const Tensor& lse) const {
  Tensor p = s;
  p.sub_(lse).exp2_();
  remask(p, 0);
  return p;
}

void ScoreTile::remask(Tensor x, double value) const {
  if (careful) x.masked_fill_(masked, value);
}

void ScoreTile::add_product(Tensor& acc, const Tensor& x, const Tensor& b) const {
  if (!acc.defined() && !careful) {
    acc = product(x, b);
    return;
  }
  if (!acc.defined()) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = b.size(-1);
    acc = at::zeros(sizes, x.options());
  }
  careful ? add_masked_product(acc, x, b, masked) : aten::add_product(acc, x, b);
}

void ScoreTile::add_transposed_product(Tensor acc, const Tensor& x, const Tensor& b) const {
  const Tensor x_t = x.transpose(-2, -1);
  careful ? add_masked_product(acc, x_t, b, masked.transpose(-2, -1))
          : aten::add_product(acc, x_t, b);
}

}  // namespace flash_attn::aten
