// fwd.cpp's loop on a GPU: what it has in several operations of ATen is one kernel here.
//
//   for each block of rows i
//     for each block of keys j that rows i see
//       S = Q_i K_jᵀ                                  a product
//       m, l, P = …                                   run_softmax_step: scale to dropout(P)
//       O += P V_j                                    a product, and run_restore
//     O_i = O / l,  LSE_i = m + log l                 run_finish_rows
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "aten/attend.h"
#include "aten/gpu.h"
#include "aten/gpu_tiles.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

namespace {

// P of a tile of products, and what it adds to the state.
Tensor take_step(const Slice& slice, const cuda::ScoreTile& tile, const Tensor& products,
                 const Probabilities& probabilities, OnlineSoftmax& state) {
  const auto operands = slice.q.options();
  const Tensor p = products.scalar_type() == slice.q.scalar_type()
                       ? products
                       : at::empty(products.sizes(), operands);
  const bool first = !state.row_max.defined();
  const auto column = [&] {
    return at::empty({products.size(0), products.size(1), 1}, products.options());
  };
  if (first) {
    state.row_max = column();
    state.row_sum = column();
    if (probabilities.wanted) state.score_max = column();
  }
  const Tensor rescale = column();
  const Tensor max_logits = slice.terms.wants_max_logits ? column() : Tensor();
  cuda::run_softmax_step(
      tile,
      {.products = products.const_data_ptr(),
       .p = p.data_ptr(),
       .row_max = state.row_max.data_ptr(),
       .row_sum = state.row_sum.data_ptr(),
       .first = first,
       .sink = first && slice.sink.defined() ? slice.sink.const_data_ptr() : nullptr,
       .rescale = rescale.data_ptr(),
       .max_logits = max_logits.defined() ? max_logits.data_ptr() : nullptr,
       .score_max = probabilities.wanted ? state.score_max.data_ptr() : nullptr,
       .probabilities =
           probabilities.of_step.defined() ? part_of(probabilities.of_step) : cuda::TensorPart{}},
      stream_of(products));
  if (!first) state.o.mul_(rescale);
  if (max_logits.defined()) {
    state.raise_max_logits(slice.unpack_queries(max_logits).amax({0, 2, 3}));
  }
  return p;
}

// S_dmask for a block of rows: the same scores again, now with the largest one of each row.
void write_probabilities(const Slice& slice, const Tensor& k, Block rows, const Tensor& score_max,
                         const Tensor& out) {
  const Tensor q = matrices_of(slice.q.narrow(2, rows.first, rows.size()), slice.kv_heads.size());
  Block left = slice.visible_keys(rows, {0, slice.seqlen_k()});
  while (left.size() > 0) {
    const Block block = slice.first_keys(rows, left);
    const Tensor products = wide_product(q, k.narrow(1, block.first, block.size()).transpose(1, 2));
    cuda::run_probabilities(score_tile(slice, rows, block), products.const_data_ptr(),
                            score_max.const_data_ptr(), part_of(out), stream_of(products));
    left.first = block.last;
  }
}

// Zeros where no tile of these rows writes a probability.
void clear_hidden(const Slice& slice, Block rows, const Tensor& probabilities) {
  const Tensor of_rows = probabilities.narrow(2, rows.first, rows.size());
  Block seen = slice.visible_keys(rows, {0, slice.seqlen_k()});
  if (seen.size() == 0) seen = {0, 0};
  of_rows.narrow(3, 0, seen.first).zero_();
  of_rows.narrow(3, seen.last, of_rows.size(3) - seen.last).zero_();
}

}  // namespace

OnlineSoftmax attend_on_gpu(const Slice& slice, const SeenKeys& seen, Block rows, Block keys,
                            const Probabilities& probabilities) {
  const Tensor q = matrices_of(slice.q.narrow(2, rows.first, rows.size()), slice.kv_heads.size());
  const auto wide = q.options().dtype(compute_dtype(q));
  OnlineSoftmax state;
  state.max_logits = slice.terms.no_max_logits(wide);

  Block left = slice.visible_keys(rows, keys);
  while (left.size() > 0) {
    const Block block = slice.first_keys(rows, left);
    const auto [k, v] = seen.load(block);
    const cuda::ScoreTile tile = score_tile(slice, rows, block);
    const Tensor products = wide_product(q, k.transpose(1, 2));
    const Tensor p = take_step(slice, tile, products, probabilities, state);
    v.add_product(state.o, tile, p, v.matrices(block), p, /*of_keys=*/false);
    left.first = block.last;
  }
  if (!state.o.defined()) {
    const Tensor sink = slice.sink_column(rows), max_logits = state.max_logits;
    state = OnlineSoftmax::start(q.to(wide), seen.head_dim_v, sink, slice.terms.bounded());
    state.max_logits = max_logits;
    state.row_max = state.row_max.contiguous();
    state.row_sum = state.row_sum.contiguous();
  }
  return state;
}

void finish_rows(const Slice& slice, Block rows, const OnlineSoftmax& state, const Tensor& out,
                 const Tensor& lse) {
  cuda::run_finish_rows(score_tile(slice, rows, {0, 0}),
                        {.o = state.o.const_data_ptr(),
                         .row_max = state.row_max.const_data_ptr(),
                         .row_sum = state.row_sum.const_data_ptr(),
                         .head_dim_v = static_cast<int>(state.o.size(-1)),
                         .out = part_of(out),
                         .lse = part_of(lse)},
                        stream_of(out));
}

void fwd_on_gpu(const Slice& slice, const Tensor& out, const Tensor& lse, const Tensor& max_logits,
                const Tensor& probabilities) {
  const int64_t kv_heads = slice.kv_heads.size();
  const Tensor k = matrices_of(slice.k, kv_heads);
  const SeenOperand v(slice.v, kv_heads, slice.may_hide({0, slice.seqlen_k()}));
  const SeenKeys seen = {slice.v.size(-1), [&](Block keys) {
                           return std::pair(k.narrow(1, keys.first, keys.size()), v);
                         }};
  const bool one_step = slice.count_key_blocks() <= 1;
  for (int64_t i = 0; i < slice.count_row_blocks(); ++i) {
    const Block rows = slice.row_block(i);
    const OnlineSoftmax state =
        attend_on_gpu(slice, seen, rows, {0, slice.seqlen_k()},
                      {probabilities.defined(), one_step ? probabilities : Tensor()});
    finish_rows(slice, rows, state, out, lse);
    write_max_logits(max_logits, slice, state);
    if (!probabilities.defined()) continue;
    if (!one_step) write_probabilities(slice, k, rows, state.score_max, probabilities);
    clear_hidden(slice, rows, probabilities);
  }
  if (probabilities.defined()) {  // of varlen calls, max_seqlen_q may be more than there are tokens
    const int64_t rows = slice.seqlen_q();
    probabilities.narrow(2, rows, probabilities.size(2) - rows).zero_();
  }
}

}  // namespace flash_attn::aten
