#include "aten/score.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();

Block ScoreTerms::visible_keys(Block rows, int64_t seqlen_k) const {
  const Block all = {0, seqlen_k};
  return band_offset.defined() ? all : all & band.visible_keys(rows);
}

Block ScoreTerms::visible_rows(Block keys, int64_t seqlen_q) const {
  const Block all = {0, seqlen_q};
  return band_offset.defined() ? all : all & band.visible_rows(keys);
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
  if (softcap > 0) {
    tile.tanh = tile.s.tanh_();
    tile.s = tile.tanh * (softcap * kLog2E);  // S = softcap · tanh(S / softcap)
  }
  Tensor s = unpack(tile.s, batch, heads);
  if (bias.defined() && bias.scalar_type() != at::kBool) {  // S += bias
    s.add_(bias_tile(bias, rows, keys).to(s.scalar_type()), kLog2E);
  }
  if (alibi_slopes.defined()) {  // S -= slope · |diagonal − key|
    s.addcmul_(alibi_slopes.to(s.scalar_type()),
               steps_from_diagonal(rows, keys, s.options()).abs_(), -kLog2E);
  }
  const Tensor masked = mask(rows, keys);  // S = −inf where masked
  if (masked.defined()) s.masked_fill_(masked, -kInf);
  const Tensor bound = band_bound(rows, keys, s.options());
  if (bound.defined()) at::minimum_out(s, s, bound);

  const bool may_mask = masked.defined() || bound.defined() || bias.defined();
  tile.careful = may_mask && !known_finite(operands);
  if (tile.careful) {
    // The minimum of NaN and −inf is NaN, and so is NaN − inf with a bias of −inf.
    Tensor all = at::zeros_like(s, at::kBool);
    if (masked.defined()) all.logical_or_(masked);
    if (bound.defined()) all.logical_or_(bound.lt(0));
    if (bias.defined() && bias.scalar_type() != at::kBool) {
      all.logical_or_(bias_tile(bias, rows, keys).eq(-kInf));
    }
    tile.masked = all.view(tile.s.sizes());
    tile.remask(tile.s, -kInf);
    if (tile.tanh.defined()) tile.remask(tile.tanh, 0);
  }
  return tile;
}

Tensor ScoreTerms::steps_from_diagonal(Block rows, Block keys, at::TensorOptions options) const {
  // Counted from the tile's corner: whatever the lengths, small distances stay exact in fp32.
  const Tensor row = at::arange(rows.size(), options).unsqueeze(-1);
  Tensor first = at::arange(keys.size(), options) + double(keys.first - rows.first - band.offset);
  if (band_offset.defined()) first = first - band_offset;
  return first - row;
}

Tensor ScoreTerms::band_bound(Block rows, Block keys, at::TensorOptions options) const {
  if (!band.limited()) return {};
  if (!band_offset.defined() && band.full_keys(rows).contains(keys)) return {};
  const Tensor steps = steps_from_diagonal(rows, keys, options);
  Tensor inside;  // > 0 inside of the band, < 0 outside, never 0
  if (band.right < Band::kNoLimit) inside = band.right + 0.5 - steps;
  if (band.left < Band::kNoLimit) {
    const Tensor right_of_start = steps + (band.left + 0.5);
    inside = inside.defined() ? at::minimum(inside, right_of_start) : right_of_start;
  }
  return inside.mul_(kInf);
}

Tensor ScoreTerms::bias_tile(const Tensor& bias, Block rows, Block keys) {
  Tensor part = bias;
  if (bias.size(2) > 1) part = part.narrow(2, rows.first, rows.size());
  if (bias.size(3) > 1) part = part.narrow(3, keys.first, keys.size());
  return part;
}

Tensor ScoreTerms::mask(Block rows, Block keys) const {
  Tensor masked;
  if (key_exists.defined()) masked = key_exists.narrow(-1, keys.first, keys.size()).logical_not();
  if (bias.defined() && bias.scalar_type() == at::kBool) {
    const Tensor dropped = bias_tile(bias, rows, keys).logical_not();
    masked = masked.defined() ? masked.logical_or(dropped) : dropped;
  }
  return masked;
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

void ScoreTile::add_product(Tensor acc, const Tensor& x, const Tensor& b) const {
  careful ? add_masked_product(acc, x, b, masked) : aten::add_product(acc, x, b);
}

void ScoreTile::add_transposed_product(Tensor acc, const Tensor& x, const Tensor& b) const {
  const Tensor x_t = x.transpose(-2, -1);
  careful ? add_masked_product(acc, x_t, b, masked.transpose(-2, -1))
          : aten::add_product(acc, x_t, b);
}

}  // namespace flash_attn::aten
