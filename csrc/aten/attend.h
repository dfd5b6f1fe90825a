// One block of query rows against some keys: forward's main loop (fwd.cpp), which decode runs too.
#pragma once

#include <functional>
#include <tuple>

#include "aten/block_range.h"
#include "aten/online_softmax.h"
#include "aten/slice.h"

namespace flash_attn::aten {

// Where attend reads K and V: some rows of a slice's keys as tiles.
struct KeyTiles {
  int64_t head_dim_v;
  std::function<std::tuple<at::Tensor, at::Tensor>(Block keys)> load;
};

// The softmax state of the rows after those of `keys` that they see. sink: Slice::sink_column, or
// undefined.
OnlineSoftmax attend(const Slice& slice, const KeyTiles& tiles, Block rows, Block keys,
                     const at::Tensor& sink);

// out like q with v's head dim, and lse: zeros and −inf, as what no sequence covers stays as it is,
// unless all rows will be written.
std::tuple<at::Tensor, at::Tensor> make_outputs(const Args& args, bool all_written);

// max_logits (heads_q) of a call, all -inf, or empty if not wanted; and what a block of rows adds
// to them.
at::Tensor make_max_logits(const Args& args);
void write_max_logits(const at::Tensor& max_logits, const Slice& slice, const OnlineSoftmax& state);

// O = o / l and LSE = m + log l of a block of rows to their places.
void write_rows(const Result& out, const Result& lse, const Slice& slice, Block rows,
                const OnlineSoftmax& state);

}  // namespace flash_attn::aten
