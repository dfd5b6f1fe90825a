#include "mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "../core/score_range.h"
#include "argument_checks.h"
#include "checks.h"

namespace flash_attn {
namespace {

using at::Tensor;
using c10::SymInt;

void check_mask_form(const char* name, const OptTensor& tensor, const std::vector<SymInt>& full,
                     const AttnArgs& args) {
  check_like(name, *tensor, args.q);
  bool fits = tensor->dim() == static_cast<int64_t>(full.size());
  const size_t broadcast = full.size() == 4 ? 2 : 1;  // dimensions that may be 1
  for (size_t d = 0; fits && d < full.size(); ++d) {
    fits = tensor->sym_size(d) == full[d] || (d < broadcast && tensor->sym_size(d) == 1);
  }
  TORCH_CHECK(fits, "flash_attn: ", name, ": must have shape (", c10::Join(", ", full),
              "), where the first may be 1", broadcast == 2 ? ", and the second" : "", ", got ",
              tensor->sym_sizes());
}

// bool (batch or 1, heads_q or 1, seqlen_q, seqlen_k) of intervals: the labels from `first` to
// `end`.
Tensor inside(const Tensor& labels, const Tensor& rows, int64_t first) {
  return labels.ge(rows.narrow(-1, first, 1))
      .logical_and_(labels.lt(rows.narrow(-1, first + 1, 1)));
}

// What mask_rows says, as if all tiles were mixed; seen: a tensor of the result's form.
Tensor seen_by_rows(const AttnArgs& args, const Tensor& seen) {
  if (!args.mask_rows) return at::zeros_like(seen, at::kBool);
  const Tensor& rows = *args.mask_rows;
  const int64_t seqlen_k = seen.size(-1);
  if (rows.scalar_type() == at::kByte) {
    const Tensor shifts = at::arange(8, rows.options());
    const Tensor bits = rows.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and(1);
    return bits.flatten(-2).narrow(-1, 0, seqlen_k).to(at::kBool);
  }
  const Tensor labels = args.mask_labels ? args.mask_labels->unsqueeze(1).unsqueeze(1)
                                         : at::arange(seqlen_k, rows.options());
  return inside(labels, rows, 0).logical_or_(inside(labels, rows, 2));
}

}  // namespace

void check_mask(const AttnArgs& args, const SymInt& batch) {
  if (!args.mask_tiles) {
    TORCH_CHECK(
        !args.mask_rows && !args.mask_labels,
        "flash_attn: mask_tiles: expected a tensor with mask_rows or mask_labels, got none");
    return;
  }
  TORCH_CHECK(!args.attn_bias,
              "flash_attn: attn_bias: expected none with mask_tiles, got a tensor");
  TORCH_CHECK(!args.is_varlen(),
              "flash_attn: mask_tiles: expected none with cu_seqlens_q, got a tensor");
  TORCH_CHECK(args.mask_tiles->scalar_type() == at::kByte,
              "flash_attn: mask_tiles: expected dtype uint8, got ", args.mask_tiles->scalar_type());
  const SymInt heads = args.q.sym_size(-2);
  const auto tiles = [](const SymInt& length) { return (length + kMaskTile - 1) / kMaskTile; };
  const SymInt key_tiles = tiles(args.max_seqlen_k);
  check_mask_form("mask_tiles", args.mask_tiles,
                  {batch, heads, tiles(args.max_seqlen_q), key_tiles}, args);
  if (args.mask_rows) {
    const auto dtype = args.mask_rows->scalar_type();
    TORCH_CHECK(dtype == at::kInt || dtype == at::kByte,
                "flash_attn: mask_rows: expected dtype int32 (intervals) or uint8 (bits), got ",
                dtype);
    check_mask_form(
        "mask_rows", args.mask_rows,
        {batch, heads, args.max_seqlen_q, dtype == at::kInt ? SymInt(4) : key_tiles * 8}, args);
  }
  if (!args.mask_labels) return;
  TORCH_CHECK(args.mask_rows && args.mask_rows->scalar_type() == at::kInt,
              "flash_attn: mask_rows: expected intervals with mask_labels, got none");
  TORCH_CHECK(args.mask_labels->scalar_type() == at::kInt,
              "flash_attn: mask_labels: expected dtype int32, got ",
              args.mask_labels->scalar_type());
  check_mask_form("mask_labels", args.mask_labels, {batch, args.max_seqlen_k}, args);
}

AttnArgs with_bool_mask(AttnArgs args) {
  if (!args.mask_tiles) return args;
  const Tensor states = args.mask_tiles->repeat_interleave(kMaskTile, 2)
                            .narrow(2, 0, args.q.size(1))
                            .repeat_interleave(kMaskTile, 3)
                            .narrow(3, 0, args.k.size(1));
  args.attn_bias = states.eq(kTileSeen).logical_or(
      states.eq(kTileMixed).logical_and(seen_by_rows(args, states)));
  args.mask_tiles = args.mask_rows = args.mask_labels = std::nullopt;
  return args;
}

Tensor seen_with_bias(const Tensor& bias) {
  Tensor numbers = bias;  // each once, however often an expanded bias has it
  for (int64_t d = 0; d < bias.dim(); ++d) {
    if (bias.stride(d) == 0 && bias.size(d) > 1) numbers = numbers.narrow(d, 0, 1);
  }
  // As a tensor, since a scalar would become a number of the bias's dtype, of fp16 an infinity.
  const Tensor least = at::full({1}, -kMaxScore, bias.options().dtype(at::kFloat));
  return numbers.ge(least).view(numbers.sizes()).expand(bias.sizes());
}

TileMask tile_mask_params(const AttnArgs& args) {
  const auto bytes = [](const Tensor& tensor, int64_t dim) {
    return tensor.size(dim) == 1 ? 0 : tensor.stride(dim) * tensor.element_size();
  };
  const Tensor& tiles = *args.mask_tiles;
  TileMask mask = {.tiles = tiles.const_data_ptr<uint8_t>(),
                   .batch_stride = bytes(tiles, 0),
                   .head_stride = bytes(tiles, 1),
                   .query_tiles = static_cast<int>(tiles.size(2)),
                   .key_tiles = static_cast<int>(tiles.size(3))};
  if (args.mask_rows) {
    mask.rows = args.mask_rows->const_data_ptr();
    mask.rows_batch_stride = bytes(*args.mask_rows, 0);
    mask.rows_head_stride = bytes(*args.mask_rows, 1);
    mask.has_bits = args.mask_rows->scalar_type() == at::kByte;
  }
  if (args.mask_labels) {
    const Tensor& labels = *args.mask_labels;
    mask.labels = labels.const_data_ptr<int32_t>();
    mask.labels_batch_stride = labels.size(0) == 1 ? 0 : labels.stride(0);
  }
  return mask;
}

}  // namespace flash_attn
