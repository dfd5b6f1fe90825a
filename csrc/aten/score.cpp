#include "aten/score.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <limits>

#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

// masked := masked or more, where undefined stands for "nothing".
void mask_also(Tensor& masked, const Tensor& more) {
  masked = masked.defined() ? masked.logical_or(more) : more;
}

}  // namespace

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
  tile.s = product(scaled_q, k.transpose(-2, -1));           // S = scale · Q Kᵀ
  if (softcap > 0) {
    tile.tanh = tile.s.tanh_();
    tile.s = tile.tanh * (softcap * kLog2E);                 // S = softcap · tanh(S / softcap)
  }
  Tensor s = unpack(tile.s, batch, heads);
  if (bias.defined() && bias.scalar_type() != at::kBool) {   // S += bias
    s.add_(bias_tile(bias, rows, keys).to(s.scalar_type()), kLog2E);
  }
  if (alibi_slopes.defined()) {                              // S -= slope · |diagonal − key|
    s.addcmul_(alibi_slopes.to(s.scalar_type()),
               diagonal_distance(rows, keys, s.scalar_type()), -kLog2E);
  }
  const bool can_mask = key_exists.defined() || bias.defined() || crosses_band(rows, keys);
  tile.careful = can_mask && !known_finite(operands);
  const Tensor masked = mask(rows, keys, s.device(), tile.careful);
  if (masked.defined()) {                                    // S = −inf where masked
    s.masked_fill_(masked, -std::numeric_limits<double>::infinity());
  }
  if (tile.careful) {
    tile.masked = masked.expand_as(s).reshape(tile.s.sizes());
    if (tile.tanh.defined()) tile.remask(tile.tanh, 0);
  }
  return tile;
}

bool ScoreTerms::crosses_band(Block rows, Block keys) const {
  return band.limited() && (band_offset.defined() || !band.full_keys(rows).contains(keys));
}

Tensor ScoreTerms::diagonal_distance(Block rows, Block keys, at::ScalarType dtype) const {
  const auto int64 = at::TensorOptions(at::kLong).device(alibi_slopes.device());
  Tensor diagonal = at::arange(rows.first + band.offset, rows.last + band.offset, int64);
  diagonal = diagonal.unsqueeze(-1);
  if (band_offset.defined()) diagonal = diagonal + band_offset;
  return (diagonal - at::arange(keys.first, keys.last, int64)).abs_().to(dtype);
}

Tensor ScoreTerms::bias_tile(const Tensor& bias, Block rows, Block keys) {
  Tensor part = bias;
  if (bias.size(2) > 1) part = part.narrow(2, rows.first, rows.size());
  if (bias.size(3) > 1) part = part.narrow(3, keys.first, keys.size());
  return part;
}

Tensor ScoreTerms::mask(Block rows, Block keys, at::Device device, bool careful) const {
  Tensor masked;
  if (crosses_band(rows, keys)) {
    // steps = key − (query + offset): the band is −left <= steps <= right.
    const auto int64 = at::TensorOptions(at::kLong).device(device);
    const Tensor diagonal = at::arange(rows.first + band.offset, rows.last + band.offset, int64);
    Tensor steps = at::arange(keys.first, keys.last, int64) - diagonal.unsqueeze(-1);
    if (band_offset.defined()) steps = steps - band_offset;
    if (band.right < Band::kNoLimit) mask_also(masked, steps.gt(band.right));
    if (band.left < Band::kNoLimit) mask_also(masked, steps.lt(-band.left));
  }
  if (key_exists.defined()) {
    mask_also(masked, key_exists.narrow(-1, keys.first, keys.size()).logical_not());
  }
  if (bias.defined()) {
    const Tensor part = bias_tile(bias, rows, keys);
    if (part.scalar_type() == at::kBool) {
      mask_also(masked, part.logical_not());
    } else if (careful) {
      mask_also(masked, part.eq(-std::numeric_limits<double>::infinity()));
    }
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
  careful ? add_masked_product(acc, x_t, b, masked.transpose(-2, -1)) : aten::add_product(acc, x_t, b);
}

}  // namespace flash_attn::aten
