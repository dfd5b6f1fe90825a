// Where the sequences of a call lie in its tensors: dense or varlen, with lengths that the host may
// read or may not.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "aten/tile.h"

namespace flash_attn::aten {

// One side of a call, queries or keys.
class Sequences {
 public:
  struct Source {
    at::Tensor tokens;  // (batch, seqlen, heads, d), or (total, heads, d) with cu_seqlens
    std::optional<at::Tensor> cu_seqlens, seqused, leftpad;
    int64_t max_seqlen;
  };
  explicit Sequences(const Source& source);

  int64_t batch() const { return batch_; }
  // The longest sequence there can be.
  int64_t max_length() const { return max_length_; }
  // The longest one there is, not padded().
  int64_t longest() const;
  // Whether lengths are on the device only; then the slices hold sequences padded to max_length().
  bool padded() const { return lengths_.defined(); }
  at::Tensor lengths() const;  // int64 (batch)
  at::Tensor exists() const;   // bool (batch, max_length): before the sequence's end

  // Some batches of x (batch, seqlen, heads, d) or (total, heads, d) as (batches, heads, length,
  // d): a view, or where padded() a copy with zeros behind the sequences' ends.
  at::Tensor load(const at::Tensor& x, Block batches) const;
  // The same without a copy, not padded().
  at::Tensor view(const at::Tensor& x, Block batches) const;

  // Where padded(): bool (batch), a sequence is longer than max_length(), which the host could not
  // know; and bool (total), of the flattened tokens those that lie behind max_length() in theirs,
  // or in one of `batches`, bool (batch).
  at::Tensor too_long() const { return needed_.gt(max_length_); }
  at::Tensor lost_tokens(const at::Tensor& batches) const;

  // Padded rows as load makes them, for a result, and what takes them to their places in x.
  at::Tensor padded_like(const at::Tensor& x) const;
  void store_padded(const at::Tensor& rows, const at::Tensor& x) const;

 private:
  struct Place {
    int64_t start, length;
  };
  // int64 (batch · max_length): the row of the flattened tokens, total_ for padding.
  at::Tensor padded_index() const;

  bool varlen_;
  int64_t batch_, total_, max_length_;
  at::TensorOptions device_;  // int64 on the tokens' device
  std::vector<Place> host_;   // start in x[b] (dense) or in x (varlen); empty if padded()
  // int64 (batch), where padded(): start in the flattened tokens; length, cut to max_length_ and
  // not.
  at::Tensor starts_, lengths_, needed_;
};

// A tensor that slices write into.
class Result {
 public:
  Result(const Sequences& sequences, const at::Tensor& tokens)
      : sequences_(sequences),
        tokens_(tokens),
        padded_(sequences.padded() ? sequences.padded_like(tokens) : at::Tensor()) {}

  // Some batches and heads as (batches, heads, length, d), to write to.
  at::Tensor part(Block batches, Block heads) const {
    const at::Tensor rows = padded_.defined() ? padded_ : sequences_.view(tokens_, batches);
    return narrowed(rows, 1, heads);
  }
  // To be called once, when all parts are written.
  void finish() const {
    if (padded_.defined()) sequences_.store_padded(padded_, tokens_);
  }

 private:
  const Sequences& sequences_;
  at::Tensor tokens_, padded_;
};

}  // namespace flash_attn::aten
