// Forward, after FlashAttention-2: for each block of query rows one pass over the keys it sees.
//
//   for each block of rows i                          (in parallel)
//     m = −inf, l = 0, o = 0
//     for each block of keys j that rows i see
//       S  = scale · Q_i K_jᵀ                         softcap, bias, ALiBi; −inf where masked
//       m' = max(m, rowmax S)
//       P  = exp(S − m')
//       l  = exp(m − m') l + rowsum P
//       o  = exp(m − m') o + dropout(P) V_j
//       m  = m'
//     O_i = o / l,  LSE_i = m + log l
//
// No tensor has the size seqlen_q · seqlen_k: memory grows with the sequence, not with its square.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "aten/attend.h"
#include "aten/attention.h"
#include "aten/gpu_tiles.h"
#include "aten/tile.h"

namespace flash_attn::aten {

using at::Tensor;

OnlineSoftmax attend(const Slice& slice, const KeyTiles& tiles, Block rows, Block keys,
                     const Tensor& sink) {
  const Tensor q = slice.scaled_queries(rows);
  const bool bounded = slice.terms.bounded();
  Block left = slice.terms.visible_keys(rows, keys);
  OnlineSoftmax state;
  if (sink.defined() || left.size() == 0) {
    state = OnlineSoftmax::start(q, tiles.head_dim_v, sink, bounded);
  }
  state.max_logits = slice.terms.no_max_logits(q.options());

  while (left.size() > 0) {
    const Block block = slice.first_keys(rows, left);
    const auto [k, v] = tiles.load(block);

    const ScoreTile tile = slice.terms.scores(q, k, rows, block, {q, k, v});  // S = scale · Q Kᵀ …
    state.raise_max_logits(tile.max_logits);
    Tensor p = state.step(tile.s, bounded);  // P = exp(S − m'); m, l, o
    if (slice.terms.dropout) p.mul_(slice.dropout_factors(rows, block));  // P = dropout(P)
    tile.add_product(state.o, p, v);                                      // o += P V

    left.first = block.last;
  }
  return state;
}

std::tuple<Tensor, Tensor> make_outputs(const Args& args, bool all_written) {
  const auto options = args.q.options();
  std::vector<int64_t> sizes = args.q.sizes().vec();
  sizes.back() = args.v.size(-1);
  const Tensor out = all_written ? at::empty(sizes, options) : at::zeros(sizes, options);

  sizes.pop_back();
  std::swap(sizes[sizes.size() - 2], sizes.back());
  const auto wide = options.dtype(compute_dtype(args.q));
  return {out, all_written ? at::empty(sizes, wide) : at::full(sizes, -kInf, wide)};
}

Tensor make_max_logits(const Args& args) {
  const auto options = args.q.options().dtype(compute_dtype(args.q));
  return args.wants_max_logits ? at::full({args.q.size(-2)}, -kInf, options)
                               : at::empty({0}, options);
}

void write_max_logits(const Tensor& max_logits, const Slice& slice, const OnlineSoftmax& state) {
  if (!state.max_logits.defined()) return;
  Tensor part = max_logits.narrow(0, slice.heads.first, slice.heads.size());
  at::maximum_out(part, part, state.max_logits);
}

void write_rows(const Result& out, const Result& lse, const Slice& slice, Block rows,
                const OnlineSoftmax& state) {
  const auto place = [&](const Result& result) {
    return narrowed(result.part(slice.batches, slice.heads), 2, rows);
  };
  place(out).copy_(slice.unpack_queries(state.normalized()));
  place(lse).copy_(slice.unpack_queries(state.lse()));
}

namespace {

// S_dmask for a block of rows: the same scores again, now with the largest one of each row.
void write_probabilities(const Slice& slice, Block rows, const Tensor& largest_score,
                         const Tensor& out) {
  const Tensor q = slice.scaled_queries(rows);
  Block left = slice.terms.visible_keys(rows, {0, slice.seqlen_k()});
  while (left.size() > 0) {
    const Block block = slice.first_keys(rows, left);
    const Tensor k = slice.tile(slice.k, block);
    const ScoreTile tile = slice.terms.scores(q, k, rows, block, {q, k});
    Tensor p = slice.unpack_queries(tile.probabilities(largest_score));
    if (slice.terms.dropout) p = p.where(slice.terms.dropout.keep(rows, block), -p);
    out.narrow(2, rows.first, rows.size()).narrow(3, block.first, block.size()).copy_(p);
    left.first = block.last;
  }
}

void fwd_in_operations(const Call& call, const Result& out, const Result& lse,
                       const Tensor& max_logits, const Tensor& probabilities) {
  std::mutex writes_max_logits;  // which row blocks share
  call.for_row_blocks([&](const Slice& slice, Block rows) {
    const KeyTiles tiles = {slice.v.size(-1), [&](Block keys) {
                              return std::tuple(slice.tile(slice.k, keys),
                                                slice.tile(slice.v, keys));
                            }};
    const Block keys = {0, slice.seqlen_k()};
    const OnlineSoftmax state = attend(slice, tiles, rows, keys, slice.sink_column(rows));
    write_rows(out, lse, slice, rows, state);
    {
      const std::lock_guard<std::mutex> lock(writes_max_logits);
      write_max_logits(max_logits, slice, state);
    }
    if (probabilities.defined()) {
      write_probabilities(slice, rows, state.largest_score(), broadcast_part(probabilities, slice));
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd(const Args& args, bool return_probs) {
  const Call call(args);
  const bool all_written = !args.cu_seqlens_q && !args.seqused_q && call.count_slices() > 0;
  const auto [out, lse] = make_outputs(args, all_written);
  const Result out_rows(call.queries, out), lse_rows(call.queries, lse_tokens(lse));
  Tensor probabilities = at::empty({0}, args.q.options());
  if (return_probs) {
    const std::array<int64_t, 4> sizes = {call.queries.batch(), args.q.size(-2), args.max_seqlen_q,
                                          args.max_seqlen_k};
    probabilities = call.on_gpu && call.count_slices() > 0 ? at::empty(sizes, args.q.options())
                                                           : at::zeros(sizes, args.q.options());
  }
  const Tensor max_logits = make_max_logits(args);
  if (call.on_gpu) {
    if (call.count_slices() > 0) {
      const Slice slice = call.slice(0);
      fwd_on_gpu(slice, out_rows.part(slice.batches, slice.heads),
                 lse_rows.part(slice.batches, slice.heads), max_logits,
                 return_probs ? probabilities : Tensor());
    }
  } else {
    fwd_in_operations(call, out_rows, lse_rows, max_logits,
                      return_probs ? probabilities : Tensor());
  }
  out_rows.finish();
  lse_rows.finish();
  if (args.cu_seqlens_q && call.queries.padded() && call.count_slices() > 0) {
    const Tensor lost = call.queries.lost_tokens(call.keys.too_long());
    out.masked_fill_(lost.unsqueeze(-1).unsqueeze(-1), std::numeric_limits<double>::quiet_NaN());
    lse.masked_fill_(lost, std::numeric_limits<double>::quiet_NaN());
  }
  return {out, lse, probabilities, max_logits};
}

}  // namespace flash_attn::aten
