#include "aten/sequences.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "aten/parallel.h"

namespace flash_attn::aten {

using at::Tensor;

Sequences::Sequences(const Source& source)
    : varlen_(source.cu_seqlens.has_value()),
      batch_(varlen_ ? source.cu_seqlens->size(0) - 1 : source.tokens.size(0)),
      total_(varlen_ ? source.tokens.size(0) : source.tokens.size(0) * source.tokens.size(1)),
      max_length_(varlen_ ? std::min(source.max_seqlen, total_) : source.tokens.size(1)),
      device_(source.tokens.options().dtype(at::kLong)) {
  if (!varlen_ && !source.seqused && !source.leftpad) {
    host_.assign(batch_, {0, max_length_});
    return;
  }
  // These tensors may hold anything: whatever they hold, the places stay inside the tokens.
  Tensor start, length;
  if (varlen_) {
    const Tensor bounds = source.cu_seqlens->to(at::kLong).clamp(0, total_);
    start = bounds.narrow(0, 0, batch_);
    length = (bounds.narrow(0, 1, batch_) - start).clamp_min_(0);
  } else {
    start = at::zeros({batch_}, device_);
    length = at::full({batch_}, max_length_, device_);
  }
  if (source.seqused) length = at::minimum(length, source.seqused->to(at::kLong).clamp_min(0));
  if (source.leftpad) {
    const Tensor pad = at::minimum(length, source.leftpad->to(at::kLong).clamp_min(0));
    start = start + pad;
    length = length - pad;
  }
  if (host_reads(source.tokens)) {
    start = start.contiguous();
    length = length.contiguous();
    for (int64_t b = 0; b < batch_; ++b) {
      host_.push_back({start.const_data_ptr<int64_t>()[b], length.const_data_ptr<int64_t>()[b]});
    }
  } else {
    starts_ = varlen_ ? start : start + at::arange(batch_, device_) * max_length_;
    needed_ = length;
    lengths_ = length.clamp_max(max_length_);
  }
}

int64_t Sequences::longest() const {
  int64_t longest = 0;
  for (const Place& place : host_) longest = std::max(longest, place.length);
  return longest;
}

Tensor Sequences::lengths() const {
  return padded() ? lengths_ : at::full({batch_}, max_length_, device_);
}

Tensor Sequences::exists() const {
  return at::arange(max_length_, device_) < lengths().unsqueeze(-1);
}

Tensor Sequences::lost_tokens(const Tensor& batches) const {
  const Tensor token = at::arange(total_, device_);
  const Tensor sequence =
      at::bucketize(token, starts_, /*out_int32=*/false, /*right=*/true).sub_(1).clamp_min_(0);
  const Tensor position = token - starts_.index_select(0, sequence);
  const Tensor inside = position.ge(0).logical_and_(position.lt(needed_.index_select(0, sequence)));
  return position.ge(max_length_)
      .logical_or_(batches.index_select(0, sequence))
      .logical_and_(inside);
}

Tensor Sequences::padded_index() const {
  const Tensor position = at::arange(max_length_, device_);
  return at::where(exists(), starts_.unsqueeze(-1) + position, total_).flatten();
}

Tensor Sequences::load(const Tensor& x, Block batches) const {
  if (padded()) {
    const Tensor tokens = varlen_ ? x : x.flatten(0, 1);
    const Tensor index = padded_index();
    Tensor rows = tokens.index_select(0, index.clamp_max(total_ - 1));
    rows.masked_fill_(index.eq(total_).view({-1, 1, 1}), 0);
    return rows.view({batch_, max_length_, x.size(-2), x.size(-1)}).transpose(1, 2);
  }
  return view(x, batches);
}

Tensor Sequences::view(const Tensor& x, Block batches) const {
  if (batches.size() != 1) return x.transpose(1, 2);
  const auto [start, length] = host_[batches.first];
  const Tensor sequence = varlen_ ? x.unsqueeze(0) : narrowed(x, 0, batches);
  return narrowed(sequence, 1, {start, start + length}).transpose(1, 2);
}

Tensor Sequences::padded_like(const Tensor& x) const {
  return at::zeros({batch_, max_length_, x.size(-2), x.size(-1)}, x.options()).transpose(1, 2);
}

void Sequences::store_padded(const Tensor& rows, const Tensor& x) const {
  // Padding goes to one more row behind the tokens, which is then left out.
  Tensor tokens = at::empty({total_ + 1, x.size(-2), x.size(-1)}, x.options());
  Tensor kept = tokens.narrow(0, 0, total_).view(x.sizes());
  kept.copy_(x);
  tokens.index_copy_(0, padded_index(), rows.transpose(1, 2).flatten(0, 1));
  x.copy_(kept);
}

}  // namespace flash_attn::aten
